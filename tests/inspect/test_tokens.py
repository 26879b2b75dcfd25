"""Measures of tokens and weights against plain formulas."""

import numpy as np
import pytest
import torch
from references import randomise
from sklearn.metrics.pairwise import cosine_similarity, linear_kernel
from sklearn.preprocessing import KernelCenterer

from vit_lightning import ISTA, MSSA, CrateBlock, ViT
from vit_lightning.inspect.survey import survey
from vit_lightning.inspect.tokens import (
    cka,
    colours,
    crate_measures,
    effective_rank,
    outliers,
    patch_filters,
    position_similarity,
)
from vit_lightning.models.crate import coding_rate
from vit_lightning.models.positions import sincos2d

SMALL = {"image_size": (8, 12), "patch_size": 4, "emb_size": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
RANDOM = np.random.default_rng(0)


def vit(**more) -> ViT:
    torch.manual_seed(0)
    return randomise(ViT(**{**SMALL, **more})).eval()


def tensor(*shape):
    return torch.from_numpy(RANDOM.standard_normal(shape))


def test_cka_is_the_alignment_of_scikit_learn_s_centred_kernels():
    layers, others = [tensor(9, 4) + 3.0, tensor(9, 7)], [tensor(9, 5)]
    # once, not here, since it lacks packages that it imports: ultimate-anatome 0.1.1, 20 pairs, 3e-16 apart at most
    rows = [  # Cortes et al. 2012: cosine of the centred Gram matrices
        KernelCenterer().fit_transform(linear_kernel(each.numpy())).ravel() for each in (*layers, *others)
    ]
    expected = cosine_similarity(rows)
    np.testing.assert_allclose(cka([*layers, *others]), expected, atol=1e-9)
    turned = torch.linalg.qr(tensor(4, 4))[0]
    assert float(cka([layers[0], 3.0 * layers[0] @ turned + 1.0])[0, 1]) == pytest.approx(1.0)


def test_colours_are_principal_components():
    tokens = tensor(3, 40, 6) * torch.tensor([9.0, 6.0, 4.0, 0.1, 0.1, 0.1])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = colours(tokens)
    assert torch.equal(before, torch.get_rng_state())
    assert found.shape == (3, 40, 3)
    assert (float(found.min()), float(found.max())) == (0.0, 1.0)
    rows = tokens.flatten(end_dim=1).numpy()
    rows = rows - rows.mean(axis=0)
    expected = rows @ np.linalg.svd(rows)[2][:3].T
    inside = ((found > 0) & (found < 1)).flatten(end_dim=1).all(dim=1).numpy()
    for channel in range(3):
        correlation = np.corrcoef(found.flatten(end_dim=1)[inside, channel], expected[inside, channel])[0, 1]
        assert abs(correlation) > 0.9999


def test_the_effective_rank_is_the_exponential_of_the_entropy():
    tokens = tensor(2, 3, 7, 5)
    values = np.linalg.svd(tokens.numpy(), compute_uv=False)
    shares = values / values.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(effective_rank(tokens), np.exp(-(shares * np.log(shares)).sum(axis=-1)), rtol=1e-9)
    np.testing.assert_allclose(effective_rank(tokens.mT), effective_rank(tokens), rtol=1e-9)
    tokens[0, 0, 0, 0] = torch.inf
    assert effective_rank(tokens)[0].isnan().tolist() == [True, False, False]
    assert float(effective_rank(torch.ones(4, 6))) == pytest.approx(1.0, abs=1e-3)
    assert float(effective_rank(torch.eye(4))) == pytest.approx(4.0)


def test_outliers_are_far_above_the_median():
    norms = torch.tensor([[1.0, 1.1, 0.9, 2.9, 3.4], [5.0, 5.0, 5.0, 5.0, 5.0]])
    assert outliers(norms).tolist() == [[False, False, False, False, True], [False] * 5]
    norms = torch.tensor([[9.0, 1.0, 1.1, 0.9, 1.2, 3.4]])  # a class token and five patches
    assert outliers(norms, prefix=1).tolist() == [[True, False, False, False, False, True]]


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "none"])
def test_the_similarity_of_positions_is_their_cosine(positions):
    network = vit(positions=positions, image_size=(16, 20))  # 4 x 5 patches
    found = position_similarity(network)
    if positions == "none":
        assert found is None
        return
    learned = network.patch_embedding.positions.table[0, 1:] if positions == "learned" else sincos2d((4, 5), 16)
    table = learned.detach().numpy()
    table = table / np.linalg.norm(table, axis=1, keepdims=True)
    assert found.shape == (20, 4, 5)
    np.testing.assert_allclose(found.flatten(start_dim=1), table @ table.T, atol=1e-9)


@pytest.mark.parametrize("projection", ["conv", "linear"])
def test_patch_filters_are_principal_components(projection):
    network = vit(patch_projection=projection, emb_size=64)
    found = patch_filters(network, count=5)
    weight = next(network.patch_embedding.projection.parameters()).detach().flatten(start_dim=1).numpy()
    expected = np.linalg.svd(weight - weight.mean(axis=0))[2][:5]
    assert found.shape == (5, 3, 4, 4)
    np.testing.assert_allclose(np.abs((found.flatten(start_dim=1).numpy() * expected).sum(axis=1)), 1.0, atol=1e-9)


def test_the_measures_of_crate_are_those_of_its_halves():
    network = vit(block=CrateBlock, attention=MSSA, feed_forward=ISTA)
    images = tensor(3, 3, 8, 12)
    rates, shares = crate_measures(network, images)
    with torch.no_grad():
        tokens = network.patch_embedding(images)
        for number, block in enumerate(network.encoder):
            compressed = block.attention(tokens)
            subspaces = block.attention.fn.attention.subspaces.weight.reshape(2, 8, 16)
            assert float(rates[number]) == pytest.approx(float(coding_rate(compressed, subspaces).mean()))
            tokens = block(tokens)
            assert float(shares[number]) == pytest.approx(float((tokens != 0).double().mean()))
    assert crate_measures(vit(), images) is None


def test_a_survey_has_a_row_for_each_layer():
    network, images = vit(register_tokens=2), tensor(3, 3, 8, 12)
    found = survey(network, images)
    tokens = []
    with torch.no_grad():
        between = network.patch_embedding(images)
        for block in network.encoder:
            between = block(between)
            tokens.append(between)
        assert torch.equal(found.logits, network(images))
    np.testing.assert_allclose(found.norms, torch.stack(tokens, dim=1).norm(dim=-1), rtol=1e-5)
    np.testing.assert_allclose(found.rank, [float(effective_rank(each).mean()) for each in tokens], rtol=1e-5)
    np.testing.assert_allclose(found.samples[1], tokens[1][:, 3:].flatten(end_dim=1), rtol=1e-5)
    assert found.attention.shape == (3, 2, 2, 6)
    assert found.colours.shape == (3, 2, 6, 3)
    assert (found.grid, found.pool, found.crate) == ((3, 2, 3), None, None)
    assert (found.reader, found.before) == ("the class token", ["class token", "register 1", "register 2"])
    found = survey(vit(class_token=False, pool="mean"), images)
    assert (found.reader, found.before) == ("the pooled patches", [])
    assert survey(vit(distillation_token=True), images).reader == "the class and the distillation token"
    timm = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=2, reg_tokens=2)
    found = survey(timm, torch.randn(1, 3, 32, 32))
    assert (found.reader, found.before) == ("the class token", ["class token", "register 1", "register 2"])
