"""The folder of a run: made for one process alone, with files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from lightning.fabric.utilities.rank_zero import _get_rank

from vit_lightning.errors import UserError

CLAIM = ".claimed"


def is_first() -> bool:
    """Whether this is the process that writes; known before Lightning has connected the others."""
    return not _get_rank()


def claim_folder(out: Path | None, parent: Path, suffix: str) -> Path:
    """A folder that is this process's alone: ``out``, or a new one in ``parent`` named after the time.

    Made exclusively, so that two runs that start in the same instant never share one. Only the first process makes it.
    """
    if not is_first():
        return out or parent
    if out is not None:
        return _claim_out(out)
    parent.mkdir(parents=True, exist_ok=True)
    name = "-".join(filter(None, [time.strftime("%Y%m%d-%H%M%S"), suffix]))
    for number in range(1000):
        folder = parent / (f"{name}-{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise UserError(f"{parent} holds a thousand runs of this second")


def _claim_out(out: Path) -> Path:
    """``out`` itself, if it is new or empty; a file in it, made exclusively, tells which process has it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        os.close(os.open(out / CLAIM, os.O_CREAT | os.O_EXCL))
    except FileExistsError as fault:
        raise UserError(f"out={out} is in use by another run (choose a new folder)") from fault
    except OSError as fault:
        raise UserError(f"out={out} cannot be made: {fault.strerror}") from fault
    if any(path.name != CLAIM for path in out.iterdir()):
        (out / CLAIM).unlink()
        raise UserError(f"out={out} is there already and not empty (choose a new folder)")
    return out


def settle(folder: Path) -> None:
    """Ends the claim on a folder: what has been written to it shows from now on that it is taken."""
    if is_first():
        (folder / CLAIM).unlink(missing_ok=True)


def give_up(folder: Path) -> None:
    """Takes a claimed folder away again if nothing was written to it."""
    if is_first():
        settle(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there complete or not at all."""
    if is_first():
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


@contextlib.contextmanager
def log_warnings(folder: Path) -> Iterator[None]:
    """Writes warnings of Python and of Lightning to ``warnings.log``, besides where they go anyway."""
    if not is_first():
        yield
        return
    with (folder / "warnings.log").open("a", buffering=1, encoding="utf-8") as file:
        before, warnings.showwarning = warnings.showwarning, _also_to(file)
        handler = logging.StreamHandler(file)
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "wandb")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            warnings.showwarning = before
            for logger in loggers:
                logger.removeHandler(handler)


def _also_to(file: TextIO) -> Any:
    show = warnings.showwarning

    def show_and_write(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {filename}:{lineno}: {category.__name__}: {message}\n")
        show(message, category, filename, lineno, *rest)

    return show_and_write
