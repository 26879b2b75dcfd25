"""Files of a run folder: on the disk before they have their names, and read whatever is in them."""

import errno
import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO
from vit_lightning.storage.environment import describe_environment, write_environment
from vit_lightning.storage.folder import write_whole
from vit_lightning.storage.wandb_logger import run_id


def save(path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, path)


@pytest.mark.parametrize("write", [save, lambda path: write_whole(path, "text")])
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, write):
    done: list[str] = []
    replace, sync = os.replace, os.fsync
    monkeypatch.setattr("os.fsync", lambda handle: done.append("on the disk") or sync(handle))
    monkeypatch.setattr("os.replace", lambda old, new: done.append("named") or replace(old, new))
    write(tmp_path / "best.ckpt")
    assert done[:2] == ["on the disk", "named"]


@pytest.mark.parametrize("fault", [SystemExit(143), OSError(errno.ENOSPC, "full")])
def test_a_file_that_a_signal_or_a_full_disk_stops_leaves_nothing(tmp_path, monkeypatch, fault):
    monkeypatch.setattr("os.fsync", Mock(side_effect=fault))
    with pytest.raises(type(fault)):
        write_whole(tmp_path / "errors.csv", "text")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", "[" * 100_000, '{"run_id": null}'])
def test_a_damaged_environment_is_written_anew(tmp_path, content):
    (tmp_path / "environment.json").write_text(content)
    name = run_id(tmp_path)
    write_environment(tmp_path, run_id=name, precision="32-true")
    assert run_id(tmp_path) == name


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
