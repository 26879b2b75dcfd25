"""``lightning export``: a trained model in a folder for other programs, with proof that its logits are the same."""

import contextlib
import importlib.util
import io
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit_lightning.commands.console import quiet, row, say, stage_line
from vit_lightning.commands.load import Checkpoint, Facts, Size, Trust, open_model
from vit_lightning.config.networks import network_in_file, open_source
from vit_lightning.errors import UserError, choice, first_line, named, refuse
from vit_lightning.sizes import pair
from vit_lightning.storage.folder import whole_folder, write_whole
from vit_lightning.storage.metrics import read_results
from vit_lightning.weights.convert import TOLERANCE, TRACED, WRITTEN, largest_difference, random_images, to_reference
from vit_lightning.weights.descriptions import BY_TIMM, KERNELS
from vit_lightning.weights.files import write_tensors
from vit_lightning.weights.options import model_config
from vit_lightning.weights.sources import Source


def export(
    *,
    ckpt: Checkpoint,
    out: Path,
    to: str = "safetensors",
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
) -> Path:
    """Writes the folder of an exported model and returns it; the folder is complete or absent.

    Args:
        out: new folder for the weights and config.json.
        to: safetensors (the names of this package), onnx (a graph for onnxruntime and others), torch-export (a graph
            for torch alone), hf (transformers loads it), or the names of another implementation, with the arguments of
            its constructor: timm (its create_model reads local-dir:FOLDER), torchvision, deit, vit_pytorch, simple_vit,
            crate, torch_encoder, einops_tutorial or timm_legacy.

    Raises:
        UserError: the model cannot be had, or not in this form, or its logits there differ from those of the source.
    """
    quiet()
    missing = [*choice("to", to, _FORMS), *_missing(to)]
    try:
        source = open_model(ckpt, image_size=image_size, config=config, trust=trust)
    except UserError as error:
        raise UserError([*missing, *error.problems]) from error
    refuse(missing)
    with whole_folder(out) as folder:
        with named(f"ckpt={ckpt}, to={to}: "):
            difference = write_model(source, folder, to)
        if to == "hf":
            write_whole(folder / "README.md", model_card(source, out.resolve().name, is_tested=image_size is None))
        names = ", ".join(sorted(path.name for path in folder.iterdir()))
    say(row("same logits", f"within {difference:.2g} (allowed {TOLERANCE:g}) for batches of 1, 2 and 5 images"))
    _, height, width = image_shape(source)
    if to == "hf" and height != width and source.view.get("resize") in (None, "cover"):
        text = f"transformers squashes them to {height} x {width}, where here the middle is cut out: crop them first"
        say(row("images", text))
    say(row("written", f"{out}: {names}"))
    return out


def write_model(source: Source, folder: Path, to: str) -> float:
    """Writes a model to a folder and returns how far its logits are from the source's, at most ``TOLERANCE``.

    Raises:
        UserError: it cannot be expressed in this form, or its logits differ.
    """
    network, shape = source.network.float().eval(), image_shape(source)
    if to not in WRITTEN:
        _write_json(folder / "config.json", describe_model(source))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tracing and of deprecations inside torch
            again = _FORMS[to](source, folder, random_images(TRACED, shape))
    except UserError:
        raise
    except Exception as fault:  # of torch.export and the layers of others, of many types
        raise UserError(f"{type(network).__name__} cannot be exported: {first_line(fault)}") from fault
    return largest_difference(network, again, shape)


def image_shape(source: Source) -> tuple[int, int, int]:
    """Returns channels, height and width of the images that a network gets."""
    if "image_size" not in source.view:
        raise UserError(f"ckpt={source.place} does not tell the size of its images: give --image_size")
    return (source.view.get("in_channels", 3), *pair(source.view["image_size"]))


def describe_model(source: Source) -> dict[str, Any]:
    """Returns the contents of ``config.json``: model as in a config, preprocessing, class names, origin."""
    from vit_lightning import __version__

    path = Path(source.place)
    return {
        "vit_lightning": __version__,
        "source": path.resolve().name if path.exists() else source.place,  # without the folders of this machine
        "model": _model(source),
        **_description(source),
    }


def _description(source: Source) -> dict[str, Any]:
    """Returns what is said beside weights: how images are prepared, where that is known, and names of the classes."""
    channels = {1: "gray", 3: "R, G, B"}.get(source.view.get("in_channels", 3), "as in training")
    prepared = f"float32 (batch, channels, height, width), channels {channels}: (pixels / 255 - mean) / std"
    usual, more = ({"interpolation": "bicubic"}, {"input": prepared}) if "mean" in source.view else ({}, {})
    return {"preprocessing": {**usual, **source.view}, **more, "class_names": source.class_names}


def _model(source: Source) -> dict[str, Any] | None:
    """Returns the model as a config has it; None for a class that no config names."""
    if source.vit is not None:
        with contextlib.suppress(UserError):  # with blocks of the user's own
            return model_config(source.vit)
    return None if source.config is None else source.config["model"]


def _safetensors(source: Source, folder: Path, images: Tensor) -> nn.Module:
    if _model(source) is None:
        raise UserError(f"{type(source.network).__name__} is no model of a config (choose onnx or torch-export)")
    write_tensors(source.network.state_dict(), folder / "model.safetensors")
    again = lambda config, _: network_in_file(config, source.run)  # noqa: E731
    return open_source(folder, make_network=again, trust=True, key="out").network  # its classes were made already


def _reference(family: str, source: Source, folder: Path, images: Tensor) -> nn.Module:
    """Writes a ViT under the names of another implementation; for Hugging Face the files of ``save_pretrained``."""
    vit, view = source.vit, source.view
    if vit is None:
        raise UserError(f"{type(source.network).__name__} is no ViT of ours (choose onnx or torch-export)")
    try:
        tensors, config = to_reference(vit, family=family, layout={"names": "disk"} if family == "hf" else None)
    except UserError as error:
        raise UserError([*error.problems, "lightning export --to=onnx or torch-export takes any network"]) from error
    if family == "hf":
        names = source.class_names or [f"LABEL_{number}" for number in range(vit.num_classes)]
        config |= {"architectures": ["ViTForImageClassification"], "model_type": "vit", "dtype": "float32"}
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
        config |= {"problem_type": "multi_label_classification"} if view.get("multi_label") else {}
        config.pop("num_labels", None)  # transformers counts id2label
        if {"mean", "std"} <= view.keys():
            _write_json(folder / "preprocessor_config.json", _image_processor(view))
    else:
        more = _read_by_timm(config, source, 1 + ("dist_token" in tensors)) if family == "timm" else {}
        config = {"family": family, "config": config, **_description(source), **more}
    _write_json(folder / "config.json", config)
    write_tensors(tensors, folder / "model.safetensors")
    return open_source(folder, key="out").network


_OF_TIMM = {("", 1): "vit_base_patch16_224", ("", 2): "deit_base_distilled_patch16_224"}
_OF_TIMM |= {("layernorm_1e-5", 1): "vit_base_patch16_clip_224"}
"""Models of timm of any size, by their norm, which its files cannot name, and number of heads."""


def _read_by_timm(arguments: Mapping[str, Any], source: Source, heads: int) -> dict[str, Any]:
    """Returns what ``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads; nothing where it could not."""
    view, resize, name = source.view, source.view.get("resize"), _OF_TIMM.get((arguments.get("norm_layer", ""), heads))
    if name is None or {"mlp_layer", "embed_norm_layer"} & arguments.keys():
        return {}
    cfg = {theirs: view[ours] for theirs, ours in BY_TIMM.items() if ours in view} | {"input_size": image_shape(source)}
    cfg |= {"interpolation": view.get("interpolation", "bicubic").rpartition("_")[2]}
    # timm rounds down
    cfg |= {"crop_pct": cfg["input_size"][1] / (pair(resize)[0] + 1e-6)} if resize not in (None, "cover") else {}
    cfg |= {"crop_mode": "squash" if isinstance(resize, list | tuple) else "center"}
    cfg |= {"num_classes": source.network.num_classes, "classifier": ["head", "head_dist"][:heads]}
    model = {key: value for key, value in {"pre_norm": False, **arguments}.items() if key != "norm_layer"}
    return {"architecture": name, "model_args": model, "label_names": source.class_names, "pretrained_cfg": cfg}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def model_card(source: Source, name: str, *, is_tested: bool) -> str:
    """Returns the card of a model for Hugging Face's hub; with the results of its run where they are of this size."""
    folder, (channels, height, width) = Path(source.place), image_shape(source)
    results = (read_results(folder) if is_tested and folder.is_dir() else None) or {}
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: image-classification\n---",
        f"# {name}",
        f"A ViT of vit_lightning for images of {channels} x {height} x {width}, which "
        f'`AutoModelForImageClassification.from_pretrained("{name}")` loads.',
        "Its image processor takes only images that are grey already." * (channels == 1),
        stage_line("test", results),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _image_processor(view: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of transformers' image processor that prepares images as our test images are."""
    height, width = view["image_size"]
    share, resize = view.get("centre_share", 1.0), view.get("resize")
    if resize in (None, "cover"):  # a rectangle is squashed there, and cut out of the middle here
        edges = (round(height / share), round(width / share))
        resize = edges[0] if height == width else edges
    size = {"shortest_edge": resize} if isinstance(resize, int) else {"height": resize[0], "width": resize[1]}
    kernel = view.get("interpolation", "bicubic").rpartition("_")[2]
    return {
        "image_processor_type": "BitImageProcessor",  # unlike ViT's it cuts out the middle
        "do_resize": True,
        "size": size,
        "resample": next(number for number, name in KERNELS.items() if name == kernel),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(view["mean"]),
        "image_std": list(view["std"]),
        "do_convert_rgb": len(view["mean"]) == 3,
    }


def _torch_export(source: Source, folder: Path, images: Tensor) -> Callable[[Tensor], Tensor]:
    program = torch.export.export(source.network, (images,), dynamic_shapes=_BATCH)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # with the paths of this machine
    path = folder / "model.pt2"
    torch.export.save(program, path)
    return torch.export.load(path).module()


def _onnx(source: Source, folder: Path, images: Tensor) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
        program: Any = torch.onnx.export(
            source.network, (images,), dynamo=True, dynamic_shapes=_BATCH, verbose=False, **names
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # with the paths of this machine
    path = folder / "model.onnx"
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


_BATCH = ({0: torch.export.Dim("batch")},)
_FORMS: dict[str, Callable[[Source, Path, Tensor], Callable[[Tensor], Tensor]]] = {
    "safetensors": _safetensors,
    "onnx": _onnx,
    "torch-export": _torch_export,
    **{family: partial(_reference, family) for family in WRITTEN},
}
"""Functions that write a model and return what is read from its files again, by the value of ``--to``."""


def _missing(to: str) -> list[str]:
    """Returns the packages that a form needs and that are not installed, as a problem."""
    needed = ("onnx", "onnxruntime", "onnxscript") if to == "onnx" else ()
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return [f"to={to} needs {', '.join(missing)}: pip install 'vit-lightning[export]'"] if missing else []
