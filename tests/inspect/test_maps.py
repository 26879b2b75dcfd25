"""Attention maps against the peers' own and what layers multiply by; rollout and relevance against plain numpy."""

import copy

import numpy as np
import pytest
import torch
from references import CONFIGS, TIMM, TIMM_CONFIGS, fresh, randomise

from vit_lightning import (
    ISTA,
    MSSA,
    AttentionPool,
    ClassTokenAndMeanPool,
    CrateBlock,
    DividedAfterSoftmaxAttention,
    MeanAllPool,
    MultiHeadAttention,
    RMSNorm,
    RotaryAttention,
    SeparateAttention,
    UserError,
    ViT,
    accelerate,
)
from vit_lightning.figures.inside import model_figures, views
from vit_lightning.inspect import survey as survey_module
from vit_lightning.inspect import watch as watch_module
from vit_lightning.inspect.maps import attention, attention_distance, relevance, rollout
from vit_lightning.inspect.survey import survey
from vit_lightning.inspect.watch import Grid, readout, watch
from vit_lightning.weights import from_reference

SMALL = {"image_size": (8, 12), "patch_size": 4, "emb_size": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
CRATE = {"block": CrateBlock, "attention": MSSA, "feed_forward": ISTA}
IMAGES = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def vit(**more) -> ViT:
    torch.manual_seed(0)
    return randomise(ViT(**{**SMALL, **more})).eval()


def close(ours, theirs):
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert ours.std() > 0.01


def inputs_of(network, images, kind):
    """What the attention of each block gets, (b, n, e)."""
    found = []
    layers = [module for module in network.modules() if isinstance(module, kind)]
    hooks = [layer.register_forward_hook(lambda module, given, out: found.append(given[0])) for layer in layers]
    with torch.no_grad():
        network(images)
    for hook in hooks:
        hook.remove()
    return layers, found


def softmax(scores):
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def test_those_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**CONFIGS["hf"], attn_implementation="eager")
    peer = randomise(transformers.ViTForImageClassification(config)).eval()
    network = from_reference(peer.state_dict(), family="hf", config=CONFIGS["hf"]).eval()
    images = IMAGES[:, :, :8, :8]
    with torch.no_grad():
        theirs = peer(images, output_attentions=True).attentions
    close(attention(network, images), torch.stack(theirs, dim=1))
    close(attention(network, images, blocks=(-1,)), theirs[-1][:, None])


@pytest.mark.parametrize("name", ["token", "registers", "qk norm", "map", "rectangles"])
def test_those_of_timm(name):
    timm = pytest.importorskip("timm")
    config = {**TIMM, **TIMM_CONFIGS[name]}
    peer = randomise(timm.models.vision_transformer.VisionTransformer(**config)).eval()
    images = torch.randn(2, peer.patch_embed.proj.in_channels, *peer.patch_embed.img_size, dtype=torch.float64)
    theirs = []
    for block in peer.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, given, out: theirs.append(given[0]))
    with torch.no_grad():
        peer(images)
    network = from_reference(peer.state_dict(), family="timm", config=config).eval()
    close(attention(network, images), torch.stack(theirs, dim=1))
    for block in peer.blocks:  # timm's own network, by its calls of torch's attention
        block.attn.fused_attn = True
    close(attention(peer, images), torch.stack(theirs[: len(peer.blocks)], dim=1))


def test_those_of_torch():
    _, state, config = fresh("torchvision")
    network = from_reference(
        {name: value.double() for name, value in state.items()}, family="torchvision", config=config
    )
    torchvision = pytest.importorskip("torchvision")
    peer = torchvision.models.VisionTransformer(**config).double().eval()
    peer.load_state_dict({name: value.double() for name, value in state.items()})
    images = IMAGES[:, :, :8, :8]
    layers, given = inputs_of(peer, images, torch.nn.MultiheadAttention)
    with torch.no_grad():
        pairs = zip(layers, given, strict=True)
        theirs = [layer(x, x, x, need_weights=True, average_attn_weights=False)[1] for layer, x in pairs]
    close(attention(network.eval(), images), torch.stack(theirs, dim=1))
    found = []
    with torch.no_grad(), watch(peer, found.append):  # torchvision's own network
        peer(images)
    close(torch.stack([each.weights() for each in found], dim=1), torch.stack(theirs, dim=1))


OTHERS = {
    "separate": {"attention": SeparateAttention},
    "divided after softmax": {"attention": DividedAfterSoftmaxAttention},
    "norm of queries and keys": {"attention": lambda e, h: MultiHeadAttention(e, h, qk_norm=RMSNorm, scale=0.7)},
    "CRATE": CRATE,
    "rotary": {"attention": RotaryAttention, "positions": "none"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_those_of_variants_are_what_their_layers_multiply_by(name):
    network = vit(**OTHERS[name])
    layers, given = inputs_of(network, IMAGES, MultiHeadAttention)
    expected = torch.stack([explicit(*pair) for pair in zip(layers, given, strict=True)], dim=1)
    close(attention(network, IMAGES), expected)


def explicit(layer, tokens):
    """What a layer multiplies values by: its output where they are the identity."""
    with torch.no_grad():
        queries, keys, _ = layer.heads(tokens)
        return layer.attend(
            queries, keys, torch.eye(tokens.shape[1], dtype=tokens.dtype).expand(*keys.shape[:2], -1, -1)
        )


def test_that_of_an_attention_pool_is_the_explicit_product():
    network = vit(pool=AttentionPool)
    pool = network.head.pool
    with torch.no_grad():
        tokens = network.forward_features(IMAGES).numpy()
    query = (pool.probe @ pool.query.weight.T + pool.query.bias).detach().numpy().reshape(2, 8)
    keys = tokens @ pool.kv.weight[:16].detach().numpy().T + pool.kv.bias[:16].detach().numpy()
    scores = np.einsum("hd,bnhd->bhn", query, keys.reshape(2, 7, 2, 8)) * 8**-0.5
    found = survey(network, IMAGES)
    np.testing.assert_allclose(found.pool, softmax(scores)[..., 1:], atol=1e-6)


def test_rollout_is_that_of_the_paper():
    network = vit()
    weights = attention(network, IMAGES)
    expected = []
    for image in weights.numpy():
        joint = np.eye(7)
        for layer in image:  # equation 1: a residual, then normalised; section 3: the layers multiplied
            augmented = layer.mean(axis=0) + np.eye(7)
            augmented /= augmented.sum(axis=-1)[:, None]
            joint = augmented @ joint
        expected.append(joint)
    close(rollout(weights), torch.from_numpy(np.stack(expected)))
    np.testing.assert_allclose(survey(network, IMAGES).rollout[:, -1], np.stack(expected)[:, 0, 1:], atol=1e-6)


POOLS = {
    "cls": ({}, [1, 0, 0, 0, 0, 0, 0]),
    "mean": ({"pool": "mean"}, [0] + [1 / 6] * 6),
    "mean of all": ({"pool": MeanAllPool}, [1 / 7] * 7),
    "both": ({"pool": ClassTokenAndMeanPool}, [1 / 2] + [1 / 12] * 6),
    "distilled": ({"distillation_token": True}, [1 / 2, 1 / 2, 0, 0, 0, 0, 0, 0]),
    "registers": ({"register_tokens": 1}, [1, 0, 0, 0, 0, 0, 0, 0]),
    "attention": ({"pool": AttentionPool}, [1 / 7] * 7),
    "CRATE": (CRATE, [1, 0, 0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", POOLS)
def test_relevance_is_that_of_the_paper(name):
    options, row = POOLS[name]
    network = vit(**options)
    assert readout(network).tolist() == pytest.approx(row)
    classes = torch.tensor([3, 1])
    maps, gradients = maps_and_gradients(network, classes)
    expected = []
    for image in range(2):
        relevances = np.eye(len(row))
        for layer, gradient in zip(maps, gradients, strict=True):
            change = np.maximum(gradient[image] * layer[image], 0.0).mean(axis=0)  # equation 5
            relevances = relevances + change @ relevances if len(change) > 1 else change @ relevances  # equation 6
        expected.append(relevances[0] if len(relevances) == 1 else np.array(row) @ relevances)
    found = relevance(network, IMAGES, classes)
    torch.testing.assert_close(found, torch.from_numpy(np.stack(expected)), rtol=0, atol=1e-6)
    logits = network(IMAGES)
    assert torch.equal(relevance(network, IMAGES), relevance(network, IMAGES, logits.argmax(dim=1)))


def maps_and_gradients(network, classes):
    """Attention as a plain product in the graph, and the gradients of logits by it."""
    maps = []

    class Plain(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, queries, keys, values, mask=None):
            maps.append((queries @ keys.mT * self.scale).softmax(dim=-1))
            maps[-1].retain_grad()
            return maps[-1] @ values

    plain = copy.deepcopy(network)
    for module in plain.modules():
        if hasattr(module, "attend"):
            module.attend = Plain(module.attend.scale)
    plain(IMAGES)[torch.arange(2), classes].sum().backward()
    return [each.detach().numpy() for each in maps], [each.grad.numpy() for each in maps]


def test_the_distance_is_the_mean_over_patches():
    weights = torch.rand(2, 3, 2, 7, 7, dtype=torch.float64)
    found = attention_distance(weights, Grid(1, 2, 3), (4.0, 6.0))
    places = [(4.0 * row, 6.0 * column) for row, column in np.ndindex(2, 3)]
    expected = 0.0
    for number, (row, column) in enumerate(places):
        distances = np.array([np.hypot(row - y, column - x) for y, x in places])
        share = weights[1, 2, 0, 1 + number, 1:].numpy()
        expected += (distances * share).sum() / share.sum() / 6
    assert found.shape == (2, 3, 2)
    assert float(found[1, 2, 0]) == pytest.approx(expected, abs=1e-9)


def test_the_network_is_as_it_was_before():
    network = vit(emb_dropout=0.5, patch_dropout=0.5).train()
    network.head.eval()
    accelerate(network)
    calls = []
    network.encoder[0]._compiled_call_impl = lambda *given: calls.append(given) or network.encoder[0]._call_impl(*given)
    modes = [module.training for module in network.modules()]
    state = {name: value.clone() for name, value in network.state_dict().items()}
    survey(network.float(), IMAGES.float())
    attention(network.double(), IMAGES)
    relevance(network, IMAGES)
    with pytest.raises(RuntimeError), watch(network, print, print):
        raise RuntimeError
    assert not calls
    assert [module.training for module in network.modules()] == modes
    assert all(not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks for m in network.modules())
    assert all(torch.allclose(value, state[name]) for name, value in network.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in network.parameters())
    network(IMAGES)
    assert len(calls) == 1


def test_what_has_no_maps_says_so():
    convolutions = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(5)).double()
    with pytest.raises(UserError, match="Sequential shows no attention"):
        attention(convolutions, IMAGES)
    with pytest.raises(UserError, match="Sequential has no patches that are known"):
        survey(convolutions, IMAGES)
    with pytest.raises(UserError, match=r"blocks=\(0, 3\) must be .* the network has 3, 0 the first"):
        attention(vit(), IMAGES, blocks=(0, 3))
    with pytest.raises(UserError, match="gives no logits"):
        relevance(vit(num_classes=0), IMAGES)
    assert survey(vit(num_classes=0), IMAGES).relevance is None


class OwnAttention(torch.nn.Module):
    """Attention that neither is ours nor calls torch's."""

    def __init__(self, emb_size, num_heads):
        super().__init__()
        self.qkv = torch.nn.Linear(emb_size, 3 * emb_size)

    def forward(self, tokens):
        queries, keys, values = self.qkv(tokens).chunk(3, dim=-1)
        return (queries @ keys.mT).softmax(dim=-1) @ values


def test_what_needs_no_attention_is_there_without_it():
    whole, found = survey(vit(), IMAGES), survey(vit(attention=OwnAttention), IMAGES)
    assert whole.without_maps == ""
    assert found.without_maps.startswith("ViT shows no attention: no layer is one of ours, nor calls torch's scaled")
    assert found.relevance is None
    assert found.attention.shape[1] == found.rollout.shape[1] == len(found.distance) == 0
    for name in ("norms", "colours", "rank", "positions", "filters"):
        assert getattr(found, name).shape == getattr(whole, name).shape, name
    figures = ["similarity of positions", "patch filters", "tokens", "similarity of layers"]
    assert list(model_figures(found)) == figures
    assert list(model_figures(whole)) == ["attention distance", *figures]
    assert set(views(found, 0)) == {"token norm", "outliers", "token components"}


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_a_glance_has_a_few_rows_of_an_image_at_once(pool, monkeypatch):
    network = ViT(image_size=8, patch_size=2, in_channels=1, num_classes=3, emb_size=8, depth=2, num_heads=2, pool=pool)
    images, share = torch.rand(3, 1, 8, 8), readout(network)
    expected = torch.einsum("q,blqk->blk", share, attention(network, images).mean(dim=2))[..., network.prefix_tokens :]
    made, weights = [], watch_module.attention_weights
    monkeypatch.setattr(survey_module, "ROWS", 5)
    monkeypatch.setattr(
        watch_module, "attention_weights", lambda *given, **options: made.append(weights(*given, **options)) or made[-1]
    )
    assert torch.allclose(survey_module.glance(network, images)[0], expected, atol=1e-6)
    assert {each.shape[:2] for each in made} == {(1, 2)}
    assert max(each.shape[2] for each in made) == (1 if pool == "cls" else 5)
