"""``lightning summary``: the layers of a network with shapes, parameters and FLOPs, and the memory of a step.

Measured on devices without numbers, so that a network of any size needs no memory.
"""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.export import image_shape
from vit_lightning.commands.load import Checkpoint, Facts, Size, Trust, open_model
from vit_lightning.commands.module import make_module
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.networks import empty_network
from vit_lightning.errors import UserError, one_line
from vit_lightning.training.resources import AUTO, auto_precision

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Types of products, by precision of training; float32 of others."""
IMAGES = 2
"""Images in the measured batch: BatchNorm refuses one."""


class _Shown(LightningModule):
    """A network without numbers, as Lightning's summary takes it."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model = network
        self.example_input_array = torch.empty(1, *shape, device="meta")

    def forward(self, images: Tensor) -> Any:
        return self.model(images)


def summary(
    experiment: Experiment | None = None,
    *,
    ckpt: Checkpoint = "",
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
) -> None:
    """Prints the layers of the network of a config, or of a trained model, and what a training step takes."""
    if bool(ckpt) == (experiment is not None):
        raise UserError("give a config, as lightning summary --config digits, or a model, as --ckpt RUN_FOLDER")
    quiet()
    if experiment is None:
        source = open_model(ckpt, image_size=image_size, config=config, trust=trust)
        network, shape, batch_size, precision = source.network, image_shape(source), 1, "32-true"
    else:
        network, shape, batch_size, precision = step_of(experiment)
    say(str(layers_of(network, shape)))
    taken = training_bytes(network, shape, batch_size, precision)
    say(row("memory", f"about {in_bytes(taken)} for a step of {batch_size} in {precision}, with AdamW"))


def step_of(experiment: Experiment) -> tuple[nn.Module, tuple[int, int, int], int, str]:
    """Returns what ``training_bytes`` takes of an experiment; its network has no numbers."""
    data, own = experiment.data, experiment.config["model"] is None
    network = empty_network((lambda: make_module(experiment)) if own else experiment.make_network)
    accelerator, precision = experiment.trainer["accelerator"], experiment.trainer["precision"] or "32-true"
    precision = auto_precision(accelerator) if precision == AUTO else precision
    return network, (data.in_channels, *data.image_size), data.batch_size, precision


def layers_of(network: nn.Module, shape: tuple[int, int, int]) -> ModelSummary:
    """Returns Lightning's table of the layers of a network, which is not changed, for an image (c, H, W) of a shape.

    Raises:
        UserError: it cannot be measured without numbers.
    """
    try:
        return ModelSummary(_Shown(copy.deepcopy(network), shape).to("meta"), max_depth=3)
    except Exception as fault:  # a network of the user may raise anything
        name = type(network).__name__
        raise UserError(f"model: {name} cannot be measured without images: {one_line(fault)}") from fault


def _short(number: int) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.{2 if number < 100 * size else 1}f}{unit}"
    return str(number)


def in_bytes(number: int) -> str:
    return f"{_short(number)}B" if number >= 1000 else f"{number} B"


def kept_bytes(network: nn.Module, shape: tuple[int, int, int], precision: str = "32-true") -> int:
    """Returns the bytes for an image that training keeps for the backward pass, with fused attention."""
    dtype, held, network = AUTOCAST.get(precision), list[Tensor](), copy.deepcopy(network).to("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = network.to_empty(device="cpu").train()
        seen = {weight.untyped_storage()._cdata for weight in (*network.parameters(), *network.buffers())}

        def keep(tensor: Tensor) -> Tensor:
            if (storage := tensor.untyped_storage()._cdata) not in seen:  # layers may keep one tensor, or parts of it
                seen.add(storage)
                held.append(tensor)  # so that no other storage gets its address
            return tensor

        mixed = torch.autocast("cpu", dtype, enabled=dtype is not None)
        with mixed, torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            network(torch.empty(IMAGES, *shape, device="cpu"))
    return sum(tensor.untyped_storage().nbytes() for tensor in held) // IMAGES


def training_bytes(network: nn.Module, shape: tuple[int, int, int], images: int, precision: str) -> int:
    """Returns the bytes that training takes beside a single operation's: 0 for a network that cannot be measured.

    They are weights, gradients, two moments, and what layers keep of a batch.

    Args:
        network: the network; it is not changed.
        shape: shape of an image, (c, H, W).
        images: images of a batch.
        precision: precision of training, as Lightning has it.
    """
    try:
        kept = kept_bytes(network, shape, precision)
    except Exception:  # a network of the user may raise anything
        return 0
    states = sum(4 * weight.numel() * (4 if weight.requires_grad else 1) for weight in network.parameters())
    return states + images * kept
