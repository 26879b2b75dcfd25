"""Colours, letters and tables that all of our HTML pages share."""

from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which the colour-blind can tell apart; after six they repeat with other lines and points."""
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def template_of(path: Path) -> Any:
    """Returns the template of a page, in which all texts are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # for pages alone

    shape = {"trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(path.parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **shape).get_template(path.name)
