"""The class token alone: when the last block leaves out what it makes of the other tokens, which nothing reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import Dropout, Identity

from vit_lightning.models import fast_paths
from vit_lightning.models.attention import MultiHeadAttention, SeparateAttention
from vit_lightning.models.blocks import (
    Branch,
    DropPath,
    LayerNorm,
    LayerScale,
    Linear,
    ResidualAdd,
    RMSNorm,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from vit_lightning.models.feed_forward import FeedForwardBlock, PackedSwiGLU, SwiGLU
from vit_lightning.models.heads import ClassificationHead, ClassTokenPool

_TOKEN_WISE = {
    *(ResidualAdd, Branch, LayerScale, DropPath, LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm, Dropout, Identity),
    *(FeedForwardBlock, SwiGLU, PackedSwiGLU, Linear, nn.GELU, nn.ReLU, nn.SiLU),
}
"""Types of modules that make each token from the same token."""


def reads_class_token_alone(network: nn.Module, images: Tensor) -> bool:
    """Returns whether the head of a ViT reads the class token alone, and no hook or part of a user the others."""
    if not fast_paths.choose_class_token(images):
        return False
    names = [name for name, _ in network.named_children()]
    if names[:2] != ["patch_embedding", "encoder"] or names[-1] != "head":
        return False  # another network, or a user has put another child in
    _, encoder, *after, head = network.children()
    if type(encoder) is not TransformerEncoder or type(head) is not ClassificationHead or not len(encoder):
        return False
    last, pool = encoder[-1], head[0]
    if type(last) is not TransformerEncoderBlock or type(pool) is not ClassTokenPool:
        return False
    if list(last._modules) != ["attention", "feed_forward"] or type(last.attention) is not ResidualAdd:
        return False
    branch: Any = last.attention.fn
    if type(branch) is not Branch or [name for name, _ in branch.named_children()][:2] != ["norm", "attention"]:
        return False
    if type(branch.attention) not in (MultiHeadAttention, SeparateAttention):  # whose queries are independent
        return False
    known: tuple[Any, ...] = (last, branch.attention)
    others = [module for part in (last, *after) for module in part.modules() if module not in known]
    return (
        all(type(module) in _TOKEN_WISE for module in others)
        and all(map(_is_only_called, (encoder, head, pool, *known, *others)))
        and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _is_only_called(module: nn.Module) -> bool:
    """Returns whether nothing but the next module reads what a module gives, and its random numbers, if any, stay."""
    kept = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    is_random = module.training and isinstance(module, Dropout) and module.p > 0.0
    is_random |= module.training and isinstance(module, MultiHeadAttention) and module.dropout > 0.0
    return not (kept or is_random or module._compiled_call_impl is not None or "forward" in vars(module))
