import pytest
import torch
import torch.nn.functional as F
from tensors import randn, randomise

from vit_lightning.errors import UserError
from vit_lightning.models.feed_forward import FeedForwardBlock, PackedSwiGLU, SwiGLU
from vit_lightning.models.layers import LayerNorm


@pytest.mark.parametrize(("activation", "function"), [("silu", F.silu), ("gelu", F.gelu)])
@pytest.mark.parametrize("norm", [None, LayerNorm])
def test_swiglu_is_the_gate_times_the_hidden_layer(norm, activation, function):
    part = randomise(SwiGLU(6, expansion=2.5, activation=activation, norm=norm)).double()
    tokens = randn(2, 5, 6)
    hidden = function(tokens @ part.gate.weight.T + part.gate.bias) * (tokens @ part.expand.weight.T + part.expand.bias)
    hidden = hidden if norm is None else part.norm(hidden)
    torch.testing.assert_close(part(tokens), part.contract(hidden), rtol=0, atol=1e-12)
    assert part.contract.in_features == 15


def test_packed_swiglu_has_the_gate_first():
    split = randomise(SwiGLU(6, expansion=2.0)).double()
    packed = PackedSwiGLU(6, expansion=2.0).double()
    state = split.state_dict()
    for kind in ("weight", "bias"):
        state[f"gate_expand.{kind}"] = torch.cat([state.pop(f"gate.{kind}"), state.pop(f"expand.{kind}")])
    packed.load_state_dict(state)
    torch.testing.assert_close(packed(randn(2, 5, 6)), split(randn(2, 5, 6)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("gelu", lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("quick_gelu", lambda x: x / (1 + torch.exp(-1.702 * x))),
        ("relu", lambda x: x.clamp(min=0)),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
    ],
)
def test_activations_are_what_they_are_called(activation, function):
    part = randomise(FeedForwardBlock(6, activation=activation)).double()
    expected = part.contract(function(part.expand(randn(2, 5, 6))))
    torch.testing.assert_close(part(randn(2, 5, 6)), expected, rtol=0, atol=1e-12)


def test_dropout_comes_after_the_activation_and_after_the_output():
    part = FeedForwardBlock(6, dropout=0.1)
    assert (part.dropout.p, part.output_dropout.p) == (0.1, 0.1)


@pytest.mark.parametrize("make", [FeedForwardBlock, SwiGLU, PackedSwiGLU])
def test_values_that_cannot_work_are_refused(make):
    with pytest.raises(UserError) as caught:
        make(8, expansion=0.0, activation="mish", dropout=1.0)
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["dropout", "expansion", "activation"]
