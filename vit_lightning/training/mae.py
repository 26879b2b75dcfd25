"""Pre-training without labels as a masked autoencoder."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError, at_least, named, problems_of, refuse
from vit_lightning.metric_facts import METRICS, Stage
from vit_lightning.models.attention import RotaryAttention
from vit_lightning.models.mae import MAEDecoder, draw_kept, image_of, masked_error, moments, patch_pixels
from vit_lightning.models.vit import ViT
from vit_lightning.training.classifier import StepOutput, ViTClassifier
from vit_lightning.training.optim import OptimizerConfig


class MAE(ViTClassifier):
    """LightningModule that trains a ViT without labels, as a masked autoencoder (He et al. 2022, arXiv 2111.06377).

    The ViT gets the patches that are kept, and a decoder tells the pixels of the others; the loss is their mean squared
    error. Masks of training are drawn from the key of each image, those of validation and test from its index, always
    the same. The head is not trained: ``init_from`` of a run of it starts a classifier.

    Args:
        network: the ViT; any but for one with RotaryAttention or patch_dropout.
        optimizer: learning rate, weight decay and schedule.
        mask_ratio: fraction of the patches that are masked.
        normalise_pixels: whether the pixels of each patch are told with mean 0 and variance 1.
        decoder_emb_size: width of the decoder, a multiple of 4.
        decoder_depth: number of its blocks.
        decoder_num_heads: number of its heads.
    """

    network: ViT
    measures: ClassVar = {"loss": METRICS["loss"]}

    def __init__(
        self,
        network: nn.Module,
        *,
        optimizer: OptimizerConfig | None = None,
        mask_ratio: float = 0.75,
        normalise_pixels: bool = True,
        decoder_emb_size: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int = 16,
    ) -> None:
        super().__init__(network, optimizer=optimizer)
        refuse(
            problems_of(("mask_ratio", mask_ratio, 0.0 < mask_ratio < 1.0, "above 0 and below 1")),
            at_least(1, decoder_depth=decoder_depth),
            _problems(network),
        )
        assert isinstance(network, ViT)
        self.mask_ratio, self.normalise_pixels = mask_ratio, normalise_pixels
        with named("decoder_"):
            self.decoder = MAEDecoder(
                network, emb_size=decoder_emb_size, depth=decoder_depth, num_heads=decoder_num_heads
            )
        network.head.requires_grad_(False)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if not getattr(self.trainer.datamodule, "own_loaders", False):  # type: ignore[attr-defined]
            raise UserError("module: MAE draws masks from the keys of images, and needs data with our own loaders")

    def optimized(self) -> nn.Module:
        return self

    def no_decay(self) -> set[str]:
        """Returns the names of parameters without weight decay: those of the ViT, vectors and token of the decoder."""
        of_decoder = {f"decoder.{name}" for name, weight in self.decoder.named_parameters() if weight.ndim != 2}
        return {f"network.{name}" for name in self.network.no_decay()} | of_decoder

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """Returns the pixels of all patches that the decoder tells, (b, n, p1 p2 c), from those kept, (b, k)."""
        if kept is None:
            kept = self.draw_kept(torch.arange(len(images), device=images.device))
        pixels: Tensor = self.decoder(self.network.forward_features(images, kept), kept)
        return pixels

    def draw_kept(self, keys: Tensor) -> Tensor:
        """Returns the numbers of the patches that are kept, (b, k), of images with these keys."""
        return draw_kept(keys, self.decoder.mask.patches, self.mask_ratio)

    def step(self, batch: Any, stage: Stage) -> StepOutput:
        """Computes loss and pixels of a batch."""
        kept = self.draw_kept(batch.keys if stage == "train" else batch.indices)
        predicted = self(batch.images, kept)
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        pixels = patch_pixels(batch.images.to(predicted.dtype), self.network.patch_size)
        if self.normalise_pixels:
            mean, std = moments(pixels)
            pixels = (pixels - mean) / std
        return StepOutput(masked_error(predicted, pixels, kept), predicted, (predicted,))

    def reconstruct(self, images: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns images (b, c, H, W) with zeros for their masked patches, and with what the decoder tells there.

        Mean and standard deviation of a patch, which it does not tell where pixels are normalised, are the true ones.
        """
        kept, pixels = self.draw_kept(keys), patch_pixels(images, self.network.patch_size)
        told = self(images.to(self.decoder.pixels.weight.dtype), kept).to(pixels.dtype)
        if self.normalise_pixels:
            mean, std = moments(pixels)
            told = told * std + mean
        is_kept = torch.zeros_like(pixels[..., 0], dtype=torch.bool).scatter(1, kept, True)[..., None]
        (height, width), (p1, p2) = images.shape[2:], self.network.patch_size
        masked, whole = (
            image_of(torch.where(is_kept, pixels, other), (height // p1, width // p2), (p1, p2))
            for other in (torch.zeros_like(pixels), told)
        )
        return masked, whole

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        raise UserError("MAE learns without labels and predicts no classes (init_from of its run starts a classifier)")


def _problems(network: nn.Module) -> list[str]:
    """Returns why a network cannot be given some of its patches alone."""
    rotary = any(isinstance(part, RotaryAttention) for part in network.modules())
    if not isinstance(network, ViT) or rotary:
        kind = "one with RotaryAttention" if rotary else type(network).__name__
        return [f"network must be a ViT whose positions are added to its tokens, not {kind} (choose another model)"]
    dropped = hasattr(network.patch_embedding, "patch_dropout")
    return ["network.patch_dropout: masks drop patches already (leave model.patch_dropout out)"] * dropped
