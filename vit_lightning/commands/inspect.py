"""``lightning inspect``: attention maps and measures of one or two trained models, as figures and a page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.embed import device_named, run_images
from vit_lightning.commands.load import Checkpoint, Facts, Model, Size, Trust, open_model, top_classes
from vit_lightning.config.files import differing_options, options_of
from vit_lightning.data.image_files import find_images
from vit_lightning.errors import UserError, named
from vit_lightning.figures.curves import file_of
from vit_lightning.figures.inside import maps_figure, model_figures
from vit_lightning.figures.inside_page import inside_page
from vit_lightning.figures.pictures import pixels_of
from vit_lightning.inspect.survey import Survey, survey
from vit_lightning.limits import at_least, refuse
from vit_lightning.notation import counted
from vit_lightning.storage.folder import new_folder, write_whole
from vit_lightning.storage.metrics import read_results
from vit_lightning.training.classifier import probabilities
from vit_lightning.weights.options import model_config
from vit_lightning.weights.sources import Source


def inspect(
    *images: Path,
    ckpt: Checkpoint,
    against: str | None = None,
    out: Path | None = None,
    count: int = 8,
    format: Literal["png", "svg"] = "png",
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
    device: str = "auto",
) -> Path:
    """Writes attention maps, relevance, and measures of tokens and weights as figures and one page; returns its path.

    Args:
        *images: image files and folders; by default test images of the run that trained the model.
        against: a second model, shown beside the first; as ckpt.
        out: new folder; by default RUN/inspect/TIME or runs/inspect/TIME.
        count: number of images at most.
        format: of the figures beside the page; svg keeps lines and text as such, for a paper.
        device: auto takes a GPU where there is one; or cpu, cuda, cuda:1, mps.

    Raises:
        UserError: models or images are not there, or a model has no patches that are known.
    """
    refuse(at_least(1, count=count))
    quiet()
    files = find_images(images)
    source = open_model(ckpt, image_size=image_size, config=config, trust=trust)
    pixels, labelled = (None, []) if files else _some_test_images(source, count, trust=trust)
    if len(files) > count:
        say(row("images", f"the first {count} of {len(files):,} (--count)"))
    second = [] if against is None else [open_model(against, image_size=image_size, trust=trust, key="against")]
    found: dict[str, Survey] = {}
    pictures, titles, known = {}, {}, {}
    configs = [_config(each) for each in (source, *second)]
    for number, each in enumerate([source, *second]):
        name = _name(each, [*found])
        model = Model(each)
        model.network.to(device_named(device))
        names, prepared = model.prepared(files[:count] if pixels is None else _resized(pixels, model))
        with named(f"{'against' if number else 'ckpt'}={each.place}: "):
            found[name] = survey(model.network, prepared)
        if found[name].without_maps:
            say(row("attention", f"{each.place}: no maps, rollout, relevance, distance: {found[name].without_maps}"))
        pictures[name] = _as_seen(model, prepared)
        titles[name] = _titles(model, labelled or names, found[name])
        known[name] = _known(each, configs[number], differing_options(configs))
    with new_folder(out, (source.run or Path("runs")) / "inspect", "") as folder:
        figures = {}
        for name, (figure, text) in model_figures(found).items():
            png = file_of(figure)
            figures[name] = png, text
            file = png if format == "png" else file_of(figure, format)
            write_whole(folder / f"{name.replace(' ', '_')}.{format}", file)
        for name, of_model in found.items():
            suffix = "" if len(found) == 1 else f"_{[*found].index(name) + 1}"
            shown = [] if of_model.without_maps else zip(titles[name], pictures[name], strict=True)
            for image, (title, picture) in enumerate(shown):
                maps: Figure = maps_figure(of_model, image, picture, f"{name}: {title}")
                write_whole(folder / f"attention_{image + 1:02}{suffix}.{format}", file_of(maps, format))
        path = folder / "inspect.html"
        command = shlex.join(["lightning", *(sys.argv[1:] or ["inspect"])])
        write_whole(path, inside_page(found, pictures, titles, known, figures, command))
    say(f"{counted(len(prepared), 'image')}, {counted(len(figures), 'figure')}: {path}")
    return path


def _some_test_images(source: Source, count: int, *, trust: bool) -> tuple[Tensor, list[str]]:
    """Returns test images of a run, evenly spaced, (b, c, H, W) in uint8, and their names with their classes."""
    data = run_images(source, "test", trust=trust)
    if not data.own_loaders:
        raise UserError(f"ckpt={source.place}: {data.title} has no image files: name images or folders")
    size = data.image_count("test")
    chosen = torch.arange(min(count, size)) * size // min(count, size)
    batches = list(data.plain_batches("test", chosen))
    names = [
        f"test image {index}, of class {data.label_names[label]}"
        for batch in batches
        for index, label in zip(batch.indices.tolist(), batch.labels.tolist(), strict=True)
    ]
    return torch.cat([batch.images for batch in batches]), names


def _resized(images: Tensor, model: Model) -> Tensor:
    """Returns images (b, c, H, W) in uint8 at the size of a model."""
    if model.image_size in (None, tuple(images.shape[2:])):
        return images
    resized = F.interpolate(images.float(), model.image_size, mode="bicubic", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8)


def _as_seen(model: Model, prepared: Tensor) -> list[Image.Image]:
    """Returns images as a model gets them."""
    pixels = pixels_of(prepared, model.mean, model.std)
    pixels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1].expand(-1, 3, -1, -1)
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]


def _titles(model: Model, names: list[str], found: Survey) -> list[str]:
    """Returns the name of each image with its most likely classes."""
    if found.relevance is None:
        return names
    classes = model.class_names or [str(number) for number in range(found.logits.shape[1])]
    tops = [
        top_classes(Path(name).name, of, classes, 3)
        for name, of in zip(names, probabilities(found.logits, multi_label=model.multi_label), strict=True)
    ]
    shares = [zip(top.classes, top.probabilities, strict=True) for top in tops]
    texts = [", ".join(f"{label} ({100 * value:.0f} %)" for label, value in share) for share in shares]
    return [f"{top.file}: predicted {text}" for top, text in zip(tops, texts, strict=True)]


def _config(source: Source) -> dict[str, Any]:
    """Returns the config of a source, or what is known of its model in the same words."""
    if source.config is not None:
        return dict(source.config)
    try:
        return {"model": model_config(source.network)}
    except UserError:  # a network of others
        return {}


def _known(source: Source, config: Mapping[str, Any], options: Sequence[str]) -> str:
    """Returns what is known of a model, and its values of the options in which two differ."""
    results = (None if source.run is None else read_results(source.run)) or {}
    measured = {"test": results.get("test/acc"), "validation": results.get("val/acc")}
    facts = [f"{split} accuracy {100 * value:.2f} %" for split, value in measured.items() if isinstance(value, float)]
    values = options_of(config)
    key = next((key for key in ("model.pool.class_path", "model.pool") if values.get(key) is not None), "")
    facts += [f"pool {str(values[key]).rpartition('.')[2]}"] if key else []
    facts += [f"{option}={values.get(option)}" for option in options if option != key]
    return ", ".join([type(source.network).__name__, *facts])


def _name(source: Source, others: list[str]) -> str:
    """Returns a name of a model that no other has."""
    name = source.place if source.run is None else source.run.name
    return name if name not in others else f"{name} ({source.place})" if source.place != name else f"{name} (again)"
