"""Trained models of any source: in Python with their preprocessing, and for the commands that name one."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_lightning.commands.console import row, say
from vit_lightning.config.files import as_flag
from vit_lightning.config.networks import open_source
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import Batch
from vit_lightning.data.decoding import Interpolation
from vit_lightning.data.image_files import ImageFiles, find_images
from vit_lightning.data.sampling import evaluation_requests
from vit_lightning.errors import UserError, at_least, counted, named, refuse
from vit_lightning.inspect.maps import attention, relevance
from vit_lightning.inspect.watch import grid_of
from vit_lightning.sizes import Resize, pair
from vit_lightning.training.classifier import probabilities
from vit_lightning.training.probes import features
from vit_lightning.weights.sources import Source
from vit_lightning.weights.trust import HINT, HINT_IN_PYTHON

AnImage = str | PathLike[str] | Image.Image | np.ndarray[Any, Any]
Images = AnImage | Sequence[AnImage] | Tensor
"""Files, folders, PIL images and uint8 arrays (H, W, c) of any size, or a tensor (b, c, H, W) of the model's size."""

Checkpoint = Annotated[
    str,
    "the model: run folder, checkpoint, file or folder of weights, or hf-hub:OWNER/NAME, timm:NAME, torchvision:NAME, "
    "wandb:ENTITY/PROJECT/ARTIFACT:ALIAS.",
]
Size = Annotated[
    int | tuple[int, int] | None,
    "height and width in pixels of the images that it gets, if they are not those of its training.",
]
Facts = Annotated[
    dict[str, Any] | None,
    "what the weights do not tell or is to be replaced: --config='{num_heads: 3, mean: [...], std: [...]}' (also "
    "centre_share, resize, interpolation, multi_label, class_names, and arguments of their family).",
]
Trust = Annotated[bool, "whether classes that the weights name may be of any package, and so run code."]


class Prediction(NamedTuple):
    """The most likely classes of an image."""

    file: str
    """The file; of an image in memory, "image" and its number."""
    classes: list[str]
    probabilities: list[float]


def top_classes(file: str, probabilities: Tensor, names: Sequence[str], count: int) -> Prediction:
    """Returns the most likely classes of an image with probabilities (classes,)."""
    values, classes = probabilities.topk(min(count, len(names)))
    return Prediction(file, [names[label] for label in classes.tolist()], values.tolist())


def load(
    source: str | PathLike[str],
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    config: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> "Model":
    """Loads a trained model; writes nothing, and leaves the global random numbers as they were.

    Args:
        source: run folder (its best checkpoint, with the averaged weights if there are any), checkpoint, .safetensors,
            .pth, .pt, .bin, .pth.tar, .npz, folder of ``save_pretrained`` or of ``lightning export``,
            hf-hub:owner/name, timm:NAME, torchvision:NAME, or wandb:ENTITY/PROJECT/ARTIFACT:ALIAS.
        image_size: height and width in pixels of its images, if not those of its training: positions are resized.
        num_classes: classes of a new, untrained head; 0 for features.
        config: what is not known or is to be replaced: mean, std, centre_share, resize, interpolation, multi_label and
            class_names, and for weights of others the arguments of their own constructor.
        trust: whether classes that the source names may be of any package, and so run code.

    Raises:
        UserError: it is not there, damaged, needs code that may not be imported, or its architecture cannot be told.
    """
    try:
        found = open_source(str(source), image_size=image_size, num_classes=num_classes, config=config, trust=trust)
    except UserError as error:
        raise UserError(text.replace(HINT, HINT_IN_PYTHON) for text in error.problems) from error.__cause__
    for note in found.notes:
        warnings.warn(f"{found.place}: {note}", stacklevel=2)
    return Model(found)


class Model:
    """A trained network with its preprocessing and class names.

    Its methods take files, folders, PIL images, uint8 arrays (H, W, c) or (H, W), or a list of these: they are cropped,
    resized and normalised as by ``lightning predict``. Or a tensor (b, c, H, W) of the model's own image size: uint8 is
    normalised, floating-point numbers are taken to be so already. An image that cannot be read is an error.

    Args:
        source: the network and what is known about it.
    """

    def __init__(self, source: Source) -> None:
        self.network, self.place, self.notes = source.network, source.place, source.notes
        self.class_names = source.class_names
        """None where they are not known: then classes are named by their numbers."""
        self.mean: Any = source.view.get("mean")
        self.std: Any = source.view.get("std")
        self.centre_share = float(source.view.get("centre_share", 1.0))
        """Fraction of the sides of an image that the centre crop shows."""
        self.interpolation: Interpolation = source.view.get("interpolation", "bicubic")
        self.resize: Resize | None = source.view.get("resize")
        """Size to which the whole image is resized, in place of the crop."""
        self.multi_label = bool(source.view.get("multi_label"))
        """Whether each class has a probability of its own."""
        self.image_size = pair(source.view["image_size"]) if "image_size" in source.view else None
        self.in_channels = int(source.view.get("in_channels", 3))
        self.prefix_tokens = int(getattr(self.network, "prefix_tokens", getattr(self.network, "num_prefix_tokens", 0)))
        """Number of tokens before the patches."""

    def predict(self, images: Images, *, top_k: int = 5, batch_size: int = 64) -> list[Prediction]:
        """Returns the ``top_k`` most likely classes of each image, in the order given; in a folder sorted by name."""
        refuse(at_least(1, top_k=top_k))
        predictions = []
        for names, batch in self._batches(images, batch_size):
            logits = self._run(batch, self.network)
            if not isinstance(logits, Tensor) or getattr(self.network, "num_classes", None) == 0:
                raise UserError(f"{self.place}: {type(self.network).__name__} gives no logits (b, classes)")
            found = probabilities(logits, multi_label=self.multi_label).cpu()
            classes = self.class_names or [str(number) for number in range(found.shape[1])]
            predictions += [top_classes(name, row, classes, top_k) for name, row in zip(names, found, strict=True)]
        return predictions

    def forward_features(self, images: Images, *, batch_size: int = 64) -> Tensor:
        """Returns the tokens before pooling, (b, p + n, e) with p tokens before the patches."""
        function = getattr(self.network, "forward_features", None)
        if function is None:
            raise UserError(f"{self.place}: {type(self.network).__name__} has no forward_features")
        return torch.cat([self._run(batch, function) for _, batch in self._batches(images, batch_size)])

    def tokens(self, images: Images, blocks: Sequence[int] = (-1,), *, batch_size: int = 64) -> tuple[Tensor, ...]:
        """Returns the tokens after each of the chosen blocks, (b, p + n, e) each; 0 is the first block, -1 the last."""
        found = [self.features(batch, blocks)[1:] for _, batch in self._batches(images, batch_size)]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def embed(self, images: Images, *, batch_size: int = 64) -> Tensor:
        """Returns the pooled features before the classifier, (b, e)."""
        return torch.cat([self.features(batch)[0] for _, batch in self._batches(images, batch_size)])

    def attention(self, images: Images, blocks: Sequence[int] | None = None, *, batch_size: int = 8) -> Tensor:
        """Returns the attention weights of each block, (b, l, h, q, k): row q says where token q attends.

        Tokens before the patches come first. All maps of an image of a ViT-L/16 at 384 take 500 MB: choose blocks.

        Args:
            images: images of any kind.
            blocks: numbers of the blocks, 0 the first and -1 the last; all when not given.
            batch_size: images in a batch.
        """
        function = partial(attention, self.network, blocks=blocks)
        return torch.cat([self._run(batch, function) for _, batch in self._batches(images, batch_size)])

    def relevance(self, images: Images, classes: Sequence[int] | None = None) -> Tensor:
        """Returns the relevance of each patch for a class, (b, rows, columns), by gradient-weighted attention.

        Args:
            images: images of any kind.
            classes: the class of each image; the predicted one when not given.
        """
        _, batch = self.prepared(images)
        if classes is not None and np.shape(classes) != (len(batch),):
            raise UserError(f"classes={classes} must be one for each of {counted(len(batch), 'image')}")
        function = partial(relevance, self.network, classes=None if classes is None else torch.tensor(classes))
        grid = grid_of(self.network)
        found: Tensor = self._run(batch, function)
        return found[:, grid.prefix :].reshape(-1, *grid[1:])

    def prepared(self, images: Images) -> tuple[list[str], Tensor]:
        """Returns names of images, and all of them as the network takes them, (b, c, H, W)."""
        names, batches = zip(*self._batches(images, 64), strict=True)
        return [name for part in names for name in part], torch.cat(batches)

    def features(self, batch: Tensor, blocks: Sequence[int] = ()) -> list[Tensor]:
        """Returns the pooled features (b, e) of prepared images, and behind them the tokens after chosen blocks."""
        return self._run(batch, partial(features, self.network, blocks=blocks))  # type: ignore[no-any-return]

    def data(self, files: Sequence[Path | Image.Image], *, batch_size: int, num_workers: int = 0) -> ImageFiles:
        """Returns images as data whose batches are prepared for this model."""
        names = ("mean", "std", "image_size", "in_channels", "centre_share", "interpolation", "resize")
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        if missing := [name for name in names[:3] if facts[name] is None]:
            raise UserError(f"{self.place}: {', '.join(missing)} of its images: not known (give config={{...}})")
        if self.in_channels not in (1, 3):
            raise UserError(f"{self.place} takes {self.in_channels} channels, which no image file has (give a tensor)")
        data = ImageFiles(class_names=self.class_names or [], batch_size=batch_size, num_workers=num_workers, **facts)
        data.files = files
        return data

    def to_input(self, batch: Batch, data: ImageData) -> Tensor:
        """Returns the images of a batch, normalised, on the device of the network and in its type."""
        weight = next(self.network.parameters())
        return data.model_input(batch.replace(images=batch.images.to(weight.device)), 0).images.to(weight.dtype)

    def _run(self, batch: Tensor, function: Callable[[Tensor], Any]) -> Any:
        with named(f"{self.place}: "), torch.no_grad():
            return function(batch)

    def _batches(self, images: Images, batch_size: int) -> Iterator[tuple[list[str], Tensor]]:
        """Yields names and prepared images."""
        if isinstance(images, Tensor):
            for first in range(0, len(images), batch_size):
                part = self._of_tensor(images[first : first + batch_size])
                yield [f"image {first + number}" for number in range(len(part))], part
            return
        data = self.data(listed(images), batch_size=batch_size)
        dataset: Any = data.dataset("test")
        # not by the loader, which would draw from the global random numbers
        for request in evaluation_requests(size=len(data.files), batch_size=batch_size, rank=0, ranks=1):
            batch = dataset.__getitems__(request)
            if isinstance(batch, UserError):
                raise batch
            yield [dataset.name(index) for index in request.indices], self.to_input(batch, data)

    def _of_tensor(self, images: Tensor) -> Tensor:
        shape = "x".join(map(str, images.shape[1:]))
        wanted = (self.in_channels, *(self.image_size or images.shape[-2:]))
        if images.ndim != 4 or tuple(images.shape[1:]) != wanted:
            raise UserError(f"{self.place} takes tensors (b, {', '.join(map(str, wanted))}), not (b, {shape})")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise UserError(f"images are {images.dtype}: neither uint8 nor normalised floating-point numbers")
        weight = next(self.network.parameters())
        if images.dtype == torch.uint8:
            images = self.data([], batch_size=1).transform.normalise(images.to(weight.device))
        return images.to(weight.device, weight.dtype)


def listed(images: Images) -> list[Path | Image.Image]:
    """Returns the files, those in folders, and the images in memory, in the order given.

    Raises:
        UserError: names all paths that do not exist, folders without images, and arrays that are no images.
    """
    given: Any = [images] if isinstance(images, str) or not isinstance(images, Iterable) else images
    if isinstance(images, np.ndarray) and images.ndim < 4:
        given = [images]
    paths = [Path(item) for item in given if isinstance(item, str | PathLike)]
    find_images([path for path in paths if not path.is_file()])
    found: list[Path | Image.Image] = []
    for item in given:
        if isinstance(item, str | PathLike):
            found += find_images([Path(item)])
        else:
            found.append(item if isinstance(item, Image.Image) else _of_array(item))
    if not found:
        raise UserError("there are no images")
    return found


def _of_array(array: Any) -> Image.Image:
    pixels = np.asarray(array)
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if isinstance(array, Tensor) or pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or channels not in (1, 3, 4):
        what = f"{type(array).__name__} of {getattr(array, 'dtype', 'no type')} and shape {tuple(np.shape(array))}"
        kinds = "a file, a PIL image, a uint8 array (H, W, c) with c 1, 3 or 4, or one tensor of all"
        raise UserError(f"{what} is no image: give {kinds}")
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


def open_model(
    place: str, *, image_size: Size = None, config: Facts = None, trust: Trust = False, key: str = "ckpt"
) -> Source:
    """Returns a trained model, and prints what was assumed about it; arguments as those of ``open_source``.

    Raises:
        UserError: it cannot be had, or needs facts, which are named as they are given on the command line.
    """
    try:
        facts: Any = {"image_size": image_size, "config": config, "trust": trust}
        source = open_source(place, **facts, key=key)
    except UserError as error:
        raise UserError([as_flag(problem) for problem in error.problems]) from error
    for note in source.notes:
        say(row("warning", as_flag(note)))
    return source
