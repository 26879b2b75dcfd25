import pytest
import torch

from vit_lightning.errors import UserError
from vit_lightning.models.resize import resize

METHODS = ("bicubic", "bilinear")


@pytest.mark.parametrize("method", METHODS)
def test_the_same_grid_and_another_type_are_kept(method):
    table = torch.randn(1, 12, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(resize(table, (4, 3), (4, 3), 0, method), table)
    assert resize(table.bfloat16(), (4, 3), (2, 2), 0, method).dtype is torch.bfloat16


def test_a_table_of_another_grid_is_refused():
    with pytest.raises(UserError, match=r"table has shape \(1, 9, 4\) and not \(1, 10, e\)"):
        resize(torch.zeros(1, 9, 4), (3, 3), (3, 2), 1, "bicubic")
