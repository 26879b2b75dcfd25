"""Files of a run folder: on the disk before they have their names, and read whatever is in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from vit_lightning import UserError
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO
from vit_lightning.storage.environment import write_environment
from vit_lightning.storage.folder import LOCK, hold, refuse_links, try_hold, write_whole
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


NO_FILES = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to(path.parent / "precious"),
}


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", NO_FILES)
def test_a_lock_that_is_no_file_is_neither_waited_for_nor_written(tmp_path, kind):
    (tmp_path / "precious").write_text("mine")
    NO_FILES[kind](tmp_path / LOCK)
    with pytest.raises(UserError, match=r"\.lock: a link to another place, or no file"):
        try_hold(tmp_path)
    with pytest.raises(UserError, match=r"\.lock: a link to another place, or no file"), hold(tmp_path, "out"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("place", ["wandb", "checkpoints/wandb", "a/wandb"])
def test_a_folder_of_wandb_that_leads_away_is_refused(tmp_path, place):
    run, path = tmp_path / "run", tmp_path / "run" / place
    (run / "wandb/run-1/files").mkdir(parents=True)
    (run / "wandb/run-1/files/kept.ckpt").symlink_to(tmp_path / "moved")  # W&B's own
    (run / "wandb/debug.log").symlink_to("run-1/logs/debug.log")
    refuse_links(run)
    if place == "wandb":
        (run / "wandb").rename(tmp_path / "moved")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"{place}: a link to another place"):
        refuse_links(run)
