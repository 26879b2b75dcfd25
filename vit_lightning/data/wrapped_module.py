"""Any LightningDataModule in the place of ours."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.data.own_code import name_of, seeded
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, with_place
from vit_lightning.sizes import pair


class WrappedDataModule(ImageData):
    """Any ``LightningDataModule`` of (images, labels) batches, used as it is: its loaders, its augmentation.

    In a config ``data.class_path`` names the module itself, with its arguments beside those of this class. Images are
    floats (b, c, H, W), labels whole numbers (b,). A fact that is not given is an attribute of the module, or is read
    from its first training batch; the number of classes must be given or an attribute.

    Args:
        module: the module.
        num_classes: number of classes; by default the module's attribute, or the number of its ``class_names``.
        class_names: name of each class; by default the module's attribute, else numbers.
        image_size: height and width of the images in pixels.
        in_channels: channels of the images.
    """

    own_loaders = False

    def __init__(
        self,
        *,
        module: LightningDataModule,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        image_size: int | tuple[int, int] | None = None,
        in_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        loaders = [f"{kind}_dataloader" for kind in ("train", "val", "test")]
        if missing := [name for name in loaders if not is_overridden(name, module)]:
            raise UserError(f"{self.title} has no {' and no '.join(missing)}")
        names = class_names or getattr(module, "class_names", None)
        count = num_classes or getattr(module, "num_classes", None) or (len(names) if names else None)
        if not isinstance(count, int) or count < 2:
            raise UserError(
                f"num_classes={count}: give data.num_classes, or {name_of(self.module)} an attribute num_classes"
            )
        if names and len(names) != count:
            raise UserError(f"class_names has {len(names)} names for {count} classes")
        self._names = [str(name) for name in names or range(count)]
        size: Any = image_size or getattr(module, "image_size", None)
        channels = in_channels or getattr(module, "in_channels", None)
        if size is None or channels is None:
            shape = self._first_images().shape
            size, channels = size or shape[2:], channels or shape[1]
        self.image_size, self.in_channels = pair(size), channels

    @property
    def title(self) -> str:
        return f"class_path={name_of(self.module)}"

    @property
    def class_names(self) -> list[str]:
        return self._names

    @property
    def notice(self) -> str:
        return (
            f"{name_of(self.module)} is used as it is: no augmentation, mixing or normalisation of ours, no check that "
            "a resumed run has the same images, and a run that is resumed inside an epoch is not bit-identical"
        )

    def _first_images(self) -> Tensor:
        """Returns the images of the first training batch."""
        try:
            with seeded():
                self.module.prepare_data()
                self.module.setup("fit")
                return self._pair(next(iter(self.module.train_dataloader())))[0]
        except UserError:
            raise
        except Exception as fault:
            raise UserError(f"{self.title}: its first batch: {with_place(fault)}") from fault

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch[:2] if isinstance(batch, tuple | list) and len(batch) >= 2 else (batch, None)
        if (
            not (isinstance(images, Tensor) and isinstance(labels, Tensor))
            or not images.is_floating_point()
            or labels.is_floating_point()
            or (images.ndim, labels.ndim) != (4, 1)
        ):
            found = [
                f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                for value in (images, labels)
            ]
            wanted = "float images (b, c, H, W) and whole labels (b,)"
            raise UserError(f"{self.title}: a batch holds {' and '.join(found)}, not {wanted}")
        return images, labels.long()

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        raise UserError(f"data.{self.title}: single images of a LightningDataModule cannot be read")

    def model_input(self, batch: Batch, completed: int) -> Batch:
        raise UserError(f"data.{self.title}: the images of a LightningDataModule cannot be drawn")

    def test_view(self) -> Any:
        """Returns None: the preprocessing of test images is the module's own."""
        return None

    def check_augment(self) -> None:
        """Returns at once: there is nothing of ours."""

    def fingerprint(self) -> str:
        """Returns an empty text: the images are not known."""
        return ""

    @property
    def train_batches_per_epoch(self) -> Any:
        """None: Lightning counts the batches."""
        return None

    def prepare_data(self) -> None:
        self.module.prepare_data()

    def setup(self, stage: str = "fit") -> None:
        self.module.trainer = self.trainer
        self.module.setup(stage)

    def teardown(self, stage: str) -> None:
        self.module.teardown(stage)

    def train_dataloader(self) -> Any:
        return _made_again_by_attributes(self.module.train_dataloader())

    def val_dataloader(self) -> Any:
        return _made_again_by_attributes(self.module.val_dataloader())

    def test_dataloader(self) -> Any:
        self._seen = 0
        return _made_again_by_attributes(self.module.test_dataloader())

    def predict_dataloader(self) -> Any:
        return self.test_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.module.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.module.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """Returns the batch in the form of ours; test images are numbered in the order of the loader."""
        assert self.trainer is not None
        try:
            images, labels = self._pair(self.module.on_after_batch_transfer(batch, dataloader_idx))
        except UserError as error:
            raise UserError([f"data.{problem}" for problem in error.problems]) from error
        indices: Any = None
        if self.trainer.testing or self.trainer.predicting:
            indices = (self._seen + torch.arange(len(labels))) * self._ranks + self._rank
            self._seen += len(labels)
        return Batch(images.to(self.trainer.lightning_module.dtype), labels, indices, None)

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(state_dict)

    def on_exception(self, exception: BaseException) -> None:
        self.module.on_exception(exception)


def _made_again_by_attributes(loader: Any) -> Any:
    """Returns a loader that Lightning can make again, with a sampler of its own for several ranks or predictions.

    It takes the arguments that it has recorded, and cannot replace one that was given by position.
    """
    if type(loader) is DataLoader:
        for name in [name for name in vars(loader) if name.startswith("__pl_saved")]:
            vars(loader).pop(name)
    return loader
