"""Colours, letters and tables that all of our HTML pages share."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which the colour-blind can tell apart; after six they repeat with other lines and points."""
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def template_of(path: Path) -> "Template":
    """Returns the template of a page, in which all texts are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # for pages alone

    loader = FileSystemLoader(path.parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(path.name)
