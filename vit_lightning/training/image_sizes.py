"""A schedule of image sizes: training begins with small images, which cost less."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vit_lightning.errors import UserError, one_line
from vit_lightning.limits import refuse
from vit_lightning.sizes import Size, pair


class ProgressiveImageSize(Callback):
    """Callback that trains on resized images, as in EfficientNetV2's progressive learning (Tan and Le 2021, section 4).

    Augmented batches are resized on the device (bilinear, antialiased) when the network gets them; a ViT's positions
    follow (``ViT.set_image_size``). Validation and test see images of the data's own size. The size is a function of
    the epoch alone, so that a resumed run is the same.

    Args:
        sizes: height and width in pixels from an epoch on, such as {0: 24, 5: 32}; epochs count from 0.
    """

    def __init__(self, sizes: dict[int, int | tuple[int, int]]) -> None:
        self.sizes: dict[int, Size] = {int(epoch): pair(size) for epoch, size in sorted(sizes.items())}
        wrong = {epoch: size for epoch, size in sizes.items() if epoch < 0 or min(pair(size)) < 1}
        refuse(
            [] if 0 in self.sizes else [f"sizes={sizes}: the size of epoch 0 is missing"],
            [f"sizes={sizes}: epochs must be at least 0 and sizes at least 1"] if wrong else [],
        )
        self._handle: RemovableHandle | None = None
        self._full: Size | None = None
        self._size = self.sizes[0]

    def size_at(self, epoch: int) -> Size:
        """Returns height and width of the images in an epoch."""
        return next(size for begin, size in reversed(self.sizes.items()) if begin <= epoch)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = _network(pl_module)
        self._full = getattr(network, "image_size", None)
        self._try_all(trainer, network)
        self._handle = network.register_forward_pre_hook(self._resized)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._size = self.size_at(trainer.current_epoch)
        _set_size(_network(pl_module), self._size)  # here, as compiled code cannot change a network

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _set_size(_network(pl_module), self._full)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            _set_size(_network(pl_module), self._full)

    def _resized(self, network: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        images: Tensor = given[0]
        height, width = images.shape[-2:]
        size = self._size if network.training else (height, width)
        _set_size(network, size)
        return (resized(images, size), *given[1:])

    @torch.no_grad()
    def _try_all(self, trainer: Trainer, network: nn.Module) -> None:
        """Checks that the network takes images of all sizes."""
        channels = getattr(trainer.datamodule, "in_channels", 3)  # type: ignore[attr-defined]
        trained = network.training
        try:
            for size in dict.fromkeys(self.sizes.values()):
                _set_size(network, size)
                network.eval()(torch.zeros(1, channels, *size).to(next(network.parameters())))
        except Exception as fault:  # whatever the layers of others raise
            text = "; ".join(fault.problems) if isinstance(fault, UserError) else one_line(fault)
            raise UserError(f"ProgressiveImageSize.sizes: {type(network).__name__} takes no {size}: {text}") from fault
        finally:
            network.train(trained)
        _set_size(network, self._full)


def resized(images: Tensor, size: Size) -> Tensor:
    """Returns images (b, c, H, W) in another size; the same one changes nothing."""
    if tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(images.float(), size=size, mode="bilinear", antialias=True).to(images.dtype)


def _network(module: LightningModule) -> nn.Module:
    network = getattr(module, "network", None)
    if not isinstance(network, nn.Module):
        raise UserError(f"ProgressiveImageSize: {type(module).__name__} has no network whose images could be resized")
    return network


def _set_size(network: nn.Module, size: Any) -> None:
    change = getattr(network, "set_image_size", None)
    if size not in (None, getattr(network, "image_size", None)) and change is not None:
        change(size)
