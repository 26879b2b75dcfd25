"""The page of ``lightning inspect``: one file that loads nothing, with sliders over images, layers and heads."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vit_lightning.figures.inside import layer_names, layers_of, outlier_words, relevance_words, views
from vit_lightning.figures.style import STYLE, template_of
from vit_lightning.inspect.survey import Survey
from vit_lightning.inspect.tokens import OUTLIER


def inside_page(
    found: Survey,
    name: str,
    known: str,
    pictures: Sequence[Image.Image],
    titles: Sequence[str],
    figures: Mapping[str, tuple[bytes, str]],
    command: str,
) -> str:
    """Returns the page of ``inspect.html``, in which all texts are escaped.

    Args:
        found: what was found in a model.
        name: its name.
        known: what is known of it, in words.
        pictures: the images as it gets them.
        titles: a title of each image, such as its classes.
        figures: PNG files by name, and a sentence on each.
        command: command line that wrote the page.
    """
    model: dict[str, Any] = {
        "name": name,
        "known": known,
        "without_maps": found.without_maps,
        "reader": found.reader,
        "layers": layer_names(found),
        "heads": [*map(str, range(1, 0 if found.without_maps else layers_of(found).shape[2] + 1)), "mean"],
        "grid": found.grid[1:],
        "images": [
            {
                "title": title,
                "picture": png_url(picture),
                "views": {view: png_url(maps) for view, maps in views(found, number).items()},
                "outliers": outlier_words(found, number),
                "relevance": relevance_words(found, number),
            }
            for number, (title, picture) in enumerate(zip(titles, pictures, strict=True))
        ],
    }
    shown = {name: (data_url(png), text) for name, (png, text) in figures.items()}
    return template_of(Path(__file__).with_name("inspect.html")).render(
        model=model, figures=shown, outlier=f"{OUTLIER:g}", style=STYLE, command=command
    )


def png_url(picture: Image.Image) -> str:
    """Returns a picture as the URL of its PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return data_url(file.getvalue())


def data_url(png: bytes) -> str:
    """Returns a PNG file as a URL, for a page that loads nothing."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
