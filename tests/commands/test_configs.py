import re

import pytest
import yaml
from runs import REPOSITORY

from vit_lightning.cli import main
from vit_lightning.commands.configs import result
from vit_lightning.config.files import find_config, shipped_configs
from vit_lightning.config.resolve import resolve

EXPERIMENTS = REPOSITORY / "experiments"
RESULTS = (EXPERIMENTS / "README.md").read_text()


@pytest.mark.parametrize("name", shipped_configs())
def test_the_first_lines_of_a_config_say_what_it_is_how_it_is_run_and_what_was_measured(name):
    head = re.match(r"(?:#.*\n)+", (EXPERIMENTS / f"{name}.yaml").read_text()).group()
    assert re.match(r"# [A-Z0-9].*[.:]\n#\n#   lightning (fit|ablate) ", head)
    told = re.findall(r"^# (Measured: |Not measured)", head, re.MULTILINE)
    assert len(told) == 1
    if told == ["Measured: "]:
        accuracy, _, n = result(head).partition(", n = ")
        assert accuracy.removesuffix(" %") in RESULTS
        assert int(n) >= 1


def test_the_command_lists_all_and_prints_one(capsys, in_folder):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a first run:"
    assert lines[1].split(maxsplit=5)[:5] == ["digits", "98.89", "%,", "n", "="]
    listed = [line.split()[0] for line in lines[: lines.index("")] if line.startswith("  ")]
    assert sorted(listed) == sorted(shipped_configs())
    (in_folder / "digits.yaml").write_text("")  # as the shell does before > digits.yaml
    assert main(["configs", "digits"]) == 0
    assert capsys.readouterr() == ((EXPERIMENTS / "digits.yaml").read_text(), "")
    assert main(["configs", "cifar10_cct"]) == 0
    needs = f"a copy of cifar10_cct needs {EXPERIMENTS / 'compact_transformers.py'} beside it"
    assert needs in capsys.readouterr().err


def test_a_name_is_found_anywhere_and_a_file_of_the_working_folder_comes_first(in_folder):
    timm = EXPERIMENTS / "families" / "timm.yaml"
    assert [find_config(name) for name in ("timm", "families/timm", "experiments/families/timm.yaml")] == [timm] * 3
    assert not find_config("timm.yaml").exists()
    assert not find_config("elsewhere/timm").exists()
    (in_folder / "timm").mkdir()
    assert find_config("timm") == timm
    mine = yaml.safe_load((EXPERIMENTS / "digits.yaml").read_text())
    mine["model"]["depth"] = 2
    (in_folder / "digits.yaml").write_text(yaml.safe_dump(mine))
    assert resolve(["--config=digits", "--trainer.accelerator=cpu"]).config["model"]["init_args"]["depth"] == 2
