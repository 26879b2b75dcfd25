"""The page of ``lightning inspect``: one file that loads nothing, with sliders over images, layers and heads."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vit_lightning.figures.inside import Surveys, layer_names, layers_of, outlier_words, relevance_words, views
from vit_lightning.figures.style import STYLE, template_of
from vit_lightning.inspect.tokens import OUTLIER


def inside_page(
    found: Surveys,
    pictures: Mapping[str, Sequence[Image.Image]],
    titles: Mapping[str, Sequence[str]],
    known: Mapping[str, str],
    figures: Mapping[str, tuple[bytes, str]],
    command: str,
) -> str:
    """Returns the page of ``inspect.html``, in which all texts are escaped.

    Args:
        found: what was found in one or two models, by their names.
        pictures: the images as each model gets them.
        titles: a title of each image for each model, such as its classes.
        known: what is known of each model, in words.
        figures: PNG files by name, and a sentence on each.
        command: command line that wrote the page.
    """
    models = [
        {
            "name": name,
            "known": known[name],
            "without_maps": each.without_maps,
            "reader": each.reader,
            "layers": layer_names(each),
            "heads": [*map(str, range(1, 0 if each.without_maps else layers_of(each).shape[2] + 1)), "mean"],
            "grid": each.grid[1:],
            "images": [
                {
                    "title": title,
                    "picture": png_url(picture),
                    "views": _urls(views(each, number)),
                    "outliers": outlier_words(each, number),
                    "relevance": relevance_words(each, number),
                }
                for number, (title, picture) in enumerate(zip(titles[name], pictures[name], strict=True))
            ],
        }
        for name, each in found.items()
    ]
    shown = {name: (data_url(png), text) for name, (png, text) in figures.items()}
    longest: Any = {part: max((model[part] for model in models), key=len) for part in ("images", "layers", "heads")}
    counts = {part: len(items) for part, items in longest.items()}
    return template_of(Path(__file__).with_name("inspect.html")).render(
        models=models, counts=counts, figures=shown, outlier=f"{OUTLIER:g}", style=STYLE, command=command
    )


def _urls(maps: Mapping[str, Image.Image]) -> dict[str, str]:
    return {name: png_url(picture) for name, picture in maps.items()}


def png_url(picture: Image.Image) -> str:
    """Returns a picture as the URL of its PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return data_url(file.getvalue())


def data_url(png: bytes) -> str:
    """Returns a PNG file as a URL, for a page that loads nothing."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
