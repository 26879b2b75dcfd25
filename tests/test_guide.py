"""The README and the guide: every link leads somewhere, every command, config and example runs, and the site builds."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from runs import REPOSITORY, example
from tensors import write_images

from vit_lightning.ablation.plan import read_plan
from vit_lightning.cli import COMMANDS, main
from vit_lightning.config.resolve import resolve

PAGES = [
    *(REPOSITORY / name for name in ("README.md", ".github/CONTRIBUTING.md")),
    *(REPOSITORY / f"experiments/{name}README.md" for name in ("", "benchmarks/")),
    *sorted((REPOSITORY / "notebooks").rglob("*.md")),
]
GUIDE = [REPOSITORY / "README.md", *sorted((REPOSITORY / "notebooks").glob("*.md"))]
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu"]


def blocks(language: str) -> list[tuple[str, str]]:
    """Returns all blocks of code in a language, with the names of their pages."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.stem, block) for page in GUIDE for block in pattern.findall(page.read_text(encoding="utf-8"))]


COMMAND_LINES = list(
    dict.fromkeys(
        tuple(shlex.split(line, comments=True)[1:])
        for _, block in blocks("bash")
        for line in block.replace("&& ", "\n").splitlines()
        if line.startswith("lightning ")
    )
)
CONFIGS = [(page, text) for page, text in blocks("yaml") if not re.search(r"^(arms|grid|method):", text, re.MULTILINE)]
PLANS = [text for _, text in blocks("yaml") if re.search(r"^(arms|grid):", text, re.MULTILINE)]
FREE = ("configs",)
"""Commands that take no time."""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def slug(head: str) -> str:
    """Returns the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {slug(head) for head in re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("https:"):
            path, _, anchor = link.partition("#")
            file = page.parent / path if path else page
            assert file.is_file(), link  # the site has no folders
            assert not anchor or anchor in anchors(file), link


def test_every_group_of_options_has_its_section_and_its_command():
    """They are read in the repository too, where the site does not fill them in."""
    from vit_lightning.commands.help import option_groups

    text = (REPOSITORY / "notebooks/options.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.*)\n\n`lightning (.*)`\n\n<!-- options: (\w+) -->$", text, re.MULTILINE)
    general = [("General", "fit --help.general", "general")]
    plan = [("Plans of ablations", "ablate --help", "plan")]
    assert sections == [*general, *((group, f"fit --help.{group}", group) for group in option_groups()), *plan]


def test_no_page_has_a_cell_that_must_be_read_twice():
    for page in GUIDE:
        for row in re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), re.MULTILINE):
            words = [len(re.sub(r"\]\([^)]*\)", "", cell).split()) for cell in row.split("|")]
            assert max(words) <= 40, f"{page.name}: {row[:100]}"


def test_the_chinese_front_page_has_the_same_commands_and_examples():
    """It names no command that the README and the guide do not, and shows the README's plan and its lines of Python."""
    chinese = (REPOSITORY / "notebooks/zh/README.md").read_text(encoding="utf-8")
    front = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^lightning .*?(?=\s+#|$)", chinese, re.MULTILINE)
    known = {" ".join(words) for words in COMMAND_LINES}
    assert lines
    assert [line for line in lines if line.removeprefix("lightning ") not in known] == []
    (plan,), (english,) = (
        [yaml.safe_load(block) for block in re.findall(r"```yaml\n(question.*?)```", text, re.DOTALL)]
        for text in (chinese, front)
    )
    assert plan == english
    code, same = (re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in (chinese, front))
    assert re.sub(r" *#.*", "", "".join(code)) == re.sub(r" *#.*", "", "".join(same))
    numbers = r"\d+\.\d+ %"
    assert set(re.findall(numbers, chinese)) <= set(re.findall(numbers, front))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, trained):
    """A folder in which all commands, configs and examples of the guide have what they name."""
    import torch

    from vit_lightning import ViT, to_reference

    folder = tmp_path_factory.mktemp("guide")
    for run in ("runs/digits/RUN", "runs/digits/OTHER", "runs/imagefolder/RUN", "SOURCE"):
        shutil.copytree(trained[0], folder / run)
    places = ["DIR/train/cat", "DIR/train/dog", "DIR/train/fox"]
    for place in [*places, "photos/train/bird", "photos/train/ship", "FOLDER"]:
        write_images(folder / place, 12)
    shutil.copy(folder / "FOLDER/000.jpg", folder / "a.jpg")
    shutil.copytree(folder / "FOLDER", folder / "new")
    (folder / "plan.yaml").write_text(PLANS[-1])
    (folder / "PHOTOS.yaml").write_text("data: {class_path: ImageFolder, init_args: {root: DIR}}")
    (folder / "CONFIG.yaml").write_text((REPOSITORY / "experiments/digits_short.yaml").read_text())
    vit = ViT(image_size=32, patch_size=8, emb_size=64, depth=1, num_heads=1, num_classes=7)
    state, _ = to_reference(vit, family="timm")
    for name in ("model_best.pth.tar", "weights.pth"):
        torch.save(state, folder / name)
    (folder / "parts.py").write_text(dict(blocks("python"))["parts"])
    (folder / "blocks.py").write_text(dict(blocks("python"))["README"])
    return folder


def flags_of(text: str) -> list[str]:
    """Returns the flags of a config of the guide: one without model and data changes that of the digits."""
    whole = {"model", "module", "data", "init_from"} & set(yaml.safe_load(text))
    return [*([] if whole else ["--config=digits"]), f"--config={write(Path('mine.yaml'), text)}"]


def test_configs_of_the_guide_are_accepted(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    for page, text in CONFIGS:
        assert resolve([*flags_of(text), "--trainer.accelerator=cpu"]).config, page


def test_plans_of_the_guide_are_accepted(in_folder):
    plans = [read_plan(write(in_folder / "plan.yaml", text)) for text in PLANS]
    assert [len(plan.arms) for plan in plans] == [3, 3, 4]
    assert yaml.safe_load(PLANS[0]) == yaml.safe_load(PLANS[1]), "the plan of the README and that of its page"


def test_mistakes_are_printed_as_the_guide_shows(capsys):
    shown = re.search(
        r"```console\n\$ lightning (.*?)\n(.*?)```", (REPOSITORY / "notebooks/configs.md").read_text(), re.DOTALL
    )
    assert main(shlex.split(shown[1])) == 2
    assert capsys.readouterr().err == shown[2]


@pytest.mark.parametrize("words", [words for words in COMMAND_LINES if words[0] in FREE], ids=" ".join)
def test_every_list_is_printed(words):
    assert main(words) == 0


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=lambda number: f"{CONFIGS[number][0]}-{number}")
def test_every_config_trains(number, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    text = CONFIGS[number][1].replace("CIFAR10", "ImageFolder, root: DIR, image_size: 32")  # without a download
    words = ["fit", *flags_of(text), "--trainer.limit_val_batches=1", "--test=false", *SHORT]
    if "devices" in text:  # ranks repeat the command line of this process
        assert subprocess.run([sys.executable, "-m", "vit_lightning", *words]).returncode == 0
    else:
        assert main(words) == 0


# a whole ablation takes minutes: experiments/ablations has its result, and tests/ablation smaller ones
@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        words
        for words in COMMAND_LINES
        if words[0] not in FREE and words != ("ablate", "pooling") and words[0] != "report"
    ],
    ids=" ".join,
)
def test_every_command_runs(words, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    short = SHORT if words[0] == "fit" and "--config" in words else []
    monkeypatch.setattr(sys, "argv", ["lightning", *words])  # of which a sweep is made
    assert main([*words, *short]) == (2 if words[0] in ("sync", "dashboard") else 0)  # which need an account


@pytest.mark.full
def test_every_example_in_python_runs(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 192, "num_attention_heads": 3, "num_labels": 10}
    names = {"state_dict": ViTForImageClassification(ViTConfig(**sizes)).state_dict(), "torch": torch}
    for page, code in blocks("python"):
        if page != "parts":  # which tests/commands/test_own_parts.py runs
            exec(code.replace("max_epochs=5", 'max_epochs=1, accelerator="cpu"'), names)
    assert names["relevance"] is not None


def test_commands_in_the_text_have_the_options_that_they_show():
    """Those that are no lines of their own, such as ``lightning convert SOURCE DST --to FAMILY``."""
    from vit_lightning.commands.help import command_options, general_options, option_groups

    general = {option.name for option in general_options("fit")}
    for page in GUIDE:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in re.findall(r"`lightning ([^`]+)`", text):
            command, *words = line.split()
            assert command in COMMANDS or command.startswith(("--", "COMMAND")), f"{page.name}: {line}"
            own = (
                {option.name for option in command_options(COMMANDS[command].load())} if command in COMMANDS else set()
            )
            for word in words:
                if word.startswith("--"):
                    name = word.lstrip("-").partition("=")[0].replace("-", "_")
                    known = {name.replace("-", "_") for name in own | general} | {"help", "ckpt"}
                    assert name in known or name.partition(".")[0] in {"help", *option_groups()}, f"{page.name}: {line}"


@pytest.mark.full
def test_the_site_builds_strictly_and_asks_nothing_of_other_servers(tmp_path):
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter")):
        pytest.skip("needs the extra docs")
    words = ["-m", "mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\"> ]+)", page.read_text())
        assert not loaded, f"{page}: {loaded[:3]}"
    index = (tmp_path / "site/search/search_index.js").read_text()
    assert "optimizer.layer_decay" in index
    assert "compare.smallest_effect" in index  # a field of a group of a plan


README = (REPOSITORY / "README.md").read_text()
WORDS = {
    "README.md": 1_000,
    "experiments/README.md": 3_000,
    "experiments/benchmarks/README.md": 2_500,
    "notebooks/*.md": 11_000,
    "notebooks/small_vits.md": 1_500,
}


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
    assert example("test command").strip() in commands


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
    code = example("five lines").replace("max_epochs=5", 'max_epochs=1, accelerator="cpu"')
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
    code = example("load").replace("runs/digits/RUN", "out")
    assert len(code.splitlines()) <= 10
    names: dict[str, object] = {}
    exec(code, names)
    assert names["features"].shape == (3, 16)
    assert [tokens.shape for tokens in names["blocks"]] == [(1, 5, 16)] * 2
    assert len(names["predictions"]) == 4
