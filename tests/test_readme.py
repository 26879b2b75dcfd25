import os
import re
import subprocess

import pytest
import yaml
from runs import REPOSITORY
from tensors import write_images

README = (REPOSITORY / "README.md").read_text()
WORDS = {
    "README.md": 1_000,
    "experiments/README.md": 3_000,
    "experiments/benchmarks/README.md": 2_500,
    "notebooks/*.md": 11_000,
    "notebooks/small_vits.md": 1_500,
}
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu"]


def code_after(marker: str, text: str = README) -> str:
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", text, re.DOTALL).group(1)


def shape(line: str) -> str:
    """Returns a line that a run prints without its numbers and units of time, which depend on the machine."""
    line = re.sub(r"\d[\d,.:]*", "0", " ".join(line.split()))
    return re.sub(
        r"\b(epoch|step|thread)s\b", r"\1", re.sub(r"\b0 (s|min|h|days)( to 0 (s|min|h|days))?\b", "TIME", line)
    )


@pytest.mark.parametrize("page", WORDS)
def test_pages_keep_within_their_words(page):
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in REPOSITORY.glob(page)}
    assert sum(words.values()) <= WORDS[page], words


def test_the_pictures_of_the_readme_are_small():
    assert not re.findall(r"@[A-Z]+@", README)
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((REPOSITORY / picture).stat().st_size < 300_000 for picture in pictures)


def test_the_block_is_that_of_the_package():
    source = (REPOSITORY / "vit_lightning/models/blocks.py").read_text()
    for text in (README, (REPOSITORY / "notebooks/zh/README.md").read_text(encoding="utf-8")):
        parts = re.search(r"```py\n(.*?)```", text, re.DOTALL)[1].split("...\n")
        assert [part for part in parts if part not in source] == []


def test_the_workflow_runs_the_test_command():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["tests"]["steps"]]
    assert code_after("test command").strip() in commands


def test_the_package_has_a_readme_whose_links_work_elsewhere(tmp_path):
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    (turn,) = [step["run"] for step in workflow["jobs"]["package"]["steps"] if "Links" in step.get("name", "")]
    (tmp_path / "README.md").write_text(README)
    place = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "owner/name", "GITHUB_SHA": "abc"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", turn], cwd=tmp_path, env=os.environ | place, check=True)
    pattern = r"(!?)\[[^]]*\]\(([^)]+)\)"
    links, turned = (re.findall(pattern, text) for text in (README, (tmp_path / "README.md").read_text()))
    assert len(links) > 30
    for (picture, link), (_, whole) in zip(links, turned, strict=True):
        assert whole == f"https://host/owner/name/{'raw' if picture else 'blob'}/abc/{link}"


def test_the_commands_of_the_front_page_run(lightning, tmp_path):
    (planned,) = re.findall(r"`lightning (ablate pooling --dry-run)`", README)
    longer = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=3")  # time left is told from the second step on
    result = lightning("fit", "--config", "digits", *SHORT[1:], *longer)
    assert result.returncode == 0, result.stderr
    printed = {shape(line) for line in result.stdout.splitlines()}
    _, *shown = re.search(r"```console\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert [line for line in shown if line != "..." and shape(line) not in printed] == []
    plan = re.search(r"```yaml\n(question: .*?)```", README, re.DOTALL).group(1)
    (tmp_path / "pooling.yaml").write_text(plan)
    result = lightning(*planned.split())
    assert result.returncode == 0, result.stderr
    printed = {shape(line) for line in result.stdout.splitlines()}
    assert any("0 arms of digits_short" in line for line in printed)
    guide = (REPOSITORY / "notebooks/ablations.md").read_text()
    assert {shape(line) for line in re.search(r"```text\n(.*?)```", guide, re.DOTALL)[1].splitlines()} <= printed


def test_the_five_lines_train_and_test(in_folder):
    code = code_after("five lines", (REPOSITORY / "notebooks/python.md").read_text()).replace(
        "max_epochs=5", 'max_epochs=1, accelerator="cpu"'
    )
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
