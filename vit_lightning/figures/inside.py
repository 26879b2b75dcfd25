"""Drawings of what ``inspect`` finds in a network: maps of an image for the page, and figures of a model."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from einops import rearrange
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw
from torch import Tensor

from vit_lightning.figures.curves import as_written
from vit_lightning.figures.pictures import font
from vit_lightning.inspect.survey import Survey
from vit_lightning.inspect.tokens import OUTLIER, cka, outliers

PALETTE = (255 * matplotlib.colormaps["viridis"](np.arange(256))[:, :3]).round().astype(np.uint8)
"""Colours of a map from 0 to its largest value."""
DASHES = ("-", "--", "-.", ":", *[(0, (1, gap)) for gap in range(2, 20)])
"""Of patches and of the tokens before them, such as the class token and registers."""
SMALL = 64
"""Largest side to which an image beside maps of attention is enlarged, in pixels."""
DRAWN_POSITIONS = 7
"""Rows and columns of patches whose positions are compared with all others."""


def views(found: Survey, number: int) -> dict[str, Image.Image]:
    """Returns the maps of an image by name, a pixel for each patch: a row of maps for each layer, a column for a head.

    The last column of attention is the mean over the heads; the other views have one column. Each map is divided by its
    largest value, relevance after its smallest is subtracted, of which a mean over patches gives all a share.
    """
    attention = layers_of(found)[number]
    maps = {
        "attention": np.concatenate([attention, attention.mean(axis=1, keepdims=True)], axis=1),
        "rollout": found.rollout[number][:, None].numpy(),
    }
    if found.relevance is not None:
        relevance = found.relevance[number][None, None]
        maps["relevance"] = (relevance - relevance.min()).numpy() * (not is_constant(relevance))
    maps["token norm"] = found.norms[number][:, None, found.grid.prefix :].numpy()
    maps["outliers"] = outliers_of(found)[number][:, None, found.grid.prefix :].float().numpy()
    drawn = {name: _coloured(of, found.grid.columns) for name, of in maps.items() if of.size}
    if found.colours.numel():
        pixels = rearrange(found.colours[number].numpy(), "l (y x) c -> (l y) x c", x=found.grid.columns)
        drawn["token components"] = Image.fromarray((255 * pixels).round().astype(np.uint8))
    return drawn


def attention_sheet(images: np.ndarray[Any, Any], maps: np.ndarray[Any, Any], columns: int) -> Image.Image:
    """Draws images (b, c, H, W), uint8, in a row each, with a map (b, l, n) for each layer beside it, by its number."""
    channels = images if images.shape[1] == 3 else images[:, :1].repeat(3, axis=1)
    shown = rearrange(PALETTE[_shades(maps)], "b l (y x) c -> b l y x c", x=columns)
    sides = [max(1, SMALL // max(images.shape[2:])) * size for size in images.shape[2:]]
    tiles = [_stretched(each, sides) for each in (rearrange(channels, "b c y x -> b 1 y x c"), shown)]
    spaced = np.pad(np.concatenate(tiles, axis=1), [(0, 0), (0, 0), (0, 2), (0, 2), (0, 0)], constant_values=255)
    drawn = Image.fromarray(rearrange(spaced, "b l y x c -> (b y) (l x) c"))
    title = "where the head looks, by layer; yellow: a map's largest weight"
    wide = max(drawn.width, int(font(12).getlength(title)) + 8)
    picture = Image.new("RGB", (wide, drawn.height + 32), "white")
    picture.paste(drawn, (0, 32))
    draw = ImageDraw.Draw(picture)
    draw.text((4, 2), title, "black", font(12))
    for layer in range(1, maps.shape[1] + 1):
        draw.text(((layer + 0.5) * spaced.shape[3], 17), str(layer), "black", font(11), anchor="ma")
    return picture


def _stretched(pixels: np.ndarray[Any, Any], sides: Sequence[int]) -> np.ndarray[Any, Any]:
    """Returns images (b, l, rows, columns, c) with as many rows and columns as given, the nearest ones."""
    rows, columns = (
        ((np.arange(n) + 0.5) * size / n).astype(int) for n, size in zip(sides, pixels.shape[2:4], strict=True)
    )
    stretched: np.ndarray[Any, Any] = pixels.take(columns, axis=3).take(rows, axis=2)
    return stretched


def _tiles(similarity: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns similarities (n, rows, columns) of every few rows and columns side by side, with gaps of nan."""
    rows, columns = similarity.shape[1:]
    chosen = [np.linspace(0, size - 1, min(size, DRAWN_POSITIONS)).round().astype(int) for size in (rows, columns)]
    maps = similarity.reshape(rows, columns, rows, columns)[np.ix_(*chosen)]
    tiles = np.pad(maps, [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    return rearrange(tiles, "a b y x -> (a y) (b x)")


def layers_of(found: Survey) -> np.ndarray[Any, Any]:
    """Returns the attention maps (b, l, h, n), with those of an AttentionPool of as many heads as a last layer."""
    attention = found.attention.numpy()
    if found.without_maps or found.pool is None or found.pool.shape[1] != attention.shape[2]:
        return attention
    return np.concatenate([attention, found.pool[:, None].numpy()], axis=1)


def outliers_of(found: Survey) -> Tensor:
    """Returns which tokens are outliers after each block, (b, l, p + n)."""
    return outliers(found.norms, found.grid.prefix)


def is_constant(values: Tensor) -> bool:
    """Whether values differ by less than 1 % of the largest, which a map would show in full contrast."""
    least, most = values.aminmax()
    return bool(most - least <= 0.01 * values.abs().max())


def relevance_words(found: Survey, number: int) -> str:
    """Returns what black and the brightest colour of an image's relevance are."""
    if found.relevance is None:
        return ""
    values = found.relevance[number]
    least, most = map(float, values.aminmax())
    if is_constant(values):
        return f"{least:.3g} to {most:.3g}, less than 1 % apart: drawn as constant"
    return f"{least:.3g} (black) to {most:.3g}"


def outlier_words(found: Survey, number: int) -> list[str]:
    """Returns which tokens of an image are outliers after each block, in words."""
    prefix = found.grid.prefix
    words = []
    for layer in outliers_of(found)[number]:
        before = [name for name, is_outlier in zip(found.before, layer[:prefix], strict=True) if is_outlier]
        count = int(layer[prefix:].sum())
        words.append(", ".join([f"{count} of {len(layer) - prefix} patches"] * bool(count) + before) or "none")
    return words


def _shades(maps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the places in ``PALETTE`` of maps (..., n), each divided by its largest value."""
    shares: np.ndarray[Any, Any] = maps / np.maximum(maps.max(axis=-1, keepdims=True), 1e-30)
    return (255 * shares).round().astype(np.uint8)


def _coloured(maps: np.ndarray[Any, Any], columns: int) -> Image.Image:
    """Returns maps (l, h, n) side by side."""
    picture = Image.fromarray(rearrange(_shades(maps), "l h (y x) -> (l y) (h x)", x=columns), "P")
    picture.putpalette(PALETTE.tobytes())
    return picture


@as_written
def maps_figure(found: Survey, number: int, image: Image.Image, title: str) -> Figure:
    """Draws an image as the model gets it and its attention maps: layers down, heads across, last their mean."""
    maps = views(found, number)["attention"]
    layers, heads = layers_of(found).shape[1:3]
    height = max(2.0, 1.0 + 0.62 * layers * found.grid.rows / found.grid.columns)
    wide = max(2.0, 0.62 * (heads + 1))
    figure = Figure(figsize=(wide + 3.0, height), layout="constrained")
    figure.suptitle(f"{title}\nattention of {found.reader}", fontsize=8)
    seen, axis, scale = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1.5, wide, 0.1]})
    seen.imshow(image)
    seen.axis("off")
    seen.set_title("image", fontsize=7)
    axis.imshow(maps.convert("RGB"), extent=(0.5, heads + 1.5, layers + 0.5, 0.5), aspect="auto", interpolation="none")
    axis.set_xticks(range(1, heads + 2), [*map(str, range(1, heads + 1)), "mean"], fontsize=7)
    axis.set_yticks(range(1, layers + 1), layer_names(found), fontsize=7)
    axis.xaxis.tick_top()
    axis.xaxis.set_label_position("top")
    axis.set_xlabel("head", fontsize=7)
    axis.set_ylabel("layer", fontsize=7)
    axis.hlines(np.arange(1.5, layers), 0.5, heads + 1.5, color="white", linewidth=1)
    axis.vlines(np.arange(1.5, heads + 1), 0.5, layers + 0.5, color="white", linewidth=1)
    colours = figure.colorbar(ScalarMappable(cmap="viridis"), cax=scale)
    colours.set_label("share of the map's largest weight", fontsize=7)
    colours.ax.tick_params(labelsize=6)
    return figure


def layer_names(found: Survey) -> list[str]:
    """Returns the names of the layers, from 1."""
    blocks, all_layers = found.attention.shape[1], layers_of(found).shape[1]
    numbers = range(1, (blocks or max(1, found.norms.shape[1])) + 1)
    return [*map(str, numbers), *["pool"] * (all_layers - blocks)]


@as_written
def model_figures(found: Survey) -> dict[str, tuple[Figure, str]]:
    """Returns the figures of a model by name, each with a sentence that says what it shows."""
    drawn = {}
    if len(found.distance):
        text = "Of each head (a point), from a patch to those it attends to."
        drawn["attention distance"] = _distances(found), text
    if found.positions is not None:
        text = "Cosine of the position of a patch with all others, of every few rows and columns."
        drawn["similarity of positions"] = _positions(found.positions), text
    if found.filters is not None:
        text = "Principal components of the filters of the patch embedding."
        drawn["patch filters"] = _filters(found.filters.numpy()), text
    if len(found.rank):
        outlier = f"An outlier is a token whose norm is above {OUTLIER:g} medians of the patches of its image."
        drawn["tokens"] = _tokens(found), f"After each block. {outlier} Effective rank: of all tokens of an image."
        drawn["similarity of layers"] = _layers(found), "Linear CKA of the patches after each block."
    if found.crate is not None:
        text = "Coding rate after MSSA, and share of the entries that are not 0 after ISTA, in each layer."
        drawn["sparse rate reduction"] = _crate(found.crate), text
    return drawn


def _panels(count: int, height: float = 3.2) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(4.4 * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _by_layer(axis: Any, label: str) -> None:
    axis.set(xlabel="layer", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def _numbers(values: Any) -> range:
    return range(1, len(values) + 1)


def _distances(found: Survey) -> Figure:
    figure, (axis,) = _panels(1)
    for head in found.distance.T.numpy():
        axis.plot(_numbers(head), head, "o", markersize=4, alpha=0.7, color="C0")
    axis.plot(_numbers(found.distance), found.distance.mean(dim=1).numpy(), color="C1", label="mean")
    _by_layer(axis, "mean attention distance (pixels)")
    axis.set_ylim(bottom=0)
    return figure


def _positions(similarity: Tensor) -> Figure:
    figure, (axis,) = _panels(1, height=4.4)
    axis.axis("off")
    shown = axis.imshow(_tiles(similarity.numpy()), vmin=-1, vmax=1, cmap="RdBu_r")
    figure.colorbar(shown, ax=axis, shrink=0.7, label="cosine")
    return figure


def _filters(filters: np.ndarray[Any, Any]) -> Figure:
    tiles = _filter_tiles(filters)
    figure, (axis,) = _panels(1, height=0.5 + 4.2 * len(tiles) / tiles.shape[1])
    axis.axis("off")
    axis.imshow(tiles, cmap="gray", vmin=0, vmax=1)
    return figure


def _filter_tiles(filters: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns filters (n, c, rows, columns) in rows of seven, or in one, each divided by its largest weight."""
    filters = filters[: 7 * (len(filters) // 7) or None]
    filters = filters if filters.shape[1] in (1, 3) else filters.mean(axis=1, keepdims=True)
    largest = np.abs(filters).max(axis=(1, 2, 3), keepdims=True)
    tiles = np.pad(0.5 + 0.5 * filters / largest, [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=1.0)
    wide = 7 if len(tiles) % 7 == 0 else len(tiles)
    return rearrange(tiles, "(a b) c y x -> (a y) (b x) c", b=wide)


def _tokens(found: Survey) -> Figure:
    """Draws a dash for each kind of token."""
    figure, (norm, outlier, rank) = _panels(3, height=3.6)
    layers, prefix = _numbers(found.rank), found.grid.prefix
    shares = 100 * outliers_of(found).float().mean(dim=0).numpy()
    lines = {
        "patches (median norm)": (found.norms[:, :, prefix:].median(dim=-1).values, shares[:, prefix:].mean(axis=1)),
        **{label: (found.norms[:, :, token], shares[:, token]) for token, label in enumerate(found.before)},
    }
    for (label, (norms, of_images)), dashes in zip(lines.items(), DASHES, strict=False):
        norm.plot(layers, norms.mean(dim=0).numpy(), label=label, color="C0", linestyle=dashes)
        outlier.plot(layers, of_images, color="C0", linestyle=dashes)
    largest = found.norms[:, :, prefix:].amax(dim=(0, 2)).numpy()
    norm.plot(layers, largest, color="C0", linestyle="", marker="+", label="largest of all patches")
    rank.plot(layers, found.rank.numpy(), color="C0")
    for axis, label in zip(
        (norm, outlier, rank), ("norm", "outliers (% of these tokens)", "effective rank"), strict=True
    ):
        _by_layer(axis, label)
    norm.set_ylim(bottom=0)
    most = max(1.0, outlier.get_ylim()[1])
    outlier.set_ylim(-0.02 * most, most)  # a line at 0 is seen
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    return figure


def _layers(found: Survey) -> Figure:
    figure, (axis,) = _panels(1)
    shares = cka(found.samples).numpy()
    extent = (0.5, len(shares) + 0.5, 0.5, len(shares) + 0.5)
    shown = axis.imshow(shares, vmin=0, vmax=1, origin="lower", extent=extent, cmap="magma")
    axis.set(xlabel="layer", ylabel="layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(shown, ax=axis, shrink=0.8, label="CKA")
    return figure


def _crate(measures: tuple[Tensor, Tensor]) -> Figure:
    figure, axes = _panels(2)
    for axis, values, label in zip(axes, measures, ("coding rate", "entries that are not 0"), strict=True):
        axis.plot(_numbers(values), values.numpy(), "o-", markersize=4)
        _by_layer(axis, label)
    return figure
