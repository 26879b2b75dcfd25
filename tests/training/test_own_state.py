"""A run with callbacks and modules of others: killed inside an epoch it ends in the same bits, or it is refused."""

import contextlib
import csv
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from runs import SMALL, killed_after, logged_rows, same_weights, whole_and_resumed

from vit_lightning.cli import main
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_metrics

RUN = ("fit", *SMALL, "--trainer.max_epochs=3", "--wandb.mode=disabled", "--test=false", "--data.fraction=0.2")
RUN += ("--data.batch_size=40", "--checkpoint.every_n_steps=1", "--trainer.log_every_n_steps=1")


@pytest.fixture(autouse=True)
def own(in_folder):
    shutil.copy(Path(__file__).with_name("own.py"), in_folder)


def resumed_equals_whole(*flags: str, kill: int) -> dict:
    whole = whole_and_resumed(*RUN, *flags, kill=kill)
    rows = [[row.get("lr") for row in read_metrics(Path(name)) if "lr" in row] for name in ("whole", "run")]
    assert rows[0] == rows[1]
    return whole


def callbacks(*given: str) -> str:
    return f"--trainer.callbacks=[{', '.join(given)}]"


SWA = "{class_path: StochasticWeightAveraging, swa_lrs: 0.01, swa_epoch_start: 1}"
SCHEDULER = "{class_path: GradientAccumulationScheduler, scheduling: {0: 4, 1: 3, 2: 1}}"


def test_attributes_of_a_callback_and_an_epoch_s_accumulation_survive_a_kill():
    """Seven batches an epoch, of which the last group has fewer: 2 + 3 + 7 steps, and the cosine ends at 0."""
    whole = resumed_equals_whole(callbacks("own.Stateless", SCHEDULER), kill=4)
    assert whole["global_step"] == 12
    assert whole["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_a_stop_that_waits_for_min_epochs_survives_a_kill():
    """PL#21857."""
    whole = resumed_equals_whole(callbacks("own.Stopping"), "--trainer.min_epochs=2", kill=10)
    assert whole["global_step"] == 14


@pytest.mark.parametrize(
    ("stopping", "others"),
    [
        (
            "EarlyStopping, monitor: val/loss, min_delta: 9",
            ["{class_path: EarlyStopping, monitor: val/acc, mode: max}"],
        ),
        ("own.stopping", ["own.Listed"]),
    ],
)
def test_a_patience_that_a_resumed_run_is_given_holds(stopping, others):
    """cookiecutter-pyml#58: that of the checkpoint was used, and config.yaml had the new one."""
    five, one = (callbacks(f"{{class_path: {stopping}, patience: {patience}}}", *others) for patience in (5, 1))
    with killed_after(4):
        main([*RUN, five, "--trainer.max_epochs=4", "--out=run"])
    given = [one, "--allow-config-change=trainer.callbacks"]
    assert main(["fit", "--resume=run", *given]) == 0
    assert json.loads(Path("run/results.json").read_text())["steps"] == 14


@pytest.mark.parametrize("kill", [4, pytest.param(7, marks=pytest.mark.full)])
def test_an_optimizer_inside_another_and_its_attributes_survive_a_kill(kill):
    """sam#31: its momentum began at 0, and its rates no longer were those of the schedule."""
    resumed_equals_whole("--optimizer.class_path=own.SAM", "--trainer.max_epochs=2", kill=kill)


def test_an_optimizer_with_other_weights_for_evaluation_has_these_in_it_and_at_the_end():
    """schedule_free#48: the last validation comes two steps before the end."""
    flags = ("--optimizer.class_path=own.Free", "--trainer.max_epochs=2", "--trainer.val_check_interval=5")
    whole = resumed_equals_whole(*flags, kill=4)
    for saved in (whole, read_checkpoint(Path("whole/checkpoints/best.ckpt"))):
        weights = [value for name, value in saved["state_dict"].items() if name.startswith("network.")]
        states = saved["optimizer_states"][0]["state"].values()
        assert {state["steps"] for state in states} == {saved["global_step"]}
        means = [state["sum"] / state["steps"] for state in states]
        norms = [float(sum(value.double().norm() for value in values)) for values in (weights, means)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert norms[0] != pytest.approx(float(sum(state["trained"].double().norm() for state in states)), rel=1e-3)


def test_batches_accumulated_for_an_optimizer_that_computes_one_again_are_refused(capfd):
    """The last batch of a step counted twice."""
    assert main([*RUN, "--optimizer.class_path=own.SAM", "--trainer.accumulate_grad_batches=2"]) == 2
    assert "trainer.accumulate_grad_batches=2: SAM computes a batch again" in capfd.readouterr().err


def test_weights_averaged_by_lightning_survive_a_kill_and_are_those_that_are_kept():
    """PL#6074, PL#11665."""
    whole = resumed_equals_whole(callbacks(SWA), kill=17)
    average = whole["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
    names = [name for name in average if name.startswith("network.")]
    assert all(torch.equal(whole["state_dict"][name], average[name]) for name in names)
    assert not Path("whole/checkpoints/best.ckpt").exists()
    results = json.loads(Path("whole/results.json").read_text())
    assert results["best_step"] == 21
    assert "val/acc" not in results, "it is that of other weights"


@pytest.mark.full
@pytest.mark.parametrize("kill", [3, 10, 17])
@pytest.mark.parametrize(
    "given",
    [
        (SWA,),
        (SCHEDULER,),
        ("{class_path: GradientAccumulationScheduler, scheduling: {1: 2}}", "own.Stateful"),
        ("EMAWeightAveraging",),
        ("WeightAveraging",),
        ("Timer", "LearningRateMonitor", "{class_path: EarlyStopping, monitor: val/acc, mode: max}", "ModelCheckpoint"),
        ("own.Stateful",),
        ("own.Stateless",),
        ("own.Unfreeze",),
        ("own.Decay",),
    ],
    ids=lambda given: given[0][:60],
)
def test_a_run_with_callbacks_ends_in_the_same_bits(given, kill):
    if "Gradient" in given[0]:
        kill = kill // 2
    resumed_equals_whole(callbacks(*given), kill=kill)


KEEPING = "{class_path: ModelCheckpoint, monitor: val/loss, every_n_train_steps: 2, save_top_k: 2, dirpath: kept}"
STOPPING = "class_path: EarlyStopping, monitor: val/acc, mode: max, patience: 1, check_on_train_epoch_end: true"
EARLIER = "--checkpoint.every_n_steps=null"  # it resumes at the end of the epoch before, of seven steps


@pytest.mark.parametrize(
    ("given", "kill"),
    [
        ((callbacks("own.Knowing"),), 17),
        ((callbacks(KEEPING),), 17),
        (("--module.class_path=own.Plateaued", EARLIER), 17),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ((callbacks("own.Knowing"), EARLIER), 23),
                ((callbacks(f"{{{STOPPING}, strict: false}}"),), 17),
                (("--module.class_path=own.Plateaued",), 17),
                (("--module.class_path=own.Plateaued",), 14),
                (("--module={class_path: own.Plateaued, interval: step}",), 17),
            )
        ),
    ],
)
def test_callbacks_of_a_resumed_run_know_its_last_validation(given, kill):
    """PL#18595: also a rate that follows it, whose step in Lightning comes after the checkpoint, or not at all."""
    flags = [flag for flag in RUN if "module" not in given[0] or not flag.startswith("--model")]
    flags += ["--trainer.check_val_every_n_epoch=2", "--trainer.max_epochs=5", *given]
    kept = []
    for name in ("whole", "run"):
        with killed_after(kill) if name == "run" else contextlib.nullcontext():
            main([*flags, f"--out={name}"])
        if name == "run":
            assert main(["fit", "--resume=run"]) == 0
        kept.append(sorted(path.name for path in Path().glob("kept/*")))
        shutil.rmtree("kept", ignore_errors=True)
    whole = same_weights("whole", "run")
    assert kept[0] == kept[1]
    assert whole["global_step"] == (21 if STOPPING in given[0] else 35)


@pytest.mark.parametrize("name", ["ModelPruning", "LearningRateFinder", "BatchSizeFinder"])
def test_what_no_resume_can_repeat_is_refused_before_the_start(capfd, name):
    arguments = ", pruning_fn: l1_unstructured, amount: 0.1" if name == "ModelPruning" else ""
    assert main([*RUN, callbacks(f"{{class_path: {name}{arguments}}}")]) == 2
    assert f"trainer.callbacks.{name}: " in capfd.readouterr().err
    assert not Path("runs").exists()


def test_what_a_callback_changes_at_the_end_is_kept_and_tested():
    assert main([*RUN, callbacks("own.Other"), "--out=Other"]) == 0
    assert not Path("Other/checkpoints/best.ckpt").exists()
    assert main([*RUN, "--out=plain"]) == 0
    plain, halved = (read_checkpoint(Path(name, "checkpoints/last.ckpt"))["state_dict"] for name in ("plain", "Other"))
    name = "network.head.linear.weight"
    assert torch.equal(halved[name], plain[name] * 0.5)
    assert Path("plain/checkpoints/best.ckpt").exists()


@pytest.mark.parametrize(
    ("name", "attributes"),
    [("Opaque", ["draw", "mean", "numbers", "recent", "torchs"]), ("Stateful", []), ("Noisy", ["Noise.draw"])],
)
def test_attributes_that_no_checkpoint_holds_are_named_before_the_first_step(name, attributes):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main([*RUN, callbacks(f"own.{name}"), "--trainer.max_steps=1"]) == 0
    texts = [str(one.message) for one in said if ": in no checkpoint: " in str(one.message)]
    assert [text.partition(": ")[0] for text in texts] == [
        text for text in [", ".join(one if "." in one else f"{name}.{one}" for one in attributes)] if text
    ]


@pytest.mark.parametrize("name", ["InSetup", "Partial", pytest.param("Configured", marks=pytest.mark.full)])
def test_layers_that_are_made_late_and_a_part_of_the_weights_are_restored_as_in_lightning(name):
    """PL#5410, PL#19281, PL#18829: they could be trained, but neither tested nor resumed."""
    flags = [flag for flag in RUN if not flag.startswith(("--model", "--test"))] + [f"--module=own.{name}"]
    whole_and_resumed(*flags, kill=4)
    assert main(["test", "--ckpt=run", "--trust", "--out=again"]) == 0
    found = {json.loads(Path(name, "results.json").read_text())["test/acc"] for name in ("whole", "run", "again")}
    assert len(found) == 1
    assert min(found) > 0.5  # a network of other weights has 0.1


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("", {"lr": 0.02}, [0.02] * 5),
        ("step", {"every": 3}, [0.1, 0.1, 0.05, 0.05, 0.05]),
        *(
            pytest.param(*given, marks=pytest.mark.full)
            for given in (
                ("warm", {"lr": 0.02}, [0.02] * 5),
                ("late", {"every": 0}, [0.1] * 5),
                ("rising", {"every": 1}, [0.1] * 5),
                ("two", {"lr": 0.02}, [0.01, 0.02, 0.01, 0.005, 0.0025]),
            )
        ),
    ],
)
def test_a_rate_or_schedule_that_a_resumed_module_is_given_holds(kind, change, expected):
    """PL#12118, PL#4044, PL#19865: those of the checkpoint were used, and config.yaml had the new ones."""
    flags = [flag for flag in RUN if not flag.startswith(("--model", "--trainer.max_epochs"))]
    with killed_after(4):
        main([*flags, "--trainer.max_steps=9", f"--module={{class_path: own.Rated, kind: '{kind}'}}", "--out=run"])
    given = [f"--module.{name}={value}" for name, value in change.items()]
    assert main(["fit", "--resume=run", *given, "--allow-config-change=module"]) == 0
    rates = {row["step"]: row["lr"] for row in read_metrics("run") if "lr" in row}
    assert [rates[step] for step in range(4, 9)] == pytest.approx(expected)
    [group] = read_checkpoint(Path("run/checkpoints/last.ckpt"))["optimizer_states"][0]["param_groups"]
    assert group["counted"].tolist() == [9, 9], "what an optimizer has made of its groups stays"


def test_buffers_that_the_checkpoint_restores_are_named_where_options_of_the_module_change():
    """Weights of classes are a buffer of the loss, and Lightning restores them with the weights."""
    flags = [flag for flag in RUN if not flag.startswith("--model")]
    with killed_after(4):
        main([*flags, "--module=own.Weighted", "--out=run"])
    with pytest.warns(UserWarning, match="^criterion.weight: as in the checkpoint, whatever the options of the module"):
        assert main(["fit", "--resume=run", "--module.weight=2", "--allow-config-change=module.weight"]) == 0


@pytest.mark.parametrize("name", ["ByHand", "Raw", pytest.param("Two", marks=pytest.mark.full)])
def test_what_a_module_steps_by_hand_survives_a_kill(monkeypatch, name):
    """OneTrainer#1465: inside a group of three batches; steps are those of the rows, whatever the Trainer counts."""
    flags = [flag for flag in RUN if not flag.startswith(("--model", "--checkpoint"))]
    flags += [f"--module=own.{name}", "--trainer.callbacks=own.Stop"]
    assert main([*flags, "--out=whole"]) == 0
    monkeypatch.setenv("STOP", "1")
    with pytest.raises(SystemExit, match="143"):
        main([*flags, "--out=run"])
    monkeypatch.delenv("STOP")
    assert main(["fit", "--resume=run"]) == 0
    assert same_weights("whole", "run")["global_step"] == 21
    assert logged_rows(Path("whole")) == logged_rows(Path("run"))
    results = [json.loads(Path(name, "results.json").read_text()) for name in ("whole", "run")]
    best = read_checkpoint(Path("whole/checkpoints/best.ckpt"))
    validated = {row["step"] + 1: row["val/acc"] for row in logged_rows(Path("whole")) if "val/acc" in row}
    assert all(one["steps"] == 21 for one in results)
    assert all(one["val/acc"] == validated[one["best_step"]] == max(validated.values()) for one in results)
    assert best["global_step"] == results[0]["best_step"]


@pytest.mark.parametrize("kill", [4, 7, *(pytest.param(kill, marks=pytest.mark.full) for kill in (2, 3, 9))])
def test_numbers_of_an_epoch_and_files_of_loggers_are_whole_after_a_kill(kill):
    """Inside an epoch, before a validation inside it, and before that at its end, of seven batches."""
    flags = [flag for flag in RUN if "model" not in flag]
    flags += ["--module=own.Following", "--trainer.val_check_interval=0.5", "--trainer.max_epochs=2"]

    def train(name: str) -> None:
        loggers = [f"{{class_path: CSVLogger, save_dir: {name}-{k}, name: null, version: {k}}}" for k in ("0", "null")]
        main([*flags, f"--trainer.logger=[{', '.join(loggers)}]", f"--out={name}"])

    train("whole")
    with killed_after(kill):
        train("run")
    assert main(["fit", "--resume=run"]) == 0
    same_weights("whole", "run")
    assert logged_rows(Path("run")) == logged_rows(Path("whole"))
    names = {name for row in logged_rows(Path("whole")) for name in row}
    assert {"train/loss_epoch", "train/most", "train/right", "train/first"} <= names
    rows = {}
    for name in ("run-0", "run-null", "whole-0"):
        lines = [row for path in sorted(Path(name).rglob("*.csv")) for row in csv.DictReader(path.open(newline=""))]
        rows[name] = [{k: float(v) for k, v in row.items() if v and not k.startswith("speed/")} for row in lines]
    both = rows.pop("run-null")  # in a file for each process
    assert rows["run-0"] == [row for k, row in enumerate(both) if row not in both[:k]] == rows["whole-0"]
    [begun] = [
        row["step"] for row in map(json.loads, Path("run/metrics.jsonl").read_text().splitlines()) if "resumed" in row
    ]
    assert all(row["step"] >= begun for k, row in enumerate(both) if row in both[:k]), "only what is trained again"


def test_a_run_on_batches_of_unknown_number_resumes_inside_an_epoch(capfd):
    """PL#19764: from the first batch, as in Lightning, which the run says before."""
    flags = [flag for flag in RUN if not flag.startswith(("--data", "--model"))]
    with killed_after(6):
        main([*flags, "--module=own.Logging", "--data.class_path=own.Streams", "--out=run"])
    assert "a run that is resumed inside an epoch is not bit-identical" in capfd.readouterr().out
    assert main(["fit", "--resume=run"]) == 0
    assert "training    resumes after step " in capfd.readouterr().out
    assert read_checkpoint(Path("run/checkpoints/last.ckpt"))["epoch"] == 3


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--module=own.Old",), "Support for `training_epoch_end` has been removed"),
        ((callbacks("BackboneFinetuning"), *SMALL), "trainer.callbacks.BackboneFinetuning: AttributeError"),
    ],
)
def test_what_lightning_refuses_is_one_line(capfd, flags, text):
    """PL#14755."""
    few = ("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--wandb.mode=disabled", "--test=false")
    assert main(["fit", *few, *flags]) == 2
    err = capfd.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_a_signal_in_the_last_batch_of_an_epoch_has_its_checkpoint(monkeypatch):
    """Where neither a validation nor a checkpoint is due; the callback is made by a function."""
    flags = (*RUN, "--trainer.callbacks=own.stop_in_last_batch", "--trainer.check_val_every_n_epoch=3")
    flags += ("--checkpoint.every_n_steps=null", "--checkpoint.every_n_epochs=10")
    assert main([*flags, "--out=whole"]) == 0
    monkeypatch.setenv("STOP", "1")
    with pytest.raises(SystemExit, match="143"):
        main([*flags, "--out=run"])
    whole, run = (read_checkpoint(Path(name, "checkpoints/last.ckpt")) for name in ("whole", "run"))
    assert run["global_step"] == whole["global_step"] * 2 / 3
    monkeypatch.delenv("STOP")
    assert main(["fit", "--resume=run"]) == 0
    same_weights("whole", "run")
