"""``lightning summary``: the layers of a network with output shapes, parameters, multiply-adds and kept activations.

Measured on devices without numbers, so that a network of any size needs no memory. torchinfo does not do it: it counts
a linear layer once for all tokens and no attention (0.03 instead of 1.26 G multiply-adds for ViT-Ti/16), and takes the
outputs of layers for what the backward pass keeps.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.load import Checkpoint, Facts, Size, Trust, open_model
from vit_lightning.commands.module import make_module
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.networks import empty_network
from vit_lightning.errors import UserError, one_line
from vit_lightning.limits import at_least, refuse
from vit_lightning.notation import counted
from vit_lightning.sizes import pair
from vit_lightning.training.resources import AUTO, auto_precision

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Types of products, by precision of training; float32 of others."""
IMAGES = 2
"""Images in the measured batch: BatchNorm refuses one."""


@dataclass(frozen=True)
class Layer:
    """A layer with all that is inside it."""

    name: str
    kind: str
    """Its class."""
    shape: tuple[int, ...]
    """Shape of its output for one image."""
    parameters: int
    multiply_adds: int
    """Multiply-adds of a forward pass of one image: of matrix products, convolutions and attention products."""
    kept: int
    """Bytes for each image that training keeps for the backward pass, in float32 with fused attention."""
    inside: tuple[Layer, ...] = ()


def summary(
    experiment: Experiment | None = None,
    *,
    ckpt: Checkpoint = "",
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
    batch_size: int = 1,
) -> None:
    """Prints the layers of the network of a config, or of a trained model, and their sums.

    Args:
        batch_size: number of images for which the activations are added up, with --ckpt.
    """
    refuse(at_least(1, batch_size=batch_size))
    if bool(ckpt) == (experiment is not None):
        raise UserError("give a config, as lightning summary --config digits, or a model, as --ckpt RUN_FOLDER")
    quiet()
    if experiment is None:
        source = open_model(ckpt, image_size=image_size, config=config, trust=trust)
        size = image_size or source.view.get("image_size")
        if size is None:
            raise UserError(f"ckpt={ckpt} does not tell the size of its images: give --image_size")
        network, shape = source.network, (int(source.view.get("in_channels", 3)), *pair(size))
    else:
        network, shape, batch_size, precision = step_of(experiment)
    say(table(network, shape, batch_size))
    if experiment is not None:
        taken = training_bytes(network, shape, batch_size, precision)
        say(row("memory", f"at least {in_bytes(taken)} for a step in {precision}, with optimizer"))


def step_of(experiment: Experiment) -> tuple[nn.Module, tuple[int, int, int], int, str]:
    """Returns what ``training_bytes`` takes of an experiment; its network has no numbers."""
    data, own = experiment.data, experiment.config["model"] is None
    network = empty_network((lambda: make_module(experiment)) if own else experiment.make_network)
    accelerator, precision = experiment.trainer["accelerator"], experiment.trainer["precision"] or "32-true"
    precision = auto_precision(accelerator) if precision == AUTO else precision
    return network, (data.in_channels, *data.image_size), data.batch_size, precision


def table(network: nn.Module, shape: tuple[int, int, int], batch_size: int) -> str:
    """Returns the table of a network's layers.

    Args:
        network: the network; it is not changed.
        shape: shape of an image, (c, H, W).
        batch_size: number of images for which the kept activations are added up.

    Raises:
        UserError: it cannot be measured without numbers.
    """
    try:
        whole = measure(network, shape)
    except Exception as fault:  # a network of the user may raise anything
        name = type(network).__name__
        raise UserError(f"model: {name} cannot be measured without images: {one_line(fault)}") from fault
    head = ("layer", "type", "output", "parameters", "multiply-adds", "kept for backward")
    rows = [head, *_rows(whole, 0)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
    aligned = [f"{'<' if n < 3 else '>'}{width}" for n, width in enumerate(widths)]
    trained = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    frozen = f", {trained:,} of them trained" * (trained < whole.parameters)
    products = f"{_short(whole.multiply_adds)} multiply-adds = {_short(2 * whole.multiply_adds)} FLOPs"
    return "\n".join(
        [
            *("  ".join(map(format, row, aligned)).rstrip() for row in rows),
            "",
            f"{counted(whole.parameters, 'parameter')} ({in_bytes(4 * whole.parameters)} in float32){frozen}",
            f"{products} for an image {'x'.join(map(str, shape))}: matrix products, convolutions, attention",
            f"{in_bytes(whole.kept)} for each image are kept for the backward pass (float32, fused attention), "
            f"{in_bytes(batch_size * whole.kept)} for a batch of {batch_size}",
        ]
    )


def _rows(layer: Layer, level: int) -> Iterator[tuple[str, ...]]:
    """Yields the row of a layer and those of the layers inside it; a run of layers that are alike has one."""
    numbers = f"{layer.parameters:,}", _short(layer.multiply_adds), in_bytes(layer.kept)
    yield "  " * level + layer.name, layer.kind, "x".join(map(str, layer.shape)), *numbers
    for _, alike in groupby(layer.inside, lambda inside: replace(inside, name="")):
        first, *others = alike
        name = f"{first.name} to {others[-1].name}, each" if others else first.name
        yield from _rows(replace(first, name=name), level + 1)


def _short(number: int) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.{2 if number < 100 * size else 1}f}{unit}"
    return str(number)


def in_bytes(number: int) -> str:
    return f"{_short(number)}B" if number >= 1000 else f"{number} B"


def measure(network: nn.Module, shape: tuple[int, int, int]) -> Layer:
    """Returns the layers of a network, measured for images (c, H, W) of a shape; whatever it raises is raised."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        copy.deepcopy(network).to("meta").eval()(torch.empty(1, *shape, device="meta"))
    shapes, kept = _shapes_and_kept(copy.deepcopy(network).to("meta"), shape)

    def layer(path: str, name: str, module: nn.Module) -> Layer:
        """Returns a layer; one that only wraps another is merged with it, and those without numbers are left out."""
        parts = (layer(f"{path}.{child}", child, part) for child, part in module.named_children())
        inside = tuple(part for part in parts if part.parameters or part.multiply_adds or part.kept)
        sums = sum(weight.numel() for weight in module.parameters()), counts[path] // 2, kept[path] // IMAGES
        if name != "model" and [(only.parameters, only.multiply_adds, only.kept) for only in inside] == [sums]:
            return replace(inside[0], name=f"{name}.{inside[0].name}")
        return Layer(
            name, type(module).__name__, shapes.get(path) or (inside[-1].shape if inside else ()), *sums, inside
        )

    counts = Counter({name: sum(each.values()) for name, each in counter.flop_counts.items()})
    return layer(type(network).__name__, "model", network)


def _shapes_and_kept(
    network: nn.Module, shape: tuple[int, int, int], precision: str = "32-true"
) -> tuple[dict[str, tuple[int, ...]], Counter[str]]:
    """Returns the shape of each module's output, and the bytes that each keeps for the backward pass of ``IMAGES``."""
    dtype = AUTOCAST.get(precision)
    shapes, kept, held = dict[str, tuple[int, ...]](), Counter[str](), list[Tensor]()

    def note_shape(name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        shapes.setdefault(name, _shape(out))

    with FakeTensorMode(allow_non_fake_inputs=True), ModuleTracker() as running:
        network = network.to_empty(device="cpu").train()
        for name, module in network.named_modules(prefix=type(network).__name__):
            module.register_forward_hook(partial(note_shape, name))
        seen = {weight.untyped_storage()._cdata for weight in (*network.parameters(), *network.buffers())}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:  # several layers may keep one tensor, or parts of it
                seen.add(storage._cdata)
                held.append(tensor)  # so that no other storage gets its address
                kept.update(dict.fromkeys(running.parents, storage.nbytes()))
            return tensor

        mixed = torch.autocast("cpu", dtype, enabled=dtype is not None)
        with mixed, torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            network(torch.empty(IMAGES, *shape, device="cpu"))
    return shapes, kept


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
        kept = _shapes_and_kept(copy.deepcopy(network).to("meta"), shape, precision)[1][type(network).__name__]
    except Exception:  # a network of the user may raise anything
        return 0
    states = sum(4 * weight.numel() * (4 if weight.requires_grad else 1) for weight in network.parameters())
    return states + images * kept // IMAGES


def _shape(out: Any) -> tuple[int, ...]:
    """Returns the shape of an output, or of the first of several, without that of the batch."""
    while isinstance(out, dict | tuple | list):
        out = next(iter(out.values() if isinstance(out, dict) else out), None)
    return tuple(out.shape[1:]) if isinstance(out, Tensor) else ()
