"""Parts of a user's own, all in the one file of the guide, untyped as one first writes them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from runs import example

from vit_lightning import UserError
from vit_lightning.cli import main
from vit_lightning.config.resolve import resolve

QUICK = (
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--wandb.mode=disabled",
    "--trainer.accelerator=cpu",
)


@pytest.fixture
def parts(in_folder) -> Path:
    (in_folder / "parts.py").write_text(example("all parts"))
    (in_folder / "exp.yaml").write_text(example("all parts in a config"))
    (in_folder / "module.yaml").write_text(example("all parts in a module"))
    (in_folder / "network.yaml").write_text(example("a network in a config"))
    return in_folder


def test_eleven_parts_of_one_file_train_together(parts):
    assert main(["fit", "--config=exp.yaml", *QUICK, "--out=run"]) == 0
    results = json.loads(Path("run/results.json").read_text())
    assert {"val/worst", "test/worst", "val/acc"} <= set(results)
    assert Path("run/parts.py").read_text() == example("all parts")


@pytest.mark.parametrize(
    "flags", [("exp.yaml", "--data.class_path=parts.Batches"), ("module.yaml", "--module.width=8")]
)
def test_a_data_module_and_a_module_of_the_same_file_train_too(parts, flags):
    assert main(["fit", "--config", *flags, *QUICK, "--out=run"]) == 0
    assert {"val/acc", "test/acc"} <= set(json.loads(Path("run/results.json").read_text()))


def test_a_network_a_classifier_and_data_beside_the_config_are_used_from_another_folder(parts, monkeypatch):
    (parts / "away").mkdir()
    monkeypatch.chdir(parts / "away")
    callback = "--trainer.callbacks=[{class_path: parts.Norms, every: 1}]"
    words = ["fit", "--config=../network.yaml", "--trainer.log_every_n_steps=1", callback]
    assert main([*words, *QUICK, "--data.batch_size=30", "--out=run"]) == 0
    results = json.loads(Path("run/results.json").read_text())
    assert 0.0 < results["train/brier"] < 1.0
    assert results["parameters"] == 64 * 32 + 32 + 32 * 2 + 2
    assert any("norm" in json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert Path("run/parts.py").is_file()


OPTIONS = {
    "model.block": ("Block", "scale", 0.5),
    "model.attention": ("Mixer", "scale", 0.5),
    "model.feed_forward": ("Wide", "factor", 2),
    "model.pool": ("Top", "count", 3),
    "loss": ("focal", "gamma", 1.5),
    "optimizer": ("Sign", "beta", 0.5),
    "data.augment": ("darker", "most", 0.2),
    "metrics": ("Worst", "power", 2.0),
    "trainer.callbacks": ("Norms", "every", 5),
}


@pytest.mark.parametrize(("number", "place"), list(enumerate(OPTIONS)))
def test_each_part_takes_an_option_of_its_own_typed_or_not(parts, number, place):
    """Also where its class had none: an argument is added, with a type or without one."""
    name, option, value = OPTIONS[place]
    text = Path("parts.py").read_text()
    own = f"added: {type(value).__name__} = {value!r}" if number % 2 else f"added={value!r}"
    pattern = rf"(class {name}\b.*?def __init__\(.*?|def {name}\(.*?)\):"
    Path("parts.py").write_text(re.sub(pattern, rf"\1, {own}):", text, count=1, flags=re.DOTALL))
    given = {"class_path": f"parts.{name}", "added": value, option: value}
    listed = place in ("data.augment", "metrics", "trainer.callbacks")
    flag = f"--{place}={json.dumps([given] if listed else given)}"
    config = resolve(["--config=exp.yaml", flag]).config
    node = config
    for key in place.split("."):
        node = (node.get("init_args", node) if isinstance(node, dict) else node)[key]
    arguments = (node[0] if listed else node)["init_args"]
    assert arguments["added"] == arguments[option] == value
    with pytest.raises(UserError, match=rf"{re.escape(place)}.*addded=.*there is no such option|addded"):
        resolve(["--config=exp.yaml", flag.replace('"added"', '"addded"')])


LIGHTNING = """
seed_everything: true
ckpt_path: null
trainer: {accelerator: cpu, max_epochs: 1, limit_train_batches: 3, default_root_dir: null, enable_checkpointing: null,
  use_distributed_sampler: true, barebones: false, callbacks: null, logger: null}
model: {class_path: parts.Lightning, init_args: {width: 8}}
data: {class_path: parts.Images, init_args: {count: 40}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.01, momentum: 0.9}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 2, gamma: 0.5}}
"""
WITHOUT_OPTIMIZER = """

class Lightning(Module):
    configure_optimizers = LightningModule.configure_optimizers
"""


def test_a_config_as_lightning_s_command_line_writes_it_runs(parts):
    Path("parts.py").write_text(example("all parts") + WITHOUT_OPTIMIZER)
    Path("cli.yaml").write_text(LIGHTNING)
    flags = ("--wandb.mode=disabled",)
    assert main(["fit", "-c", "cli.yaml", *flags, "--out=run"]) == 0
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["module"]["class_path"] == "parts.Lightning"
    assert config["optimizer"]["init_args"]["schedule"]["class_path"] == "torch.optim.lr_scheduler.StepLR"
    again = resolve(["--config=run/config.yaml"])
    assert again.config == resolve(["--config=cli.yaml", "--experiment=cli", *flags]).config
    Path("cli.yaml").write_text(LIGHTNING.replace("enable_checkpointing: null", "enable_checkpointing: false"))
    with pytest.raises(UserError) as caught:
        resolve(["--config=cli.yaml", *flags])
    assert caught.value.problems == [
        "trainer.enable_checkpointing=false: a run keeps checkpoints, from which it is resumed (leave it out)"
    ]


def test_options_that_a_module_does_not_take_are_refused_in_a_file_as_on_the_command_line(parts):
    Path("base.yaml").write_text("optimizer: {lr: 1e-3, warmup_epochs: 0}\ndata: {class_path: parts.Images}\n")
    words = ["--config=base.yaml", "--module=parts.Module"]
    expected = "optimizer.lr=0.001, optimizer.warmup_epochs=0: module.class_path=parts.Module takes no optimizer (--"
    with pytest.raises(UserError, match=re.escape(expected)):
        resolve(words)
    assert not resolve([*words, "--optimizer=null"]).config["optimizer"]
    with pytest.raises(UserError, match=r"optimizer\.name=sgd: module"):
        resolve(["--data=parts.Images", *words[1:], "--optimizer.name=sgd"])
