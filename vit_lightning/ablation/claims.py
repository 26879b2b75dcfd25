"""Who has a run of an ablation: files that one process alone can make, and signs of life.

A claim is never taken away. The next number takes the run over, so that of many processes that see a dead one only one
wins, and one that comes back to life sees that it has lost. No lock of the file system is needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit_lightning.storage.folder import write_whole

LEASE = 60.0
"""Seconds without a sign of life after which a run is taken from a process on another machine."""


@dataclass
class Claim:
    """A run that is this process's own."""

    path: Path
    number: int

    def is_mine(self) -> bool:
        """Whether nobody has taken the run over; gives a sign of life."""
        if self.path.with_name(f"{self.number + 1:04}.claim").exists():
            return False
        with contextlib.suppress(OSError):  # a file system that is away for a while
            os.utime(self.path)
        return True

    def end(self, outcome: str, **facts: Any) -> None:
        """Writes down how it ended."""
        write_whole(self.path.with_suffix(".end"), json.dumps({"outcome": outcome, **facts}) + "\n")


@dataclass
class Leases:
    """What this process has seen of the claims of others."""

    seconds: float = LEASE
    _seen: dict[Path, tuple[int, float]] = field(default_factory=dict)

    def is_over(self, path: Path) -> bool:
        """Whether the process that made a claim is gone, or has given no sign of life for the time of a lease.

        The clocks of other machines are not trusted: the lease is counted here, from when the file last changed.
        """
        said = read_json(path)
        here = owner()
        if said and all(said.get(key) == here[key] for key in ("machine", "processes")):
            return not _lives(said)
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


def create_once(path: Path, text: str) -> bool:
    """Makes a file that is there whole or not at all, if nobody has made it yet; whether this process did."""
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    try:
        os.link(part, path)
        return True
    except FileExistsError:
        return part.stat().st_nlink > 1  # made after all: the answer of a server was lost, and it was asked twice
    except OSError:  # a file system without links: made exclusively, and for an instant empty
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text)
            return True
        return False
    finally:
        part.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """What a file holds, as plain data; nothing where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@functools.cache
def _machine() -> dict[str, str]:
    """Tells processes whose numbers can be compared from others: the boot of the machine, and the container in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return {"machine": boot, "processes": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"machine": platform.node(), "processes": ""}


def owner() -> dict[str, Any]:
    """This process, so that others can tell whether it lives."""
    return {**_machine(), "host": platform.node(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    """When a process of this machine began; empty if that cannot be known."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if state == "Z" else rest[18]
    except (OSError, IndexError, ValueError):
        return ""


def _lives(said: dict[str, Any]) -> bool:
    if Path("/proc/self/stat").exists():
        return bool(_started(said["pid"])) and _started(said["pid"]) == said["started"]
    try:
        os.kill(said["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
