"""Rows 6, 7, 13 and 14 of the fault plan: checkpoint files under kills, damage, full disks and numbers that diverge."""

import os
import random
import re
import shutil
import time
from pathlib import Path

import harness
import processes
import pytest
import torch

from vit_lightning.errors import gathered
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO, newest_checkpoint, read_checkpoint

FILES = ("last", "previous", "best")


def write_for_ever(folder: Path, megabytes: int, begin: int) -> None:
    """Checkpoints of rising steps, one after the other, and each second one in the background."""
    weights = torch.rand(megabytes * 250_000)
    io, step = AtomicCheckpointIO(), begin
    while True:
        step += 1
        io.in_background = step % 2 == 0
        io.save_checkpoint({"state_dict": {"w": weights}, "global_step": step, "config": {}}, folder / "last.ckpt")


@pytest.fixture
def elsewhere(tmp_path):
    """A temporary folder on another file system than the run, where there is one."""
    shared = Path("/dev/shm")
    folder = (shared if shared.is_dir() else tmp_path) / f"vitl-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.full
def test_row_06_ten_kills_while_a_checkpoint_is_written(tmp_path, elsewhere):
    """Each leaves a newest checkpoint that can be read, not older than any before, and no file elsewhere.

    Every second kill comes once a file is seen that is being written, the others at any time.
    """
    draw, step, left_over, place, log = random.Random(1), 0, 0, tmp_path / "checkpoints", tmp_path / "log.txt"
    shared = {"folder": tmp_path, "environment": {**os.environ, "TMPDIR": str(elsewhere)}, "out": log, "err": log}
    for number in range(10):
        process, first = processes.start(write_for_ever, place, 30, step, **shared), time.monotonic() + 60
        while not (place / "last.ckpt").exists() and time.monotonic() < first:
            time.sleep(0.01)
        process.join(draw.uniform(0.1, 0.7))
        while number % 2 and not list(place.glob(".*.part")) and time.monotonic() < first:
            pass
        process.kill()
        process.join()
        for name in FILES[:2]:
            if (place / f"{name}.ckpt").exists():
                read_checkpoint(place / f"{name}.ckpt")
        newest = newest_checkpoint(tmp_path)
        assert newest is not None
        assert newest.checkpoint["global_step"] >= step
        step = newest.checkpoint["global_step"]
        left_over += len(list(place.glob(".*.part")))
    assert step > 0
    assert left_over > 0, "no kill came in the middle of a write"
    assert not [path for path in elsewhere.iterdir() if path.name.startswith("tmp")]


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGE = {
    "cut in half": lambda path: cut(path, 0.5),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("a checkpoint"),
    "one bit flipped": lambda path: flip(path, path.stat().st_size // 2, 3),
    "missing": lambda path: path.unlink(),
    "dangling link": dangle,
    "foreign": lambda path: torch.save({"w": torch.zeros(3)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_row_07_a_damaged_newest_is_passed_over(tmp_path, killed, damage):
    shutil.copytree(killed / "run", tmp_path / "run")
    DAMAGE[damage](tmp_path / "run/checkpoints/last.ckpt")
    newest = newest_checkpoint(tmp_path / "run")
    assert newest is not None
    assert newest.checkpoint["global_step"] == 12


def test_row_07_a_damaged_newest_falls_back_and_says_so(tmp_path, killed, whole):
    shutil.copytree(killed / "run", tmp_path / "run")
    shutil.copy(killed / "witness0.jsonl", tmp_path)
    cut(tmp_path / "run/checkpoints/last.ckpt", 0.5)
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)
    said = harness.log(tmp_path)
    assert "run/checkpoints/last.ckpt" in said
    assert ": falling back to previous.ckpt\n" in said
    assert "resumes after step 12 of " in said
    assert not harness.differences(whole, harness.outcome(tmp_path))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_row_07_without_any_that_can_be_read_nothing_starts(tmp_path, killed):
    shutil.copytree(killed / "run", tmp_path / "run")
    for name in FILES:
        cut(tmp_path / f"run/checkpoints/{name}.ckpt", 0.5)
    before = contents(tmp_path / "run")
    assert harness.resume(tmp_path) == 3
    assert "run/checkpoints" in harness.log(tmp_path)
    assert "Traceback" not in harness.log(tmp_path)
    assert before == contents(tmp_path / "run")
    assert not (tmp_path / "witness0.jsonl").exists()


def test_row_07_two_hundred_flipped_bits_are_detected_or_change_nothing(tmp_path, killed):
    path, draw = tmp_path / "x.ckpt", random.Random(3)
    content = (killed / "run/checkpoints/last.ckpt").read_bytes()
    path.write_bytes(content)
    whole, found = read_checkpoint(path, mmap=False), 0
    ends = [(len(content) - place, bit) for place in range(1, 23) for bit in (0, 5)]  # the end of a zip file
    anywhere = [(draw.randrange(len(content)), draw.randrange(8)) for _ in range(200 - len(ends))]
    for place, bit in [*ends, *anywhere]:
        path.write_bytes(content)
        flip(path, place, bit)
        problems: list[str] = []
        with gathered(problems):  # none of a date, or of what fills up to the next 64 bytes
            assert not harness.differences(whole, read_checkpoint(path, mmap=False))
        assert all("x.ckpt" in problem for problem in problems)
        found += len(problems)
    assert found > 100


def test_row_07_a_damaged_best_is_named_before_training_continues(tmp_path, killed):
    shutil.copytree(killed / "run", tmp_path / "run")
    flip(tmp_path / "run/checkpoints/best.ckpt", 5000, 1)
    assert harness.resume(tmp_path) == 2
    assert re.search(r"best\.ckpt is damaged.*deleted, the run resumes", harness.log(tmp_path))
    assert not (tmp_path / "witness0.jsonl").exists()
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)


EVERY_EIGHT = ("--checkpoint.every_n_steps=null",)


def test_row_13_a_run_goes_on_after_a_full_disk_as_if_it_had_not_been(tmp_path, whole):
    for number, fault in enumerate(("0:9:batch_start:FULL", "0:27:batch_start:BRIM")):  # then no line can be logged
        assert (harness.resume if number else harness.fit)(tmp_path, fault=fault) == 2, harness.log(tmp_path)
        said = harness.log(tmp_path)
        assert "File too large" in said
        assert "Traceback" not in said
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)
    assert not harness.differences(whole, harness.outcome(tmp_path))
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("faults", "flags", "code", "words"),
    [
        ("0:10:batch_start:FULL", (), 2, "last.ckpt was not written (File too large)"),
        ("0:32:train_end:FULL", EVERY_EIGHT, 2, "File too large"),
        pytest.param("0:32:test:FULL", EVERY_EIGHT, 2, "File too large", marks=pytest.mark.full),
        ("0:0:setup:BRIM", EVERY_EIGHT, 2, ""),  # the log takes no line either
        ("0:12:batch_start:MOVE", (), 2, "run was moved or deleted while it trained"),
        pytest.param("0:12:batch_start:LOSE", EVERY_EIGHT, 0, "is missing: the best", marks=pytest.mark.full),
        ("0:32:train_end:LOSE", EVERY_EIGHT, 0, "is missing: the best"),
    ],
)
def test_row_13_what_a_disk_or_somebody_takes_away_is_said_and_the_run_goes_on(
    tmp_path, whole, faults, flags, code, words
):
    assert harness.fit(tmp_path, *flags, fault=faults) == code, harness.log(tmp_path)
    said = harness.log(tmp_path)
    assert words in said
    assert "Traceback" not in said
    assert not list((tmp_path / "run/checkpoints").glob(".*"))
    if not code:
        return  # a best checkpoint that is gone is not replaced in silence
    assert len([line for line in said.splitlines() if line.startswith("lightning fit: ")]) == 1 or not words, said
    assert not (tmp_path / "run/results.json").exists()
    if "MOVE" in faults:
        (tmp_path / "moved").rename(tmp_path / "run")
    if "10:" in faults:
        assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] == 10
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)
    assert not harness.differences(whole, harness.outcome(tmp_path))


def finite(folder: Path) -> list[str]:
    """Names of the checkpoints of a run, all of whose numbers are finite."""
    found = []
    for path in sorted((folder / "run/checkpoints").glob("*.ckpt")):
        checkpoint = read_checkpoint(path)
        states = [state for optimizer in checkpoint["optimizer_states"] for state in optimizer["state"].values()]
        tensors = [*checkpoint["state_dict"].values(), *(value for state in states for value in state.values())]
        assert all(torch.isfinite(torch.as_tensor(tensor)).all() for tensor in tensors)
        found.append(path.stem)
    return found


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    ("point", "every", "what"),
    [
        ("forward", 1, "loss is nan"),
        ("after_backward", 1, "weights are no longer finite"),
        ("after_backward", 100, "gradients are not finite"),
    ],
)
def test_row_14_a_number_that_is_none_stops_at_once(tmp_path, point, every, what, accumulate):
    flags = (f"--trainer.accumulate_grad_batches={accumulate}", f"--checkpoint.every_n_steps={every}")
    assert harness.fit(tmp_path, *flags, fault=f"0:11:{point}:NAN") == 4
    said = harness.log(tmp_path)
    assert f"training diverged in step {11 // accumulate} (the first is 0): {what}" in said
    assert "Traceback" not in said
    assert finite(tmp_path) == ["best", "last", *(["previous"] if every == 1 else [])]
    assert (tmp_path / "run/diverged.json").is_file()
    assert len(harness.batches(tmp_path)) <= 12 + accumulate, "it went on for more than a step"
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] <= 11 // accumulate


def test_row_14_averages_of_the_optimizer_that_overflow_are_in_no_checkpoint(tmp_path):
    assert harness.fit(tmp_path, fault="0:11:after_backward:HUGE") == 4
    assert "the optimizer's averages are no longer finite" in harness.log(tmp_path)
    finite(tmp_path)


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.full)])
def test_row_14_a_rate_that_is_far_too_high(tmp_path, precision):
    flags = ("--optimizer.lr=1e10", "--optimizer.warmup_epochs=0", f"--trainer.precision={precision}")
    assert harness.fit(tmp_path, *flags) == 4
    assert "diverged" in harness.log(tmp_path)
    finite(tmp_path)
    assert harness.fit(tmp_path, *flags, "--resume=auto") == 4
    assert "resumed as it is it would do so again (change what it needs" in harness.log(tmp_path)
    assert not (tmp_path / "run/results.json").exists()
