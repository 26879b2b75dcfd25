"""From tokens to logits: pools, chosen in a config by ``model.pool``, and heads.

Shape letters: b images, p tokens before the patches, n patches, e emb_size.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.attention import DotProductAttention
from vit_lightning.models.feed_forward import Activation, FeedForwardBlock
from vit_lightning.models.layers import Layer, LayerNorm, NamedSequential

Pool = Callable[[int, int, int], nn.Module]
"""Makes a pool from emb_size, num_heads and the number of tokens before the patches."""


class TokenPool(nn.Module):
    """A pool over the patches, or with ``prefix`` over all tokens: (b, p + n, e) -> (b, e).

    Args:
        emb_size: width of the tokens.
        num_heads: number of heads.
        prefix_tokens: number of tokens before the patches.
        prefix: whether the tokens before the patches count too.
    """

    def __init__(self, emb_size: int, num_heads: int, prefix_tokens: int, *, prefix: bool = False) -> None:
        super().__init__()
        self.prefix = prefix
        self.prefix_tokens = 0 if prefix else prefix_tokens

    def reduce(self, tokens: Tensor) -> Tensor:
        """Reduces the tokens that count, (b, n, e) -> (b, e)."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        return self.reduce(tokens[:, self.prefix_tokens :])

    def extra_repr(self) -> str:
        return f"prefix_tokens={self.prefix_tokens}"


class ClassTokenPool(TokenPool):
    """The class token, which is token 0: (b, 1 + n, e) -> (b, e)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]


class MeanPool(TokenPool):
    """Mean over the patches, without the tokens before them."""

    def reduce(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)


class MeanAllPool(MeanPool):
    """Mean over all tokens, those before the patches too, as in the einops tutorial."""

    def __init__(self, emb_size: int, num_heads: int, prefix_tokens: int) -> None:
        super().__init__(emb_size, num_heads, prefix_tokens=0)


class MaxPool(TokenPool):
    """Largest value of each channel over the patches, or with ``prefix`` over all tokens."""

    def reduce(self, tokens: Tensor) -> Tensor:
        return tokens.amax(dim=1)


class MeanMaxPool(TokenPool):
    """Half the mean plus half the maximum over the patches, or with ``prefix`` over all tokens (timm's avgmax)."""

    def reduce(self, tokens: Tensor) -> Tensor:
        return 0.5 * (tokens.amax(dim=1) + tokens.mean(dim=1))


class ClassTokenAndMeanPool(MeanPool):
    """Class token and mean over the patches side by side (Oquab et al. 2023, DINOv2's classifier): -> (b, 2 e)."""

    def __init__(self, emb_size: int, num_heads: int, prefix_tokens: int) -> None:
        super().__init__(emb_size, num_heads, prefix_tokens)
        self.features = 2 * emb_size

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens[:, 0], super().forward(tokens)], dim=-1)


class SequencePool(TokenPool):
    """Weighted mean over the patches, or with ``prefix`` over all tokens (SeqPool, Hassani et al. 2021, section 3.2).

    The weights are the softmax over the tokens of one score each, which a linear layer gives.
    """

    def __init__(self, emb_size: int, num_heads: int, prefix_tokens: int, *, prefix: bool = False) -> None:
        super().__init__(emb_size, num_heads, prefix_tokens, prefix=prefix)
        self.score = nn.Linear(emb_size, 1)

    def reduce(self, tokens: Tensor) -> Tensor:
        weights: Tensor = self.score(tokens).softmax(dim=1).to(tokens.dtype)
        return (weights.mT @ tokens)[:, 0]


class AttentionPool(TokenPool):
    """Multi-head attention pooling, MAP (Zhai et al. 2022, "Scaling vision transformers"): (b, p + n, e) -> (b, e).

    One learned query, the probe, attends to the tokens; a feed-forward part with residual follows. Sources, which are
    the same: big_vision, ``models/vit.py: MAPHead``, and timm's AttentionPoolLatent.

    Args:
        emb_size: width of the tokens.
        num_heads: number of heads.
        prefix_tokens: number of tokens before the patches.
        prefix: whether the probe attends to them too.
        expansion: width of the hidden layer over emb_size.
        activation: activation of the hidden layer.
        norm: norm before the feed-forward part.
    """

    def __init__(
        self,
        emb_size: int,
        num_heads: int,
        prefix_tokens: int,
        *,
        prefix: bool = True,
        expansion: float = 4.0,
        activation: Activation = "gelu",
        norm: Layer = LayerNorm,
    ) -> None:
        super().__init__(emb_size, num_heads, prefix_tokens, prefix=prefix)
        if emb_size % num_heads:
            raise UserError(f"num_heads={num_heads} does not divide emb_size={emb_size}")
        self.num_heads = num_heads
        self.probe = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, 1, emb_size)))
        self.query = nn.Linear(emb_size, emb_size)
        self.kv = nn.Linear(emb_size, 2 * emb_size)
        self.attend = DotProductAttention((emb_size // num_heads) ** -0.5)
        self.projection = nn.Linear(emb_size, emb_size)
        self.norm = norm(emb_size)
        self.feed_forward = FeedForwardBlock(emb_size, expansion=expansion, activation=activation)

    def reduce(self, tokens: Tensor) -> Tensor:
        probe = repeat(self.query(self.probe.to(tokens.dtype)), "1 1 e -> b 1 e", b=tokens.shape[0])
        query = rearrange(probe, "b q (h d) -> b h q d", h=self.num_heads)
        keys, values = rearrange(self.kv(tokens), "b n (kv h d) -> kv b h n d", kv=2, h=self.num_heads)
        pooled = self.projection(rearrange(self.attend(query, keys, values), "b h 1 d -> b (h d)"))
        result: Tensor = pooled + self.feed_forward(self.norm(pooled))
        return result

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, {super().extra_repr()}"


class ClassificationHead(NamedSequential):
    """Tokens to logits: pool, norm, dropout, representation, linear layer. (b, n, e) -> (b, classes).

    Args:
        pool: tokens to one vector, (b, n, e) -> (b, e); a pool of another width names it in ``features``.
        emb_size: width of the tokens.
        num_classes: number of classes; 0 leaves the linear layer out and returns the features.
        norm: norm of the pooled vector; none when not given.
        dropout: dropout probability on the pooled vector.
        representation_size: width of a layer with tanh before the classifier ("pre-logits"); none when not given.
    """

    def __init__(
        self,
        *,
        pool: nn.Module,
        emb_size: int,
        num_classes: int,
        norm: Layer | None = None,
        dropout: float = 0.0,
        representation_size: int | None = None,
    ) -> None:
        pooled = int(getattr(pool, "features", emb_size))
        representation = None
        if representation_size is not None:
            representation = NamedSequential(linear=nn.Linear(pooled, representation_size), tanh=nn.Tanh())
        features = pooled if representation_size is None else representation_size
        super().__init__(
            pool=pool,
            norm=None if norm is None else norm(pooled),
            dropout=nn.Dropout(dropout) if dropout > 0.0 else None,
            representation=representation,
            linear=nn.Linear(features, num_classes) if num_classes > 0 else None,
        )


class DistilledHead(nn.Module):
    """Two linear heads, on the class token and on the distillation token (Touvron et al. 2021, DeiT, section 4).

    (b, 2 + n, e) -> (b, classes), the mean of both; in training the pair; with num_classes=0 of the tokens (b, e).
    """

    def __init__(self, *, emb_size: int, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(emb_size, num_classes) if num_classes > 0 else nn.Identity()
        self.distillation = nn.Linear(emb_size, num_classes) if num_classes > 0 else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        of_class = self.linear(self.dropout(tokens[:, 0]))
        of_teacher = self.distillation(self.dropout(tokens[:, 1]))
        return (of_class, of_teacher) if self.training else (of_class + of_teacher) / 2


POOLS: dict[str, Pool] = {"cls": ClassTokenPool, "mean": MeanPool}


def heads_of(network: nn.Module, given: Any) -> tuple[Tensor, ...]:
    """Returns the logits that a network gives, of both heads where it learns from a teacher by one (as timm's).

    Raises:
        UserError: it gives something else, as logits of an auxiliary head or hidden features beside them.
    """
    parts = network.named_modules() if type(given) is tuple else ()
    is_distilled = any(isinstance(part, DistilledHead) or name.endswith("head_dist") for name, part in parts)
    heads: tuple[Tensor, ...] = given if is_distilled else (given,)
    if all(isinstance(logits, Tensor) for logits in heads):
        return heads
    what = f"({', '.join(type(one).__name__ for one in given)})" if type(given) is tuple else type(given).__name__
    way_out = "aux_logits: false, or a class of your own around it returns them"
    raise UserError(f"{type(network).__name__} gives {what} where logits alone are expected ({way_out})")


def find_head(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the parts that turn features into logits, by name.

    They are ``head`` of a ViT, what timm's ``get_classifier`` gives, or else the last linear layer.

    Raises:
        UserError: there are none.
    """
    modules = dict(network.named_modules())
    if isinstance(modules.get("head"), ClassificationHead | DistilledHead):
        return {"head": modules["head"]}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    heads = {name: modules[name] for name in linear[-1:]}
    if callable(classifier := getattr(network, "get_classifier", None)):
        given = classifier()  # two of a network with a distillation token
        found = given if isinstance(given, tuple) else (given,)
        heads = {name: module for name, module in modules.items() if any(module is head for head in found)}
    if not heads:
        raise UserError(f"{type(network).__name__} has no linear layer, so that its head is unknown")
    return heads
