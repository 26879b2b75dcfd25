from __future__ import annotations

import csv
import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SMALL

from vit_lightning import UserError
from vit_lightning.checkpoints import read_checkpoint
from vit_lightning.config import resolve
from vit_lightning.run import claim_folder, evaluate, fit
from vit_lightning.tracking import read_metrics


def run(*flags: str, out: str = "out"):
    return fit(resolve([*SMALL, f"--out={out}", *flags]))


def test_a_run_leaves_what_it_promises(in_folder, capsys):
    results = fit(resolve([*SMALL, "--experiment=small"]))
    (folder,) = (in_folder / "runs" / "small").iterdir()
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "checkpoints", "metrics.jsonl", "results.json"}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert [path.name for path in in_folder.iterdir()] == ["runs"]
    assert json.loads((folder / "results.json").read_text()) == results
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["emb_size"] == 16
    numbers = {"test/acc", "test/loss", "test/acc5", "test/ece", "val/acc", "val/loss", "train/acc", "train/loss"}
    facts = {"seconds", "train_seconds", "images_per_second", "parameters", "steps", "epochs", "best_step", "seed"}
    assert numbers | facts <= set(results)
    assert 0 <= results["test/acc"] <= 1
    assert results["steps"] == 21
    said = capsys.readouterr().out
    for part in (
        f"{100 * results['test/acc']:.2f} %",
        f"lightning test --ckpt {folder.relative_to(in_folder)}",
        "images/s",
    ):
        assert part in said


def test_metrics_hold_steps_epochs_and_test(in_folder):
    results = run("--trainer.log_every_n_steps=5", "--trainer.max_epochs=2")
    rows = read_metrics(Path("out"))
    assert [row["step"] for row in rows if "train/loss_step" in row] == list(range(4, 42, 5))
    assert all("lr" in row for row in rows if "train/loss_step" in row)
    assert [row["epoch"] for row in rows if "val/acc" in row] == [0, 1]
    assert [row["test/acc"] for row in rows if "test/acc" in row] == [results["test/acc"]]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(in_folder):
    random = ["--model.emb_dropout=0.1", '--data.augment=[{"class_path": "RandomCrop"}]']
    results = [run(*random, f"--seed_everything={seed}", out=str(n)) for n, seed in enumerate((1, 1, 2))]
    same = [{k: v for k, v in result.items() if "second" not in k} for result in results]
    assert same[0] == same[1]
    weights = [read_checkpoint(Path(str(n), "checkpoints/last.ckpt"))["state_dict"] for n in range(3)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["network.head.linear.weight"], weights[2]["network.head.linear.weight"])


def test_a_run_can_be_repeated_from_its_config(in_folder):
    first = run()
    again = fit(resolve(["--config", "out/config.yaml", "--out=again"]))
    assert again["test/loss"] == first["test/loss"]


@pytest.mark.parametrize("place", ["out", "out/checkpoints/best.ckpt"])
def test_testing_again_needs_no_page_and_gives_the_same_numbers(in_folder, place):
    results = run()
    again = evaluate(resolve([f"--ckpt={place}"], "test"), "test")
    assert again == {name: value for name, value in results.items() if name.startswith("test/")}
    assert len(list(Path("out/test").iterdir())) == 1
    assert evaluate(resolve([f"--ckpt={place}"], "validate"), "validate")["val/acc"] == results["val/acc"]


def test_predictions_are_written_for_each_test_image(in_folder):
    results = run()
    evaluate(resolve(["--ckpt=out", "--out=said"], "predict"), "predict")
    rows = list(csv.DictReader(Path("said/predictions.csv").read_text().splitlines()))
    assert len(rows) == 360
    assert sum(row["label"] == row["prediction"] for row in rows) / 360 == pytest.approx(results["test/acc"])


def test_a_checkpoint_file_alone_is_enough(in_folder):
    results = run()
    Path("out/checkpoints/best.ckpt").rename("alone.ckpt")
    again = evaluate(resolve(["--ckpt=alone.ckpt"], "test"), "test")
    assert again["test/acc"] == results["test/acc"]


def test_first_weights_come_from_another_run(in_folder):
    run("--trainer.max_epochs=2")
    run("--init_from=out", "--optimizer.lr=0", out="second")
    before, after = (read_checkpoint(Path(name, "checkpoints/best.ckpt"))["state_dict"] for name in ("out", "second"))
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("network."))


def test_the_test_can_be_left_out(in_folder):
    assert not any(name.startswith("test/") for name in run("--test=false"))


def test_without_validation_the_last_checkpoint_is_tested(in_folder):
    results = run("--trainer.limit_val_batches=0")
    assert "test/acc" in results
    assert not Path("out/checkpoints/best.ckpt").exists()


def test_fast_dev_run_leaves_nothing(in_folder):
    fit(resolve([*SMALL, "--trainer.fast_dev_run=true"]))
    assert not list(in_folder.iterdir())


def test_lightning_s_callbacks_loggers_and_profilers_come_from_the_page(in_folder):
    Path("page.yaml").write_text(
        "trainer:\n"
        "  max_epochs: 5\n"
        "  profiler: {class_path: lightning.pytorch.profilers.SimpleProfiler, init_args: {filename: times}}\n"
        "  callbacks:\n"
        "    - class_path: lightning.pytorch.callbacks.EarlyStopping\n"
        "      init_args: {monitor: val/acc, patience: 0, stopping_threshold: 0.0}\n"
        "  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: out}}\n"
    )
    config = resolve([*SMALL[:-2], "--config=page.yaml", "--out=out"])
    assert fit(config)["epochs"] == 2
    assert list(Path("out").rglob("metrics.csv"))
    assert list(Path("out").glob("*times*"))


def test_a_folder_in_use_is_refused_before_training(in_folder):
    run()
    before = Path("out/results.json").read_bytes()
    with pytest.raises(UserError, match="out=out is there already"):
        run()
    assert Path("out/results.json").read_bytes() == before


def claim(barrier, folders, parent):
    barrier.wait()
    folders.put(claim_folder(None, Path(parent), "seed0"))


def test_runs_that_start_together_never_share_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, folders = context.Barrier(8), context.Queue()
    processes = [context.Process(target=claim, args=(barrier, folders, tmp_path)) for _ in range(8)]
    for process in processes:
        process.start()
    names = {folders.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    assert len(names) == 8
