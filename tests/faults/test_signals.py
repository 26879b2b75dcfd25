"""Row 8 of the fault plan, and what holds a run folder: the same command again resumes where it was told to end."""

from __future__ import annotations

import json
import os
import signal
import time

import harness
import pytest

from vit_lightning.storage.checkpoint_files import read_checkpoint


@pytest.mark.parametrize(
    ("fault", "code", "saved"),
    [
        pytest.param("11:batch_start:TERM", 143, 12, marks=pytest.mark.full),
        pytest.param("11:forward:INT", 130, 12, marks=pytest.mark.full),
        ("9:after_backward:USR1", 138, 10),
    ],
)
def test_row_08_a_signal_ends_training_with_a_checkpoint(tmp_path, whole, fault, code, saved):
    assert harness.fit(tmp_path, "--checkpoint.every_n_steps=null", fault=f"0:{fault}") == code
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] == saved
    assert "to resume: lightning fit --resume run" in harness.log(tmp_path)
    assert "Traceback" not in harness.log(tmp_path)
    assert harness.resume(tmp_path) == 0
    assert not harness.differences(whole, harness.outcome(tmp_path))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param("15:forward:TERM", 143, marks=pytest.mark.full),
        ("16:val:KILL", -9),
        pytest.param("16:val:TERM", 143, marks=pytest.mark.full),
        pytest.param("16:epoch_end:TERM", 143, marks=pytest.mark.full),
        pytest.param("32:val:INT", 130, marks=pytest.mark.full),
    ],
)
def test_row_08_a_validation_loses_nothing_of_training(tmp_path, whole, fault, code):
    assert harness.fit(tmp_path, "--checkpoint.every_n_steps=null", fault=f"0:{fault}") == code
    checkpoint = read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    assert checkpoint["global_step"] == (32 if fault.startswith("32") else 16)
    assert checkpoint["before_validation"]
    assert harness.resume(tmp_path) == 0
    assert not harness.differences(whole, harness.outcome(tmp_path))
    results = json.loads((tmp_path / "run/results.json").read_text())
    before = checkpoint["callbacks"]["Stopwatch"]
    assert results["seconds"] > results["train_seconds"] >= round(before["seconds"], 3) > 0.0
    assert results["seconds"] > before["run_seconds"] > before["seconds"]


@pytest.mark.full
@pytest.mark.parametrize("step", [4, 16, 20])
def test_row_08_the_same_with_validations_within_an_epoch_and_the_last_one_at_max_steps(tmp_path, step):
    flags = ("--trainer.val_check_interval=0.5", "--trainer.max_steps=20", "--checkpoint.every_n_steps=null")
    assert harness.fit(tmp_path / "whole", *flags) == 0
    assert harness.fit(tmp_path, *flags, fault=f"0:{step}:val:KILL") == -9
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] == step
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)
    assert not harness.differences(harness.outcome(tmp_path / "whole"), harness.outcome(tmp_path))


def test_row_08_a_signal_in_mid_accumulation_waits_for_its_end(tmp_path):
    flags = ("--trainer.accumulate_grad_batches=2", "--checkpoint.every_n_steps=null")
    assert harness.fit(tmp_path / "whole", *flags) == 0
    assert harness.fit(tmp_path, *flags, fault="0:10:batch_start:TERM") == 143
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] == 6
    assert harness.resume(tmp_path) == 0
    assert not harness.differences(harness.outcome(tmp_path / "whole"), harness.outcome(tmp_path))


def test_row_18_a_run_that_continues_is_held_against_others(tmp_path):
    process = harness.start(tmp_path, "fit", *harness.FLAGS, fault="0:9:batch_start:STOP")
    end = time.monotonic() + 60
    while not (tmp_path / "run/checkpoints/last.ckpt").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert harness.resume(tmp_path) == 2
    assert f"resume=run is in use by a live run (process {process.pid} on " in harness.log(tmp_path)
    assert harness.fit(tmp_path) == 2
    assert "out=run is in use by a live run" in harness.log(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)[-2000:]
