"""Python files of the user's own: found beside a config and in the working folder, and kept in the run folder.

Installed packages and the standard library are never shadowed by such a file, except by the copies in a run folder:
these repeat what the run once used.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from vit_lightning.errors import UserError, one_line
from vit_lightning.storage.folder import is_first

_folders: tuple[Path, ...] = ()
_sources: dict[Path, bytes] = {}
"""Text of each file as it was when it was imported."""
_appended: list[str] = []
"""What ``sys.path`` has of ``_folders``, for processes that are started afresh and load pickled objects."""


class _Loader(SourceFileLoader):
    """Loader that keeps the source it runs, and neither reads nor writes bytecode files."""

    def path_stats(self, path: str) -> NoReturn:
        raise OSError  # what the import system takes for "no bytecode"

    def get_data(self, path: str) -> bytes:
        return _sources.setdefault(Path(path), super().get_data(path))


class _Finder(MetaPathFinder):
    """Finder of modules in the searched folders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None:
            return _find(name)
        places = {str(folder.joinpath(*name.split(".")[:-1])) for folder in _folders}
        if name.startswith("vit_lightning.") or not places & {*path}:
            return None
        return _fresh(PathFinder.find_spec(name, path))


_FINDER = _Finder()


def search(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Lets imports also search these folders, the first one first; returns them with full paths.

    Forgets modules that were imported for another config and that these folders have elsewhere, or changed since.
    """
    global _folders
    # not what the program itself has imported, such as tests or a notebook's modules in the working folder
    loaded = {name: path for name, path in own_modules().items() if _is_for_config(sys.modules[name])}
    _folders = tuple(dict.fromkeys(folder.resolve() for folder in folders))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    sys.path[:] = [place for place in sys.path if place not in _appended]
    _appended[:] = [str(folder) for folder in _folders if str(folder) not in sys.path]
    sys.path += _appended
    importlib.invalidate_caches()
    if any(_changed(path) or not path.is_relative_to(_home(name.partition(".")[0])) for name, path in loaded.items()):
        tops = {name.partition(".")[0] for name in loaded}
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            del sys.modules[name]
    for path in _sources.keys() - own_modules().values():
        del _sources[path]
    return _folders


def searched_folders() -> tuple[Path, ...]:
    """Returns the folders that imports search."""
    return _folders


def is_searched(folders: tuple[Path, ...]) -> bool:
    """Whether these folders, with full paths, are those that imports search now."""
    return folders == _folders


def _is_for_config(module: ModuleType) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


def _changed(path: Path) -> bool:
    try:
        return _sources.get(path, path.read_bytes()) != path.read_bytes()
    except OSError:
        return True


def _home(name: str) -> Path:
    """Returns the file or folder that a top-level module would now be imported from; one that is not there if none."""
    spec = _find(name)
    places = [] if spec is None else spec.submodule_search_locations or [str(spec.origin)]
    return Path(next(iter(places), "/nowhere"))


def _find(name: str) -> ModuleSpec | None:
    """Returns a module of the searched folders, unless an installed one has its name."""
    if not _folders or name in sys.stdlib_module_names or name == "vit_lightning":
        return None
    spec = _fresh(PathFinder.find_spec(name, [str(folder) for folder in _folders]))
    if spec is None:
        return None
    places = spec.submodule_search_locations or []
    folder = Path(places[0] if places else str(spec.origin)).parent
    if spec.loader is None and not any(any(Path(place).glob("*.py")) for place in places):  # runs/, data/ or wandb/
        return None
    return spec if _is_run(folder) or _installed(name) is None else None


def _fresh(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
    elif spec is not None and spec.loader is None:
        places = list(spec.submodule_search_locations or [])
        spec = ModuleSpec(spec.name, None, is_package=True)
        spec.submodule_search_locations = places
    return spec


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "environment.json").is_file()


def _installed(name: str) -> str | None:
    """Returns the file of an installed module, or of one of the standard library."""
    others = [place for place in sys.path if Path(place).resolve() not in _folders]
    for finder in sys.meta_path:
        if finder is not _FINDER:
            spec = finder.find_spec(name, others if finder is PathFinder else None)
            origin = Path(str(None if spec is None or spec.loader is None else spec.origin))
            if origin.is_absolute() and origin.parents[origin.name == "__init__.py"] not in _folders:
                return str(origin)
    return None


def own_modules() -> dict[str, Path]:
    """Returns the files of the imported modules that lie in the searched folders, by the names of the modules."""
    roots: dict[str, bool] = {}
    found = {}
    for name, module in sys.modules.copy().items() if _folders else ():  # another thread may import meanwhile
        file = str(getattr(module, "__file__", None) or "")
        if root := _root(name, file):
            if root not in roots:
                roots[root] = Path(root).resolve() in _folders
            if roots[root]:
                found[name] = Path(file)
    return found


@cache  # thousands of modules, asked about several times
def _root(name: str, file: str) -> str:
    """Returns the folder from which a module was imported by its full name; empty for our own and without a file."""
    relative = name.replace(".", os.sep)
    for end in (f"{os.sep}{relative}.py", f"{os.sep}{relative}{os.sep}__init__.py"):
        if file.endswith(end) and name.partition(".")[0] != "vit_lightning":
            return file.removesuffix(end) + os.sep
    return ""


def empty_caches() -> None:
    """Empties the caches of the user's own functions: after a check they may hold tensors without numbers."""
    for module in map(sys.modules.__getitem__, own_modules()):
        for space in (module, *(item for item in vars(module).values() if isinstance(item, type))):
            for name in vars(space).copy():
                if callable(clear := getattr(getattr(space, name, None), "cache_clear", None)):
                    clear()


def _own_files() -> dict[str, Path]:
    """Returns the same files by their paths in the run folder, such as ``blocks/mlp.py``."""
    return {
        "/".join(path.parts[-1 - name.count(".") - (path.name == "__init__.py") :]): path
        for name, path in own_modules().items()
    }


def import_problem(class_path: str) -> str | None:
    """Imports the module of a class; returns what is wrong with it.

    A class or module that is not there is no problem here: other checks name the choices.
    """
    name = class_path.rpartition(".")[0]
    top = name.partition(".")[0]
    for folder in _folders:
        path = folder / f"{top}.py"
        if (path.is_file() or path.with_suffix("").joinpath("__init__.py").is_file()) and _find(top) is None:
            taken = "the standard library" if top in sys.stdlib_module_names else f"a package ({_installed(top)})"
            return f"{shown(path)} has the name of a module of {taken}: rename it"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as fault:
        if fault.name is None or not (name == fault.name or name.startswith(f"{fault.name}.")):
            return where(fault) or one_line(fault)
    except Exception as fault:  # whatever a module raises
        return where(fault) or one_line(fault)
    return None


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


def _own_frames(fault: BaseException) -> list[tuple[str, int]]:
    """Returns files and lines of a traceback, of its causes, and of one that a data-loading worker has sent as text."""
    own = {*own_modules().values(), *_sources}
    frames: list[tuple[str, int]] = []
    error: BaseException | None = fault
    while error is not None:
        frames += [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
        frames += [(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+), in ', str(error))]
        if isinstance(error, SyntaxError):
            frames.append((str(error.filename), error.lineno or 0))
        error = error.__cause__
    return [(file, line) for file, line in frames if Path(file) in own]


def _place(file: str, line: int) -> str:
    return f"{shown(Path(file))}, line {line}"


def _line(file: str, line: int) -> str:
    """Returns a source line as it was imported, on a line of its own."""
    try:
        lines = _sources.get(Path(file), Path(file).read_bytes()).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return f"\n    {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""


def shown(path: Path) -> str:
    """Returns a path as the user would write it: relative in the working folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def searched() -> str:
    """Names the searched folders, for messages; empty where only known packages may be imported."""
    return ", ".join("the working folder" if folder == Path.cwd() else shown(folder) for folder in _folders)


def searched_modules() -> list[str]:
    """Returns the names of the modules that lie directly in the searched folders."""
    return [path.stem for folder in _folders for path in folder.glob("*.py")]


def trust_flag() -> str:
    """Returns the flag that later commands on a run with files of the user's own need, after a space."""
    return " --trust-config" if own_modules() else ""


def keep_own_files(folder: Path) -> None:
    """Copies the imported files of the user's own into a run folder, as they were when they were imported."""
    for name, path in _own_files().items() if is_first() else ():
        target = folder / name
        text = _sources.get(path) or path.read_bytes()
        if not target.is_file() or target.read_bytes() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")
            part.write_bytes(text)
            os.replace(part, target)


def changed_files(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Returns the imported files that differ from their copies in a run folder, with the checksums of both."""
    own = {  # what the run has imported late, this process has not imported yet
        name: found
        for name in (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
        if (found := next((place / name for place in _folders if (place / name).is_file()), None))
    } | _own_files()
    texts = {name: (folder / name, _sources.get(path) or path.read_bytes()) for name, path in own.items()}
    kept = {name: (copy.read_bytes(), text) for name, (copy, text) in texts.items() if copy.is_file()}
    return {name: (_digest(copy), _digest(text)) for name, (copy, text) in kept.items() if copy != text}


def digests() -> dict[str, str]:
    """Returns the checksums of the imported files by their paths in a run folder."""
    return {name: _digest(_sources.get(path) or path.read_bytes()) for name, path in _own_files().items()}


def _digest(text: bytes) -> str:
    return sha256(text).hexdigest()[:12]


class OwnFault(UserError):
    """Error that the user's own code raised while it ran. Exit code 1."""

    exit_code = 1
