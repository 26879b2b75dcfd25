"""Makes the site of the repository's pages: the guide of this folder, the README as its start, results, contributing.

Links are written as they work in the repository, and are turned here. Two pages are read from the docstrings that
``lightning COMMAND --help`` reads, and one from the public names.
"""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import vit_lightning
from vit_lightning.ablation.plan import PlanFile
from vit_lightning.cli import COMMANDS
from vit_lightning.config.help import Option, command_options, general_options, option_groups, options_of, usage_of

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "notebooks/"
PAGES = {
    "README.md": "index.md",
    "experiments/README.md": "experiments/README.md",
    "experiments/benchmarks/README.md": "experiments/benchmarks/README.md",
    ".github/CONTRIBUTING.md": "contributing.md",
}
"""Pages that lie elsewhere in the repository, and their places in the site."""

LINK = re.compile(r"(\]\(|href=\")(?!https?:|#|mailto:)([^)\s#\"]+)(#[^)\s\"]*)?")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere, and the files to which any page links."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for file in list(files):
        if file.src_uri.endswith((".md", ".ipynb")):
            for _, link, _ in LINK.findall(Path(file.abs_src_path).read_text(encoding="utf-8")):
                path = os.path.normpath(os.path.join(os.path.dirname(_path(file.src_uri)), link))
                if (ROOT / path).is_file() and files.get_file_from_path(_place(path)) is None:
                    files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page, and writes what is generated into it."""
    marks = re.compile(rf"<!-- ({'|'.join(GENERATED)})(?:: (\w+))? -->")
    markdown = marks.sub(lambda found: GENERATED[found[1]](*filter(None, [found[2]])), markdown)
    return _with_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes reStructuredText of docstrings readable, and leaves scripts from elsewhere out of notebooks."""
    html = re.sub(r":\w+:<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r"<script[^>]* src=\"https:.*?</script>", "", html, flags=re.DOTALL)
        html = re.sub(r"(href=\"[^\"]*)(README)?\.(?:ipynb|md)\b", r"\1.html", _with_links(html, page.file.src_uri))
    return html


def _path(place: str) -> str:
    """Returns the path in the repository of a page of the site."""
    return next((path for path, known in PAGES.items() if known == place), GUIDE + place)


def _place(path: str) -> str:
    """Returns the place in the site of a file of the repository."""
    return PAGES.get(path, path.removeprefix(GUIDE))


def _with_links(text: str, place: str) -> str:
    def turned(found: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(_path(place)), found[2]))
        target = os.path.relpath(_place(path), os.path.dirname(place) or ".")
        return f"{found[1]}{target}{found[3] or ''}"

    return LINK.sub(turned, text)


def options(group: str) -> str:
    """Returns the options of a group, or of ``general``, those of none, or of ``plan``, those of an ablation."""
    if group == "plan":
        return "\n".join(_options("", options_of(PlanFile.__module__, "PlanFile")))
    if group == "general":
        return "\n".join(_options("", general_options("fit")))
    found = options_of(*option_groups()[group])
    parts = _options(f"{group}.", found)
    known = {option.name for option in found}
    for name in ("CIFAR10", "TorchvisionSet", "ImageFolder", "ImageFiles", "HuggingFaceSet") if group == "data" else ():
        own = [option for option in options_of(_home(name), name) if option.name not in known]
        parts += [f"### data: {name}", "", *_options("data.", own)]
    return "\n".join(parts)


def commands() -> str:
    """Returns each command with its own options."""
    parts = []
    for name, command in COMMANDS.items():
        usage = ["```text", usage_of(name, command.function), "```"]
        parts += [f"## {name}", "", _sentence(command.summary), "", *usage, ""]
        own = command_options(command.function)
        parts += ["It takes the [options of configs](options.md).", ""] if own and own[0].name == "experiment" else []
        parts += _options("", [option for option in own if option.name != "experiment"])
    return "\n".join(parts)


def names() -> str:
    """Returns the public names by room, each with its docstring."""
    places = sorted(f"{_home(name)}.{name}" for name in vit_lightning.__all__)
    parts = []
    for room, found in groupby(places, lambda place: place.split(".")[1]):
        parts += [f"## {room}", ""]
        for place in found:
            parts += [f"::: {place}", ""]
    return "\n".join(parts)


GENERATED = {"options": options, "commands": commands, "names": names}


def _home(name: str) -> str:
    return vars(vit_lightning)["_MODULES"][name]


def _options(prefix: str, found: list[Option]) -> list[str]:
    lines = []
    for option in found:
        default = f", by default `{option.default}`" if option.default else ""
        name = option.name.removeprefix("*")  # several words, such as images
        lines += [f"#### {prefix}{name}", "", f"`{option.kind}`{default}. {_sentence(option.text)}", ""]
    return lines


def _sentence(text: str) -> str:
    text = text.replace("*", r"\*").replace("<", "&lt;")
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
