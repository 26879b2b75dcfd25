"""Claims on runs of an ablation: files that only one process can create, renewed by their modification time.

A claim is never withdrawn. The claim with the next number takes the run over, so that only one of many processes that
see a dead owner wins, and an owner that comes back sees that it has lost. No lock of the file system is needed.

Claims and the lock of a run folder (``storage/folder.py``) answer different questions, and both are needed. A claim
decides which process may work on a run also where locks do not work or a dead machine keeps them, and its files count
the attempts. The lock keeps two writers apart while an owner that lost its claim still lives, and keeps out
``lightning fit --resume`` by hand.
"""

import contextlib
import functools
import itertools
import json
import os
import platform
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit_lightning.storage.folder import read_json, write_whole

LEASE = 60.0
"""Seconds without renewal after which a run is taken over from a process on another machine."""


@dataclass
class Claim:
    """Claim of this process on a run."""

    path: Path
    number: int

    def is_mine(self) -> bool:
        """Whether no other process has taken the run over; renews the claim."""
        if self.path.with_name(f"{self.number + 1:04}.claim").exists():
            return False
        with contextlib.suppress(OSError):  # a file system that is away for a while
            os.utime(self.path)
        return True

    def end(self, outcome: str, **facts: Any) -> None:
        """Writes how the attempt ended."""
        write_whole(self.path.with_suffix(".end"), json.dumps({"outcome": outcome, **facts}) + "\n")

    def silent_deaths(self) -> int:
        """Counts the claims before this one that have no end, in a row, since the run last got further than before."""
        claims = [self.path.with_name(f"{number:04}.claim") for number in range(1, self.number + 1)]
        best, count = 0, 0
        for earlier, later in itertools.pairwise(claims):
            reached = read_json(later).get("progress", 0)
            count = 0 if reached > best or earlier.with_suffix(".end").exists() else count + 1
            best = max(best, reached)
        return count


@dataclass
class Leases:
    """Leases of the claims of other processes, as observed by this one."""

    seconds: float = LEASE
    _seen: dict[Path, tuple[int, float]] = field(default_factory=dict)

    def has_expired(self, path: Path) -> bool:
        """Whether the owner of a claim is gone, or has not renewed it for the time of a lease.

        The clocks of other machines are not trusted: the lease is counted here, from the last change of the file.
        """
        claimant, here = read_json(path), owner()
        if claimant and all(claimant.get(key) == here[key] for key in ("machine", "processes")):
            return not _lives(claimant)
        try:
            with path.open("rb") as file:  # opened, so that a network file system asks its server
                changed = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return False
        seen = self._seen.get(path)
        if seen is None or seen[0] != changed:
            self._seen[path] = (changed, time.monotonic())
            return False
        return time.monotonic() - seen[1] > self.seconds


def last_claim(folder: Path) -> Path | None:
    """Returns the file of the last claim in a folder."""
    return max(folder.glob("[0-9]*.claim"), default=None)


def next_claim(folder: Path, leases: Leases) -> Path | None:
    """Returns the file of the next claim in a folder; None while the process of the last one works."""
    last = last_claim(folder)
    if last is not None and not _has_ended(last, leases):
        return None
    return folder / f"{1 if last is None else int(last.stem) + 1:04}.claim"


def _has_ended(claim: Path, leases: Leases) -> bool:
    """Whether a claim has ended; "done" from another machine must wait for its results (NFS may lag)."""
    end = claim.with_suffix(".end")
    if not end.exists():
        return leases.has_expired(claim)
    is_remote = read_json(claim).get("machine") != owner()["machine"]
    return not is_remote or read_json(end).get("outcome") != "done" or leases.has_expired(end)


def make_claim(path: Path, progress: int = 0) -> Claim | None:
    """Makes a claim; returns None if another process has made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    claimant = {**owner(), "progress": progress, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    return Claim(path, int(path.stem)) if create_once(path, json.dumps(claimant) + "\n") else None


def create_once(path: Path, text: str) -> bool:
    """Creates a file atomically; returns True if this process created it, False if it was there."""
    # containers may share the name of their host and the number of a process: random bytes tell them apart
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.{secrets.token_hex(8)}.part")
    part.write_text(text, encoding="utf-8")
    try:
        os.link(part, path)
        return True
    except FileExistsError:
        return part.stat().st_nlink > 1  # created after all: the server's answer was lost and the request repeated
    except OSError:  # a file system without links: created exclusively, for an instant empty
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text)
            return True
        return False
    finally:
        part.unlink(missing_ok=True)


@functools.cache
def _machine() -> dict[str, str]:
    """Identifies the boot of the machine and the container: only inside them can process ids be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return {"machine": boot, "processes": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"machine": platform.node(), "processes": ""}


def owner() -> dict[str, Any]:
    """Identifies this process, so that others can tell whether it lives."""
    return {**_machine(), "host": platform.node(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    """Returns the start time of a process on this machine; empty if unknown."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if state == "Z" else rest[18]
    except (OSError, IndexError, ValueError):
        return ""


def _lives(claimant: dict[str, Any]) -> bool:
    if Path("/proc/self/stat").exists():
        return bool(_started(claimant["pid"])) and _started(claimant["pid"]) == claimant["started"]
    try:
        os.kill(claimant["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
