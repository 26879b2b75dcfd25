"""Features of a network, and their nearest neighbours during training."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from vit_lightning.errors import UserError, at_least, refuse
from vit_lightning.inspect.watch import chosen_of, find_blocks
from vit_lightning.models.heads import ClassificationHead, DistilledHead, find_head
from vit_lightning.random_keys import one_key
from vit_lightning.training.callbacks import gather, is_due


def features(network: nn.Module, images: Tensor, blocks: Sequence[int] = ()) -> list[Tensor]:
    """Returns the pooled features (b, e) before the classifier, and behind them the tokens after chosen blocks.

    Args:
        network: a network whose last linear layer is its classifier, or that has none and returns features.
        images: images (b, c, H, W) as the network takes them.
        blocks: numbers of blocks, 0 the first and -1 the last.

    Raises:
        UserError: the network has no such blocks.
    """
    chosen = chosen_of(find_blocks(network), blocks)
    found: list[Tensor] = []
    tokens: dict[int, Tensor] = {}
    hooks = [one.register_forward_pre_hook(lambda _, given: found.append(given[0])) for one in _classifiers(network)]
    for number, block in enumerate(chosen):
        hooks.append(block.register_forward_hook(lambda _, __, output, number=number: tokens.update({number: output})))
    try:
        output = network(images)
    finally:
        for hook in hooks:
            hook.remove()
    pooled = torch.stack(found).mean(dim=0) if found else output  # DeiT has a classifier on each of two tokens
    return [pooled, *(tokens[number] for number in range(len(chosen)))]


def _classifiers(network: nn.Module) -> list[nn.Module]:
    """Returns the layers from features to logits; none if the network returns features."""
    head: Any = getattr(network, "head", None)
    if isinstance(head, ClassificationHead | DistilledHead):
        return [module for name, module in head.named_children() if name in ("linear", "distillation")]
    return [] if getattr(network, "num_classes", None) == 0 else list(find_head(network).values())


class Features(NamedTuple):
    """Features of images, (n, d) in float32, and their labels, (n,)."""

    vectors: Tensor
    labels: Tensor


class KNNProbe(Callback):
    """Callback that logs ``val/knn_acc``, the accuracy of weighted nearest neighbours in validation.

    The neighbours are training images, their similarity is the cosine of the features, and each votes for its class
    with weight exp(similarity / temperature), as in Wu et al. 2018, DINO's ``eval_knn.py``, dinov3's ``eval/knn.py``.
    Features are what the last linear layer gets (the mean, of two heads), of images without augmentation. Test images
    are never used. Training is the same, bit for bit, with and without it.

    Args:
        k: number of neighbours.
        temperature: temperature of the votes.
        every_n_epochs: epochs between two measurements, which are made in the validations of an epoch; the last
            of max_epochs has one too.
        train_images: number of training images that are used, drawn once by the seed; null uses all.
    """

    def __init__(
        self, k: int = 20, temperature: float = 0.07, *, every_n_epochs: int = 1, train_images: int | None = 10_000
    ) -> None:
        refuse(at_least(1, k=k, every_n_epochs=every_n_epochs, train_images=train_images))
        self.k, self.temperature = k, temperature
        self.every_n_epochs, self.train_images = every_n_epochs, train_images

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not getattr(trainer.datamodule, "own_loaders", False):  # type: ignore[attr-defined]
            raise UserError("trainer.callbacks: KNNProbe needs data with our own loaders (ImageData)")
        find_head(getattr(pl_module, "network", pl_module))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not is_due(trainer, self.every_n_epochs):
            trainer.callback_metrics.pop("val/knn_acc", None)  # else Lightning keeps the value of an earlier epoch
        elif not trainer.sanity_checking:
            with isolate_rng():
                accuracy = self._measure(trainer, pl_module)
            pl_module.log("val/knn_acc", accuracy, sync_dist=trainer.world_size > 1)  # the same on all ranks

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> float:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(one_key(int(os.environ.get("PL_GLOBAL_SEED", 0)), 0, -2))
        train = torch.arange(data.image_count("train")) if data.train_subset is None else data.train_subset
        if self.train_images is not None:
            train = train[torch.randperm(len(train), generator=generator)[: self.train_images].sort().values]
        known = _features(trainer, pl_module, "train", train)
        val = _features(trainer, pl_module, "val", torch.arange(data.image_count("val")))
        return self.measure(known, val, len(data.label_names))

    def measure(self, train: Features, val: Features, classes: int) -> float:
        """Returns the accuracy for features of validation images."""
        known, votes = F.normalize(train.vectors), F.one_hot(train.labels, classes).float()
        correct = torch.tensor(0)
        for vectors, labels in zip(torch.split(val.vectors, 256), torch.split(val.labels, 256), strict=True):
            similarity, nearest = (F.normalize(vectors) @ known.T).topk(min(self.k, len(known)))
            weight = (similarity / self.temperature).softmax(dim=1)[:, None]
            correct += ((weight @ votes[nearest])[:, 0].argmax(dim=1) == labels).sum().cpu()
        return float(correct) / len(val.labels)


@torch.no_grad()
def _features(trainer: Trainer, module: LightningModule, split: str, indices: Tensor) -> Features:
    """Returns features and labels of all ranks, in the order of the indices."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    vectors, labels, places = [], [], []
    for batch in data.plain_batches(split, indices):
        batch = trainer.strategy.batch_to_device(batch)  # which calls the hooks of the data: images are normalised
        with trainer.precision_plugin.val_step_context():
            vectors.append(features(getattr(module, "network", module), batch.images)[0].flatten(1))
        labels.append(batch.labels)
        places.append(batch.indices)
    parts = [torch.cat(rows) for rows in (places, vectors, labels)]
    if trainer.world_size > 1:
        parts = [gather(trainer, part.cpu()).to(trainer.strategy.root_device) for part in parts]
        order = parts[0].argsort()
        parts = [part[order] for part in parts]
    return Features(parts[1].float(), parts[2])
