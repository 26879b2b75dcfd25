"""The encoder block chosen in a config."""

from __future__ import annotations

import pytest
import yaml
from runs import REPOSITORY

from vit_lightning import UserError
from vit_lightning.config.resolve import resolve

DIGITS = REPOSITORY / "experiments" / "digits.yaml"

POST_NORM = """
from torch import nn
from vit_lightning import ResidualAdd
from vit_lightning.models.blocks import Layer, NamedSequential

class PostNormBlock(NamedSequential):
    def __init__(
        self, emb_size: int, attention: nn.Module, feed_forward: nn.Module, norm: Layer,
        layer_scale: float | None, drop_path: float, *, last_norm: bool = True,
    ):
        super().__init__(
            attention=ResidualAdd(attention),
            attention_norm=norm(emb_size),
            feed_forward=ResidualAdd(feed_forward),
            feed_forward_norm=norm(emb_size) if last_norm else None,
        )
"""


def test_a_config_names_a_block_of_the_user_s_own(tmp_path, monkeypatch):
    (tmp_path / "my_blocks.py").write_text(POST_NORM)
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "post_norm.yaml"
    config.write_text("model:\n  block: {class_path: my_blocks.PostNormBlock, init_args: {last_norm: false}}\n")
    arguments = ["--config", str(DIGITS), "--config", str(config)]
    resolved = resolve(arguments)
    names = {name for name, _ in resolved.make_network().encoder[0].named_children()}
    assert names == {"attention", "attention_norm", "feed_forward"}
    assert yaml.safe_load(resolved.to_yaml())["model"]["init_args"]["block"] == {
        "class_path": "my_blocks.PostNormBlock",
        "init_args": {"last_norm": False},
    }
    with pytest.raises(UserError) as caught:
        resolve([*arguments, "--model.block.lastnorm=true", "--model.depth=two"])
    assert {problem.split("=")[0] for problem in caught.value.problems} == {"model.block.lastnorm", "model.depth"}
