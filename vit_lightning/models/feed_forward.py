"""Gated feed-forward parts, in place of ``FeedForwardBlock``."""

from __future__ import annotations

from einops import rearrange
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.blocks import ACTIVATIONS, Activation, Block, hidden_problems, share_problems


class SwiGLU(nn.Module):
    """A hidden layer times its gate, token by token (Shazeer 2020, equation 6): (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        expansion: width of the hidden layer over emb_size.
        activation: of the gate; silu makes it SwiGLU, gelu GEGLU.
        bias: whether the layers have a bias.
        norm: normalisation of the gated hidden layer; none when not given.
        dropout: share dropped in training after the gate and after the output.
    """

    def __init__(
        self,
        emb_size: int = 768,
        *,
        expansion: float = 4.0,
        activation: Activation = "silu",
        bias: bool = True,
        norm: Block | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = round(expansion * emb_size)
        problems = [*share_problems({"dropout": dropout}), *hidden_problems(hidden, expansion, activation)]
        if problems:
            raise UserError(problems)
        self.make_expansion(emb_size, hidden, bias)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)
        self.norm = None if norm is None else norm(hidden)
        self.contract = nn.Linear(hidden, emb_size, bias=bias)
        self.output_dropout = nn.Dropout(dropout)

    def make_expansion(self, emb_size: int, hidden: int, bias: bool) -> None:
        """Makes what leads from tokens to gate and hidden layer."""
        self.gate = nn.Linear(emb_size, hidden, bias=bias)
        self.expand = nn.Linear(emb_size, hidden, bias=bias)

    def gate_and_hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and hidden layer, (b, n, hidden) each."""
        return self.gate(tokens), self.expand(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, hidden = self.gate_and_hidden(tokens)
        hidden = self.dropout(self.activation(gate) * hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        out: Tensor = self.output_dropout(self.contract(hidden))
        return out


class PackedSwiGLU(SwiGLU):
    """SwiGLU with gate and hidden layer as one matrix, the gate first."""

    def make_expansion(self, emb_size: int, hidden: int, bias: bool) -> None:
        self.gate_expand = nn.Linear(emb_size, 2 * hidden, bias=bias)

    def gate_and_hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        gate, hidden = rearrange(self.gate_expand(tokens), "b n (parts f) -> parts b n f", parts=2)
        return gate, hidden
