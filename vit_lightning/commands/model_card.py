"""The model card of an exported model: what it is, how to load it, how good it is, what it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vit_lightning.commands.console import stage_line
from vit_lightning.notation import counted
from vit_lightning.storage.metrics import read_results
from vit_lightning.weights.logits import TOLERANCE
from vit_lightning.weights.sources import Source

LOAD = {
    "safetensors": """import vit_lightning

model = vit_lightning.load(".")  # this folder
logits = model.network({images})
""",
    "hf": """from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained(".")  # this folder
processor = AutoImageProcessor.from_pretrained(".")  # of PIL images: processor(images, return_tensors="pt")
logits = model({images}).logits
""",
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
logits = session.run(["logits"], {{"images": {images}.numpy()}})[0]
""",
    "torch-export": """model = torch.export.load("model.pt2").module()
logits = model({images})
""",
}
"""Lines that load a model, by the value of ``--to``."""
SHOWN_CLASSES = 20


def model_card(
    source: Source,
    *,
    name: str,
    to: str,
    shape: tuple[int, int, int],
    difference: float,
    license: str | None,
    resized: bool,
) -> str:
    """Returns ``README.md`` of an exported model.

    Args:
        source: the model.
        name: title of the card.
        to: form of the export.
        shape: channels, height and width of its images.
        difference: largest difference of its logits from the source's.
        license: licence of the weights; not stated without one.
        resized: whether the images have another size than those on which the run was tested.
    """
    from vit_lightning import __version__

    head = {"license": license} if license else {}
    task = "image-feature-extraction" if getattr(source.network, "num_classes", None) == 0 else "image-classification"
    head |= {"library_name": "transformers" if to == "hf" else "vit-lightning", "pipeline_tag": task}
    parameters = sum(weight.numel() for weight in source.network.parameters())
    channels, height, width = shape
    use = LOAD[to].format(images=f"torch.rand(5, {channels}, {height}, {width})")
    if not {"mean", "std"} <= source.view.keys():
        use = "".join(line for line in use.splitlines(True) if not line.startswith("processor"))
        use = use.replace("AutoImageProcessor, ", "")
    names = source.class_names or []
    number = len(names) or getattr(source.network, "num_classes", None)
    more = f", and {len(names) - SHOWN_CLASSES:,} more in config.json" if len(names) > SHOWN_CLASSES else ""
    sections = {
        "Use": f"```python\nimport torch\n{use}```\n\n{_preprocessing(source.view)}"
        + "".join(f"\nThe image processor differs: {text}." for text in _differences(shape) if to == "hf"),
        "Classes": f"{', '.join(names[:SHOWN_CLASSES])}{more}." if names else "",
        "Results": _results(source, resized),
        "Data and training": _training(source.config) if source.config is not None else "",
        "Check": "The logits were compared with those of the source in float32, for random images in batches of 1, 2 "
        f"and 5: they differ by at most {difference:.2g} (allowed: {TOLERANCE:g}).",
        "Assumed": "\n".join(f"- {note}" for note in source.notes),
        "Licence": f"Of the weights: {license or 'not stated'}.",
    }
    what = (
        f"{type(source.network).__name__} with {parameters:,} parameters for images of {channels} x {height} x {width} "
        f"(channels, height, width){f' and {number:,} classes' if number else ''}; "
        f"written by vit_lightning {__version__} from `{name_of(source)}`."
    )
    parts = [f"# {name}\n\n{what}", *(f"## {title}\n\n{text}" for title, text in sections.items() if text)]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n\n".join(parts) + "\n"


def name_of(source: Source) -> str:
    """Returns the name of a model without the folders of this machine."""
    path = Path(source.place)
    return path.resolve().name if path.exists() else source.place


def _preprocessing(view: Mapping[str, Any]) -> str:
    if not {"mean", "std"} <= view.keys():
        return "How its images were prepared is not known."
    mean, std = ([round(float(value), 6) for value in view[key]] for key in ("mean", "std"))
    share = view.get("centre_share", 1.0)
    cut = "the middle of the image" if share == 1.0 else f"the middle {100 * share:g} % of the image's sides"
    kernel = view.get("interpolation", "bicubic").removeprefix("fast_")
    return (
        f"The input is float32 (b, c, H, W), any number of images: {cut}, resized ({kernel}, antialiased), as values "
        f"between 0 and 1, minus the mean {mean}, divided by the standard deviation {std}."
    )


def _differences(shape: tuple[int, int, int]) -> list[str]:
    """Returns where the image processor of transformers prepares images otherwise."""
    texts = {
        "it squeezes the whole image to a rectangle, of which it takes the middle": shape[1] != shape[2],
        "it takes only images that are grey already": shape[0] == 1,
    }
    return [text for text, holds in texts.items() if holds]


def _results(source: Source, resized: bool) -> str:
    """Returns the test results of a run with their interval and number of images."""
    folder = Path(source.place)
    results = (read_results(folder) if folder.is_dir() else None) or {}
    test = stage_line("test", results)
    if not test:
        return "None are known."
    count = f", on {counted(results['test_images'], 'test image')}" if "test_images" in results else ""
    size = ", measured before the image size was changed" if resized else ""
    return (
        f"{test.removeprefix('test').strip()}{count}, in one run with "
        f"seed {results['seed']} of {counted(results['epochs'], 'epoch')}{size}. The weights are those of the best of "
        f"its checkpoints by the validation images, step {results['best_step']:,}."
    )


def _training(config: Mapping[str, Any]) -> str:
    """Returns the part on data and training."""
    shown = {key: config.get(key) for key in ("init_from", "freeze", "data", "optimizer", "loss")}
    parts = {key: config.get(key) or {} for key in ("ema", "lora")}
    shown |= {key: part for key, part in parts.items() if part.get("decay") is not None or part.get("rank")}
    return f"```yaml\n{yaml.safe_dump(_given(shown), sort_keys=False, allow_unicode=True)}```"


def _given(value: Any) -> Any:
    """Returns a config without options that are not set, and without the folders of files."""
    if isinstance(value, dict):
        return {key: part for key, item in value.items() if (part := _given(item)) not in (None, {})}
    if isinstance(value, list):
        return [_given(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):  # a place on this machine
        return Path(value).name
    return value
