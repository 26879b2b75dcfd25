"""The run folder: locked by one process, with files that are complete or absent."""

import contextlib
import csv
import errno
import fcntl
import io
import json
import os
import platform
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import _get_rank

from vit_lightning.errors import UserError

LOCK = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, or of a limit for this user."""


class InUse(UserError):
    """Run folder that a live process holds. Exit code 2."""


def is_first() -> bool:
    """Whether this is the process that writes, rank 0; known before Lightning has connected the ranks."""
    return not _get_rank()


@contextlib.contextmanager
def new_folder(out: Path | None, parent: Path, suffix: str) -> Iterator[Path]:
    """Makes and locks a folder: ``out``, or a new one in ``parent`` named after the time.

    Runs that start at the same time get different folders. An empty folder is removed at the end. Only rank 0 makes it.
    """
    if not is_first():
        yield out or parent
        return
    folder = _make_new(parent, suffix) if out is None else out
    was_there = out is not None and out.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"out={out} cannot be made: {fault.strerror}") from fault
    try:
        with hold(folder, "out"):
            if any(path.name != LOCK and path.suffix != ".part" for path in folder.iterdir()):
                raise UserError(f"out={out} is there already and not empty (choose a new folder)")
            yield folder
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _make_new(parent: Path, suffix: str) -> Path:
    name = "-".join(filter(None, [time.strftime("%Y%m%d-%H%M%S"), suffix]))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1000):
            folder = parent / (f"{name}-{number}" if number else name)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as fault:
        raise UserError(f"{parent} cannot be written to: {fault.strerror} (--out=FOLDER chooses another)") from fault
    raise UserError(f"{parent} holds a thousand runs of this second")


@contextlib.contextmanager
def hold(folder: Path, key: str) -> Iterator[None]:
    """Locks a run folder; the lock ends with the process, however that ends.

    Raises:
        InUse: a live process holds it; the message names ``key``.
    """
    if not is_first():
        yield
        return
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise UserError(f"{key}={folder} cannot be written to")
    lock = try_hold(folder)
    if lock is None:
        holder = ""
        with contextlib.suppress(OSError):
            holder = (folder / LOCK).read_text(encoding="utf-8")
        raise InUse(f"{key}={folder} is in use by a live run ({holder or 'its lock is taken'})")
    try:
        yield
    finally:
        release(folder, lock)


def try_hold(folder: Path) -> int | None:
    """Locks a folder; returns a file descriptor for ``release``, or None if another process holds the folder.

    A POSIX record lock: the kernel drops it when the process dies, data-loading workers do not inherit it, and it works
    on shared file systems. On a file system without locks it warns and takes the folder to be free.

    Raises:
        UserError: the disk is full.
    """
    path = folder / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as fault:
            if fault.errno in FULL:
                raise UserError(f"{path} cannot be written: {fault.strerror}") from fault
            return None  # another process has just removed the folder, or it cannot be written to
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno in (errno.EACCES, errno.EAGAIN):
                os.close(handle)
                return None
            warnings.warn(f"{folder}: {fault.strerror}: it cannot be locked against a second process", stacklevel=2)
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:  # else its last holder has just removed it
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
                return handle
        os.close(handle)


def release(folder: Path, lock: int) -> None:
    """Releases the lock of ``try_hold``."""
    (folder / LOCK).unlink(missing_ok=True)
    os.close(lock)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "environment.json"))


def runs_in(folder: Path) -> list[Path]:
    """Returns the run folders in a folder, by name: itself, or those at most two levels down.

    Raises:
        UserError: there is none.
    """
    below = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if is_run(path) and not is_run(path.parent)]
    runs = [folder] if is_run(folder) else sorted(below)
    if not runs:
        raise UserError(f"{folder} holds no run (give a run folder, or one that holds run folders)")
    return runs


def read_json(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON file; an empty one if it cannot be read or is a link."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if is_plain(path, path.parent) else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_plain(path: Path, folder: Path) -> bool:
    """Whether a path is a file in a folder: no pipe, which is waited for, and no link to another place."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is complete or absent."""
    if not is_first():
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # another process may write it too
    if isinstance(content, str):
        content = content.encode("utf-8", errors="surrogateescape")  # file names may hold any bytes
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave a whole name with half a file
        os.replace(part, path)
    finally:  # a full disk, or a signal
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Gives a hidden folder beside ``out``, which becomes ``out`` at the end and is removed after an error.

    Raises:
        UserError: ``out`` is there and not empty, or cannot be made.
    """
    place = out.resolve()  # which has a name, also where out is "."
    try:
        if place.is_file() or (place.is_dir() and any(place.iterdir())):
            raise UserError(f"out={out} is there already (choose a new one)")
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        part.mkdir()
    except OSError as fault:
        raise UserError(f"out={out} cannot be made: {fault.strerror}") from fault
    try:
        yield part
        part.rename(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table as the text of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
