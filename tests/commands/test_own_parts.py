"""Runs with parts of a user's own, those of the guide's one file: from another folder, killed, resumed, used again."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
import torch
from processes import Running, command
from runs import example

from vit_lightning import UserError
from vit_lightning.cli import main
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_results

PARTS, MORE = example("all parts"), Path(__file__).with_name("more.py").read_text()


@pytest.fixture
def project(in_folder) -> Path:
    folder = in_folder / "project"
    (folder / "pieces").mkdir(parents=True)
    (folder / "pieces" / "mixing.py").write_text("def mix(tokens):\n    return tokens / 2\n")
    (folder / "pieces" / "late.py").write_text("WEIGHT = 0.5\n")
    (folder / "parts.py").write_text(PARTS)
    (folder / "more.py").write_text(MORE)
    (folder / "exp.yaml").write_text(example("all parts in a config"))
    (folder / "module.yaml").write_text(example("all parts in a module"))
    (folder / "network.yaml").write_text(example("a network in a config"))
    return folder


def test_all_parts_together_are_killed_and_resumed_from_the_copies(lightning, project, tmp_path):
    flags = ["fit", "--config=project/exp.yaml", "--model.attention=more.Mixing", "--data.batch_size=16"]
    flags += ["--module.class_path=more.WithAux", "--module.aux_weight=0.5", "--trainer.accelerator=cpu"]
    flags += ["--trainer.callbacks=[parts.Norms, more.Kill]", "--trainer.max_epochs=3", "--checkpoint.every_n_steps=5"]
    whole = lightning(*flags, "--out=whole")
    assert whole.returncode == 0, whole.stderr
    environment = {"KILL_AT": "8", "WANDB_MODE": "disabled"}
    killed = Running(command, *flags, "--out=killed", folder=tmp_path, environment=environment).finish()
    assert killed.returncode == -9, killed.stderr
    copies = sorted(str(path.relative_to(tmp_path / "killed")) for path in (tmp_path / "killed").rglob("*.py"))
    assert copies == ["more.py", "parts.py", "pieces/late.py", "pieces/mixing.py"]
    assert (tmp_path / "killed" / "parts.py").read_text() == PARTS
    (project / "pieces" / "mixing.py").write_text("def mix(tokens):\n    return tokens\n")
    (project / "pieces" / "late.py").write_text("WEIGHT = 0.4\n")  # which the run has imported in its first step
    refused = lightning(*flags, "--out=killed", "--resume=auto")
    assert refused.returncode == 2
    assert all(f"pieces/{name}.py has changed" in refused.stderr for name in ("mixing", "late"))
    assert "--allow-config-change pieces/mixing.py" in refused.stderr
    project.rename(tmp_path / "gone")
    resumed = lightning("fit", "--resume=killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "lightning test --ckpt killed --trust" in resumed.stdout
    one, other = (read_checkpoint(Path(run, "checkpoints/last.ckpt"))["state_dict"] for run in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert "aux.weight" in one
    assert all(torch.equal(one[name], other[name]) for name in one)
    tested = lightning("test", "--ckpt=killed", "--trust", "--out=tested")
    assert tested.returncode == 0, tested.stderr
    results = read_results(Path("killed"))
    assert {"val/worst", "test/worst", "val/acc"} <= set(results)
    assert json.loads(Path("tested/results.json").read_text())["test/acc"] == results["test/acc"]


def test_a_lightning_module_of_its_own_kind_runs_predicts_and_shows_its_errors(lightning, project, tmp_path):
    flags = ["fit", "--config=project/module.yaml", "--module=more.Alone", "--trainer.max_epochs=2"]
    flags += ["--trainer.accelerator=cpu"]
    result = lightning(*flags, "--out=run")
    assert result.returncode == 0, result.stderr
    assert "test_step of Alone returns no logits" in result.stdout
    results = read_results(Path("run"))
    assert {"val/acc", "test/acc"} <= set(results)
    predicted = lightning("predict", "--ckpt=run", "--trust", "--out=predicted")
    assert predicted.returncode == 0, predicted.stderr
    rows = list(csv.DictReader(Path("predicted/predictions.csv").read_text().splitlines()))
    assert len(rows) == 12, "a fifth of the images"
    assert sum(row["label"] == row["prediction"] for row in rows) / 12 == pytest.approx(results["test/acc"])
    breaks = {**os.environ, "BREAK": "1"}
    broken = Running(command, *flags, "--out=broken", folder=tmp_path, environment=breaks).finish()
    assert broken.returncode == 1
    line = MORE[: MORE.index("return self.no_such_thing")].count("\n") + 1
    assert f"project/more.py, line {line}\n    return self.no_such_thing" in broken.stderr
    assert "AttributeError: 'Alone' object has no attribute 'no_such_thing'" in broken.stderr
    assert len(broken.stderr.splitlines()) < 15
    assert "training_step" in Path("broken/error.log").read_text()


QUICK = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.accelerator=cpu")


def test_a_network_a_classifier_and_data_beside_the_config_are_used_from_another_folder(project, monkeypatch):
    (project / "away").mkdir()
    monkeypatch.chdir(project / "away")
    callback = "--trainer.callbacks=[{class_path: parts.Norms, every: 1}]"
    words = ["fit", "--config=../network.yaml", "--trainer.log_every_n_steps=1", callback]
    assert main([*words, *QUICK, "--data.batch_size=30", "--out=run"]) == 0
    results = read_results(Path("run"))
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
def test_each_part_takes_an_option_of_its_own_typed_or_not(project, number, place):
    """Also where its class had none: an argument is added, with a type or without one."""
    name, option, value = OPTIONS[place]
    own = f"added: {type(value).__name__} = {value!r}" if number % 2 else f"added={value!r}"
    pattern = rf"(class {name}\b.*?def __init__\(.*?|def {name}\(.*?)\):"
    (project / "parts.py").write_text(re.sub(pattern, rf"\1, {own}):", PARTS, count=1, flags=re.DOTALL))
    given = {"class_path": f"parts.{name}", "added": value, option: value}
    listed = place in ("data.augment", "metrics", "trainer.callbacks")
    flag = f"--{place}={json.dumps([given] if listed else given)}"
    config = resolve(["--config=project/exp.yaml", flag]).config
    node = config
    for key in place.split("."):
        node = (node.get("init_args", node) if isinstance(node, dict) else node)[key]
    arguments = (node[0] if listed else node)["init_args"]
    assert arguments["added"] == arguments[option] == value
    with pytest.raises(UserError, match=rf"{re.escape(place)}.*addded=.*there is no such option|addded"):
        resolve(["--config=project/exp.yaml", flag.replace('"added"', '"addded"')])
