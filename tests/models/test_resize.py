import copy

import pytest
import torch
import torch.nn.functional as F

from vit_lightning.errors import UserError
from vit_lightning.models.positions import LearnedPositions
from vit_lightning.models.resize import RESIZE_METHODS, resize


def plane(rows, columns):
    """A table that grows linearly over the grid, which every bilinear method keeps inside it."""
    y, x = torch.meshgrid(torch.linspace(0, 1, rows), torch.linspace(0, 1, columns), indexing="ij")
    return torch.stack([y, x], dim=-1).reshape(1, rows * columns, 2).double()


@pytest.mark.parametrize(
    "method", ["bilinear_align_corners", "big_vision_zoom_grid", "vit_jax_zoom", "torchvision_bicubic"]
)
def test_methods_that_lay_corner_on_corner_keep_a_plane_at_its_corners(method):
    table = torch.cat([torch.full((1, 1, 2), 7.0, dtype=torch.float64), plane(4, 3)], dim=1)
    resized = resize(table, (4, 3), (5, 7), 1, method)
    if method == "big_vision_zoom_grid":  # which has no tokens before the patches
        assert torch.equal(resized, resize(table[:, 1:].numpy(), (4, 3), (5, 7), 0, method))
        resized = torch.cat([table[:, :1], resized], dim=1)
    assert resized.shape == (1, 36, 2)
    assert torch.equal(resized[:, 0], table[:, 0])
    corners = resized[0, 1:].reshape(5, 7, 2)[[0, 0, -1, -1], [0, -1, 0, -1]]
    torch.testing.assert_close(corners, torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float64))
    if "bicubic" not in method:
        torch.testing.assert_close(resized[:, 1:], plane(5, 7))


@pytest.mark.parametrize("method", RESIZE_METHODS)
def test_the_same_grid_and_another_type_are_kept(method):
    table = plane(4, 3)
    assert torch.equal(resize(table, (4, 3), (4, 3), 0, method), table)
    assert resize(table.bfloat16(), (4, 3), (2, 2), 0, method).dtype is torch.bfloat16


@pytest.mark.parametrize("method", RESIZE_METHODS)
@pytest.mark.parametrize("grid", [(14, 10), (3, 4), (1, 9)])
def test_product_and_gradient_are_those_of_interpolate(method, grid):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(1, 42, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    image = table.unflatten(1, (6, 7)).permute(0, 3, 1, 2)
    expected = F.interpolate(image, size=grid, **RESIZE_METHODS[method]).flatten(2).transpose(1, 2)
    found = resize(table, (6, 7), grid, 0, method)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    above = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    (wanted,), (got,) = (torch.autograd.grad(output, table, above) for output in (expected, found))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_positions_are_resized_in_float32_at_least_whatever_autocast_and_the_model_s_type_are():
    exact = LearnedPositions((4, 4), 8, 1).double()
    torch.nn.init.normal_(exact.table, generator=torch.Generator().manual_seed(0))
    single = copy.deepcopy(exact).float()
    for positions in (exact, single):
        positions.set_grid((6, 7))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(single.rows().double(), exact.rows(), rtol=0, atol=1e-6)
    half = single.bfloat16()
    assert (half.rows().dtype, half.resizing.table.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(half.double().resizing.table, exact.resizing.table)
    assert list(half.state_dict()) == ["table"]
    assert half.to("meta").rows().shape == (1, 43, 8)  # where autocast knows no type


def test_resizing_says_what_is_wrong_all_at_once():
    with pytest.raises(UserError) as caught:
        resize(torch.zeros(1, 9, 4), (3, 3), (0, 2), 1, "bicubic")
    starts = [problem.split("=")[0].split(" ")[0] for problem in caught.value.problems]
    assert starts == ["method", "table", "new_grid"]
    assert "timm_bicubic_antialias" in caught.value.problems[0]
