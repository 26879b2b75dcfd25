"""Trained models that a command without a config names, with what their weights do not tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vit_lightning.commands.console import row, say
from vit_lightning.config.experiment import network_in_file
from vit_lightning.errors import UserError
from vit_lightning.weights.sources import Source, open_source


def open_model(
    place: str, *, image_size: int | tuple[int, int] | None, config: Mapping[str, Any] | None, key: str
) -> Source:
    """Returns a trained model, and prints what was assumed about it; arguments as those of ``open_source``.

    Raises:
        UserError: it cannot be had, or needs facts, which are named as they are given on the command line.
    """
    try:
        source = open_source(place, make_network=network_in_file, image_size=image_size, config=config, key=key)
    except UserError as error:
        raise UserError([as_flag(problem) for problem in error.problems]) from error
    for note in source.notes:
        say(row("warning", as_flag(note)))
    return source


def as_flag(text: str) -> str:
    """Returns a message that shows the argument ``config`` of Python as the flag of the command line."""
    return re.sub(r"config=\{(.*?)\}", lambda found: "--config='{" + found[1].replace("'", "") + "}'", text)
