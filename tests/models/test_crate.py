from functools import partial

import numpy as np
import pytest
import torch

from vit_lightning import UserError, ViT
from vit_lightning.models.crate import ISTA, MSSA, coding_rate
from vit_lightning.weights.convert import from_reference, to_reference

MICRO = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 12, "depth": 2, "heads": 2, "dim_head": 5}


def draw(shape, generator, scale=0.5):
    return scale * generator.standard_normal(shape)


def parameters(config, seed=0):
    """Random weights of CRATE, by its names."""
    draws = np.random.default_rng(seed)
    dim, inner, patch = config["dim"], config["heads"] * config["dim_head"], config.get("channels", 3) * 16
    shapes = {
        "pos_embedding": (1, 5, dim),
        "cls_token": (1, 1, dim),
        "to_patch_embedding.2.weight": (dim, patch),
        "to_patch_embedding.2.bias": (dim,),
        "mlp_head.1.weight": (config["num_classes"], dim),
        "mlp_head.1.bias": (config["num_classes"],),
    }
    norms = {"to_patch_embedding.1": patch, "to_patch_embedding.3": dim, "mlp_head.0": dim}
    for n in range(config["depth"]):
        layer = f"transformer.layers.{n}"
        norms |= {f"{layer}.0.norm": dim, f"{layer}.1.norm": dim}
        shapes |= {f"{layer}.0.fn.qkv.weight": (inner, dim), f"{layer}.1.fn.weight": (dim, dim)}
        if (config["heads"], config["dim_head"]) != (1, dim):
            shapes |= {f"{layer}.0.fn.to_out.0.weight": (dim, inner), f"{layer}.0.fn.to_out.0.bias": (dim,)}
    drawn = {name: draw(shape, draws) for name, shape in shapes.items()}
    for name, width in norms.items():
        drawn |= {f"{name}.weight": 1.0 + draw(width, draws), f"{name}.bias": draw(width, draws)}
    return drawn


def normalise(x, weights, name):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def compress(z, weights, layer, config):
    """MSSA: for each subspace U_k, (U_k z) softmax((U_k z)^T (U_k z)), with columns for tokens."""
    heads, width = config["heads"], config["dim_head"]
    subspaces = weights[f"{layer}.0.fn.qkv.weight"].reshape(heads, width, -1)
    parts = []
    for subspace in subspaces:
        projected = subspace @ z.T  # (width, tokens)
        likeness = projected.T @ projected / np.sqrt(width)
        likeness = np.exp(likeness - likeness.max(axis=1, keepdims=True))
        likeness /= likeness.sum(axis=1, keepdims=True)
        parts.append((projected @ likeness.T).T)
    out = np.concatenate(parts, axis=1)
    if f"{layer}.0.fn.to_out.0.weight" not in weights:
        return out
    return out @ weights[f"{layer}.0.fn.to_out.0.weight"].T + weights[f"{layer}.0.fn.to_out.0.bias"]


def sparsify(z, dictionary, step=0.1, threshold=0.1):
    """ISTA, token by token: a gradient step on |D a - z|^2 / 2 at a = z, then shrinkage to what is not negative."""
    out = np.empty_like(z)
    for n, token in enumerate(z):
        gradient = dictionary.T @ (dictionary @ token - token)
        out[n] = np.maximum(token - step * gradient - step * threshold, 0.0)
    return out


def crate(images, weights, config):
    logits = []
    for image in images:
        channels = len(image)
        patches = [
            image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].transpose(1, 2, 0).reshape(16 * channels)
            for row in range(2)
            for column in range(2)
        ]
        tokens = normalise(np.stack(patches), weights, "to_patch_embedding.1")
        tokens = tokens @ weights["to_patch_embedding.2.weight"].T + weights["to_patch_embedding.2.bias"]
        tokens = normalise(tokens, weights, "to_patch_embedding.3")
        z = np.concatenate([weights["cls_token"][0], tokens]) + weights["pos_embedding"][0]
        for n in range(config["depth"]):
            layer = f"transformer.layers.{n}"
            half = z + compress(normalise(z, weights, f"{layer}.0.norm"), weights, layer, config)
            z = sparsify(
                normalise(half, weights, f"{layer}.1.norm"), weights[f"{layer}.1.fn.weight"], config.get("ista", 0.1)
            )
        pooled = z.mean(axis=0) if config.get("pool") == "mean" else z[0]
        pooled = normalise(pooled, weights, "mlp_head.0")
        logits.append(pooled @ weights["mlp_head.1.weight"].T + weights["mlp_head.1.bias"])
    return np.stack(logits)


@pytest.mark.parametrize(
    "options", [{}, {"pool": "mean", "ista": 0.3}, {"heads": 1, "dim_head": 12, "channels": 1}], ids=str
)
def test_crate_equals_plain_numpy_written_from_the_paper(options):
    config = {**MICRO, **options}
    weights = parameters(config)
    images = np.random.default_rng(1).standard_normal((3, config.get("channels", 3), 8, 8))
    vit = from_reference(weights, family="crate", config=config).eval()
    logits = vit(torch.from_numpy(images)).detach().numpy()
    expected = crate(images, weights, config)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10)
    back, same = to_reference(vit, family="crate")
    assert same == config
    assert all(np.array_equal(back[name].numpy(), weights[name]) for name in weights)


def test_bad_values_of_ista_are_named_at_once():
    with pytest.raises(UserError) as caught:
        ISTA(16, step_size=-1.0, threshold=float("nan"))
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["step_size", "threshold"]


@pytest.mark.parametrize("feed_forward", [ISTA, partial(ISTA, threshold=0.2)])
def test_ista_in_a_block_with_residuals_is_an_error(feed_forward):
    with pytest.raises(UserError, match="feed_forward=ISTA needs block=CrateBlock"):
        ViT(image_size=8, patch_size=4, emb_size=16, depth=2, num_heads=2, attention=MSSA, feed_forward=feed_forward)


def test_coding_rate_is_the_sum_of_logarithms_over_subspaces():
    draws = np.random.default_rng(0)
    z, subspaces = draws.standard_normal((2, 7, 6)), draws.standard_normal((3, 4, 6))
    expected = []
    for image in z:
        total = 0.0
        for subspace in subspaces:
            projected = subspace @ image.T
            # as the paper has it, over tokens; ours is over channels, which is smaller and has the same determinant
            gram = np.eye(7) + 4 / (7 * 0.3**2) * projected.T @ projected
            total += 0.5 * np.log(np.linalg.det(gram))
        expected.append(total)
    rates = coding_rate(torch.from_numpy(z), torch.from_numpy(subspaces), precision=0.3)
    np.testing.assert_allclose(rates.numpy(), expected, rtol=1e-10)
    assert (coding_rate(torch.from_numpy(0.1 * z), torch.from_numpy(subspaces)) < rates).all()
