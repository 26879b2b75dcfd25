"""Adapters: made by peft, trained with the head, kept in checkpoints, merged into plain weights."""

import pytest
import torch
import torchvision
from runs import SMALL

from vit_lightning import UserError, ViT
from vit_lightning.commands.fit import fit
from vit_lightning.commands.trained import validate
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import load_network, read_checkpoint
from vit_lightning.training.fine_tuning import LoraConfig, add_lora
from vit_lightning.weights.adapt import merged
from vit_lightning.weights.init_from import open_initial_weights
from vit_lightning.weights.sources import open_source

LORA = ["--lora.rank=2", "--lora.alpha=8", "--lora.targets=[qkv,expand]"]


def tiny() -> ViT:
    return ViT(image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=16, depth=2, num_heads=2)


def test_adapters_change_nothing_at_first_and_draw_no_number_of_the_run():
    network, images = tiny(), torch.randn(3, 1, 8, 8)
    torch.nn.init.normal_(network.head.linear.weight)
    # with adapters in it the last block is computed for all tokens, not for the class token alone: other last bits
    tokens, state, random = network.forward_features(images), network.state_dict(), torch.get_rng_state()
    add_lora(network, LoraConfig(rank=2))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(network.forward_features(images), tokens)
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    adapters = {name for name in trained if ".lora_A." in name or ".lora_B." in name}
    assert len(adapters) == 2 * 2 * 2
    assert trained - adapters == {"head.linear.weight", "head.linear.bias"}
    base = {name.replace(".base_layer", ""): value for name, value in network.state_dict().items()}
    assert all(torch.equal(base[name], value) for name, value in state.items())


def test_a_run_with_adapters_is_tested_from_its_checkpoint_alone_and_merges(in_folder):
    results = fit(resolve([*SMALL, *LORA, "--optimizer.lr=0.02", "--test=false", "--out=out"]))
    assert results["trained_parameters"] == 2 * (16 + 48) + 2 * (16 + 64) + 170
    assert validate(resolve(["--ckpt=out", "--out=again"], "validate"))["val/acc"] == results["val/acc"]
    path = in_folder / "out/checkpoints/best.ckpt"
    checkpoint = read_checkpoint(path)
    network = network_in_file(checkpoint["config"])
    load_network(network, checkpoint, path)
    plain, images = merged(network.eval()), torch.randn(5, 1, 8, 8)
    assert not any("lora" in name or "base_layer" in name for name in plain.state_dict())
    assert all(weight.requires_grad for weight in plain.parameters())
    torch.testing.assert_close(plain(images), network(images), rtol=0, atol=1e-5)
    assert all(value.abs().max() > 1e-3 for name, value in network.state_dict().items() if "lora_B" in name)
    assert merged(plain) is plain
    assert torch.equal(open_source("out", make_network=network_in_file).network(images), plain(images))
    second = resolve([*SMALL, *LORA, "--init_from=out"]).make_network()
    notes = open_initial_weights("out", network_in_file).fitted(second, "bicubic").notes
    assert not notes, "adapters change no option of the network below them"


def test_layers_of_other_networks_and_names_that_are_not_there():
    sizes = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    network = torchvision.models.VisionTransformer(**sizes)
    for target in ("head", "out_proj"):  # attention of torch does not call its out_proj
        with pytest.raises(UserError, match=f"VisionTransformer has no linear layer {target} before its head"):
            add_lora(network, LoraConfig(rank=2, targets=[target]))
    add_lora(network, LoraConfig(rank=2, targets=["0"]))
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert trained >= {"heads.head.weight", "heads.head.bias"}
    assert len(trained) == 2 + 2 * 2
