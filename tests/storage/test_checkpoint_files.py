"""Checkpoint files: read again, and written in the background."""

from pathlib import Path
from threading import Event, Lock

import numpy as np
import pytest
import torch

from vit_lightning import UserError
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO, _copied, read_checkpoint

WEIGHTS = {"network.weight": torch.arange(3.0)}


def test_each_file_can_be_read_again_whatever_state_callbacks_come_to_have(tmp_path):
    io, last = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    contents = {"state_dict": WEIGHTS, "callbacks": {"Best": {"seen": [0.1, 0.3], "mean": 0.0}}}
    io.save_checkpoint(contents, last)
    contents["callbacks"]["Best"]["mean"] = np.mean([0.1, 0.3])
    io.save_checkpoint(contents, last)
    assert read_checkpoint(last)["callbacks"] == {"Best": {"seen": [0.1, 0.3], "mean": np.mean([0.1, 0.3])}}
    contents["callbacks"]["Best"]["where"] = Path()
    with pytest.raises(UserError, match=r"state of a callback\?.*pathlib"):
        io.save_checkpoint(contents, last)
    assert read_checkpoint(last)["callbacks"]["Best"].keys() == {"seen", "mean"}
    contents["callbacks"]["Best"] = {"seen": 1, "lock": Lock()}
    with pytest.raises(UserError, match=r"callbacks\.Best\.lock: cannot pickle"):
        io.save_checkpoint(contents, last)


def test_a_copy_of_a_checkpoint_keeps_versions_and_bytes():
    state = torch.nn.BatchNorm1d(2).state_dict()
    copied = _copied({"state_dict": state, "own_state": (b"pickled", 1)})
    assert copied["state_dict"]._metadata == state._metadata
    assert torch.equal(copied["state_dict"]["weight"], torch.ones(2))
    assert copied["state_dict"]["weight"] is not state["weight"]
    assert copied["own_state"] == (b"pickled", 1)


class Held(AtomicCheckpointIO):
    """Writes a file only once something waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.in_background, self._is_awaited = True, Event()

    def finish(self):
        if self._writing is not None:
            self._is_awaited.set()
        super().finish()

    def _write(self, contents, target):
        assert self._is_awaited.wait(60)
        self._is_awaited.clear()
        super()._write(contents, target)


def test_a_save_in_the_background_holds_the_numbers_of_its_moment_and_waits_for_the_one_before(tmp_path):
    io, last, counts = Held(), tmp_path / "last.ckpt", [0]
    weights = torch.zeros(10)
    for step in (1, 2):
        weights += 1
        counts[0] += 1
        state = {"tied": weights, "as": weights.view(2, 5)}
        io.save_checkpoint({"state_dict": state, "global_step": step, "counts": counts}, last)
        assert last.exists() == (step == 2)
    weights += 1
    counts[0] += 1
    assert read_checkpoint(last)["global_step"] == 1
    io.finish()
    for step, name in ((1, "previous"), (2, "last")):
        found = read_checkpoint(tmp_path / f"{name}.ckpt")
        assert (found["global_step"], found["counts"]) == (step, [step])
        assert found["state_dict"]["tied"].tolist() == [step] * 10
        assert found["state_dict"]["as"].data_ptr() == found["state_dict"]["tied"].data_ptr()
    for wrong in (Lock(), Event):  # each error is that of the save itself
        with pytest.raises(UserError, match=r"cannot be written|more than tensors"):
            io.save_checkpoint({"state_dict": {}, "wrong": wrong}, last)
    assert read_checkpoint(last)["global_step"] == 2


def test_what_a_save_in_the_background_meets_is_told_when_it_is_waited_for(tmp_path, monkeypatch):
    io, last, best = Held(), tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    monkeypatch.setattr("os.fsync", raises(OSError(28, "No space left on device")))
    io.save_checkpoint({"state_dict": {}, "global_step": 1}, best)
    with pytest.raises(UserError, match=r"best\.ckpt was not written \(No space left"):
        io.save_checkpoint({"state_dict": {}, "global_step": 1}, last)
    monkeypatch.undo()
    io.save_checkpoint({"state_dict": {}, "global_step": 1}, last)
    io.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def raises(fault: Exception):
    def call(*_):
        raise fault

    return call
