import pytest
import torch
from timm.layers import resample_abs_pos_embed

from vit_lightning.errors import UserError
from vit_lightning.models.resize import resize

METHODS = ("bicubic", "bilinear")


@pytest.mark.parametrize("method", METHODS)
def test_the_same_grid_and_another_type_are_kept(method):
    table = torch.randn(1, 12, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(resize(table, (4, 3), (4, 3), 0, method), table)
    assert resize(table.bfloat16(), (4, 3), (2, 2), 0, method).dtype is torch.bfloat16


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grid", [(14, 10), (3, 4), (1, 9)])
def test_product_and_gradient_are_those_of_timm(method, grid):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(1, 43, 5, generator=generator, requires_grad=True)
    expected = resample_abs_pos_embed(table, grid, (6, 7), num_prefix_tokens=1, interpolation=method)
    found = resize(table, (6, 7), grid, 1, method)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    above = torch.randn(found.shape, generator=generator)
    (wanted,), (got,) = (torch.autograd.grad(output, table, above) for output in (expected, found))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_a_table_of_another_grid_is_refused():
    with pytest.raises(UserError, match=r"table has shape \(1, 9, 4\) and not \(1, 10, e\)"):
        resize(torch.zeros(1, 9, 4), (3, 3), (3, 2), 1, "bicubic")
