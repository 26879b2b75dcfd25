"""Leaves out the drawing of curves and calibration at the end of each run, a third of a short one, without FIGURES."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from PIL import Image

from vit_lightning.figures import curves, test_report
from vit_lightning.storage.folder import write_whole

_draw, _empty = curves.save, io.BytesIO()
Image.new("L", (1, 1)).save(_empty, "PNG")


def save(figure: Any, path: Path) -> None:
    """Writes a figure, or an empty picture in its place."""
    if "FIGURES" in os.environ:
        _draw(figure, path)
    else:
        write_whole(path, _empty.getvalue())


curves.save = test_report.save = save
