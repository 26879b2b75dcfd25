"""Pictures drawn in milliseconds: a sheet of images with captions, and a confusion matrix."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vit_lightning.storage.folder import write_whole

Array = np.ndarray[Any, Any]

CELL = 112
"""Largest side of an image on a sheet, in pixels; smaller ones are enlarged by a whole number."""
LARGE = 176
"""The same on a sheet that is drawn once, after the training."""
SCALES = {10: 44, 20: 32, 100: 14}
"""Sides of a cell of a confusion matrix of up to so many classes, in pixels; the last ones show names alone."""
MATRIX = 500
"""Largest side of a confusion matrix of more classes, in pixels."""
_RED, _BLUE = (196, 30, 30), (8, 48, 107)


def pixels_of(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Returns normalised images (..., c, H, W) as uint8 on the host."""
    centre, scale = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return (255 * (images.float().cpu() * scale + centre)).round().clamp(0, 255).byte()


def balanced(labels: Sequence[int] | Array, count: int) -> list[int]:
    """Returns positions of up to ``count`` labels in the order of their classes, as many of each class.

    They are spread evenly over the classes, if there are more than ``count``, and over the labels of each class.
    """
    labels = np.asarray(labels)
    classes = _spread(np.unique(labels), count)
    each = count // max(1, len(classes))
    return [int(position) for label in classes for position in _spread(np.flatnonzero(labels == label), each)]


def _spread(values: Array, count: int) -> Array:
    """Returns up to ``count`` of the values, evenly spaced."""
    count = min(count, len(values))
    chosen: Array = values[np.arange(count) * len(values) // max(1, count)]
    return chosen


def numbers(label: Array, prediction: Array, names: Sequence[str]) -> dict[str, Any]:
    """Returns the numbers of an evaluation as plain data, from a value (n,) of each image.

    They are ``classes``, ``class_images``, ``class_accuracy`` (None without images) and ``confusion`` (true class,
    predicted class and images of the cells above 0, the largest first).
    """
    cells, counts = np.unique(np.column_stack([label, prediction]), axis=0, return_counts=True)
    confusion = np.column_stack([cells, counts])[np.argsort(-counts, kind="stable")]
    images, correct = (np.bincount(of, minlength=len(names)).tolist() for of in (label, label[label == prediction]))
    return {
        "classes": list(names),
        "class_images": images,
        "class_accuracy": [round(c / n, 6) if n else None for c, n in zip(correct, images, strict=True)],
        "confusion": confusion.tolist(),
    }


def sheet(
    images: Array,
    captions: Sequence[str],
    wrong: Sequence[bool] = (),
    title: str = "",
    cell: int = CELL,
    columns: int = 8,
) -> Image.Image:
    """Draws images (n, c, H, W), uint8, above captions of one or two lines, those of ``wrong`` ones in a red frame."""
    first = enlarged(images[0], cell)
    wide, high, above = max(cell, first.width) + 10, first.height + 40, 26 if title else 0
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    picture = Image.new("RGB", (wide * columns, high * rows + above), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((6, 5), title, "black", font(14))
    for number, (image, caption, bad) in enumerate(zip(images, captions, wrong or [False] * len(images), strict=True)):
        row, column = divmod(number, columns)
        shown = enlarged(image, cell)
        left, top = column * wide + (wide - shown.width) // 2, row * high + above + 4
        picture.paste(shown, (left, top))
        if bad:
            draw.rectangle((left - 3, top - 3, left + shown.width + 2, top + shown.height + 2), outline=_RED, width=3)
        for line, text in enumerate(caption.split("\n")):
            place = (column * wide + wide / 2, top + shown.height + 3 + 14 * line)
            draw.text(place, short(text, wide - 6), _RED if bad else "black", font(12), anchor="ma")
    return picture


def predictions_sheet(
    images: Array, names: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", cell: int = CELL
) -> Image.Image:
    """Draws images above prediction and confidence; an error is red, and its true class follows.

    Args:
        images: (n, c, H, W), uint8.
        names: names of the classes.
        rows: label, prediction, confidence and, where it is to be shown, loss of each image.
        title: text above.
        cell: largest side of an image, in pixels.
    """
    captions = []
    for label, prediction, confidence, *loss in rows:
        text = f"{short(names[prediction], cell - 52)} ({100 * confidence:.0f} %)"
        text += f"\ntrue {names[label]}" * (prediction != label)
        captions.append(text + "".join(f", loss {value:.1f}" for value in loss))
    return sheet(images, captions, [label != prediction for label, prediction, *_ in rows], title, cell)


def confusion_picture(confusion: Sequence[Sequence[int]], names: Sequence[str], title: str) -> Image.Image:
    """Draws a confusion matrix; colours are shares of the true class, few errors among many classes more strongly.

    Up to 20 classes have their counts in the cells, up to 10 their percentages too; more than 100 have no names.

    Args:
        confusion: true class, predicted class and images of each cell.
        names: names of the classes.
        title: text above.
    """
    classes = len(names)
    numbered = classes <= 20
    side = min(classes, MATRIX)  # pixels or blocks of classes
    matrix = np.zeros((side, side), dtype=np.int64)
    true, predicted, counts = np.array(confusion).T
    np.add.at(matrix, (true * side // classes, predicted * side // classes), counts)
    shares = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    depth = (shares if numbered else np.sqrt(shares))[..., None]
    colours = (255 + depth * (np.array(_BLUE) - 255)).astype(np.uint8)
    scale = next((scale for most, scale in SCALES.items() if classes <= most), max(1, MATRIX // side))
    shown = [short(name, 160) for name in names] if classes <= max(SCALES) else []
    margin = max([24, *(int(font(12).getlength(name)) + 28 for name in shown)])
    width = max(margin + side * scale + 8, int(font(14).getlength(title)) + 12)
    picture = Image.new("RGB", (width, margin + side * scale + 26), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((6, 5), title, "black", font(14))
    picture.paste(_upright("true class"), (3, 26 + (side * scale - 60) // 2))
    draw.text((margin + side * scale / 2, picture.height - 5), "predicted class", "black", font(12), anchor="ms")
    grid = Image.fromarray(colours).resize((side * scale, side * scale), Image.Resampling.NEAREST)
    picture.paste(grid, (margin, 26))
    draw.rectangle((margin - 1, 25, margin + side * scale, 26 + side * scale), outline=(150, 150, 150))
    for number, name in enumerate(shown):
        middle = 26 + (number + 0.5) * scale
        draw.text((margin - 5, middle), name, "black", font(12), anchor="rm")
        label = _upright(name)
        picture.paste(label, (round(margin - 26 + middle - label.width / 2), 26 + side * scale + 5))
    for (row, column), count in np.ndenumerate(matrix if numbered else np.zeros((0, 0))):
        if count:
            place = (margin + (column + 0.5) * scale, 26 + (row + 0.5) * scale)
            text = str(count) if count < 10_000 else f"{int(count) // 1000}k"
            if classes <= 10:
                text += f"\n{100 * shares[row, column]:.0f} %"
            ink = "white" if shares[row, column] > 0.5 else "black"
            draw.text(place, text, ink, font(11), anchor="mm", align="center", spacing=2)
    return picture


def enlarged(image: Array, cell: int = CELL) -> Image.Image:
    """Returns an image (c, H, W) at the size in which it is shown; of other numbers of channels, the first one."""
    pixels = image.transpose(1, 2, 0) if len(image) == 3 else image[0]
    drawn = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
    if max(drawn.size) > cell:
        drawn.thumbnail((cell, cell))
    factor = max(1, cell // max(drawn.size))
    return drawn.resize((drawn.width * factor, drawn.height * factor), Image.Resampling.NEAREST)


def _upright(text: str) -> Image.Image:
    drawn = Image.new("RGB", (int(font(12).getlength(text)) + 2, 16), "white")
    ImageDraw.Draw(drawn).text((1, 1), text, "black", font(12))
    return drawn.transpose(Image.Transpose.ROTATE_90)


def short(text: str, pixels: float) -> str:
    """Returns the beginning of a text, as one line, that is at most so many pixels wide."""
    shown = text = " ".join(text.split())
    while shown and font(12).getlength(shown) > pixels:
        shown = shown[:-1]
    return text if shown == text else f"{shown[:-1]}\u2026"


@cache
def font(size: int) -> Any:
    """Returns the font of all pictures, in so many pixels."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)


def write_png(path: Path, picture: Image.Image) -> None:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    write_whole(path, file.getvalue())
