"""The encoder block chosen in a config, and configs from before it could be chosen."""

from __future__ import annotations

import copy

import pytest
import torch
import yaml
from runs import REPOSITORY

from vit_lightning import UserError
from vit_lightning.config.changes import changes
from vit_lightning.config.resolve import resolve

CRATE = REPOSITORY / "experiments" / "families" / "crate.yaml"
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


def weights(config):
    torch.manual_seed(0)
    return config.make_network().state_dict()


def same(first, second):
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def without_block(config, path):
    """Writes a config as it was before ``block``."""
    del config["model"].get("init_args", config["model"])["block"]
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_a_config_names_a_block_of_the_user_s_own(tmp_path, monkeypatch):
    (tmp_path / "my_blocks.py").write_text(POST_NORM)
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "post_norm.yaml"
    config.write_text("model:\n  block: {class_path: my_blocks.PostNormBlock, init_args: {last_norm: false}}\n")
    arguments = ["--config", str(DIGITS), "--config", str(config)]
    with pytest.raises(UserError, match=r"model\.block"):
        resolve(arguments)
    arguments.append("--trust-config=true")
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


@pytest.mark.parametrize("written", ["by the user", "by a run", "with the class alone"])
def test_ista_without_a_block_is_crate_s_as_it_was_before_there_was_a_choice(tmp_path, written):
    now = resolve(["--config", str(CRATE)])
    old = copy.deepcopy(now.config) if written == "by a run" else yaml.safe_load(CRATE.read_text())
    if written == "with the class alone":
        old["model"]["feed_forward"] = "ISTA"
    then = resolve(["--config", without_block(old, tmp_path / "crate.yaml")])
    assert then.config["model"]["init_args"]["block"]["class_path"] == "vit_lightning.CrateBlock"
    assert same(weights(then), weights(now))
    assert "encoder.0.feed_forward.feed_forward.dictionary" in weights(then)


@pytest.mark.parametrize("path", [CRATE, DIGITS], ids=lambda path: path.stem)
def test_a_run_from_before_the_choice_resumes_without_a_changed_config(tmp_path, path):
    now = copy.deepcopy(dict(resolve(["--config", str(path)]).config))
    old = copy.deepcopy(dict(resolve(["--config", str(path)]).config))
    without_block(old, tmp_path / "config.yaml")
    assert changes(old, now) == {}
    now["model"]["init_args"]["block"]["class_path"] = "somewhere.Block"
    assert list(changes(old, now)) == ["model.block.class_path"]
