import numpy as np
import pytest
import torch

from vit_lightning.errors import UserError
from vit_lightning.models.positions import LearnedPositions, RotaryPositions, SinCos2dPositions, sincos2d
from vit_lightning.models.vit import ViT


def table_by_formula(rows, columns, emb_size, temperature=10_000.0):
    y, x = np.mgrid[:rows, :columns].reshape(2, -1, 1) * temperature ** -np.linspace(0.0, 1.0, emb_size // 4)
    return torch.from_numpy(np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1))


@pytest.mark.parametrize("temperature", [10_000.0, 100.0])
@pytest.mark.parametrize(("rows", "columns", "emb_size"), [(1, 1, 4), (4, 4, 8), (2, 5, 16), (5, 2, 64), (3, 3, 4)])
def test_sincos2d_is_the_formula(rows, columns, emb_size, temperature):
    table = sincos2d((rows, columns), emb_size, temperature)
    assert table.dtype is torch.float64
    expected = table_by_formula(rows, columns, emb_size, temperature)
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_way_of", ["float", "bfloat16"])
def test_a_model_turned_to_float64_has_an_exact_table(by_way_of):
    network = ViT(image_size=16, patch_size=2, emb_size=16, depth=1, num_heads=2, positions="sincos2d")
    network = getattr(network, by_way_of)().double()
    table = network.patch_embedding.positions.table
    assert table.dtype is torch.float64
    assert torch.equal(table[1:], sincos2d((8, 8), 16))


@pytest.mark.parametrize("positions", [LearnedPositions((2, 3), 8, 1), SinCos2dPositions((2, 3), 8, 1)], ids=type)
def test_bfloat16_tokens_stay_bfloat16_with_a_float32_table(positions):
    assert positions.table.dtype is torch.float32
    assert positions(torch.zeros(2, 7, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_simple_vit_s_form_is_its_float32_arithmetic():
    lucid = pytest.importorskip("vit_pytorch.simple_vit")
    table = SinCos2dPositions((5, 7), 32, form="simple_vit").double().table
    assert torch.equal(table, lucid.posemb_sincos_2d(5, 7, 32).double())
    assert 0 < (table - sincos2d((5, 7), 32)).abs().max() < 1e-5


def test_an_unknown_form_is_refused():
    with pytest.raises(UserError, match="form=moco must be one of big_vision, simple_vit"):
        SinCos2dPositions((2, 2), 8, form="moco")


def test_rotary_positions_refuse_what_gives_no_table_or_is_not_used():
    with pytest.raises(UserError, match=r"temperature=0.0 must be above 0"):
        RotaryPositions((2, 2), 8, temperature=0.0)
    with pytest.raises(UserError, match=r"max_resolution=4.0 must be left out with centred=true"):
        RotaryPositions((2, 2), 8, max_resolution=4.0, centred=True)
