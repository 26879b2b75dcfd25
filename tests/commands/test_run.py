"""What a run leaves, and how one goes on."""

import contextlib
import json
import multiprocessing
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from PIL import Image
from runs import REPOSITORY, SMALL, killed_after, logged_rows
from torch import nn

from vit_lightning import UserError
from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.commands.module import compile_chosen
from vit_lightning.commands.resume import changed_arguments, note_changes, read_run, refuse_changes
from vit_lightning.commands.trained import evaluate
from vit_lightning.config.resolve import resolve
from vit_lightning.report.dashboard import SECTIONS
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.folder import new_folder
from vit_lightning.storage.metrics import read_metrics, read_results


def run(*flags: str, out: str = "out"):
    return fit(resolve([*SMALL, f"--out={out}", *flags]))


def test_a_run_leaves_what_it_promises(in_folder, capsys, drawn):
    results = fit(resolve([*SMALL, "--experiment=small", "--optimizer.warmup_epochs=1"]))
    (folder,) = (in_folder / "runs" / "small").iterdir()
    files = "config.yaml environment.json checkpoints metrics.jsonl validation test_predictions.npz curves.png"
    files += " confusion.png test_images.png worst_errors.png classes.csv errors.csv results.json"
    assert {path.name for path in folder.iterdir()} == {*files.split()}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt", "previous.ckpt"}
    with Image.open(folder / "curves.png") as picture:
        assert picture.size == (4 * 585, 570)  # two losses, accuracy and learning rate at 150 dpi
    assert [path.name for path in in_folder.iterdir()] == ["runs"]
    assert read_results(folder) == results
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["emb_size"] == 16
    numbers = {"test/acc", "test/loss", "test/acc5", "test/ece", "val/acc", "val/loss", "train/acc", "train/loss"}
    facts = "seconds train_seconds images_per_second parameters steps epochs best_step seed flops"
    assert numbers | {*facts.split()} <= set(results)
    assert 0 <= results["test/acc"] <= 1
    assert results["steps"] == 21
    said = capsys.readouterr().out
    for part in (
        f"run         {folder.relative_to(in_folder)} (",
        f"model       ViT, {results['parameters']:,} parameters\n",
        "device      CPU, ",
        "data        Digits, 10 classes, 8x8 pixels, 1 channel\n",
        "images      1,294 training, 143 validation, 360 test (validation and test cut from the training",
        "training    1 epoch, 21 steps, batch size 64\n",
        "note        optimizer.warmup_epochs=1.0 takes all of the training: the learning rate only rises, to 0.001",
        "epoch 1/1  train loss ",
        f"{100 * results['test/acc']:.2f} %",
        f"lightning test --ckpt {folder.relative_to(in_folder)}",
        "images/s",
    ):
        assert part in said


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A folder with a run of two epochs and an average of its weights in ``out``, and its results."""
    folder = tmp_path_factory.mktemp("averaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run("--ema.decay=0.9", "--trainer.log_every_n_steps=5", "--trainer.max_epochs=2")


def test_metrics_hold_steps_epochs_and_test(averaged):
    folder, results = averaged
    rows = read_metrics(folder / "out")
    assert [row["step"] for row in rows if "train/loss_step" in row] == list(range(4, 42, 5))
    assert all("lr" in row for row in rows if "train/loss_step" in row)
    assert [row["epoch"] for row in rows if "val/acc" in row] == [0, 1]
    assert [row["test/acc"] for row in rows if "test/acc" in row] == [results["test/acc"]]
    listed = re.findall(r"- `([\w/]+)`: ", (REPOSITORY / "notebooks/logged.md").read_text())
    assert {name for row in rows for name in row} - {"step", "epoch", "time"} <= {*listed}
    curves = {name for names in SECTIONS.values() for name in names}
    assert curves <= {*listed}, "W&B's workspaces draw what is logged"


def test_a_run_can_be_repeated_from_its_config_and_another_seed_is_another_run(results):
    again, other = (fit(resolve(["--config=out/config.yaml", f"--seed_everything={n}", f"--out={n}"])) for n in (0, 1))
    assert again["test/loss"] == results["test/loss"] != other["test/loss"]


@pytest.mark.parametrize("place", ["out", "best.ckpt"])
def test_testing_again_needs_no_config_and_gives_the_same_numbers(results, in_folder, monkeypatch, place):
    if place == "best.ckpt":
        monkeypatch.chdir("out/checkpoints")
    again = evaluate(resolve([f"--ckpt={place}"], "test"), "test")
    assert again == {name: value for name, value in results.items() if name.startswith("test")}
    assert len(list((in_folder / "out/test").iterdir())) == 1
    assert evaluate(resolve([f"--ckpt={place}"], "validate"), "validate")["val/acc"] == results["val/acc"]


def test_what_is_kept_tested_and_taken_up_is_the_average(averaged, monkeypatch):
    folder, results = averaged
    monkeypatch.chdir(folder)
    checkpoint = read_checkpoint(Path("out/checkpoints/best.ckpt"))
    average = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("network.")}
    trained = checkpoint["ema"]["trained"]
    assert any(not torch.equal(value, trained[name.removeprefix("network.")]) for name, value in average.items())
    again = evaluate(resolve(["--ckpt=out"], "test"), "test")
    assert again["test/loss"] == results["test/loss"]
    validated = evaluate(resolve(["--ckpt=out"], "validate"), "validate")
    assert (validated["val/acc"], validated["val/loss"]) == (results["val/acc"], results["val/loss"])
    run("--init_from=out", "--optimizer.lr=0", out="second")
    after = read_checkpoint(Path("second/checkpoints/best.ckpt"))["state_dict"]
    assert all(torch.equal(value, after[name]) for name, value in average.items())


def test_fast_dev_run_leaves_nothing(in_folder):
    fit(resolve([*SMALL, "--trainer.fast_dev_run=true", "--optimizer.warmup_epochs=5"]))
    assert not list(in_folder.iterdir())


@pytest.mark.parametrize(
    ("end", "warmup", "lr"), [("max_steps=3", "epochs=0.7", 1e-3), ("limit_train_batches=2", "steps=9", 5e-4)]
)
def test_a_warm_up_that_is_longer_than_the_training_ends_with_it_and_says_at_which_rate(
    in_folder, capsys, end, warmup, lr
):
    flags = ["--data.batch_size=300", f"--trainer.{end}", "--trainer.log_every_n_steps=1", "--test=false"]
    run(*flags, f"--optimizer.warmup_{warmup}", f"--optimizer.lr={lr}")
    rates = [row["lr"] for row in read_metrics(Path("out")) if "lr" in row]
    assert rates == pytest.approx([lr * (step + 1) / len(rates) for step in range(len(rates))])
    name, value = warmup.split("=")
    said = f"optimizer.warmup_{name}={float(value) if name == 'epochs' else value} takes all of the training: the"
    assert f"{said} learning rate only rises, to {lr:g} in the last step" in capsys.readouterr().out


def test_what_lightning_refuses_of_its_trainer_is_one_line_and_leaves_no_folder(in_folder, capsys):
    assert main(["fit", *SMALL, "--trainer.val_check_interval=500", "--out=out"]) == 2
    (refused,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning fit: ")]
    assert "val_check_interval" in refused
    assert not list(in_folder.iterdir())


@pytest.mark.parametrize("name", ["digits", "digits_short", "cifar10_vit_tiny", "imagefolder"])
def test_the_first_thing_that_everybody_types_is_no_mistake(in_folder, name):
    assert resolve([f"--config={name}", "--data=Digits", "--trainer.max_epochs=1", "--model.patch_size=4"])


def test_the_profile_is_printed_and_kept(in_folder, capsys):
    run("--trainer.profiler=simple", "--trainer.enable_model_summary=true", "--trainer.limit_train_batches=2")
    said = capsys.readouterr()
    for stage in ("fit", "test"):
        assert Path(f"out/{stage}-profile.txt").read_text().strip() in said.out
    assert "run_training_batch" in said.out
    assert "Trainable params" in said.out + said.err


def claim(barrier, folders, parent):
    for number in range(50):
        barrier.wait()
        with new_folder(None, parent / str(number), "seed0") as folder:
            folders.put((number, folder))
            (folder / "config.yaml").touch()
        barrier.wait()
        with contextlib.suppress(UserError), new_folder(parent / "given" / str(number), parent, "") as folder:
            folders.put((number, folder))
            (folder / "config.yaml").touch()


def test_eight_runs_that_start_together_never_share_a_folder_in_fifty_rounds(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, folders = context.Barrier(8), context.Queue()
    processes = [context.Process(target=claim, args=(barrier, folders, tmp_path)) for _ in range(8)]
    for process in processes:
        process.start()
    claimed = [folders.get(timeout=60) for _ in range(50 * 9)]
    for process in processes:
        process.join()
    assert folders.empty()
    assert len({folder for _, folder in claimed}) == 50 * 9
    assert [sum(number == n for n, _ in claimed) for number in range(50)] == [9] * 50


def test_a_stopped_run_continues_to_the_pictures_and_numbers_of_one_that_was_not_stopped(in_folder, capsys):
    flags = ["--trainer.max_epochs=2", "--checkpoint.every_n_steps=4", "--model.emb_dropout=0.1"]
    run(*flags, out="reference")
    with killed_after(5):
        run(*flags, out="run")
    assert not Path("run/results.json").exists()
    capsys.readouterr()
    fit(read_run(Path("run")))
    assert "training    resumes after " in capsys.readouterr().out
    files = [{path.name: path.read_bytes() for path in Path(f, "validation").glob("*.*")} for f in ("reference", "run")]
    assert files[0] == files[1]
    assert len(files[0]) == 4 * 2


def test_resuming_what_is_done_does_nothing_and_changes_are_refused(results):
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    assert main(["fit", "--resume", "out"]) == 0
    assert fit(read_run(Path("out"))) == results
    assert main(["fit", "--resume=out", "--optimizer.lr=1", "--allow-config-change=optimizer.lr"]) == 2
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def test_the_folder_tells_where_a_run_took_place(results):
    environment = json.loads(Path("out/environment.json").read_text())
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert {"command", "python", "processor", "cores", "gpus", "git", "started"} <= set(environment)


def test_a_test_without_batches_leaves_a_run(in_folder):
    results = run("--trainer.limit_test_batches=0")
    assert "test/acc" not in results
    assert not Path("out/test_predictions.npz").exists()


def test_a_short_run_without_validation_has_rows_and_says_that_the_last_weights_are_tested(in_folder, capsys):
    flags = ("--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=null", "--data.batch_size=400")
    assert fit(resolve([*SMALL, *flags, "--out=out"]))["steps"] == 4
    assert "no validation chose a best checkpoint: the weights of the last step are tested" in capsys.readouterr().out
    assert not Path("out/checkpoints/best.ckpt").exists()
    assert [row["step"] for row in logged_rows(Path("out")) if "lr" in row] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("device", "ranks", "flags", "said"),
    [
        ("cuda", 1, [], "reduce-overhead"),
        ("cpu", 1, [], None),
        ("cuda", 2, [], "off, 2 GPUs"),
        ("cuda", 1, ["--trainer.accumulate_grad_batches=2"], "off, trainer.accumulate_grad_batches=2"),
        ("cuda", 1, ["--trainer.callbacks=[{class_path: StochasticWeightAveraging, swa_lrs: 0.1}]"], "off, trainer."),
    ],
)
def test_compile_auto_is_cuda_graphs_where_they_are_allowed(in_folder, capsys, monkeypatch, device, ranks, flags, said):
    compiled = Mock(return_value=[nn.Identity()])
    monkeypatch.setattr("vit_lightning.commands.module.compile_module", compiled)
    experiment = resolve([*SMALL, "--trainer.accelerator=auto", "--compile=auto", *flags])
    monkeypatch.setattr(type(experiment.data.transform), "compile", lambda _: None)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), world_size=ranks)
    assert compile_chosen(nn.Identity(), experiment, trainer) == (said == "reduce-overhead")
    if said == "reduce-overhead":
        assert compiled.call_args.kwargs == {"ranks": 1, "replays": True}
    else:
        assert not compiled.called
        assert capsys.readouterr().out.startswith(f"compile     auto: {said}") == (said is not None)


def start(*flags: str):
    return fit(resolve([*SMALL, *flags]))


def runs() -> list[str]:
    return sorted(path.parent.name for path in Path("runs/run").glob("*/config.yaml"))


def test_auto_continues_the_trial_of_an_agent_and_no_other_with_the_same_options(in_folder, trained, monkeypatch):
    shutil.copytree(trained[0], "runs/run/0")
    Path("runs/run/0/results.json").unlink()
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "other")
    start("--resume=auto")
    assert len(runs()) == 2
    monkeypatch.setenv("WANDB_RUN_ID", json.loads(Path("runs/run/0/environment.json").read_text())["run_id"])
    start("--resume=auto")
    assert len(runs()) == 2
    assert Path("runs/run/0/results.json").exists()


def test_auto_continues_with_the_newest_run_of_the_same_config_that_is_not_over(in_folder, trained):
    shutil.copytree(trained[0], "runs/run/0")
    results = Path("runs/run/0/results.json")
    results.unlink()
    assert start("--resume=auto")["test/loss"] == trained[1]["test/loss"]
    assert runs() == ["0"]
    assert [row["step"] for row in read_metrics(results.parent) if "test/acc" in row] == [21]
    start("--resume=auto")
    assert len(runs()) == 2, "what is over does not go on"
    results.unlink()
    start("--resume=auto", "--optimizer.lr=0.01")
    assert len(runs()) == 3, "another page is another run"
    again = Path("runs/run", runs()[-1], "results.json")
    again.unlink()
    start("--resume=auto", "--data.num_workers=1", "--optimizer.lr=0.01")
    assert len(runs()) == 3
    assert again.exists()


def test_a_config_remembers_what_it_was_and_a_group_allows_its_own_keys_alone(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: 1\n")
    path.write_text(note_changes("a: 2\n", path, {"a": ("0\nb: 1", 2)}, 5))
    assert (
        note_changes("a: 3\n", path, {"a": (2, 3)}, 9) == "# a was 0 b: 1 until step 5\n# a was 2 until step 9\na: 3\n"
    )
    with pytest.raises(UserError) as caught:
        refuse_changes({"optimizer.lr": (1, 2), "optimizers": (1, 2)}, ["optimizer"], path)
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["optimizers"]


def test_arguments_of_a_callback_are_compared_with_those_of_its_class_wherever_it_stood():
    stops, other = {"class_path": "a.Stops", "patience": 1, "mode": "min"}, {"class_path": "a.Other"}
    lists = [stops], [other, {**stops, "patience": 2}]
    before, now = ({"trainer": {"callbacks": given}} for given in lists)
    assert changed_arguments(before, now) == [{"class_path"}, {"patience"}]


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["callbacks"]["Stopwatch"].update(seconds="long"),
        lambda held: held["callbacks"].pop("Stopwatch"),
    ],
)
def test_a_run_is_named_whose_checkpoints_hold_something_else(results, change, capsys):
    Path("out/results.json").unlink()
    for path in Path("out/checkpoints").iterdir():
        held = read_checkpoint(path, mmap=False)
        change(held)
        torch.save(held, path)
    assert main(["fit", "--resume=out"]) == 2
    assert "its contents do not fit together" in capsys.readouterr().err


def test_a_run_can_be_trained_in_a_thread_and_its_checkpoint_holds_the_config(in_folder):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(start, "--out=out", "--resume=auto").result()["steps"] == 21
    page = read_checkpoint(Path("out/checkpoints/last.ckpt"))["config"]
    assert "resume" not in page
    assert json.dumps(page), "plain data"


def test_what_writes_checkpoints_is_not_for_the_config(in_folder, capsys):
    plugin = '--trainer.plugins=[{"class_path": "lightning.pytorch.plugins.AsyncCheckpointIO"}]'
    assert main(["fit", *SMALL, plugin]) == 2
    assert "trainer.plugins: a CheckpointIO cannot be given" in capsys.readouterr().err


def test_another_accuracy_that_the_config_asks_for_is_no_false_one(in_folder, capsys, drawn):
    results = run("--metrics=[{class_path: torchmetrics.Accuracy, top_k: 2}]")
    assert results["test/accuracy"] > results["test/acc"] + 0.02
    assert results["test/acc_low"] < results["test/acc"] < results["test/acc_high"]
    assert "is not that of the logits" not in capsys.readouterr().out


def test_a_step_accumulates_no_more_batches_than_an_epoch_has(in_folder, capsys):
    """PL#21808: a step was said to see 30 batches of 64, of 21 in an epoch."""
    assert fit(resolve([*SMALL, "--trainer.accumulate_grad_batches=30"]))["steps"] == 1
    assert "1 step, batch size 64 x 21 accumulated = 1344\n" in capsys.readouterr().out
