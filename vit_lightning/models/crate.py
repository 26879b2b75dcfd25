"""CRATE's block and its two parts (Yu et al. 2023, "White-box transformers via sparse rate reduction").

A block compresses the tokens, then makes them sparse. MSSA is an approximate gradient step on the coding rate R^c of
the tokens in K subspaces, one for each head (equations 8 to 12): tokens that are alike in a subspace move together.
ISTA is a proximal gradient step on lambda |z|_1 + |x - D z|^2 over z >= 0, with a learned dictionary D (16 and 17).
Source: Ma-Lab-Berkeley/CRATE, ``model/crate.py``.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.models.attention import MultiHeadAttention
from vit_lightning.models.blocks import Branch
from vit_lightning.models.layers import Layer, LayerNorm, NamedSequential, ResidualAdd

SIZES = {"T": (384, 12, 6), "S": (576, 12, 12), "B": (768, 12, 12), "L": (1024, 24, 16)}
"""emb_size, depth and num_heads of CRATE-T, S, B and L, with patches of 16 pixels (the repository's constructors)."""


class MSSA(MultiHeadAttention):
    """Multi-head subspace self-attention (equation 12): one projection is queries, keys and values. Keeps (b, n, e).

    Args:
        emb_size: width of the tokens.
        num_heads: number of subspaces.
        dim_head: width of a subspace; emb_size / num_heads when not given.
        projection: whether the subspaces' outputs are projected; the reference leaves it out for one full subspace.
        dropout: probability of dropping an attention weight in training.
        projection_dropout: probability of dropping an output in training.
    """

    def __init__(
        self,
        emb_size: int = 384,
        num_heads: int = 6,
        *,
        dim_head: int | None = None,
        projection: bool = True,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            emb_size,
            num_heads,
            dim_head=dim_head,
            projection=projection,
            dropout=dropout,
            projection_dropout=projection_dropout,
        )

    def make_projections(self, emb_size: int, inner: int, bias: bool) -> None:
        self.subspaces = nn.Linear(emb_size, inner, bias=False)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = rearrange(self.subspaces(tokens), "b n (h d) -> b h n d", h=self.num_heads)
        return projected, projected, projected


class ISTA(nn.Module):
    """One step of iterative shrinkage-thresholding (equation 17): relu(x + s D^T (x - D x) - s lambda), same shape.

    Args:
        emb_size: width of the tokens.
        step_size: s.
        threshold: lambda, the weight of sparsity.
    """

    needs_block = "CrateBlock"
    """Block without a residual around the feed-forward part, since the step itself starts from the tokens."""

    def __init__(self, emb_size: int = 384, *, step_size: float = 0.1, threshold: float = 0.1) -> None:
        super().__init__()
        self.step_size, self.threshold = step_size, threshold
        self.dictionary = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(emb_size, emb_size)))

    def forward(self, tokens: Tensor) -> Tensor:
        missing = tokens - F.linear(tokens, self.dictionary)  # x - D x
        step = F.linear(missing, self.dictionary.t()) - self.threshold
        return F.relu(tokens + self.step_size * step)

    def extra_repr(self) -> str:
        return f"step_size={self.step_size:g}, threshold={self.threshold:g}"


class CrateBlock(NamedSequential):
    """CRATE's block, whose second half is no residual: (b, n, e) -> (b, n, e).

    x = x + attention(norm(x))
    x = feed_forward(norm(x))

    The arguments are those of ``TransformerEncoderBlock``, with MSSA as attention and ISTA as feed-forward part;
    layer_scale and drop_path act on the first half alone.
    """

    def __init__(
        self,
        emb_size: int,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: Layer = LayerNorm,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        parts = {"norm": norm(emb_size), "attention": attention}
        compress = Branch(emb_size=emb_size, layer_scale=layer_scale, drop_path=drop_path, **parts)
        super().__init__(
            attention=ResidualAdd(compress),
            feed_forward=NamedSequential(norm=norm(emb_size), feed_forward=feed_forward),
        )


def coding_rate(tokens: Tensor, subspaces: Tensor, *, precision: float = 0.5) -> Tensor:
    """Returns R^c of tokens (b, n, e) in subspaces (h, d, e), (b,): the paper's equation 8.

    Half the sum over subspaces U_k of logdet(I + d / (n precision^2) (U_k z)(U_k z)^T).
    """
    projected = torch.einsum("bne,hde->bhdn", tokens, subspaces)
    count, width = tokens.shape[1], subspaces.shape[1]
    gram = projected @ projected.transpose(-1, -2) * (width / (count * precision**2))
    identity = torch.eye(width, dtype=gram.dtype, device=gram.device)
    rate: Tensor = 0.5 * torch.linalg.slogdet(identity + gram).logabsdet.sum(dim=1)
    return rate
