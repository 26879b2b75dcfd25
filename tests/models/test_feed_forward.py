import pytest

from vit_lightning.errors import UserError
from vit_lightning.models.feed_forward import FeedForwardBlock, PackedSwiGLU, SwiGLU


@pytest.mark.parametrize("make", [FeedForwardBlock, SwiGLU, PackedSwiGLU])
def test_values_that_cannot_work_are_refused(make):
    with pytest.raises(UserError) as caught:
        make(8, expansion=0.0, activation="mish", dropout=1.0)
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["dropout", "expansion", "activation"]
