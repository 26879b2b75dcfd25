"""Python files of the user's own: imported from beside a config and the working folder, and kept in the run folder.

Their folders stand last in ``sys.path``, so that they shadow no module of others. A process has one version of a file.
"""

import importlib
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import vit_lightning
from vit_lightning.errors import UserError, one_line
from vit_lightning.storage.folder import is_first, write_whole

Folders = tuple[Path, ...]

_INSTALLED = tuple(f"{place}{os.sep}" for place in (Path(vit_lightning.__file__).parent, sysconfig.get_path("stdlib")))

_CONFIGS = Path(vit_lightning.__file__).parent / "configs"
"""Those of the package where it is installed: what lies beside them is kept in a run too, which needs it to resume."""

_used: Folders = ()
"""The folders that imports search now."""
_imported: dict[str, tuple[Path, bytes]] = {}
"""Files of modules of the user's own, and their texts as they were imported, by the names of the modules."""


def use_files(folders: Iterable[Path] = ()) -> None:
    """Lets imports search these folders after all others, in place of those before."""
    global _used
    # the last one of each: a folder may have stood there before
    for place in filter(sys.path.__contains__, map(str, _used)):
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(place)]
    _used = tuple(dict.fromkeys(folder.resolve() for folder in folders))
    sys.path += map(str, _used)
    importlib.invalidate_caches()


def folders_in_use() -> Folders:
    """Returns the folders that imports search now."""
    return _used


def also_search(folder: Path) -> None:
    """Lets imports search one more folder, after those in use."""
    use_files([*_used, folder])


@contextmanager
def files_of(folder: Path | None) -> Iterator[None]:
    """Lets imports inside search a folder too, before those in use; None for a file that nobody trusts."""
    before = _used
    use_files([*filter(None, [folder]), *before])
    try:
        yield
    finally:
        use_files(before)


def own_files() -> dict[str, tuple[Path, bytes]]:
    """Returns the files in use that were imported, by their paths in a run folder, with their texts as they were."""
    folders = tuple(map(str, _used))
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__dict__", {}).get("__file__"))
        if file.startswith(folders) and name not in _imported and _is_used(name, file) and _is_own(file):
            _imported[name] = Path(file), Path(file).read_bytes()
    paths = {_path(name, str(file)): (name, file, text) for name, (file, text) in _imported.items()}
    return {
        path: (file, text) for path, (name, file, text) in paths.items() if _is_used(name, str(file)) or _found(path)
    }


def _path(name: str, file: str) -> str:
    """Returns the path of a module's file in a run folder, such as ``blocks/mlp.py``."""
    return name.replace(".", "/") + ("/__init__.py" if file.endswith("__init__.py") else ".py")


def _is_used(name: str, file: str) -> bool:
    return any(file == f"{folder}/{_path(name, file)}" for folder in _used)


def _is_own(file: str) -> bool:
    """Whether a file lies in the folders in use, and was not installed there."""
    path, ours = Path(file), Path(file).parent == _CONFIGS
    installed = file.startswith(_INSTALLED) or {"site-packages", "dist-packages"} & {*path.parts}
    return (ours or not installed) and any(path.is_relative_to(folder) for folder in _used)


def _found(path: str) -> Path | None:
    """Returns the file that the folders in use have for a path in a run folder."""
    return next(filter(Path.is_file, (folder / path for folder in _used)), None)


def empty_caches() -> None:
    """Empties the caches of the user's own functions: after a check they may hold tensors without numbers."""
    for module in [sys.modules[name] for name in _imported if name in sys.modules]:
        for space in (module, *(item for item in vars(module).values() if isinstance(item, type))):
            for name in vars(space).copy():
                if callable(clear := getattr(getattr(space, name, None), "cache_clear", None)):
                    clear()


def imported(class_path: str) -> ModuleType | None:
    """Returns the module of a class; None if it is not there: other checks name the choices.

    Raises:
        UserError: a file of the user's is wrong, or hidden by another module.
    """
    name, _, attribute = class_path.rpartition(".")
    top = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    except Exception as fault:  # whatever a module raises
        if isinstance(fault, ModuleNotFoundError) and f"{name}.".startswith(f"{fault.name}."):
            return None
        raise UserError(where(fault) or one_line(fault)) from fault
    if top == "vit_lightning" or not any((folder / end).exists() for folder in _used for end in (top, f"{top}.py")):
        return module
    own_files()
    for known, (file, text) in _imported.items():
        other = _found(_path(known, str(file)))
        if other is not None and other.read_bytes() != text:
            before = "" if other == file else f", {shown(file)}"
            raise UserError(f"{shown(other)} is not as this process has imported it{before}: start another process")
    if hasattr(module, attribute) or (hidden := _found(f"{top}.py")) is None or top in _imported:
        return module
    package = f"a package ({getattr(sys.modules[top], '__file__', None)})"
    taken = "the standard library" if top in sys.stdlib_module_names else package
    raise UserError(f"{shown(hidden)} has the name of a module of {taken}: rename it")


def where(fault: BaseException) -> str | None:
    """Returns file, line, error and source line of an error in a file of the user's own; None for any other error."""
    frames = _own_frames(fault)
    return f"{_place(*frames[-1])}: {one_line(fault)}{_line(*frames[-1])}" if frames else None


def own_traceback(fault: BaseException) -> str | None:
    """Returns the part of a traceback that lies in files of the user's own; None if nothing does."""
    frames = _own_frames(fault)
    if not frames:
        return None
    steps = [f"{_place(*frame)}{_line(*frame)}" for frame in dict.fromkeys(frames[-8:])]
    return "\n".join(["an error in your own code:", *steps, one_line(fault)])


def _own_frames(fault: BaseException | None) -> list[tuple[str, int]]:
    """Returns files and lines of a traceback, of its causes, and of one that a data-loading worker has sent as text."""
    frames: list[tuple[str, int]] = []
    while fault is not None:
        frames += [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(fault.__traceback__)]
        frames += [(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+), in ', str(fault))]
        if isinstance(fault, SyntaxError):
            frames.append((str(fault.filename), fault.lineno or 0))
        fault = fault.__cause__
    return [(file, line) for file, line in frames if _is_own(file)]


def _place(file: str, line: int) -> str:
    return f"{shown(Path(file))}, line {line}"


def _line(file: str, line: int) -> str:
    """Returns a source line, on a line of its own."""
    text = linecache.getline(file, line).strip()
    return f"\n    {text}" if text else ""


def shown(path: Path) -> str:
    """Returns a path as the user would write it: relative in the working folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def searched() -> str:
    """Names the searched folders, for messages."""
    return ", ".join("the working folder" if folder == Path.cwd() else shown(folder) for folder in _used)


def searched_modules() -> list[str]:
    """Returns the names of the modules that lie directly in the searched folders."""
    return [path.stem for folder in _used for path in folder.glob("*.py")]


def trust_flag() -> str:
    """Returns the flag with which commands use the weights of a run with files of the user's own, after a space."""
    return " --trust" if own_files() else ""


def keep_own_files(folder: Path) -> None:
    """Copies the imported files of the user's own into a run folder, as they were when they were imported."""
    for name, (_, text) in own_files().items() if is_first() else ():
        target = folder / name
        if not target.is_file() or target.read_bytes() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, text)


def changed_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the files that differ from their copies in a run folder, with the digests of both."""
    imported, changed = own_files(), {}
    for copy in folder.rglob("*.py"):
        name = copy.relative_to(folder).as_posix()
        # what the run has imported late, this process has not imported yet
        file = None if name in imported else _found(name)
        text = imported[name][1] if name in imported else copy.read_bytes() if file is None else file.read_bytes()
        if text != copy.read_bytes():
            changed[name] = _digest(copy.read_bytes()), _digest(text)
    return changed


def digests() -> dict[str, str]:
    """Returns the digests of the imported files by their paths in a run folder."""
    return {name: _digest(text) for name, (_, text) in own_files().items()}


def _digest(text: bytes) -> str:
    return sha256(text).hexdigest()[:12]


class OwnFault(UserError):
    """Error that the user's own code raised while it ran. Exit code 1."""

    exit_code = 1
