"""The examples of ``.github/CONTRIBUTING.md``: each is short, and does what the text around it says."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from runs import REPOSITORY, SMALL, example

from vit_lightning import ViT, ViTClassifier, cli, from_reference, to_reference
from vit_lightning.cli import COMMANDS, main
from vit_lightning.metric_facts import METRICS
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.weights import FAMILIES

TEXT = (REPOSITORY / ".github" / "CONTRIBUTING.md").read_text()
DIGITS = f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}"
WITHOUT_SIZES = ("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--wandb.mode=disabled")


@pytest.fixture(autouse=True)
def unchanged_tables():
    kept = [(table, dict(table)) for table in (METRICS, FAMILIES, COMMANDS)]
    yield
    for name in ("my_blocks", "my_data"):  # other tests have files of these names too
        sys.modules.pop(name, None)
    for table, entries in kept:
        table.clear()
        table.update(entries)


@pytest.mark.parametrize("name", [name for name in re.findall(r"<!-- (.*?) -->", TEXT) if "all parts" not in name])
def test_an_example_is_under_20_lines(name):
    assert len([line for line in example(name).splitlines() if line]) < 20


def test_a_block_of_a_file_in_the_working_folder(in_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(in_folder))
    (in_folder / "my_blocks.py").write_text(example("block"))
    flags = ("--model.block.class_path=my_blocks.PostNorm", "--out=run", "--wandb.mode=disabled")
    assert main(["fit", DIGITS, *SMALL, *flags]) == 0
    assert json.loads((in_folder / "run" / "results.json").read_text())["test/acc"] > 0.05
    names: dict[str, type] = {}
    exec(example("block"), names)
    vit = ViT("Ti/4", image_size=8, depth=1, num_classes=10, block=names["PostNorm"])
    assert [name for name, _ in vit.encoder[0].named_children()] == ["attention", "norm1", "feed_forward", "norm2"]


def write(folder, **examples):
    for name, text in examples.items():
        (folder / f"{name}.py").write_text(example(text))


def test_a_network_a_classifier_and_a_callback_of_files_beside_the_config(in_folder):
    write(in_folder, my_net="network", my_module="classifier", my_callback="callback")
    (in_folder / "exp.yaml").write_text(
        "model: {class_path: my_net.Net, width: 16}\nmodule: {class_path: my_module.Confident, weight: 0.2}\n"
        "trainer: {callbacks: [{class_path: my_callback.WeightNorm, every: 1}]}\n"
    )
    (in_folder / "away").mkdir()
    os.chdir(in_folder / "away")
    words = ["fit", "--config=../exp.yaml", "--trainer.log_every_n_steps=1"]
    assert main([*words, "--out=run", *WITHOUT_SIZES]) == 0
    results = json.loads(Path("run/results.json").read_text())
    assert 0.0 < results["train/brier"] < 1.0
    assert results["parameters"] == 64 * 16 + 16 + 16 * 10 + 10
    assert any("weight_norm" in line for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert sorted(path.name for path in Path("run").glob("*.py")) == ["my_callback.py", "my_module.py", "my_net.py"]


def test_any_lightning_module_and_a_pool(in_folder):
    write(in_folder, my_module="module", my_pool="pool")
    flags = ("--module.class_path=my_module.Plain", "--checkpoint.monitor=val/loss", "--checkpoint.mode=min")
    pool = ("--model.pool.class_path=my_pool.TopPool", "--model.pool.count=3")
    config = in_folder / "exp.yaml"
    config.write_text("test: false\n")
    words = ("fit", f"--config={config}", "--out=run", *SMALL, "--wandb.mode=disabled")
    assert main([*words, *flags, *pool]) == 0
    results = json.loads((in_folder / "run" / "results.json").read_text())
    assert 0.0 < results["val/loss"] < 3.0
    assert results["parameters"] > 1000
    assert main([*words, *flags, "--optimizer.lr=0.1"]) == 2


def test_a_loss_optimizer_schedule_and_metric_train_and_resume_exactly(in_folder, monkeypatch):
    for name in ("loss", "optimizer", "schedule", "metric"):
        (in_folder / f"my_{name}.py").write_text(example(name))
    flags = (*SMALL, "--trainer.max_epochs=2", "--wandb.mode=disabled")
    flags += ("--loss.class_path=my_loss.focal", "--loss.gamma=1.5", "--optimizer.class_path=my_optimizer.SignSGD")
    flags += ("--optimizer.scale=0.5", "--optimizer.schedule=my_schedule.restarts", "--optimizer.schedule.cycles=2")
    flags += ("--metrics=[F1Score, {class_path: my_metric.Confidence, power: 2, name: sure}]",)
    flags += ("--checkpoint.monitor=val/sure", "--checkpoint.mode=min")
    assert main(["fit", DIGITS, *flags, "--out=whole"]) == 0
    whole = json.loads((in_folder / "whole" / "results.json").read_text())
    assert {"val/f1_score", "test/f1_score", "val/sure", "test/sure"} <= set(whole)

    def stop(self, *_):
        if self.global_step == 30:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(ViTClassifier, "on_train_batch_end", stop)
        with pytest.raises(RuntimeError, match="killed"):
            main(["fit", DIGITS, *flags, "--checkpoint.every_n_steps=25", "--out=cut"])
    assert not (in_folder / "cut" / "results.json").exists()
    assert main(["fit", "--resume", "cut"]) == 0
    ends = [read_checkpoint(in_folder / name / "checkpoints" / "last.ckpt") for name in ("whole", "cut")]
    weights = [end["state_dict"] for end in ends]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] if name.startswith("network."))
    assert ends[0]["optimizer_states"][0]["param_groups"] == ends[1]["optimizer_states"][0]["param_groups"]
    cut = json.loads((in_folder / "cut" / "results.json").read_text())
    assert all(cut[name] == value for name, value in whole.items() if name.startswith(("val/", "test/")))


def test_a_data_set_of_a_file_in_the_working_folder(in_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(in_folder))
    (in_folder / "my_data.py").write_text(example("data set"))
    flags = ("--data.class_path=my_data.Noise", "--data.count=90", "--out=run")
    assert main(["fit", *SMALL, *flags, *WITHOUT_SIZES]) == 0
    assert json.loads((in_folder / "run" / "results.json").read_text())["test/acc"] <= 1.0


@pytest.mark.parametrize(
    ("name", "file", "flags"),
    [
        ("Dataset", "my_stripes", ("--data.class_path=my_stripes.Stripes", "--data.count=90", "--data.batch_size=16")),
        ("LightningDataModule", "my_blobs", ("--data.class_path=my_blobs.Blobs", "--data.batch_size=16")),
        (
            "augmentation",
            "my_changes",
            ("--data.augment=[my_changes.inverted, RandomPerspective, {class_path: my_changes.Darker, most: 0.3}]",),
        ),
    ],
)
def test_data_of_others(in_folder, name, file, flags):
    (in_folder / f"{file}.py").write_text(example(name))
    assert main(["fit", *SMALL, *flags, "--out=run", *WITHOUT_SIZES]) == 0
    assert json.loads((in_folder / "run" / "results.json").read_text())["test/acc"] <= 1.0
    with (in_folder / "run" / "config.yaml").open() as config:
        assert f"{file}." in config.read()


def test_a_family_goes_out_and_comes_back():
    exec(example("family"), {})
    vit = ViT(image_size=8, patch_size=4, emb_size=16, depth=2, num_heads=2, num_classes=5).eval()
    state, config = to_reference(vit, family="mine")
    assert {"layers.1.attn.qkv.bias", "fc.weight"} <= set(state)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(from_reference(state, family="mine", config=config).eval()(images), vit(images))


def test_a_command_is_a_file_and_a_line(capsys, monkeypatch):
    module = types.ModuleType("vit_lightning.commands.count")
    exec(example("command"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    COMMANDS.update(eval(f"{{{example('command line')}}}", vars(cli)))
    assert main(["count", DIGITS]) == 0
    assert re.search(r"^[\d,]+ parameters$", capsys.readouterr().out, re.MULTILINE)
    assert main(["count", DIGITS, "--model.dept=3"]) == 2
    assert "model.depth" in capsys.readouterr().err
