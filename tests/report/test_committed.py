"""The study whose results come with the clone, analysed again from them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from runs import REPOSITORY

from vit_lightning.cli import main
from vit_lightning.config.shipped import shipped_configs

POOLING = REPOSITORY / "experiments" / "ablations" / "pooling"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_verdicts_of_pooling_follow_from_its_files(in_folder, capsys):
    shutil.copytree(POOLING, "pooling")
    for name in ("results.csv", "verdicts.json"):
        Path("pooling", name).unlink()
    assert main(["report", "pooling"]) == 0
    said = "equivalent to 'cls' with lr 0.002 (within 1 point), on these images only (test/acc 98.17 %, "
    assert f"'mean without class token' with lr 0.002: {said}" in capsys.readouterr().out
    assert rows(Path("pooling")) == rows(POOLING)
    found, committed = (json.loads((place / "verdicts.json").read_text()) for place in (Path("pooling"), POOLING))
    assert found == [{key: pytest.approx(value) for key, value in row.items()} for row in committed]
    page = Path("pooling/report.md").read_text()
    assert page.count("| yes |") == 5, "all checks hold"


def test_configs_of_its_runs_are_none_of_the_package():
    found = [name for name in shipped_configs() if "pooling" in name]
    assert found == ["ablations/pooling", "ablations/pooling_cifar10", "ablations/pooling_larger"]
