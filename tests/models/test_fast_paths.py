import copy

import pytest
import torch
from tensors import randn, randomise

from vit_lightning import ViT
from vit_lightning.models import fast_paths


@pytest.fixture(autouse=True)
def small_sizes_too(monkeypatch):
    """Takes the fused bias at sizes of tests."""
    table = {key: row | {"fused_bias_from": 0} for key, row in fast_paths.TABLE.items() if key[1] is torch.bfloat16}
    monkeypatch.setattr(fast_paths, "TABLE", fast_paths.TABLE | table)
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
    for module in network.encoder.modules():
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
    assert not fast_paths.choose_linear("cuda", torch.bfloat16, 2**30)
    assert fast_paths.choose_attention("cuda", torch.bfloat16, 17, 16) is None
    assert fast_paths.choose_attention("cpu", torch.float64, 17, 16) is None


def test_frozen_weights_and_inputs_get_no_gradient():
    network = randomise(ViT(image_size=8, patch_size=4, emb_size=8, depth=1, num_heads=2, num_classes=3))
    network.encoder[0].attention.fn.attention.qkv.weight.requires_grad_(False)
    found = results(network, randn(2, 3, 8, 8, dtype=torch.float32), bfloat16=True)
    assert found.pop("encoder.0.attention.fn.attention.qkv.weight") is None
    assert all(gradient is not None for gradient in found.values())
