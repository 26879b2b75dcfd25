import pytest
import torch

from vit_lightning.errors import UserError
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


def test_resizing_says_what_is_wrong_all_at_once():
    with pytest.raises(UserError) as caught:
        resize(torch.zeros(1, 9, 4), (3, 3), (0, 2), 1, "bicubic")
    starts = [problem.split("=")[0].split(" ")[0] for problem in caught.value.problems]
    assert starts == ["method", "table", "new_grid"]
    assert "timm_bicubic_antialias" in caught.value.problems[0]
