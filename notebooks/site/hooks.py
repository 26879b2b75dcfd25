"""Makes the site of the repository's pages: the guide of this folder, the README as its start, results, contributing.

Links are written as they work in the repository, and are turned here. Two pages are read from the docstrings that
``lightning COMMAND --help`` reads, and one from the public names.
"""

from __future__ import annotations

import inspect
import os
import re
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

import vit_lightning
from vit_lightning import Digits, HuggingFaceSet, ImageData, ImageFiles, ImageFolder, TorchvisionSet
from vit_lightning.ablation.plan import plan_options
from vit_lightning.cli import COMMANDS
from vit_lightning.commands.help import HelpItem, command_options, general_options, help_items, option_groups, usage_of
from vit_lightning.data.image_set import ImageSet

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "notebooks/"
PAGES = {
    "README.md": "index.md",
    "experiments/README.md": "experiments/README.md",
    "experiments/benchmarks/README.md": "experiments/benchmarks/README.md",
    ".github/CONTRIBUTING.md": "contributing.md",
}
"""Pages that lie elsewhere in the repository, and their places in the site."""

SEARCH = {"experiments": 0.1, "zh": 0.5, "options": 2.0, "commands": 2.0, "python": 0.5, "contributing": 0.5}
"""Weight of a folder or page in the search, where it is not that of a page of the guide (4) or a notebook (1)."""

LINK = re.compile(r"(\]\(|href=\")(?!https?:|#|mailto:)([^)\s#\"]+)(#[^)\s\"]*)?")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere, and the files to which any page links."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    pages = list(files)
    for file in pages:  # which grow: reports of studies have figures
        if file.src_uri.endswith((".md", ".ipynb")):
            for _, link, _ in LINK.findall(Path(file.abs_src_path).read_text(encoding="utf-8")):
                path = os.path.normpath(os.path.join(os.path.dirname(_path(file.src_uri)), link))
                if (ROOT / path).is_file() and files.get_file_from_path(_place(path)) is None:
                    pages.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
                    files.append(pages[-1])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page, and writes what is generated into it."""
    place = page.file.src_uri
    usual = 1.0 if place.endswith(".ipynb") else 4.0
    page.meta["search"] = {"boost": SEARCH.get(re.split(r"[/.]", place)[0], usual)}
    marks = re.compile(rf"<!-- ({'|'.join(GENERATED)})(?:: (\w+))? -->")
    markdown = marks.sub(lambda found: GENERATED[found[1]](*filter(None, [found[2]])), markdown)
    return _with_links(markdown, place)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes reStructuredText of docstrings readable, and leaves scripts from elsewhere out of notebooks."""
    html = re.sub(r":\w+:<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r"<script[^>]* src=\"https:.*?</script>", "", html, flags=re.DOTALL)
        html = LINK.sub(lambda found: f"{found[1]}{_url(found[2], page, files)}{found[3] or ''}", html)
        html = _with_anchors(html, page)
    return html


def _path(place: str) -> str:
    """Returns the path in the repository of a page of the site."""
    usual = GUIDE + place if (ROOT / GUIDE / place).exists() else place
    return next((path for path, known in PAGES.items() if known == place), usual)


def _place(path: str) -> str:
    """Returns the place in the site of a file of the repository; it has no hidden folders."""
    return PAGES.get(path, path.removeprefix(GUIDE).removeprefix("."))


def _linked(link: str, place: str) -> str:
    """Returns the place in the site of what a page links to."""
    return _place(os.path.normpath(os.path.join(os.path.dirname(_path(place)), link)))


def _with_links(text: str, place: str) -> str:
    def turned(found: re.Match[str]) -> str:
        target = os.path.relpath(_linked(found[2], place), os.path.dirname(place) or ".")
        return f"{found[1]}{target}{found[3] or ''}"

    return LINK.sub(turned, text)


def _url(link: str, page: Page, files: Files) -> str:
    """Returns the address of what a notebook links to, which mkdocs does not turn as it does links of Markdown."""
    file = files.get_file_from_path(_linked(link, page.file.src_uri))
    return link if file is None else get_relative_url(file.url, page.file.url)


def _with_anchors(html: str, page: Page) -> str:
    """Gives the headings of a notebook the anchors of its table of contents: those in Chinese have none."""
    anchors = (part.id for top in page.toc for part in (top, *top.children))
    heading = re.compile(r"(<h[12] id=\")[^\"]*(\">.*?<a class=\"anchor-link\" href=\"#)[^\"]*")
    return heading.sub(lambda found: f"{found[1]}{(anchor := next(anchors))}{found[2]}{anchor}", html)


def options(group: str) -> str:
    """Returns the options of a group, or of ``general``, those of none, or of ``plan``, those of an ablation."""
    if group == "plan":
        return "\n".join(_options("", plan_options()))
    if group == "general":
        return "\n".join(_options("", general_options("fit")))
    if group != "data":
        return "\n".join(_options(f"{group}.", help_items(option_groups()[group])))
    parts = []
    for title, kind in KINDS_OF_DATA.items():
        bases = [base for base in kind.__mro__[1:] if base in KINDS_OF_DATA.values()]
        known = {option for base in bases for option in help_items(base)}
        found = [option for option in help_items(kind) if option not in known]
        parts += [f"### data: {title}", "", *_options("data.", found)]
    return "\n".join(parts)


def commands() -> str:
    """Returns each command with its own options."""
    parts = []
    for name, command in COMMANDS.items():
        called = command.load()
        usage = ["```text", usage_of(name, called), "```"]
        parts += [f"## {name}", "", _sentence(command.summary), "", *usage, ""]
        takes_config = "experiment" in inspect.signature(called).parameters
        parts += ["It takes the [options of configs](options.md).", ""] if takes_config else []
        parts += _options("", command_options(called))
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


KINDS_OF_DATA = {
    "all kinds": ImageData,
    "Digits": Digits,
    "TorchvisionSet, CIFAR10, CIFAR100": TorchvisionSet,
    "ImageFolder and HuggingFaceSet": ImageSet,
    "ImageFolder": ImageFolder,
    "HuggingFaceSet": HuggingFaceSet,
    "ImageFiles": ImageFiles,
}
"""Classes of data by their headings, under which stand the options that its bases do not have in the same words."""

GENERATED = {"options": options, "commands": commands, "names": names}


def _home(name: str) -> str:
    return vars(vit_lightning)["_MODULES"][name]


def _options(prefix: str, found: list[HelpItem]) -> list[str]:
    lines = []
    for option in found:
        default = f", by default `{option.default}`" if option.default else ""
        name = option.name.removeprefix("*")  # several words, such as images
        lines += [f"#### {prefix}{name}", "", f"`{option.kind}`{default}. {_sentence(option.text)}", ""]
    return lines


def _sentence(text: str) -> str:
    text = text.replace("*", r"\*").replace("<", "&lt;")
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
