"""Teachers for distillation: trained models that give logits for the student's images."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from vit_lightning.config.sources import open_source
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError
from vit_lightning.training.distillation import Teacher

KEY = "distillation.teacher"


def load_teacher(place: str, data: ImageData) -> Teacher:
    """Returns the teacher for the student's data; leaves the global random numbers as they were.

    Raises:
        UserError: it is not there, takes other images, or has other classes.
    """
    source = open_source(place, ours=False, imports=None, key=KEY)
    if not {"mean", "std"} <= source.view.keys():
        raise UserError(f"{KEY}={place}: mean and std of its images are not known")
    for note in source.notes:
        warnings.warn(f"{KEY}={place}: {note}", stacklevel=2)
    _check(source.network, place, data)
    return Teacher(source.network, normalised=(source.view["mean"], source.view["std"]), images=(data.mean, data.std))


def _check(network: nn.Module, place: str, data: ImageData) -> None:
    """Checks that the teacher gives logits for the student's images and classes."""
    shape = (data.in_channels, *data.image_size)
    text = "x".join(map(str, shape))
    try:
        with torch.no_grad():
            logits = copy.deepcopy(network).to("meta").eval()(torch.empty(2, *shape, device="meta"))
    except Exception as fault:  # whatever the layers of others raise
        reason = " ".join(str(fault).split())[:200]
        raise UserError(f"{KEY}={place} does not take the images of the data, {text}: {reason}") from fault
    if tuple(logits.shape) != (2, data.num_classes):
        raise UserError(f"{KEY}={place} knows {logits.shape[-1]} classes, the data has {data.num_classes}")
