"""Environment of a run: versions, hardware, code and command."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vit_lightning.storage.credentials import without_credentials
from vit_lightning.storage.folder import read_json, write_whole

PACKAGES = ("vit-lightning", "torch", "torchvision", "lightning", "torchmetrics", "einops", "numpy", "wandb")


def describe_environment() -> dict[str, Any]:
    """Returns versions, hardware, the state of the code in git, and the command; no environment variables."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["lightning", *sys.argv[1:]]) if "lightning" in sys.argv[0] else shlex.join(sys.argv),
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": {"package": _git(Path(__file__).parent), "working folder": _git(Path.cwd())},
    }


def write_environment(folder: Path, *, run_id: str, precision: str) -> None:
    """Writes ``environment.json`` of a run; a resumed one keeps that of its beginning, but for another W&B id."""
    path = folder / "environment.json"
    found = read_json(path) or {**describe_environment(), "precision": precision}
    if found.get("run_id") != run_id:
        write_whole(path, json.dumps({"run_id": run_id} | found | {"run_id": run_id}, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(folder: Path) -> dict[str, Any] | None:
    """Returns commit, remote and changed files of a folder; None outside a git repository."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = (_run_git(folder, "status", "--porcelain") or "").splitlines()
    remote = without_credentials((_run_git(folder, "remote", "get-url", "origin") or "").strip())
    return {"commit": commit.strip(), "changed": changed, **({"remote": remote} if remote else {})}


def _run_git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]  # else a run that is killed meanwhile leaves .git/index.lock
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
