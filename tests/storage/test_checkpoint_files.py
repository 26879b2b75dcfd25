"""Checkpoints of earlier versions are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vit_lightning import UserError
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO, read_checkpoint, seal

WEIGHTS = {"network.weight": torch.arange(3.0)}


@pytest.mark.parametrize("entry", ["page", "config"])
def test_the_config_is_found_under_both_of_its_names(tmp_path, entry):
    path = tmp_path / "last.ckpt"
    with path.open("w+b") as file:
        torch.save({"state_dict": WEIGHTS, entry: {"seed_everything": 3}}, file)
        seal(file)
    checkpoint = read_checkpoint(path)
    assert checkpoint["config"] == {"seed_everything": 3}
    assert "page" not in checkpoint
    assert torch.equal(checkpoint["state_dict"]["network.weight"], torch.arange(3.0))


@pytest.mark.parametrize("contents", [{"page": {}}, {"config": {}, "between_steps": True}], ids=["earlier", "now"])
def test_a_checkpoint_of_ours_without_a_checksum_is_damaged(tmp_path, contents):
    torch.save({"state_dict": WEIGHTS, **contents}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match="it has no checksum"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_the_config_of_another_program_needs_no_checksum(tmp_path):
    torch.save({"state_dict": WEIGHTS, "config": {"lr": 1}}, tmp_path / "theirs.ckpt")
    assert read_checkpoint(tmp_path / "theirs.ckpt")["config"] == {"lr": 1}


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
