"""A run that is killed, or ended by a signal, comes out as if it had not been; what holds a run folder."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import harness
import pytest
import torch
import yaml
from tensors import write_images

from vit_lightning.storage.checkpoint_files import newest_checkpoint, read_checkpoint
from vit_lightning.storage.metrics import read_metrics

VARIANTS = {
    "plain": (),
    "accumulate 2": ("--trainer.accumulate_grad_batches=2",),
    "accumulate 3": ("--trainer.accumulate_grad_batches=3",),
    "average of weights": ("--ema.decay=0.9",),
    "average of weights of Lightning": ('--trainer.callbacks+=[{"class_path": "EMAWeightAveraging"}]',),
    "validation in mid-epoch": ("--trainer.val_check_interval=0.5",),
    "ended by steps": ("--trainer.max_epochs=-1", "--trainer.max_steps=28"),
    "checkpoint every 3 steps": ("--checkpoint.every_n_steps=3",),
    "checkpoint at epoch ends": ("--checkpoint.every_n_steps=null",),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, whole):
    """The outcome of a run of some flags that nobody kills."""
    known = {(): whole}

    def outcome(*flags: str):
        if flags not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            assert harness.fit(folder, *flags) == 0, harness.log(folder)
            known[flags] = harness.outcome(folder)
        return known[flags]

    return outcome


def check_chain(folder: Path, expected, *faults: str, flags: tuple[str, ...] = ()) -> None:
    """A run with ``flags`` that ends by each fault in turn, and is resumed, comes out as expected."""
    for number, fault in enumerate(faults):
        code = harness.resume(folder, fault=fault) if number else harness.fit(folder, *flags, fault=fault)
        assert code == -9, harness.log(folder)
    assert harness.resume(folder) == 0, harness.log(folder)
    assert not harness.differences(expected, harness.outcome(folder))


def test_row_01_the_reference_repeats_and_shows_each_image_once_an_epoch(tmp_path, uninterrupted):
    assert harness.fit(tmp_path) == 0
    outcome = harness.outcome(tmp_path)
    assert not harness.differences(uninterrupted(), outcome)
    assert outcome["steps"] == len(outcome["batches"]) == 32
    for epoch in range(4):
        images = [index for indices, _ in outcome["batches"][8 * epoch : 8 * epoch + 8] for index in indices]
        assert sorted(images) == list(range(1294))


def changed(value):
    """The same with one number, word or bit of it changed, in the innermost of it."""
    if isinstance(value, dict):
        key = next(iter(value), "another")
        return {**value, key: changed(value.get(key))}
    if isinstance(value, list | tuple):
        return [changed(next(iter(value), None)), *value[1:]]
    if isinstance(value, torch.Tensor):
        value = value.clone()
        value.view(-1).view(torch.uint8)[0] ^= 1
        return value
    return f"not {value}"


def test_row_01_the_comparison_sees_a_change_of_any_part_and_of_one_bit(whole):
    for part in whole:
        (found,) = harness.differences(whole, {**whole, part: changed(whole[part])})
        assert found.startswith(f".{part}")


ACCUMULATE = "--trainer.accumulate_grad_batches="
EIGHT = "--checkpoint.every_n_steps=null"
"""Checkpoints at ends of epochs alone, every eight steps."""
STOP_EARLY = '--trainer.callbacks+=[{"class_path": "EarlyStopping", "monitor": "val/loss", "stopping_threshold": 9.0}]'
MAX_STEPS = ("--trainer.val_check_interval=0.5", "--trainer.max_steps=20", EIGHT)
COMPILED = ("--compile=true", "--trainer.precision=bf16-mixed", "--ema.decay=0.9", "--model.drop_path=0.2")
COMPILED += ("--model.depth=2", "--model.patch_dropout=0.3", "--model.activation_checkpointing=true")
CODES = {"KILL": -9, "TERM": 143, "INT": 130, "USR1": 138}
ENDED = {
    "1:batch_start:KILL": (),
    "11:ckpt_write:KILL": (),
    "16:val:KILL": (EIGHT,),
    "9:after_backward:USR1": (EIGHT,),
    "10:batch_start:TERM": (f"{ACCUMULATE}2", EIGHT),
    "8:train_end:KILL": (STOP_EARLY,),
    "16:best_write:LATE_KILL": (),
    "11:ckpt_write:LATE_INT": (),
}
"""Flags of a run by how it is ended: before a step, within, in a validation, while a file is written."""
ENDED_TOO = [
    *((f"12:{point}:KILL", ()) for point in ("forward", "after_backward", "after_opt_step")),
    *((f"{point}:KILL", ()) for point in ("16:val", "11:ckpt_done", "16:ckpt_done")),
    *((f"{point}:LATE_KILL", ()) for point in ("11:ckpt_write", "16:best_done", "15:ckpt_write")),
    *((f"{point}:{kind}", ()) for point, kind in (("16:best_write", "LATE_INT"), ("15:ckpt_write", "LATE_USR1"))),
    *((f"11:{point}", (EIGHT,)) for point in ("batch_start:TERM", "forward:INT")),
    *((point, (EIGHT,)) for point in ("15:forward:TERM", "16:val:TERM", "16:epoch_end:TERM", "32:val:INT")),
    *((f"{step}:val:KILL", MAX_STEPS) for step in (4, 16, 20)),
    ("10:after_backward:TERM", VARIANTS["average of weights"]),
    *(("13:batch_start:KILL", (f"--trainer.precision={precision}",)) for precision in ("64-true", "bf16-true")),
    ("13:batch_start:KILL", COMPILED),
    ("14:batch_start:KILL", (f"{ACCUMULATE}4", "--trainer.val_check_interval=3")),
    ("14:batch_start:KILL", ("--trainer.precision=bf16-true", f"{ACCUMULATE}4", "--trainer.val_check_interval=3")),
    ("14:batch_start:KILL", ("--trainer.val_check_interval=5", "--trainer.check_val_every_n_epoch=null")),
]
WHILE_WRITING = {"11:ckpt_write": (11, 8), "16:best_write": (16, 8), "16:best_done": (16, 16), "15:ckpt_write": (15, 8)}
"""Steps of the newest and the best checkpoint behind a kill while training goes on during a write."""


@pytest.mark.parametrize(
    ("fault", "flags"), [*ENDED.items(), *(pytest.param(*case, marks=pytest.mark.full) for case in ENDED_TOO)]
)
def test_a_run_that_is_ended_once_comes_out_as_if_it_had_not_been(tmp_path, uninterrupted, fault, flags):
    expected = uninterrupted(*(flag for flag in flags if flag != EIGHT))
    step, point, kind = fault.split(":")
    code = CODES[kind.removeprefix("LATE_")]
    assert harness.fit(tmp_path, *flags, fault=f"0:{fault}") == code, harness.log(tmp_path)
    checkpoint, checkpoints = newest_checkpoint(tmp_path / "run").checkpoint, tmp_path / "run/checkpoints"
    accumulated = next((int(flag[-1]) for flag in flags if flag.startswith(ACCUMULATE)), 1)
    if code > 0:  # after the step
        trained = len((tmp_path / "witness0.jsonl").read_text().splitlines())
        assert checkpoint["global_step"] == trained // accumulated
        assert "to resume: lightning fit --resume run" in harness.log(tmp_path)
        assert "Traceback" not in harness.log(tmp_path)
        assert not list(checkpoints.glob(".*"))
    if kind == "LATE_KILL":
        assert len(list(checkpoints.glob(".*.part"))) == ("write" in point)
        found = checkpoint["global_step"], read_checkpoint(checkpoints / "best.ckpt")["global_step"]
        assert found == WHILE_WRITING[f"{step}:{point}"]
    if point == "val" and EIGHT in flags:
        assert checkpoint["global_step"] == int(step)
        assert checkpoint["before_validation"] or flags == MAX_STEPS
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)
    outcome = harness.outcome(tmp_path)
    if STOP_EARLY in flags:  # the last file is that of the epoch's end, which was also that of training
        parts = ("best", "rows", "results", "predictions", "batches", "optimizer", "schedule")
        expected, outcome = ({name: found[name] for name in parts} for found in (expected, outcome))
    assert not harness.differences(expected, outcome)
    assert not list(checkpoints.glob(".*"))
    results, before = json.loads((tmp_path / "run/results.json").read_text()), checkpoint["callbacks"]["Stopwatch"]
    assert results["seconds"] > results["train_seconds"] >= round(before["seconds"], 3)
    assert results["seconds"] > before["run_seconds"]


@pytest.mark.full
@pytest.mark.parametrize("averaged", [False, True], ids=["accumulate", "average"])
def test_row_02_and_19_fifty_random_kills(tmp_path, uninterrupted, averaged):
    variant = VARIANTS["average of weights" if averaged else "accumulate 2"]
    flags = ("--trainer.max_epochs=200", "--data.num_workers=2", "--checkpoint.every_n_steps=5", *variant)
    expected = uninterrupted(*flags)
    assert harness.punish(tmp_path, *flags, seed=int(averaged), kills=50, apart=(0.8, 3.0)) == 50
    assert not harness.differences(expected, harness.outcome(tmp_path))
    end = time.monotonic() + 10
    while harness.orphans(tmp_path) and time.monotonic() < end:
        time.sleep(0.2)
    assert not harness.orphans(tmp_path)


def test_row_03_three_kills_around_ends_of_epoch_and_validations_of_averaged_weights(tmp_path, uninterrupted):
    flags = VARIANTS["average of weights"] + VARIANTS["validation in mid-epoch"]
    faults = [f"0:{step}:batch_start:KILL" for step in (8, 10, 12)]
    check_chain(tmp_path, uninterrupted(*flags), *faults, flags=flags)


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("first", "gap"), [(1, 1), (1, 2), (2, 2)])
def test_row_03_each_pair_of_kills_one_or_two_steps_apart(tmp_path, uninterrupted, variant, first, gap):
    """One after the other: killed at every step, at every odd and at every even one."""
    steps = range(first, 28 if variant == "ended by steps" else 32, gap)
    faults = [f"0:{step}:batch_start:KILL" for step in steps]
    check_chain(tmp_path, uninterrupted(*VARIANTS[variant]), *faults, flags=VARIANTS[variant])


@pytest.mark.full
def test_row_17_a_change_outlives_a_kill_before_the_next_checkpoint(tmp_path, killed):
    copy(killed, tmp_path)
    change = ("--optimizer.lr=0.5", "--allow-config-change=optimizer.lr")
    assert harness.resume(tmp_path, *change, fault="0:13:batch_start:KILL") == -9
    assert harness.resume(tmp_path) == 0, harness.log(tmp_path)
    assert (tmp_path / "run/config.yaml").read_text().count("# optimizer.lr was") == 1


def test_row_05_the_number_of_workers_may_change(tmp_path, killed, whole):
    copy(killed, tmp_path)
    assert harness.resume(tmp_path, "--data.num_workers=2") == 0, harness.log(tmp_path)
    assert not harness.differences(whole, harness.outcome(tmp_path))


def copy(killed: Path, folder: Path) -> bytes:
    shutil.copytree(killed, folder, dirs_exist_ok=True)
    return (folder / "run/checkpoints/last.ckpt").read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        ("--data.batch_size=81", "--seed_everything=1", "--data.split_seed=1"),
        ("--data.fraction=0.5", "--data.repetitions=2", "--trainer.accumulate_grad_batches=2"),
        ("--data.shots=20",),
        ("--trainer.devices=2",),
    ],
)
def test_row_05_what_would_make_other_batches_is_refused(tmp_path, killed, flags):
    before = copy(killed, tmp_path)
    keys = [flag.strip("-").partition("=")[0] for flag in flags]
    assert harness.resume(tmp_path, *flags, f"--allow-config-change={','.join(keys)}") == 2
    for key in keys:
        assert f"{key}=" in harness.log(tmp_path)
    assert (tmp_path / "run/checkpoints/last.ckpt").read_bytes() == before
    assert len(harness.batches(tmp_path)) == 14


def test_row_05_other_images_are_refused(tmp_path):
    for name in ("train/a", "train/b", "test/a", "test/b"):
        write_images(tmp_path / "images" / name, 12, size=(8, 8), seed=len(name))
    sizes = ["--data.image_size=8", "--data.batch_size=4", "--data.num_workers=0", "--model.patch_size=4"]
    small = ["--model.emb_size=16", "--model.depth=1", "--model.num_heads=2", "--trainer.accelerator=cpu"]
    flags = ["--data=ImageFolder", "--data.root=images", *sizes, *small, "--trainer.max_epochs=2", "--out=run"]
    callback = "--trainer.callbacks=[{'class_path': 'fault.Fault'}]"
    assert harness.command(tmp_path, "fit", *flags, callback, fault="0:8:batch_start:KILL") == -9
    write_images(tmp_path / "images" / "train" / "a", 13, size=(8, 8))
    assert harness.resume(tmp_path) == 2
    assert "data: the training or validation images are no longer those" in harness.log(tmp_path)


def test_row_17_a_changed_config_is_refused_with_the_difference(tmp_path, killed):
    copy(killed, tmp_path)
    assert harness.resume(tmp_path, "--model.emb_dropout=0.5", "--optimizer.lr=0.5") == 2
    said = harness.log(tmp_path)
    assert "model.emb_dropout=0.5, but run has 0.1 (to change it: --allow-config-change model.emb_dropout)" in said
    assert "optimizer.lr=0.5, but run has" in said
    assert len(harness.batches(tmp_path)) == 14
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    written["model"]["init_args"]["emb_dropout"] = 0.5
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(written))
    assert harness.resume(tmp_path) == 2, "a config that was edited is a change as well"


def test_row_17_a_change_that_is_allowed_holds(tmp_path, killed):
    copy(killed, tmp_path)
    changes = ["--optimizer.lr=0.5", "--optimizer.weight_decay=0.7", "--optimizer.schedule=constant"]
    assert harness.resume(tmp_path, *changes, "--allow-config-change=optimizer") == 0, harness.log(tmp_path)
    rates = [row["lr"] for row in read_metrics(tmp_path / "run") if "lr" in row]
    assert rates[13:] == [0.5] * 19
    assert max(rates[:13]) < 0.01
    assert "# optimizer.lr was 0.001 until step 13" in (tmp_path / "run/config.yaml").read_text()
    last = read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    assert last["optimizer_states"][0]["param_groups"][0]["weight_decay"] == 0.7
    assert last["config"]["optimizer"]["lr"] == 0.5


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
