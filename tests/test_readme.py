from __future__ import annotations

import re
import shlex
import shutil

import pytest
import yaml
from runs import REPOSITORY
from tensors import write_images

from vit_lightning.cli import main

README = (REPOSITORY / "README.md").read_text()
FRONT = README.partition("## More")[0]
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.replace("&& ", "\n").splitlines()
    if line.startswith("lightning ")
]
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu"]


def code_after(marker: str) -> str:
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL).group(1)


def test_the_front_page_is_short_and_its_pictures_are_small():
    assert len(FRONT.split()) <= 900
    assert not re.findall(r"@[A-Z]+@", README)
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((REPOSITORY / picture).stat().st_size < 300_000 for picture in pictures)


@pytest.mark.parametrize("place", [".", "experiments", ".github", "notebooks/zh"])
def test_every_link_leads_somewhere(place):
    page = f"{place}/{'CONTRIBUTING' if place == '.github' else 'README'}.md"
    for link in re.findall(r"\]\(([^)\s]+)\)", (REPOSITORY / page).read_text()):
        if not link.startswith("https:"):
            path, _, anchor = link.partition("#")
            file = (REPOSITORY / page).parent / path if path else REPOSITORY / page
            assert file.exists(), link
            if anchor:
                heads = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads], link


def test_the_workflow_runs_the_test_command():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["tests"]["steps"]]
    assert code_after("test command").strip() in commands


def test_the_commands_of_the_front_page_run(in_folder, capsys):
    assert ["fit", "--config", "digits"] in COMMANDS
    (run,) = re.findall(r"`lightning (board runs/digits)`", FRONT)
    (listed,) = re.findall(r"`lightning (configs digits) > mine.yaml`", FRONT)
    (planned,) = re.findall(r"`lightning (ablate pooling --dry-run)`", FRONT)
    assert main(["fit", "--config", "digits", *SHORT]) == 0
    assert main(run.split()) == 0
    assert (in_folder / "runs/digits/board.html").is_file()
    assert main(listed.split()) == 0
    plan = re.search(r"```yaml\n(question: .*?)```", FRONT, re.DOTALL).group(1)
    (in_folder / "pooling.yaml").write_text(plan)
    capsys.readouterr()
    assert main(planned.split()) == 0
    assert "3 arms of digits_short" in capsys.readouterr().out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, trained):
    """A folder in which all of the README's commands have what they name."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(trained[0], folder / "runs/digits/RUN")
    for place in ("DIR/train/cat", "DIR/train/dog", "DIR/train/fox", "FOLDER"):
        write_images(folder / place, 12)
    shutil.copy(folder / "FOLDER/000.jpg", folder / "a.jpg")
    (folder / "PHOTOS.yaml").write_text("data: {class_path: ImageFolder, init_args: {root: DIR}}")
    (folder / "CONFIG.yaml").write_text((REPOSITORY / "experiments/digits_short.yaml").read_text())
    return folder


# the whole of that ablation takes minutes: experiments/README.md has its result, and tests/ablation smaller ones
@pytest.mark.full
@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if words != ["ablate", "pooling"] and words[0] != "report"], ids=" ".join
)
def test_every_command_runs(words, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    short = SHORT if words[0] == "fit" and "--config" in words else []
    more = {"lr-find": ["--steps=20"], "bench": ["--rounds=3", "--seconds=0", "--peers=false"]}.get(words[0], [])
    assert main([*words, *short, *more]) == (2 if words[0] == "sync" else 0)  # which needs an account


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
