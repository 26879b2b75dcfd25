"""CRATE's objectives, measured in each layer during training."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vit_lightning.models.crate import ISTA, MSSA, coding_rate


class CrateMeasures(Callback):
    """Callback that logs two measures of each layer on the first batch of a validation (Yu et al. 2023, section 3.1).

    ``crate/coding_rate/N`` is R^c of the tokens after the MSSA of layer N, in the subspaces of that layer, a mean over
    the images; MSSA is to minimize it. ``crate/sparsity/N`` is the fraction of entries that are not zero after the ISTA
    of layer N, which ISTA is to minimize.

    Args:
        precision: epsilon of the coding rate.
    """

    def __init__(self, precision: float = 0.5) -> None:
        self.precision = precision
        self._handles: list[RemovableHandle] = []
        self._measures: dict[str, Tensor] = {}

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx or dataloader_idx:
            return
        blocks = [block for block in pl_module.modules() if _is_crate(block)]
        for number, block in enumerate(blocks):
            attention = block.get_submodule("attention")
            subspaces = attention.get_submodule("fn.attention")
            assert isinstance(subspaces, MSSA)
            self._handles += [
                attention.register_forward_hook(self._measure_rate(f"crate/coding_rate/{number}", subspaces)),
                block.register_forward_hook(self._measure_sparsity(f"crate/sparsity/{number}")),
            ]

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._remove()
        for name, value in self._measures.items():
            pl_module.log(name, value, on_step=False, on_epoch=True, batch_size=1)
        self._measures = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _measure_rate(self, name: str, attention: MSSA) -> Any:
        def hook(module: nn.Module, inputs: Any, tokens: Tensor) -> None:
            matrix = rearrange(attention.subspaces.weight, "(h d) e -> h d e", h=attention.num_heads)
            with torch.autocast(tokens.device.type, enabled=False):  # bfloat16 is too coarse for a determinant
                rates = coding_rate(tokens.float(), matrix.float(), precision=self.precision)
            self._measures[name] = rates.mean()

        return hook

    def _measure_sparsity(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, tokens: Tensor) -> None:
            self._measures[name] = (tokens != 0).float().mean()

        return hook


def _is_crate(block: nn.Module) -> bool:
    parts = [child for half in block.children() for child in half.modules()]
    kinds = {type(part) for part in parts}
    return {"attention", "feed_forward"} == {name for name, _ in block.named_children()} and kinds >= {MSSA, ISTA}
