"""Arguments of commands without a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from vit_lightning import UserError
from vit_lightning.commands.plain_arguments import read_plain


@dataclass
class Options:
    source: str
    images: list[Path] = field(default_factory=list)
    to: Literal["onnx", "hf"] = "onnx"
    image_size: int | None = None
    blocks: list[int] | None = None


USAGE = "SOURCE [IMAGES ...]"


def test_words_and_flags_are_fields():
    given = ["run", "a.jpg", "--to=hf", "b.jpg", "--image-size", "48", "--blocks=[0, 5]"]
    assert read_plain(Options, given, USAGE) == Options("run", [Path("a.jpg"), Path("b.jpg")], "hf", 48, [0, 5])
    assert read_plain(Options, ["run"], USAGE) == Options("run")


def test_all_mistakes_are_named_at_once():
    with pytest.raises(UserError) as error:
        read_plain(Options, ["--to=zip", "--image_sise=4", "--blocks=all", "--to=hf"], USAGE)
    text = "\n".join(error.value.problems)
    for part in ("SOURCE is missing", "to is given twice (zip and hf)", "did you mean image_size?", "blocks=all must"):
        assert part in text
    with pytest.raises(UserError, match="to=zip must be one of onnx, hf"):
        read_plain(Options, ["run", "--to=zip"], USAGE)
    with pytest.raises(UserError, match=r"more: unexpected argument"):
        read_plain(Options, ["run", "more"], "SOURCE")
