"""Features of images in a trained network: the pooled vector before the classifier, and tokens inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.heads import ClassificationHead, DistilledHead, find_head
from vit_lightning.models.vit import ViT


def features(network: nn.Module, images: Tensor, blocks: Sequence[int] = ()) -> list[Tensor]:
    """Returns the pooled features (b, e) before the classifier, and behind them the tokens after chosen blocks.

    Args:
        network: a network whose last linear layer is its classifier, or that has none and returns features.
        images: images (b, c, H, W) as the network takes them.
        blocks: numbers of blocks, 0 the first and -1 the last.

    Raises:
        UserError: the network has no such blocks.
    """
    encoder: Any = network.encoder if isinstance(network, ViT) else getattr(network, "blocks", ())
    if wrong := [number for number in blocks if not -len(encoder) <= number < len(encoder)]:
        raise UserError(f"blocks={wrong}: {type(network).__name__} has {len(encoder)} blocks, from 0")
    found: list[Tensor] = []
    tokens: dict[int, Tensor] = {}
    hooks = [module.register_forward_pre_hook(_keep_input(found)) for module in _classifiers(network)]
    hooks += [encoder[number].register_forward_hook(_keep_output(tokens, number)) for number in blocks]
    try:
        output = network(images)
    finally:
        for hook in hooks:
            hook.remove()
    pooled = torch.stack(found).mean(dim=0) if found else output  # DeiT has a classifier on each of two tokens
    return [pooled, *(tokens[number] for number in blocks)]


def _classifiers(network: nn.Module) -> list[nn.Module]:
    """Returns the layers from features to logits; none if the network returns features."""
    head: Any = getattr(network, "head", None)
    if isinstance(head, ClassificationHead | DistilledHead):
        return [module for name, module in head.named_children() if name in ("linear", "distillation")]
    return [] if getattr(network, "num_classes", None) == 0 else list(find_head(network).values())


def _keep_input(found: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    return lambda module, given: found.append(given[0])


def _keep_output(found: dict[int, Tensor], number: int) -> Callable[[nn.Module, Any, Tensor], None]:
    return lambda module, given, output: found.update({number: output})
