import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from tensors import randn, randomise
from throughput import left_out_flops
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_lightning import ViT, accelerate
from vit_lightning.models.attention import DotProductAttention, MultiHeadAttention, RotaryAttention
from vit_lightning.models.feed_forward import FeedForwardBlock
from vit_lightning.models.heads import ClassificationHead
from vit_lightning.models.layers import LayerNorm, ResidualAdd
from vit_lightning.training import fast_paths
from vit_lightning.training.fast_paths import FastAttention, FastPatches, FastViT
from vit_lightning.training.fine_tuning import LoraConfig, add_lora

SIZES = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


@pytest.fixture(autouse=True)
def small_sizes_too(monkeypatch):
    """Takes all forms at sizes of tests, on any processor."""
    table = {key: replace(forms, patches=True) for key, forms in fast_paths.TABLE.items() if key[0] != "cuda"}
    monkeypatch.setattr(fast_paths, "TABLE", table)


def small(**options):
    return randomise(ViT(**{**SIZES, **options}))


def images(count=4, size=8):
    return randn(count, 3, size, size, dtype=torch.float32)


def accelerated(network):
    copied = copy.deepcopy(network)
    accelerate(copied)
    return copied


def results(network, images, *, bfloat16=False, seed=0):
    """Logits, and the gradients of all parameters by name."""
    network.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = network(images)
    logits.to(images.dtype).square().sum().backward()
    return {"logits": logits.detach(), **{name: weight.grad for name, weight in network.named_parameters()}}


def error(found, exact):
    return sum((found[name].double() - exact[name]).norm() / exact[name].norm() for name in exact) / len(exact)


def tokens_of_the_last_block(network, images):
    """How many tokens its feed-forward part gets, whose product is replaced since a hook would ask for all of them."""
    counts = []
    linear = nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        last = network.encoder[-1].feed_forward.fn.feed_forward.contract.weight
        patch.setattr(
            nn.functional,
            "linear",
            lambda x, w, b: (counts.append(x.shape[1]) if w is last else None, linear(x, w, b))[1],
        )
        network(images)
    return counts[0]


def test_a_swapped_network_is_the_same_objects_with_the_same_weights_names_and_hooks():
    network = small()
    seen = []
    network.encoder[0].register_forward_hook(lambda module, given, out: seen.append(module))
    modules, weights = dict(network.named_modules()), dict(network.named_parameters())
    for _ in range(2):  # a second call changes nothing
        accelerate(network)
        assert dict(network.named_modules()) == modules
        assert list(network.state_dict()) == list(weights)
        assert all(weight is weights[name] for name, weight in network.named_parameters())
    assert {type(module) for module in modules.values()} >= {FastViT, FastPatches, FastAttention}
    logits = network(images())
    assert seen == [network.encoder[0]]
    seen.clear()
    network.encoder[0]._forward_hooks.clear()
    for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert tokens_of_the_last_block(again, images()) == 1
        assert torch.equal(again(images()), logits)


@pytest.mark.parametrize("image_size", [16, 28])  # 17 and 50 tokens, for which the table differs
@pytest.mark.parametrize("bfloat16", [False, True])
def test_logits_and_gradients_are_as_near_to_float64_as_those_of_the_plain_network(image_size, bfloat16):
    network = randomise(ViT(image_size=image_size, patch_size=4, emb_size=24, depth=2, num_heads=3, num_classes=5))
    batch = randn(4, 3, image_size, image_size)
    exact = results(copy.deepcopy(network).double(), batch)
    batch, fast = batch.float(), accelerated(network)
    auto, plain = results(fast, batch, bfloat16=bfloat16), results(network, batch, bfloat16=bfloat16)
    assert error(auto, exact) < 1.3 * error(plain, exact) + 1e-7
    assert error(auto, exact) < (0.2 if bfloat16 else 2e-5)
    assert any(not torch.equal(auto[name], plain[name]) for name in auto)  # it is another path
    again = results(fast, batch, bfloat16=bfloat16)
    assert all(torch.equal(auto[name], again[name]) for name in auto)
    assert all(again[name].dtype == torch.float32 for name, _ in network.named_parameters())
    # the same bits when the blocks are computed again in the backward pass, and with hooks on what is inside of them
    seen = []
    for module in fast.encoder[0].modules():
        module.register_forward_hook(lambda module, given, out: seen.append(module))
    fast.encoder.activation_checkpointing = True
    repeated = results(fast, batch, bfloat16=bfloat16)
    assert all(torch.equal(auto[name], repeated[name]) for name in auto)
    assert {fast.encoder[0].attention.fn.attention.qkv, fast.encoder[0].feed_forward.fn.feed_forward.expand} <= {*seen}


@pytest.mark.parametrize("masked", [False, True])
def test_bfloat16_attention_agrees_with_float32(masked):
    mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.7 if masked else None
    tensors = [randn(2, 3, 9, 8, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    attend = accelerated(nn.ModuleList([DotProductAttention(0.35)]))[0]
    assert type(attend) is FastAttention
    half = [tensor.clone().requires_grad_() for tensor in tensors]
    full = [tensor.float().requires_grad_() for tensor in tensors]
    out, expected = attend(*half, mask), DotProductAttention(0.35)(*full, mask)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.03)
    out.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(half, full, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled_code_has_one_product_of_patches_and_the_last_block_for_the_class_token(checkpointing, monkeypatch):
    monkeypatch.setitem(fast_paths.TABLE, (fast_paths.processor("cpu"), torch.float64), fast_paths.Forms(patches=True))
    network, graphs = small(activation_checkpointing=checkpointing).double(), []
    exact = results(copy.deepcopy(network), images().double())
    accelerate(network)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    network.compile(backend=backend, fullgraph=True)
    found = results(network, images().double())
    assert error(found, exact) < 1e-12
    parts = [part for part in graphs[0].modules() if isinstance(part, torch.fx.GraphModule)]
    linear = [node for part in parts for node in part.graph.find_nodes(op="call_function", target=torch._C._nn.linear)]
    hidden = [tuple(node.meta["example_value"].shape) for node in linear if node.meta["example_value"].shape[-1] == 64]
    assert hidden == [(4, 5, 64), (4, 1, 64)]
    assert not any("conv2d(" in part.code for part in parts)


def test_a_hook_gets_all_tokens_of_compiled_code_too(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "skip_nnmodule_hook_guards", False)  # as compile_module does
    network, seen = accelerated(small()), []
    network.compile(backend="eager")
    logits = network(images())
    attention = network.get_submodule("encoder.1.attention.fn.attention")
    attention.register_forward_hook(lambda module, given, out: seen.append(out.shape[1]))
    torch.testing.assert_close(network(images()), logits)
    assert seen == [5]


def test_other_devices_and_types_take_torch_s_own_attention():
    assert fast_paths.choose_attention("cuda", torch.bfloat16, 17, 16) is None
    assert fast_paths.choose_attention("cpu", torch.float64, 17, 16) is None


@pytest.mark.parametrize(
    "more", [{}, {"activation_checkpointing": True}, {"attention": partial(MultiHeadAttention, gate="heads")}]
)
def test_the_last_block_is_computed_for_the_class_token_alone(more):
    network = small(drop_path=0.5, layer_scale=0.5, head_dropout=0.1, **more)
    exact = results(copy.deepcopy(network).double(), images(8).double())
    accelerate(network)
    assert error(results(network, images(8)), exact) < 1e-5
    assert tokens_of_the_last_block(network, images()) == 1
    assert left_out_flops(network, images()) > 0
    network.eval()
    assert tokens_of_the_last_block(network, images()) == 1


@pytest.mark.parametrize("place", ["encoder", "head", "norm", "encoder.1.attention.fn.attention", "encoder.1"])
def test_a_hook_gets_all_tokens_whether_it_was_there_before_or_came_later(place):
    network, seen = small(), []

    def hook(module, given, out):
        seen.append(given[0].shape[1])

    handle = network.get_submodule(place).register_forward_hook(hook)
    accelerate(network)
    network(images())
    handle.remove()
    assert tokens_of_the_last_block(network, images()) == 1
    network.get_submodule(place).register_forward_hook(hook)
    network(images())
    assert seen == [5, 5]


def test_all_tokens_of_the_last_block_are_computed_where_something_else_may_read_them():
    class OwnAttention(MultiHeadAttention):
        pass

    attentions = (OwnAttention, RotaryAttention, partial(MultiHeadAttention, dropout=0.1))
    networks = [small(attention=attention) for attention in attentions]
    networks += [small(pool="mean"), small(feed_forward=partial(FeedForwardBlock, dropout=0.1))]
    for network in networks:
        accelerate(network)
    assert [tokens_of_the_last_block(network, images()) for network in networks] == [5, 5, 5, 5, 5]
    assert [tokens_of_the_last_block(network.eval(), images()) for network in networks] == [5, 5, 1, 5, 1]


class OwnHead(ClassificationHead):
    def forward(self, tokens):
        return super().forward(tokens) + self.linear(tokens.mean(dim=1))


def put_in_a_part_more(network):
    network.encoder[-1].add_module("more", randomise(ResidualAdd(nn.Linear(16, 16))))


def put_in_an_own_head(network):
    head = OwnHead(pool=network.head.pool, emb_size=16, num_classes=3)
    head.load_state_dict(network.head.state_dict())
    network.head = head


def leave_out_attention(network):
    network.encoder[-1].attention.fn.attention = nn.Identity()


def add_adapters(network):
    pytest.importorskip("peft")
    add_lora(network, LoraConfig(rank=2))
    randomise(network)


CHANGES = [put_in_a_part_more, put_in_an_own_head, leave_out_attention, add_adapters]


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_changed_before_or_after_the_swap_gives_its_own_logits(change):
    plain = small()
    change(plain)
    before, after = accelerated(plain), accelerated(small())
    change(after)
    expected = results(plain.eval(), images())
    for network in (before, after):
        found = results(network.eval(), images())
        for name, value in expected.items():
            if value is not None:
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


VARIANTS = [
    {"feed_forward": partial(MultiHeadAttention, num_heads=2)},
    {"patch_dropout": 0.5},
    {"emb_dropout": 0.3, "head_dropout": 0.3},
    {"distillation_token": True},
    {"register_tokens": 2},
    {"attention": RotaryAttention, "emb_size": 16},
    {"attention": partial(MultiHeadAttention, qk_norm=LayerNorm, norm=LayerNorm)},
    {"patch_projection": "linear", "final_norm": "after_pool", "activation_checkpointing": True},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: next(iter(options)))
def test_variants_of_a_network_give_the_logits_of_the_plain_one(options):
    network = small(**options)
    fast = accelerated(network)
    for training in (True, False):
        outputs = []
        for one in (network, fast):
            torch.manual_seed(0)
            outputs.append(one.train(training)(images()))
        for found, plain in zip(*(out if isinstance(out, tuple) else (out,) for out in outputs), strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_those_of_the_plain_network_and_torch_s_transforms_take_its_own_operators():
    plain = small()
    network = accelerated(plain)
    second = []
    for one in (network, plain):
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has none on a CPU
            loss = one(images()).square().sum()
        gradients = torch.autograd.grad(loss, [*one.parameters()], create_graph=True)
        second.append(torch.autograd.grad(sum(each.square().sum() for each in gradients), [*one.parameters()]))
    for found, expected in zip(*second, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    weights = dict(network.named_parameters())
    loss = network(images()).square().sum()

    def functional(weights):
        return torch.func.functional_call(network, weights, (images(),)).square().sum()

    gradients = torch.func.grad(functional)(weights)
    for name, expected in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
        torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.jit.trace(network.eval(), images())(images()), network(images()))


def test_a_batch_without_images_has_gradients():
    for bfloat16 in (False, True):
        assert results(accelerated(small()), images(0), bfloat16=bfloat16)["logits"].shape == (0, 3)


@pytest.mark.parametrize(("tokens", "is_kept"), [(1_100, True), (1_101, False), (3_137, False)])
@pytest.mark.parametrize("processor", ["cpu", "cpu with amx"])
def test_of_many_tokens_no_attention_is_kept(tokens, is_kept, processor, monkeypatch):
    monkeypatch.setattr(fast_paths, "processor", lambda device: processor)
    assert (fast_paths.choose_attention("cpu", torch.bfloat16, tokens, 64) is not None) == is_kept
    heads = [torch.zeros(1, 1, tokens, 2, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        FastAttention(0.125)(*heads)
    assert (max(kept) >= tokens**2) == is_kept
