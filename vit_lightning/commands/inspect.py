"""``lightning inspect``: attention maps and measures of a trained model, as figures and a page."""

import shlex
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.embed import run_images
from vit_lightning.commands.load import Checkpoint, Facts, Model, Size, Trust, open_model, top_classes
from vit_lightning.data.image_files import find_images
from vit_lightning.errors import UserError, at_least, counted, named, refuse
from vit_lightning.figures.curves import file_of
from vit_lightning.figures.inside import maps_figure, model_figures
from vit_lightning.figures.inside_page import inside_page
from vit_lightning.figures.pictures import pixels_of
from vit_lightning.inspect.survey import Survey, survey
from vit_lightning.storage.folder import new_folder, write_whole
from vit_lightning.storage.metrics import read_results
from vit_lightning.training.classifier import probabilities
from vit_lightning.training.resources import device_type
from vit_lightning.weights.sources import Source


def inspect(
    *images: Path,
    ckpt: Checkpoint,
    out: Path | None = None,
    count: int = 8,
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
) -> Path:
    """Writes attention maps, relevance, and measures of tokens and weights as figures and one page; returns its path.

    Args:
        *images: image files and folders; by default test images of the run that trained the model.
        out: new folder; by default RUN/inspect/TIME or runs/inspect/TIME.
        count: number of images at most.

    Raises:
        UserError: model or images are not there, or it has no patches that are known.
    """
    refuse(at_least(1, count=count))
    quiet()
    files = find_images(images)
    source = open_model(ckpt, image_size=image_size, config=config, trust=trust)
    pixels, labelled = (None, []) if files else _some_test_images(source, count, trust=trust)
    if len(files) > count:
        say(row("images", f"the first {count} of {len(files):,} (--count)"))
    model = Model(source)
    model.network.to(device_type("auto"))
    names, prepared = model.prepared(files[:count] if pixels is None else _resized(pixels, model))
    with named(f"ckpt={source.place}: "):
        found = survey(model.network, prepared)
    if found.without_maps:
        say(row("attention", f"{source.place}: no maps, rollout, relevance, distance: {found.without_maps}"))
    pictures, titles = _as_seen(model, prepared), _titles(model, labelled or names, found)
    name = source.place if source.run is None else source.run.name
    with new_folder(out, (source.run or Path("runs")) / "inspect", "") as folder:
        figures = {title: (file_of(figure), text) for title, (figure, text) in model_figures(found).items()}
        for title, (png, _) in figures.items():
            write_whole(folder / f"{title.replace(' ', '_')}.png", png)
        for number, (title, picture) in enumerate([] if found.without_maps else zip(titles, pictures, strict=True)):
            maps: Figure = maps_figure(found, number, picture, f"{name}: {title}")
            write_whole(folder / f"attention_{number + 1:02}.png", file_of(maps))
        path = folder / "inspect.html"
        command = shlex.join(["lightning", *(sys.argv[1:] or ["inspect"])])
        write_whole(path, inside_page(found, name, _known(source), pictures, titles, figures, command))
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


def _known(source: Source) -> str:
    """Returns what is known of a model."""
    results = (None if source.run is None else read_results(source.run)) or {}
    measured = {"test": results.get("test/acc"), "validation": results.get("val/acc")}
    facts = [f"{split} accuracy {100 * value:.2f} %" for split, value in measured.items() if isinstance(value, float)]
    return ", ".join([type(source.network).__name__, *facts])
