"""The HTML of a board: one file that loads nothing, with its data as JSON, drawn by ``board.js``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from vit_lightning.report.style import COLOURS, STYLE

DARK = ("#5aa9e6", "#ff8a3d", "#2cc295", "#e3a0c8", "#f0b429", "#a5dcff")
"""The same colours, lighter, for a dark screen."""


def board_page(data: Mapping[str, Any]) -> str:
    """Returns the page of what ``board.read_board`` has read."""
    # a text of the data, such as a run's name, must not end the script
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    folder = Path(__file__).parent
    script, style = ((folder / f"board.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    colours, dark = ("".join(f"--c{n}:{c};" for n, c in enumerate(of)) for of in (COLOURS, DARK))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{escape(str(data["name"]))}</title>
<style>:root {{{colours}}} @media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}{STYLE}{style}</style>
</head>
<body>
<main id="board"><noscript>This page is drawn by its own script: allow JavaScript to see it.</noscript></main>
<script type="application/json" id="data">{text}</script>
<script>{script}</script>
</body>
</html>
"""
