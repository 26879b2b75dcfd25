"""What is kept of the place of a run."""

import os
import subprocess
from pathlib import Path

from vit_lightning.storage.environment import describe_environment


def git(*words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *name, *words], check=True, capture_output=True, text=True).stdout.strip()


def test_the_repository_of_the_working_folder_is_read_and_left_alone(in_folder):
    """Without its lock, which a killed run would leave to the user: git would refuse the next commit."""
    git("init")
    Path("exp.yaml").write_text("a")
    git("add", "exp.yaml")
    git("commit", "-m", "first")
    git("remote", "add", "origin", "https://me:secret@example.org/a.git")
    Path("new.yaml").write_text("a")
    os.utime("exp.yaml", (0, 0))  # which git would note in its index
    before = Path(".git/index").read_bytes()
    found = describe_environment()["git"]["working folder"]
    assert (found["commit"], found["changed"]) == (git("rev-parse", "HEAD"), ["?? new.yaml"])
    assert found["remote"] == "https://example.org/a.git"
    assert Path(".git/index").read_bytes() == before
