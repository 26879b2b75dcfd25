"""Colours, letters and tables that all of our HTML pages share."""

from pathlib import Path

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which the colour-blind can tell apart; after six they repeat with other lines and points."""
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
