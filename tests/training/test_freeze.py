"""A frozen backbone: what is trained, what stays, and what a run makes of it."""

import copy

import pytest
import timm
import torch
from runs import SMALL
from torch import nn

from vit_lightning import UserError, ViT
from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.models.heads import find_head
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.training.fine_tuning import freeze_backbone

TINY = {"image_size": 8, "in_channels": 1, "num_classes": 10, "emb_size": 16, "depth": 1, "num_heads": 2}


class Convolutional(nn.Sequential):
    """A network with statistics and dropout before its last linear layer."""

    num_classes = 10

    def __init__(self) -> None:
        norm = nn.BatchNorm2d(4)
        super().__init__(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Dropout(), nn.Linear(144, 10))


NETWORKS = {
    "ViT": lambda: ViT(**TINY, patch_size=4, pool="mean", final_norm="after_pool", emb_dropout=0.5, drop_path=0.5),
    "two heads": lambda: ViT(**TINY, patch_size=4, distillation_token=True),
    "last layer": Convolutional,
    "timm": lambda: timm.create_model(
        "deit_tiny_distilled_patch16_224",
        **{"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "depth": 1, "embed_dim": 12},
    ),
}
HEADS = {"ViT": ["head"], "two heads": ["head"], "last layer": ["4"], "timm": ["head", "head_dist"]}


@pytest.mark.parametrize("name", NETWORKS)
def test_only_the_head_is_trained_and_all_else_stays_in_evaluation_mode(name):
    network = NETWORKS[name]().train()
    freeze_backbone(network)
    assert list(find_head(network)) == HEADS[name]
    heads = tuple(f"{head}." for head in HEADS[name])
    network = copy.deepcopy(network).train()
    images = torch.randn(4, 1, 8, 8)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    first, again = (torch.cat([*given] if isinstance(given := network(images), tuple) else [given]) for _ in range(2))
    assert torch.equal(first, again)
    first.sum().backward()
    for key, weight in network.named_parameters():
        assert (weight.grad is not None) == key.startswith(heads), key
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    modes = {key: module.training for key, module in network.named_modules()}
    assert {key for key, mode in modes.items() if mode} >= set(HEADS[name])
    assert not any(modes[key] for key in ("patch_embedding", "encoder", "1", "blocks") if key in modes)


def test_a_network_without_a_linear_layer_has_no_head():
    with pytest.raises(UserError, match="Sequential has no linear layer"):
        freeze_backbone(nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()))


def test_a_run_says_what_it_trains_and_begins_with_a_new_head_if_it_is_told_so(results, in_folder, capsys):
    flags = ["--init_from=out", "--freeze=backbone", "--reset_head=true", "--trainer.limit_train_batches=2"]
    new = fit(resolve([*SMALL, *flags, "--test=false", "--out=new"]))
    said = capsys.readouterr()
    assert f"model       ViT, 170 of {results['parameters']:,} parameters trained\n" in said.out
    assert "18 tensors taken, new head (reset_head)\n" in said.out
    assert "eval mode" not in said.err
    assert (new["parameters"], new["trained_parameters"]) == (results["parameters"], 170)
    paths = (in_folder / name / "checkpoints/best.ckpt" for name in ("out", "new"))
    before, after = (read_checkpoint(path)["state_dict"] for path in paths)
    kept = [name for name in before if name.startswith("network.") and ".head." not in name]
    assert len(kept) > 10
    assert all(torch.equal(before[name], after[name]) for name in kept)
    norms = [float(state["network.head.linear.weight"].norm()) for state in (before, after)]
    assert norms[1] < norms[0] / 2  # a new classifier is zero; two steps move it a little
