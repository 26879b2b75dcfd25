"""The figure of a network: boxes of its modules as they lie in each other, with names, sizes and shapes, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from torch import nn

from vit_lightning.models.attention import MultiHeadAttention
from vit_lightning.models.heads import ClassificationHead, DistilledHead
from vit_lightning.models.layers import DropPath, ResidualAdd
from vit_lightning.models.patches import PatchEmbedding

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of the output of each module for one image, by its path from the name of the network's class."""

WIDTH, ROW, GAP = 760, 24, 7
SKIP = 26
"""Width in which a residual's way around its branch is drawn."""
COLOURS: dict[type[nn.Module], str] = {
    PatchEmbedding: "#e69f00",
    MultiHeadAttention: "#0072b2",
    ResidualAdd: "#009e73",
    ClassificationHead: "#d55e00",
    DistilledHead: "#d55e00",
}
"""Colours of some modules; the others are grey."""


def architecture(network: nn.Module, shapes: Shapes) -> str:
    """Returns the figure as SVG; siblings that are alike, such as encoder blocks, are drawn once.

    Args:
        network: the network.
        shapes: shapes of the outputs of its modules.
    """
    name = type(network).__name__
    drawn: list[str] = []
    height = _draw(drawn, shapes, [network], name, name, GAP, GAP, WIDTH - 2 * GAP) + 2 * GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
    style = 'font-family="system-ui, sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head + style, *drawn, "</svg>\n"])


def _draw(
    drawn: list[str], shapes: Shapes, alike: Sequence[Any], name: str, path: str, left: int, top: int, width: int
) -> int:
    """Draws the last of modules that are alike, and what is in it; returns its height."""
    module = alike[-1]
    around = SKIP if isinstance(module, ResidualAdd) else 0
    y, first = top + ROW, len(drawn)
    for names in _groups(module, shapes, path):
        child = names[-1]
        title = child if len(names) == 1 else f"{names[0]} to {child}, each of {len(names)}"
        parts = [getattr(each, name, None) for each in alike for name in names]
        y += _draw(drawn, shapes, parts, title, f"{path}.{child}", left + GAP, y, width - 2 * GAP - around) + GAP
    height = y - top
    colour = next((colour for kind, colour in COLOURS.items() if isinstance(module, kind)), "#888")
    box = f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="4" fill="{colour}" fill-opacity="0.07" '
    shown = " x ".join(map(str, shapes.get(path, ())))
    rates = [getattr(each, "p", 0.0) for each in alike] if isinstance(module, DropPath) else [0.0]
    sizes = f"p={min(rates):.3g} to {max(rates):.3g}" if len({*rates}) > 1 else module.extra_repr()
    about = type(module).__name__ + f" ({sizes if len(sizes) < 60 else sizes[:57] + '...'})" * bool(sizes)
    line = f'y="{top + 16}"'
    drawn.insert(first, f'{box}stroke="{colour}"/>')  # below what is in it
    drawn += [
        f'<text x="{left + 8}" {line}><tspan font-weight="600">{escape(name)}</tspan>  {escape(about)}</text>',
        f'<text x="{left + width - 8 - around}" {line} text-anchor="end" fill="#555">{shown}</text>',
    ]
    if around:
        x, end = left + width - SKIP, top + height - ROW // 2
        way = f"M {x - GAP} {top + ROW - 4} H {x + 12} V {end - 7}"
        drawn += [
            f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<circle cx="{x + 12}" cy="{end}" r="7" fill="white" stroke="{colour}"/>',
            f'<text x="{x + 12}" y="{end + 4}" text-anchor="middle">+</text>',
        ]
    return height


def _groups(module: nn.Module, shapes: Shapes, path: str) -> list[list[str]]:
    """Returns the names of the children, those that follow each other and are alike together."""
    groups = groupby(module.named_children(), lambda child: _form(child[1], shapes, f"{path}.{child[0]}"))
    return [[name for name, _ in alike] for _, alike in groups]


def _form(module: nn.Module, shapes: Shapes, path: str) -> Any:
    """Returns all that is drawn of a module but the rate of its drop path."""
    children = [(name, part) for name, part in module.named_children() if not isinstance(part, DropPath)]
    inside = [(name, _form(part, shapes, f"{path}.{name}")) for name, part in children]
    return type(module), module.extra_repr() if not inside else "", shapes.get(path), inside
