"""The command in processes of its own: installed where its start matters."""

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from harness import in_group
from processes import Running
from runs import SMALL

from vit_lightning.cli import COMMANDS, main
from vit_lightning.commands.console import say
from vit_lightning.config.options import Settings
from vit_lightning.errors import UserError


def test_a_problem_of_two_splits_is_told_once():
    assert UserError(iter(["no classes", "no test", "no classes"])).problems == ["no classes", "no test"]


@pytest.mark.parametrize("program", ["lightning", "vit-lightning", "python"])
def test_three_names_are_one_program(installed, program):
    result = installed("--help", program=program)
    assert result.returncode == 0
    for name, command in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert command.summary in result.stdout


def test_the_version_is_the_package_s(capsys):
    import vit_lightning

    assert main(["--version"]) == 0
    said = capsys.readouterr().out  # lightning-sdk has a command of this name too
    assert said.startswith(
        f"vit_lightning {vit_lightning.__version__} (the lightning command of vit-lightning), torch "
    )


def test_a_reader_that_has_gone_ends_a_command_without_a_word():
    command = [sys.executable, "-m", "vit_lightning", "configs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_a_reader_that_has_gone_ends_no_run(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        say("results")
        monkeypatch.undo()


def takes_config(command: str) -> bool:
    first = next(iter(inspect.signature(COMMANDS[command].load()).parameters.values()))
    return first.name == "experiment" and first.default is first.empty


WITH_CONFIG = [name for name in COMMANDS if takes_config(name)]


@pytest.mark.parametrize("command", WITH_CONFIG)
def test_the_help_lists_the_options_of_the_reader(command, capsys):
    from vit_lightning.commands.help import USED
    from vit_lightning.config.build import OPTION_KINDS, trainer_options
    from vit_lightning.config.signatures import signature_of
    from vit_lightning.models.vit import ViT

    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "`" not in said
    shown = re.findall(r"^  --(\S+) ", said, flags=re.MULTILINE)
    known = {name for kind in OPTION_KINDS for name in signature_of(kind).options}
    listed = {name for name in shown if name.startswith(("trainer.", *(f"{group}." for group in Settings._fields)))}
    assert len(shown) == len(set(shown))
    parts = {name: signature_of(type(part)).options for name, part in Settings()._asdict().items()}
    parts["trainer"] = trainer_options()
    for group in USED.get(command, ("trainer", *Settings._fields)):
        if group != "data":
            assert {name for name in listed if name.startswith(f"{group}.")} == {
                f"{group}.{name}" for name in parts.get(group) or signature_of(ViT).options
            }
    known |= {name.replace("_", "-") for name in inspect.signature(COMMANDS[command].load()).parameters}
    assert {name for name in shown if "." not in name} <= known | {"config", "ckpt", "allow-config-change"}


def test_switches_are_shown_and_given_without_a_value(capsys):
    from vit_lightning.ablation.ablate import ablate
    from vit_lightning.commands.arguments import read_call
    from vit_lightning.config.files import SWITCHES, split_words

    assert main(["ablate", "--help"]) == main(["fit", "--help"]) == main(["embed", "--help"]) == 0
    said = capsys.readouterr().out
    shown = re.findall(r"^  --(\S+)(?: {2}.*)?$", said, flags=re.MULTILINE)
    assert {*SWITCHES} <= {*shown}
    assert "\n  IMAGES ... path\n" in said
    assert "--images" not in said
    given = read_call("ablate", ablate, ["--dry_run", "--retry", "plan.yaml", "--workers=auto"]).words[0]
    assert (given.plan.name, given.dry_run, given.retry, given.workers) == ("plan.yaml", True, True, "auto")
    assert split_words(["--reset-head", "a.yaml"])[0] == [("reset_head", "true"), ("config", "a.yaml")]


def test_the_help_of_a_group_explains_it_in_full(capsys):
    assert main(["fit", "--help.data", "--help.model.attention=MSSA", "--help.model=torchvision.models.ResNet"]) == 0
    said = capsys.readouterr().out
    for text in ("RandAugment", "a larger one contains every smaller one", "number of subspaces"):
        assert text in said
    assert main(["fit", "--help.model.attention=RotaryAttention", "--help.data=ImageFolder"]) == 0
    said = capsys.readouterr().out
    assert "MultiHeadAttention with rotary positions" in said, "what the class is"
    assert "probability of dropping an attention weight" in said, "an option of the base is explained there"
    assert "(default: (0.485, 0.456, 0.406))" in said, "a constant is shown as its value"
    assert main(["fit", "--help"]) == 0
    assert "--model.norm class (default: LayerNorm)" in capsys.readouterr().out, "a class by its name"
    assert main(["fit", "--help.general"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 for no watchdog" in said
    assert {"--print_config", "--seed_everything", "--allow-config-change"} <= {*said.split()}
    for arguments, group in ((["--help.model=MSSA"], "MSSA"), (["--help.loss"], "LossConfig")):
        assert main(["fit", *arguments]) == 0
        assert group in capsys.readouterr().out.splitlines()[0]


def test_print_config_prints_a_config_and_does_nothing(in_folder, capsys):
    assert main(["fit", *SMALL, "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["num_classes"] == 10
    assert main(["fit", "--config=deit", "--model.depth=3", "--print_config"]) == 0  # without its images
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["model"]["init_args"]["depth"] == 3
    assert "data.root=data/imagenet is not a folder" in printed.err
    assert not list(in_folder.iterdir())


LOADED = """import pathlib, sys
from lightning.pytorch import Callback
class Loaded(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 1:
            pathlib.Path("loaded.txt").write_text("\\n".join(sys.modules))
"""
LATE = {"wandb", "pydantic", "sklearn", "pandas", "pyarrow", "timm", "datasets", "onnx"}
"""Packages that take seconds to import, and that the first step of a run does without."""


def test_the_installed_command_trains_and_loads_nothing_that_it_does_without(installed, tmp_path):
    (tmp_path / "first.py").write_text(LOADED)
    fitted = installed("fit", *SMALL, "--out=run", "--trainer.callbacks+=first.Loaded", "--wandb.mode=offline")
    assert fitted.returncode == 0, fitted.stderr
    assert fitted.stderr == ""
    assert not LATE & {*(tmp_path / "loaded.txt").read_text().split()}


def test_two_processes_train_and_count_each_image_once(lightning, tmp_path):
    flags = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=50"]
    arguments = ("fit", *SMALL, *flags, "--trainer.max_epochs=2", "--out=run")
    result = Running(in_group, *arguments, folder=tmp_path).finish()
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 26
    assert results["epochs"] == 2
    said = lightning("predict", "--ckpt=run", "--out=said")
    assert said.returncode == 0, said.stderr
    rows = [line.split(",") for line in (tmp_path / "said" / "predictions.csv").read_text().splitlines()[1:]]
    assert [int(row[0]) for row in rows] == list(range(360))
    assert sum(row[1] == row[2] for row in rows) / 360 == pytest.approx(results["test/acc"])
    alone = lightning("test", "--ckpt=run", "--trainer.devices=1", "--trainer.strategy=auto", "--out=alone")
    assert alone.returncode == 0, alone.stderr
    again = json.loads((tmp_path / "alone" / "results.json").read_text())
    for name, value in again.items():
        assert results[name] == pytest.approx(value, abs=1e-6), name


def test_a_further_rank_of_a_program_continues_after_the_command(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["sync", "--help"]) == 0
