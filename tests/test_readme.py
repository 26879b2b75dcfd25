from __future__ import annotations

import re

import yaml
from runs import REPOSITORY
from tensors import write_images

README = (REPOSITORY / "README.md").read_text()


def code_after(marker: str) -> str:
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL).group(1)


def test_the_workflow_runs_the_test_command():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["tests"]["steps"]]
    assert code_after("test command").strip() in commands


def test_the_five_lines_train_and_test(in_folder):
    code = code_after("five lines").replace("max_epochs=5", 'max_epochs=1, accelerator="cpu"')
    assert "max_epochs=1" in code
    lines = [line for line in code.splitlines() if line and not line.startswith(("from", "import"))]
    assert len(lines) <= 5
    names: dict[str, object] = {}
    exec(code, names)
    assert float(names["trainer"].callback_metrics["test/acc"]) > 0.05


def test_a_trained_model_in_ten_lines(results, in_folder):
    write_images(in_folder / "FOLDER", 3)
    write_images(in_folder, 1)
    (in_folder / "000.jpg").rename("a.jpg")
    code = code_after("load").replace("runs/digits/RUN", "out")
    assert len(code.splitlines()) <= 10
    names: dict[str, object] = {}
    exec(code, names)
    assert names["features"].shape == (3, 16)
    assert [tokens.shape for tokens in names["blocks"]] == [(1, 5, 16)] * 2
    assert len(names["predictions"]) == 4
