"""The feed-forward part of a block and its gated variants, chosen in a config by ``model.feed_forward.class_path``."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import choice, probabilities, refuse
from vit_lightning.models.layers import Layer, NamedSequential

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), by which OpenAI's CLIP approximates GELU."""

    def forward(self, values: Tensor) -> Tensor:
        return values * (1.702 * values).sigmoid()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


def _hidden_size(emb_size: int, expansion: float, activation: str, *, dropout: float) -> int:
    """Returns the width of the hidden layer, or raises all problems of a feed-forward part's arguments."""
    hidden = round(expansion * emb_size)
    refuse(
        probabilities(dropout=dropout),
        [] if hidden > 0 else [f"expansion={expansion} leaves no hidden layer"],
        choice("activation", activation, ACTIVATIONS),
    )
    return hidden


class FeedForwardBlock(NamedSequential):
    """The transformer's MLP, token by token: (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        expansion: width of the hidden layer over emb_size.
        activation: gelu is exact, gelu_tanh its approximation by tanh, the default in JAX.
        bias: whether both layers have a bias.
        norm: norm of the hidden layer after its activation; none when not given.
        dropout: dropout probability after the activation and after the output layer.
    """

    def __init__(
        self,
        emb_size: int = 768,
        *,
        expansion: float = 4.0,
        activation: Activation = "gelu",
        bias: bool = True,
        norm: Layer | None = None,
        dropout: float = 0.0,
    ) -> None:
        hidden = _hidden_size(emb_size, expansion, activation, dropout=dropout)
        super().__init__(
            expand=nn.Linear(emb_size, hidden, bias=bias),
            activation=ACTIVATIONS[activation](),
            dropout=nn.Dropout(dropout),
            norm=None if norm is None else norm(hidden),
            contract=nn.Linear(hidden, emb_size, bias=bias),
            output_dropout=nn.Dropout(dropout),
        )


class SwiGLU(nn.Module):
    """A hidden layer times its gate, token by token (Shazeer 2020, equation 6): (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        expansion: width of the hidden layer over emb_size.
        activation: activation of the gate; silu makes it SwiGLU, gelu GEGLU.
        bias: whether the layers have a bias.
        norm: norm of the gated hidden layer; none when not given.
        dropout: dropout probability after the gate and after the output layer.
    """

    def __init__(
        self,
        emb_size: int = 768,
        *,
        expansion: float = 4.0,
        activation: Activation = "silu",
        bias: bool = True,
        norm: Layer | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = _hidden_size(emb_size, expansion, activation, dropout=dropout)
        self.make_expansion(emb_size, hidden, bias)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)
        self.norm = None if norm is None else norm(hidden)
        self.contract = nn.Linear(hidden, emb_size, bias=bias)
        self.output_dropout = nn.Dropout(dropout)

    def make_expansion(self, emb_size: int, hidden: int, bias: bool) -> None:
        """Makes the layers that give the gate and the hidden layer."""
        self.gate = nn.Linear(emb_size, hidden, bias=bias)
        self.expand = nn.Linear(emb_size, hidden, bias=bias)

    def gate_and_hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gate and hidden layer, (b, n, hidden) each."""
        return self.gate(tokens), self.expand(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, hidden = self.gate_and_hidden(tokens)
        hidden = self.dropout(self.activation(gate) * hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        out: Tensor = self.output_dropout(self.contract(hidden))
        return out


class PackedSwiGLU(SwiGLU):
    """SwiGLU with one matrix for gate and hidden layer, the gate first."""

    def make_expansion(self, emb_size: int, hidden: int, bias: bool) -> None:
        self.gate_expand = nn.Linear(emb_size, 2 * hidden, bias=bias)

    def gate_and_hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        gate, hidden = rearrange(self.gate_expand(tokens), "b n (parts f) -> parts b n f", parts=2)
        return gate, hidden
