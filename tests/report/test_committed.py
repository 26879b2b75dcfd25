"""Studies whose runs come with the clone: they go on from their archives, and are analysed again from them."""

import csv
import json
import re
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from runs import REPOSITORY

from vit_lightning.cli import main
from vit_lightning.config.files import shipped_configs

STUDIES = REPOSITORY / "experiments" / "ablations"
ARCHIVES = {path.parent.name: path for path in sorted(STUDIES.glob("*/runs.tar.xz"))}

MAY_FAIL = {"plan, code, results and claims are as they were first", "all runs had the same hardware and versions"}
"""Checks that a study fails which was gone on with later, on another machine: its report says so."""


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "pooling" else pytest.mark.full) for name in ARCHIVES]
)
def test_a_study_goes_on_from_its_archive_and_gives_its_verdicts(name, in_folder, capsys):
    study = Path("runs/ablations", name)
    study.mkdir(parents=True)
    with tarfile.open(ARCHIVES[name]) as archive:
        archive.extractall(study, filter="data")
    assert main(["report", str(study)]) == 0
    assert rows(study) == rows(STUDIES / name)
    found, committed = (json.loads((place / "verdicts.json").read_text()) for place in (study, STUDIES / name))
    assert found == [{key: pytest.approx(value) for key, value in row.items()} for row in committed]
    report = (study / "report.md").read_text()
    assert {*re.findall(r"^\| (.+) \| NO \|", report, re.MULTILINE)} <= MAY_FAIL
    with Image.open(REPOSITORY / "experiments" / "pictures" / f"{name}.png") as picture:
        assert f"**{picture.info['Title']}**" in report.replace("\\", ""), "archive.py draws it"
    needs_runs = ": runs/" in (STUDIES / f"{name}.yaml").read_text()
    if name != "pooling" and (needs_runs or not (REPOSITORY / "data" / "CIFAR-10-images").is_dir()):
        return  # ablate reads the images of a study, and the runs from which it starts, before it goes on
    Path("data").symlink_to(REPOSITORY / "data")
    capsys.readouterr()
    assert main(["ablate", name, "--dry-run"]) == 0
    assert ("nothing is left" in capsys.readouterr().out.lower()) == all(row["decided"] for row in committed)


def test_studies_with_verdicts_have_an_archive():
    assert set(ARCHIVES) == {path.parent.name for path in STUDIES.glob("*/verdicts.json")}


def test_an_archive_is_none_of_the_package_s_configs():
    found = [name for name in shipped_configs() if "pooling" in name]
    assert found == ["ablations/pooling", "ablations/pooling_cifar10", "ablations/pooling_larger"]
