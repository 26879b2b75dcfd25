"""The encoder of a Vision Transformer, as in the einops tutorial: Sequentials whose named children are the figure.

Its blocks differ in where the norms stand; a config chooses one by ``model.block``.

Shape letters: b images, n tokens, e emb_size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_lightning.errors import UserError
from vit_lightning.models.attention import MultiHeadAttention
from vit_lightning.models.feed_forward import FeedForwardBlock
from vit_lightning.models.layers import DropPath, Layer, LayerNorm, LayerScale, NamedSequential, ResidualAdd


class Branch(NamedSequential):
    """The inside of a residual: norms and part, LayerScale, DropPath. (b, n, e) -> (b, n, e).

    Args:
        emb_size: width of the tokens.
        layer_scale: initial value of LayerScale; none when not given.
        drop_path: probability of dropping the branch in training.
        parts: norms and attention or feed-forward part, in order, by their names in checkpoints.
    """

    def __init__(self, *, emb_size: int, layer_scale: float | None, drop_path: float, **parts: nn.Module) -> None:
        super().__init__(
            **parts,
            layer_scale=None if layer_scale is None else LayerScale(emb_size, layer_scale),
            drop_path=DropPath(drop_path) if drop_path > 0.0 else None,
        )


MakeNorm = Callable[[], nn.Module]
MakeBranch = Callable[..., Branch]
Parts = dict[str, nn.Module]
"""The children of a block by name, in order."""


class TransformerEncoderBlock(NamedSequential):
    """Pre-norm block: (b, n, e) -> (b, n, e).

    x = x + attention(norm(x))
    x = x + feed_forward(norm(x))

    A block of your own has the same six arguments in the same order (``model.block.class_path`` in a config). Attention
    and feed-forward part come as modules, layer_scale and drop_path as numbers: those of this block.

    Args:
        emb_size: width of the tokens.
        attention: the attention, (b, n, e) -> (b, n, e); MultiHeadAttention of 12 heads when not given.
        feed_forward: the feed-forward part, (b, n, e) -> (b, n, e); FeedForwardBlock when not given.
        norm: makes a norm from emb_size.
        layer_scale: initial value of LayerScale on both branches; none when not given.
        drop_path: probability of dropping a branch of this block in training, a number and no module; ViT's drop_path
            is that of the last block.

    Raises:
        UserError: the feed-forward part, such as ISTA, must have no residual and names the block that it needs.
    """

    def __init__(
        self,
        emb_size: int = 768,
        attention: nn.Module | None = None,
        feed_forward: nn.Module | None = None,
        norm: Layer = LayerNorm,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        if needed := getattr(feed_forward, "needs_block", None):
            raise UserError(f"feed_forward={type(feed_forward).__name__} needs block={needed}")
        attention = MultiHeadAttention(emb_size) if attention is None else attention
        feed_forward = FeedForwardBlock(emb_size) if feed_forward is None else feed_forward
        branch = partial(Branch, emb_size=emb_size, layer_scale=layer_scale, drop_path=drop_path)
        super().__init__(**self.parts(attention, feed_forward, partial(norm, emb_size), branch))

    @staticmethod
    def parts(attention: nn.Module, feed_forward: nn.Module, norm: MakeNorm, branch: MakeBranch) -> Parts:
        """Returns the children; a block with its norms elsewhere overrides it."""
        return {
            "attention": ResidualAdd(branch(norm=norm(), attention=attention)),
            "feed_forward": ResidualAdd(branch(norm=norm(), feed_forward=feed_forward)),
        }


class PostNormBlock(TransformerEncoderBlock):
    """Post-norm block of the first transformer (Vaswani et al. 2017, section 3.1): (b, n, e) -> (b, n, e).

    x = norm(x + attention(x))
    x = norm(x + feed_forward(x))

    The last block ends with a norm, so that ``final_norm: none`` fits.
    """

    @staticmethod
    def parts(attention: nn.Module, feed_forward: nn.Module, norm: MakeNorm, branch: MakeBranch) -> Parts:
        return {
            "attention": ResidualAdd(branch(attention=attention)),
            "attention_norm": norm(),
            "feed_forward": ResidualAdd(branch(feed_forward=feed_forward)),
            "feed_forward_norm": norm(),
        }


class ResPostNormBlock(TransformerEncoderBlock):
    """Res-post-norm block of Swin v2 (Liu et al. 2022, section 3.2): (b, n, e) -> (b, n, e).

    x = x + norm(attention(x))
    x = x + norm(feed_forward(x))
    """

    @staticmethod
    def parts(attention: nn.Module, feed_forward: nn.Module, norm: MakeNorm, branch: MakeBranch) -> Parts:
        return {
            "attention": ResidualAdd(branch(attention=attention, norm=norm())),
            "feed_forward": ResidualAdd(branch(feed_forward=feed_forward, norm=norm())),
        }


class CompactBlock(TransformerEncoderBlock):
    """Block of the Compact Transformers (Hassani et al. 2021, ``src/utils/transformers.py``): (b, n, e) -> (b, n, e).

    x = norm(x + attention(norm(x)))
    x = x + feed_forward(x)

    The second norm is of the sum, so that both the feed-forward part and its residual start from normalised tokens.
    """

    @staticmethod
    def parts(attention: nn.Module, feed_forward: nn.Module, norm: MakeNorm, branch: MakeBranch) -> Parts:
        return {
            "attention": ResidualAdd(branch(norm=norm(), attention=attention)),
            "feed_forward_norm": norm(),
            "feed_forward": ResidualAdd(branch(feed_forward=feed_forward)),
        }


class SandwichNormBlock(TransformerEncoderBlock):
    """Block with a norm on both sides of each part (Ding et al. 2021, CogView, section 2.4): (b, n, e) -> (b, n, e).

    x = x + output_norm(attention(norm(x)))
    x = x + output_norm(feed_forward(norm(x)))
    """

    @staticmethod
    def parts(attention: nn.Module, feed_forward: nn.Module, norm: MakeNorm, branch: MakeBranch) -> Parts:
        return {
            "attention": ResidualAdd(branch(norm=norm(), attention=attention, output_norm=norm())),
            "feed_forward": ResidualAdd(branch(norm=norm(), feed_forward=feed_forward, output_norm=norm())),
        }


class Parallel(NamedSequential):
    """The sum of its parts, each of the same tokens: (b, n, e) -> (b, n, e)."""

    def forward(self, tokens: Tensor) -> Tensor:
        first, *others = (part(tokens) for part in self)
        total: Tensor = sum(others, first)
        return total


class ParallelBlock(TransformerEncoderBlock):
    """Block whose two parts stand side by side behind one norm (Dehghani et al. 2023, ViT-22B, section 2).

    x = x + attention(norm(x)) + feed_forward(norm(x)), (b, n, e) -> (b, n, e)

    The two products that the paper makes of one matrix are two layers here. The paper has norms of queries and keys
    too (``attention.qk_norm``) and no bias in their projection.
    """

    @staticmethod
    def parts(attention: nn.Module, feed_forward: nn.Module, norm: MakeNorm, branch: MakeBranch) -> Parts:
        parallel = Parallel(attention=attention, feed_forward=feed_forward)
        return {"parallel": ResidualAdd(branch(norm=norm(), parts=parallel))}


EncoderBlock = Callable[[int, nn.Module, nn.Module, Layer, float | None, float], nn.Module]
"""Makes a block from emb_size, attention, feed-forward part, norm, and as numbers layer_scale and its drop_path."""


class TransformerEncoder(nn.Sequential):
    """Blocks one after the other: (b, n, e) -> (b, n, e).

    With ``activation_checkpointing`` only the tokens between blocks are kept for the backward pass, and the inside of a
    block is computed a second time, with the same random numbers (Chen et al. 2016, "Training deep nets with sublinear
    memory cost").
    """

    activation_checkpointing = False

    def call(self, block: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Calls a block, where activation checkpointing is on so that its inside is computed a second time."""
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        out: Tensor = checkpoint(block, tokens, use_reentrant=False) if recompute else block(tokens)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self:
            tokens = self.call(block, tokens)
        return tokens


def drop_path_rates(last: float, depth: int, schedule: str = "linear") -> list[float]:
    """Returns each block's probability of dropping a branch: growing from 0 to ``last``, or constant.

    Of a single block it grows to 0, as in timm.
    """
    first = 0.0 if schedule == "linear" else last
    rates: list[float] = torch.linspace(first, last, depth, device="cpu", dtype=torch.float32).tolist()
    return rates
