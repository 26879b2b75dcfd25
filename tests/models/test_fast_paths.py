import copy
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from tensors import randn, randomise
from torch import nn

from vit_lightning import UserError, ViT
from vit_lightning.models import fast_paths
from vit_lightning.models.attention import MultiHeadAttention, RotaryAttention
from vit_lightning.models.blocks import ResidualAdd
from vit_lightning.models.feed_forward import FeedForwardBlock
from vit_lightning.models.heads import ClassificationHead


@pytest.fixture(autouse=True)
def small_sizes_too(monkeypatch):
    """Takes all forms at sizes of tests, on any processor."""
    smaller = {
        torch.bfloat16: {"fused_bias_from": 0, "fused_bias_inference_from": 0},
        torch.float32: {"bias_after": (0, 600_000)},
    }
    table = {key: replace(forms, patches=True, **smaller[key[1]]) for key, forms in fast_paths.TABLE.items()}
    monkeypatch.setattr(fast_paths, "TABLE", table)
    yield
    fast_paths.use("auto")


def results(network, images, *, paths="auto", bfloat16=False):
    """Logits, and the gradients of all parameters by name."""
    fast_paths.use(paths)
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = network(images)
    logits.to(images.dtype).square().sum().backward()
    return {"logits": logits.detach(), **{name: weight.grad for name, weight in network.named_parameters()}}


def error(found, exact):
    return sum((found[name].double() - exact[name]).norm() / exact[name].norm() for name in exact) / len(exact)


@pytest.mark.parametrize("image_size", [16, 28])  # 17 and 50 tokens, for which the table differs
@pytest.mark.parametrize("bfloat16", [False, True])
def test_logits_and_gradients_are_as_near_to_float64_as_those_of_the_plain_path(image_size, bfloat16):
    network = randomise(ViT(image_size=image_size, patch_size=4, emb_size=24, depth=2, num_heads=3, num_classes=5))
    images = randn(4, 3, image_size, image_size)
    exact = results(copy.deepcopy(network).double(), images, paths="plain")
    images = images.float()
    auto, plain = (results(network, images, paths=paths, bfloat16=bfloat16) for paths in ("auto", "plain"))
    assert error(auto, exact) < 1.3 * error(plain, exact) + 1e-7
    assert error(auto, exact) < (0.2 if bfloat16 else 2e-5)
    assert any(not torch.equal(auto[name], plain[name]) for name in auto)  # it is another path
    again = results(network, images, bfloat16=bfloat16)
    assert all(torch.equal(auto[name], again[name]) for name in auto)
    assert all(again[name].dtype == torch.float32 for name, _ in network.named_parameters())
    # the same bits when the blocks are computed again in the backward pass, and with hooks on what is inside of them
    seen = []
    for module in network.encoder[0].modules():
        module.register_forward_hook(lambda module, given, out: seen.append(module))
    network.encoder.activation_checkpointing = True
    repeated = results(network, images, bfloat16=bfloat16)
    assert all(torch.equal(auto[name], repeated[name]) for name in auto)
    assert {network.encoder[0].attention.fn.attention.qkv, network.encoder[0].feed_forward.fn.feed_forward.expand} <= {
        *seen
    }


def test_compiled_networks_and_other_devices_take_torch_s_own_operators():
    network = randomise(ViT(image_size=8, patch_size=4, emb_size=8, depth=1, num_heads=2, num_classes=3))
    images = randn(2, 3, 8, 8, dtype=torch.float32)
    fast_paths.use("plain")
    plain = network(images)
    fast_paths.use("auto")
    assert torch.equal(torch.compile(network, backend="eager", fullgraph=True)(images), plain)
    assert fast_paths.choose_linear("cuda", torch.bfloat16, 2**30) == "plain"
    assert fast_paths.choose_attention("cuda", torch.bfloat16, 17, 16) is None
    assert fast_paths.choose_attention("cpu", torch.float64, 17, 16) is None


def test_frozen_weights_and_inputs_get_no_gradient():
    network = randomise(ViT(image_size=8, patch_size=4, emb_size=8, depth=1, num_heads=2, num_classes=3))
    network.encoder[0].attention.fn.attention.qkv.weight.requires_grad_(False)
    found = results(network, randn(2, 3, 8, 8, dtype=torch.float32), bfloat16=True)
    assert found.pop("encoder.0.attention.fn.attention.qkv.weight") is None
    assert all(gradient is not None for gradient in found.values())


def tokens_of_the_last_block(network, images):
    """How many tokens its feed-forward part gets, whose product is replaced since a hook would ask for all of them."""
    counts = []
    linear = fast_paths.linear
    with pytest.MonkeyPatch.context() as patch:
        last = network.encoder[-1].feed_forward.fn.feed_forward.contract.weight
        patch.setattr(
            fast_paths, "linear", lambda x, w, b: (counts.append(x.shape[1]) if w is last else None, linear(x, w, b))[1]
        )
        network(images)
    return counts[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_last_block_is_computed_for_the_class_token_alone(checkpointing):
    network = randomise(
        ViT(
            **{"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3},
            **{"drop_path": 0.5, "layer_scale": 0.5, "activation_checkpointing": checkpointing},
        )
    )
    images = randn(8, 3, 8, 8)
    torch.manual_seed(1)
    exact = results(copy.deepcopy(network).double(), images, paths="plain")
    torch.manual_seed(1)
    found = results(network, images.float())
    assert error(found, exact) < 1e-5
    assert tokens_of_the_last_block(network, images.float()) == 1
    network.eval()
    assert tokens_of_the_last_block(network, images.float()) == 1
    assert network.forward_features(images.float()).shape == (8, 5, 16)


def test_all_tokens_of_the_last_block_are_computed_where_something_else_may_read_them():
    images = randn(2, 3, 8, 8, dtype=torch.float32)
    sizes = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3}

    class OwnAttention(MultiHeadAttention):
        pass

    attentions = (OwnAttention, RotaryAttention, partial(MultiHeadAttention, dropout=0.1))
    networks = [ViT(**sizes, attention=attention) for attention in attentions]
    networks += [ViT(**sizes, pool="mean"), ViT(**sizes, feed_forward=partial(FeedForwardBlock, dropout=0.1))]
    assert [tokens_of_the_last_block(network, images) for network in networks] == [5, 5, 5, 5, 5]
    assert [tokens_of_the_last_block(network.eval(), images) for network in networks] == [5, 5, 1, 5, 1]
    network = networks[-1]
    for module in (network.encoder, network.head, network.norm, network.encoder[-1].attention.fn.attention):
        seen = []
        handle = module.register_forward_hook(lambda module, given, out, seen=seen: seen.append(given[0].shape[1]))
        network(images)
        handle.remove()
        assert seen == [5]
    fast_paths.use("plain")
    assert tokens_of_the_last_block(network, images) == 5


def test_a_network_whose_parts_stand_elsewhere_computes_all_tokens():
    sizes = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3}

    class OwnHead(ClassificationHead):
        def forward(self, tokens):
            return super().forward(tokens) + self.linear(tokens.mean(dim=1))

    attends_twice = randomise(ViT(**sizes, feed_forward=partial(MultiHeadAttention, num_heads=2)))
    a_block_more, a_part_more, own_head, no_attention = (randomise(ViT(**sizes)) for _ in range(4))
    a_part_more.encoder[-1].add_module("more", ResidualAdd(nn.Linear(16, 16)))
    a_block_more.norm = nn.Sequential(a_block_more.encoder[0])
    own_head.head.__class__ = OwnHead
    no_attention.encoder[-1].attention.fn.attention = nn.Identity()
    no_block = randomise(ViT(**sizes))
    no_block.encoder = no_block.encoder[:0]
    images = randn(4, 3, 8, 8).float()
    for network in (attends_twice, a_block_more, a_part_more, own_head, no_attention, no_block):
        fast_paths.use("plain")
        plain = network.eval()(images)
        fast_paths.use("auto")
        torch.testing.assert_close(network(images), plain, rtol=1e-4, atol=1e-5)


def test_what_a_linear_layer_refuses_is_refused_whatever_its_size():
    rows, weight, bias = torch.randn(400, 16), torch.randn(64, 16), torch.randn(64)
    sliced = torch.randn(128)[::2].to(torch.bfloat16)
    fast_paths.use("auto")
    found = fast_paths.linear(rows.bfloat16(), weight.bfloat16(), sliced)
    torch.testing.assert_close(found, nn.functional.linear(rows.bfloat16(), weight.bfloat16(), sliced.contiguous()))
    for given in ((rows.bfloat16(), weight, bias), (rows[:, :8].bfloat16(), weight.bfloat16(), bias.bfloat16())):
        with pytest.raises(RuntimeError) as plain:
            nn.functional.linear(*given)
        with pytest.raises(RuntimeError, match=re.escape(str(plain.value))):
            fast_paths.linear(*given)


def test_second_derivatives_are_refused_and_torch_s_transforms_take_its_own_operators():
    network = randomise(ViT(image_size=8, patch_size=4, emb_size=16, depth=1, num_heads=2, num_classes=3))
    images, weights = randn(2, 3, 8, 8).float(), dict(network.named_parameters())
    loss = network(images).square().sum()
    with pytest.raises(UserError, match="fast_paths=plain"):
        torch.autograd.grad(loss, list(weights.values()), create_graph=True)

    def functional(weights):
        return torch.func.functional_call(network, weights, (images,)).square().sum()

    gradients = torch.func.grad(functional)(weights)
    for name, expected in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
        torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.jit.trace(network.eval(), images)(images), network(images))


def test_a_batch_without_images_has_gradients():
    network = ViT(image_size=8, patch_size=4, emb_size=16, depth=1, num_heads=2, num_classes=3)
    for bfloat16 in (False, True):
        assert results(network, torch.zeros(0, 3, 8, 8), bfloat16=bfloat16)["logits"].shape == (0, 3)
