"""The configs that come with the package, by name: ``digits``, ``families/timm`` or in short ``timm``."""

from __future__ import annotations

import difflib
import functools
import os
from pathlib import Path

import vit_lightning

CONFIG_FILES = (".yaml", ".yml")
_ROOT = Path(vit_lightning.__file__).parent


@functools.cache
def shipped_configs() -> dict[str, Path]:
    """Returns the files by name: of the folder ``experiments`` in a clone, of ``vit_lightning/configs`` installed."""
    folder = next(filter(Path.is_dir, (_ROOT / "configs", _ROOT.parent / "experiments")), _ROOT)
    paths = [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]  # not those of runs, which lie deeper
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "digits", "/" in item[0], item[0])))


def shipped_config(name: str) -> Path | None:
    """Returns the file of a config of the package, None if there is none of this name."""
    if name.startswith("experiments/"):  # as it is written in a clone
        name = name.removeprefix("experiments/").removesuffix(".yaml")
    return next((file for known, file in shipped_configs().items() if name in (known, file.stem)), None)


def find_config(text: str | Path) -> Path:
    """Returns the file of a config: of a path, or else of a name; the path itself where there is none.

    ``NAME.yaml`` in the working folder comes before the package's config ``NAME``.
    """
    for path in (Path(text), Path(f"{text}.yaml")):
        if os.path.isfile(path):  # also false for a text that is too long for a path
            return path
    return shipped_config(str(text)) or Path(text)


def near_configs(path: Path, *, here: bool = True) -> str:
    """Returns the configs that could be meant by a path where there is no file: of its folder, if ``here``, or ours."""
    files = sorted((path if path.is_dir() else path.parent).glob("*")) if here else []
    known = {file.stem: str(file) for file in files if file.suffix in CONFIG_FILES}
    near = list(known)[:4] if path.is_dir() else difflib.get_close_matches(path.stem, known, n=1)
    if near:
        return f" (did you mean {', '.join(known[name] for name in near)}?)"
    known = {file.stem: name for name, file in shipped_configs().items()}
    near = difflib.get_close_matches(path.stem, known, n=1)
    meant = f"did you mean {known[near[0]]}? " if near else ""
    return f" ({meant}lightning configs lists those of the package)"
