"""Python files of the user's own: found beside a config and in the working folder, and kept in the run folder.

They are found where nothing installed has their name, so that they shadow no module of others.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from vit_lightning.errors import UserError, one_line
from vit_lightning.storage.folder import is_first, write_whole


class OwnFiles:
    """The files that one config may import, with the modules that were made of them.

    Two configs may have different files of one name: each has its own modules, and ``use`` puts them in place.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self.folders = tuple(dict.fromkeys(folder.resolve() for folder in folders))
        self.packages: set[str] = set()
        """Names of the modules and packages that lie directly in these folders, as far as they were imported."""
        self.modules: dict[str, ModuleType] = {}
        self.texts: dict[Path, bytes] = {}
        """Text of each file as it was when it was imported."""

    def use(self) -> None:
        """Lets imports search these folders from now on, in place of those of another config."""
        global _used
        if _used is self:
            return
        tops = {name.partition(".")[0] for name in _used.modules}
        _used.modules |= {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops}
        for name in _used.modules:
            sys.modules.pop(name, None)
        sys.path[:] = [place for place in sys.path if place not in _appended]
        _appended[:] = [str(folder) for folder in self.folders if str(folder) not in sys.path]
        sys.path += _appended  # for processes that are started afresh and load pickled objects
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        importlib.invalidate_caches()
        _used = self
        sys.modules.update(self.modules)

    def by_name(self) -> dict[str, Path]:
        """Returns the imported files by their paths in a run folder, such as ``blocks/mlp.py``."""
        files = {name: Path(str(getattr(module, "__file__", None))) for name, module in self.modules.items()}
        return {
            "/".join(path.parts[-1 - name.count(".") - (path.name == "__init__.py") :]): path
            for name, path in files.items()
            if path in self.texts
        }


_used = OwnFiles()
_appended: list[str] = []
"""What ``sys.path`` has of the folders in use."""


class _Loader(SourceFileLoader):
    """Loader that keeps the module and the source that it runs, and neither reads nor writes bytecode files."""

    def path_stats(self, path: str) -> NoReturn:
        raise OSError  # what the import system takes for "no bytecode"

    def get_data(self, path: str) -> bytes:
        return _used.texts.setdefault(Path(path), super().get_data(path))

    def exec_module(self, module: ModuleType) -> None:
        _used.modules[module.__name__] = module
        try:
            super().exec_module(module)
        except BaseException:
            del _used.modules[module.__name__]
            raise


class _Finder(MetaPathFinder):
    """Finder of modules in the folders in use; not of those that Python finds elsewhere."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        folders = list(map(str, _used.folders))
        if path is None and (name in sys.stdlib_module_names or name == "vit_lightning" or not folders):
            return None
        if path is not None and name.partition(".")[0] not in _used.packages:
            return None  # of a package of others, which may lie below the working folder
        spec = PathFinder.find_spec(name, folders if path is None else path)
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        if spec is None or (spec.loader is None and not any(any(Path(place).glob("*.py")) for place in places)):
            return None  # such as runs/ or data/
        if path is None and _installed(name) is not None:
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        elif spec.loader is None:  # a folder without __init__.py: Python would search it in sys.path
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = places
        _used.packages.add(name.partition(".")[0])
        return spec


_FINDER = _Finder()


def _installed(name: str) -> str | None:
    """Returns the file of an installed module, or of one of the standard library."""
    others = [place for place in sys.path if Path(place).resolve() not in _used.folders]
    for finder in sys.meta_path:
        if finder is not _FINDER:
            spec = finder.find_spec(name, others if finder is PathFinder else None)
            origin = Path(str(None if spec is None or spec.loader is None else spec.origin))
            if origin.is_absolute() and origin.parents[origin.name == "__init__.py"] not in _used.folders:
                return str(origin)
    return None


def use_files(folders: Iterable[Path] = ()) -> OwnFiles:
    """Lets imports search these folders, the first one first; returns their files, read anew if one has changed."""
    files = OwnFiles(folders)
    unchanged = all(path.is_file() and path.read_bytes() == text for path, text in _used.texts.items())
    if files.folders == _used.folders and unchanged:
        return _used
    files.use()
    return files


def also_search(folder: Path) -> None:
    """Lets imports search one more folder, after those in use."""
    _used.folders = tuple(dict.fromkeys([*_used.folders, folder.resolve()]))


@contextmanager
def files_of(folder: Path | None) -> Iterator[None]:
    """Lets imports inside search a folder too, before those in use; None for a file that nobody trusts."""
    before = _used
    if folder is not None:
        use_files([folder, *before.folders])
    try:
        yield
    finally:
        if before.folders:  # of an experiment, which continues with its own
            before.use()


def empty_caches() -> None:
    """Empties the caches of the user's own functions: after a check they may hold tensors without numbers."""
    for module in _used.modules.values():
        for space in (module, *(item for item in vars(module).values() if isinstance(item, type))):
            for name in vars(space).copy():
                if callable(clear := getattr(getattr(space, name, None), "cache_clear", None)):
                    clear()


def import_problem(class_path: str) -> str | None:
    """Imports the module of a class; returns what is wrong with it.

    A class or module that is not there is no problem here: other checks name the choices.
    """
    name = class_path.rpartition(".")[0]
    top = name.partition(".")[0]
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as fault:
        if fault.name is None or not f"{name}.".startswith(f"{fault.name}."):
            return where(fault) or one_line(fault)
    except Exception as fault:  # whatever a module raises
        return where(fault) or one_line(fault)
    hidden = top not in _used.modules and not hasattr(sys.modules.get(name), class_path.split(".")[-1])
    path = next(filter(Path.is_file, (folder / f"{top}.py" for folder in _used.folders)), None) if hidden else None
    if path is None:
        return None
    taken = "the standard library" if top in sys.stdlib_module_names else f"a package ({_installed(top)})"
    return f"{shown(path)} has the name of a module of {taken}: rename it"


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
    return [(file, line) for file, line in frames if Path(file) in _used.texts]


def _place(file: str, line: int) -> str:
    return f"{shown(Path(file))}, line {line}"


def _line(file: str, line: int) -> str:
    """Returns a source line as it was imported, on a line of its own."""
    lines = _used.texts[Path(file)].decode(errors="replace").splitlines()
    return f"\n    {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""


def shown(path: Path) -> str:
    """Returns a path as the user would write it: relative in the working folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def searched() -> str:
    """Names the searched folders, for messages."""
    return ", ".join("the working folder" if folder == Path.cwd() else shown(folder) for folder in _used.folders)


def searched_modules() -> list[str]:
    """Returns the names of the modules that lie directly in the searched folders."""
    return [path.stem for folder in _used.folders for path in folder.glob("*.py")]


def trust_flag() -> str:
    """Returns the flag with which commands use the weights of a run with files of the user's own, after a space."""
    return " --trust" if _used.modules else ""


def keep_own_files(folder: Path) -> None:
    """Copies the imported files of the user's own into a run folder, as they were when they were imported."""
    for name, path in _used.by_name().items() if is_first() else ():
        target, text = folder / name, _used.texts[path]
        if not target.is_file() or target.read_bytes() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, text)


def changed_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the files that differ from their copies in a run folder, with the checksums of both."""
    return {name: (_digest(copy), _digest(text)) for name, copy, text in _with_copies(folder) if copy != text}


def _with_copies(folder: Path) -> Iterator[tuple[str, bytes, bytes]]:
    imported = _used.by_name()
    for name in (path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
        # what the run has imported late, this process has not imported yet
        places = [imported[name]] if name in imported else [place / name for place in _used.folders]
        if path := next((place for place in places if place in _used.texts or place.is_file()), None):
            yield name, (folder / name).read_bytes(), _used.texts.get(path) or path.read_bytes()


def digests() -> dict[str, str]:
    """Returns the checksums of the imported files by their paths in a run folder."""
    return {name: _digest(_used.texts[path]) for name, path in _used.by_name().items()}


def _digest(text: bytes) -> str:
    return sha256(text).hexdigest()[:12]


class OwnFault(UserError):
    """Error that the user's own code raised while it ran. Exit code 1."""

    exit_code = 1
