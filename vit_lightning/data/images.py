"""Datasets of images in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit_lightning.data.bad_images import all_damaged
from vit_lightning.data.batches import Batch, Request
from vit_lightning.errors import UserError


class Images(Dataset[Batch]):
    """Images in memory.

    Args:
        images: (n, c, H, W), uint8.
        labels: (n,), int64.
        faults: errors of images that could not be decoded, by index; batches leave these out.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, faults: Mapping[int, str] | None = None) -> None:
        assert images.dtype == torch.uint8
        assert len(images) == len(labels)
        self.images, self.labels = images, labels
        self.faults = dict(faults or {})
        self._on_device: tuple[Tensor, Tensor] | None = None  # a copy of images and labels

    def move_to(self, device: torch.device) -> None:
        """Copies the images to a device, from which batches then come; the loader must have no workers."""
        self._on_device = self.images.to(device), self.labels.to(device)

    @property
    def is_moved(self) -> bool:
        return self._on_device is not None

    def needs_workers(self, device: torch.device) -> bool:
        """Whether worker processes may make its batches, for training on a device."""
        return not self.is_moved

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, request: Request) -> Batch | UserError:
        indices = torch.tensor(request.indices)
        keys = None if request.keys is None else torch.tensor(request.keys)
        skipped: tuple[str, ...] = ()
        if self.faults:
            good = torch.tensor([index not in self.faults for index in request.indices])
            skipped = tuple(self.faults[index] for index in request.indices if index in self.faults)
            if not good.any():
                return all_damaged(skipped)
            indices, keys = indices[good], None if keys is None else keys[good]
        images, labels = (self.images, self.labels) if self._on_device is None else self._on_device
        indices = indices.to(images.device)
        keys = None if keys is None else keys.to(images.device)
        return Batch(images.index_select(0, indices), labels[indices], indices, keys, skipped=skipped)

    def name(self, index: int) -> str:
        """Returns the name of an image in errors and lists: here its index."""
        return str(index)

    def whole(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns an image, uint8 (H, W, c)."""
        return self.images[index].permute(1, 2, 0).numpy()

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        digest.update(self.images.contiguous().numpy().data)
        return digest.hexdigest()
