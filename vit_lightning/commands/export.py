"""``lightning export`` and ``convert``: a trained model in a folder for other programs, or a ViT as a file of another
implementation, with proof that its logits are the same."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shlex
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vit_lightning.commands.console import quiet, row, say, stage_line
from vit_lightning.commands.load import Checkpoint, Facts, Size, Trust, open_model
from vit_lightning.config.networks import network_in_file
from vit_lightning.errors import UserError, first_line, named
from vit_lightning.limits import refuse
from vit_lightning.storage.checkpoint_files import run_folder_of
from vit_lightning.storage.folder import whole_folder, write_whole
from vit_lightning.storage.metrics import read_results
from vit_lightning.weights.convert import (
    TOLERANCE,
    TRACED,
    WRITTEN,
    largest_difference,
    random_images,
    to_reference,
)
from vit_lightning.weights.describe import model_config
from vit_lightning.weights.descriptions import KERNELS
from vit_lightning.weights.files import FORMATS, write_tensors
from vit_lightning.weights.identify import OURS
from vit_lightning.weights.sources import Source, open_source

Form = Literal["safetensors", "onnx", "torch-export", "hf"]


def export(
    *,
    ckpt: Checkpoint,
    out: Path,
    to: Form = "safetensors",
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
) -> Path:
    """Writes the folder of an exported model and returns it; the folder is complete or absent.

    Args:
        out: new folder for the weights and config.json.
        to: safetensors (the names of this package), onnx (a graph for onnxruntime and others), torch-export (a graph
            for torch alone), or hf (transformers loads it).

    Raises:
        UserError: the model cannot be had, or not in this form, or its logits there differ from those of the source.
    """
    quiet()
    missing = _missing(to)
    try:
        source = open_model(ckpt, image_size=image_size, config=config, trust=trust)
    except UserError as error:
        raise UserError([*missing, *error.problems]) from error
    refuse(missing)
    _write_folder(source, out, to, f"ckpt={ckpt}, to={to}", resized=image_size is not None)
    return out


def _write_folder(source: Source, out: Path, to: Form, place: str, *, resized: bool, key: str = "out") -> None:
    """Writes a model to a new folder, and says what it holds; errors name the place of the model."""
    with whole_folder(out, key) as folder:
        with named(f"{place}: "):
            difference = write_model(source, folder, to)
        if to == "hf":
            write_whole(folder / "README.md", model_card(source, out.resolve().name, is_tested=not resized))
        names = ", ".join(sorted(path.name for path in folder.iterdir()))
    say_same_logits(difference)
    say(row("written", f"{out}: {names}"))


def say_same_logits(difference: float) -> None:
    """Says how far the logits of what was written are from those of the source."""
    say(row("same logits", f"within {difference:.2g} (allowed {TOLERANCE:g}) for batches of 1, 2 and 5 images"))


def write_model(source: Source, folder: Path, to: Form) -> float:
    """Writes a model to a folder and returns how far its logits are from the source's, at most ``TOLERANCE``.

    Raises:
        UserError: it cannot be expressed in this form, or its logits differ.
    """
    network, shape = source.network.float().eval(), image_shape(source)
    if to != "hf":
        text = json.dumps(describe_model(source, to), indent=2, ensure_ascii=False) + "\n"
        write_whole(folder / "config.json", without_home(text))
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
    if not {"in_channels", "image_size"} <= source.view.keys():
        raise UserError("the size of its images is not known (give --image_size)")
    height, width = source.view["image_size"]
    return source.view["in_channels"], height, width


def name_of(source: Source) -> str:
    """Returns the name of a model without the folders of this machine."""
    path = Path(source.place)
    return path.resolve().name if path.exists() else source.place


def describe_model(source: Source, to: Form) -> dict[str, Any]:
    """Returns the contents of ``config.json``: model as in a config, preprocessing, class names, origin."""
    from vit_lightning import __version__

    return {
        "vit_lightning": __version__,
        "source": name_of(source),
        "format": to,
        "model": _model(source),
        "preprocessing": source.view,
        "class_names": source.class_names,
    }


def _model(source: Source) -> dict[str, Any] | None:
    """Returns the model as a config has it; None for a class that no config names."""
    if source.vit is not None:
        with contextlib.suppress(UserError):  # with blocks of the user's own
            return model_config(source.vit)
    if source.config is None:
        return None
    model: dict[str, Any] = source.config["model"]
    return model


def without_home(text: str) -> str:
    """Returns a text with the home folder as ~."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _safetensors(source: Source, folder: Path, images: Tensor) -> nn.Module:
    if _model(source) is None:
        raise UserError(f"{type(source.network).__name__} is no model of a config (choose onnx or torch-export)")
    write_tensors(source.network.state_dict(), folder / "model.safetensors")
    files = None if source.path is None else run_folder_of(source.path)
    again = lambda config, _: network_in_file(config, files)  # noqa: E731
    return open_source(folder, make_network=again, trust=True, key="out").network  # its classes were made already


def _hf(source: Source, folder: Path, images: Tensor) -> nn.Module:
    write_hf(source, folder)
    return open_source(folder, make_network=network_in_file, key="out").network


def write_hf(source: Source, folder: Path) -> None:
    """Writes the files of ``save_pretrained`` of a ViTForImageClassification and its image processor.

    Raises:
        UserError: names the options of the model that Hugging Face's ViT does not have.
    """
    if source.vit is None:
        raise UserError(f"{type(source.network).__name__} is no ViT of ours (choose onnx or torch-export)")
    with _other_forms(source):
        tensors, config = to_reference(source.vit, family="hf", layout={"names": "disk"}, dropouts=False)
    names = source.class_names or [f"LABEL_{number}" for number in range(source.vit.num_classes)]
    config |= {"architectures": ["ViTForImageClassification"], "model_type": "vit", "dtype": "float32"}
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    config |= {"problem_type": "multi_label_classification"} if source.view.get("multi_label") else {}
    config.pop("num_labels", None)
    write_tensors(tensors, folder / "model.safetensors")
    write_whole(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if {"mean", "std"} <= source.view.keys():
        preprocessing = json.dumps(_image_processor(source.view), indent=2) + "\n"
        write_whole(folder / "preprocessor_config.json", preprocessing)


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


@contextlib.contextmanager
def _other_forms(source: Source) -> Iterator[None]:
    """Adds to the problems of one implementation which others, and which forms of export, have all of a ViT."""
    try:
        yield
    except UserError as error:
        others = []
        assert source.vit is not None
        for family in WRITTEN:
            with contextlib.suppress(UserError):
                to_reference(source.vit, family=family, dropouts=False)
                others.append(family)
        families = f"all of it is in {', '.join(others)} (lightning convert --to={others[0]}), and" if others else ""
        way_out = f"{families} lightning export --to=onnx or torch-export takes any network".lstrip()
        raise UserError([*error.problems, way_out]) from error


def _image_processor(view: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of transformers' image processor that prepares images as our test images are."""
    height, width = view["image_size"]
    share, resize = view.get("centre_share", 1.0), view.get("resize")
    if resize is None:  # a rectangle is squashed there, and cut out of the middle here
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
    again: Callable[[Tensor], Tensor] = torch.export.load(path).module()
    return again


def _onnx(source: Source, folder: Path, images: Tensor) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        program: Any = torch.onnx.export(
            source.network,
            (images,),
            dynamo=True,
            dynamic_shapes=_BATCH,
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # with the paths of this machine
    path = folder / "model.onnx"
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


_BATCH = ({0: torch.export.Dim("batch")},)
_FORMS: dict[Form, Callable[[Source, Path, Tensor], Callable[[Tensor], Tensor]]] = {
    "safetensors": _safetensors,
    "onnx": _onnx,
    "torch-export": _torch_export,
    "hf": _hf,
}
"""Functions that write a model and return what is read from its files again, by the value of ``--to``."""


def _missing(to: Form) -> list[str]:
    """Returns the packages that a form needs and that are not installed, as a problem."""
    needed = ("onnx", "onnxruntime", "onnxscript") if to == "onnx" else ()
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return [f"to={to} needs {', '.join(missing)}: pip install 'vit-lightning[export]'"] if missing else []


def convert(
    source: str,
    dst: Path,
    *,
    to: str,
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
) -> None:
    """Writes a ViT under the names of another implementation, and as JSON the arguments of its constructor.

    Args:
        source: the model: run folder, checkpoint, file or folder of weights, or hf-hub:OWNER/NAME, timm:NAME,
            torchvision:NAME, wandb:ENTITY/PROJECT/ARTIFACT:ALIAS.
        dst: new file that ends with .safetensors, .pth or .npz; or with --to=hf a new folder, that of lightning export.
        to: implementation: timm, torchvision, hf, deit, vit_pytorch, simple_vit, crate, torch_encoder,
            einops_tutorial or timm_legacy.

    Raises:
        UserError: names the options that the implementation does not have; or the logits differ.
    """
    to = to.replace("-", "_")
    # weights, and the arguments of the constructor beside them; or the one folder
    files = (dst, dst.with_suffix(".json")) if dst.suffix else (dst,)
    of_dst = dict(zip(files, ("", f", where the arguments of {dst} are to be"), strict=False))
    problems = [f"DST {path} is there already{why} (choose a new one)" for path, why in of_dst.items() if path.exists()]
    if to == OURS:
        problems.append(f"to={OURS}: lightning export --ckpt={shlex.quote(source)} --out=FOLDER writes our own names")
    elif to not in WRITTEN:
        problems.append(f"to={to} must be one of {', '.join(WRITTEN)}")
    if dst.suffix not in FORMATS and (to != "hf" or dst.suffix):
        folder = ", or be a folder" if to == "hf" else ""
        problems.append(f"DST {dst} must end with {', '.join(FORMATS)}{folder}")
    refuse(problems)
    quiet()
    model = open_model(source, image_size=image_size, config=config, trust=trust, key="source")
    if model.vit is None:
        raise UserError(f"source={source}: {type(model.network).__name__} is no ViT of ours")
    if not dst.suffix:
        _write_folder(model, dst, "hf", f"source={source}", resized=image_size is not None, key="DST")
        return
    with named(f"source={source}: "):
        difference = _write_converted(model, to, files)
    say_same_logits(difference)
    say(row("written", ", ".join(map(str, files))))


def _write_converted(source: Source, to: str, files: Sequence[Path]) -> float:
    """Writes the files, reads them again, and returns the largest difference of the logits."""
    vit, shape = source.vit, image_shape(source)
    assert vit is not None
    vit.float()
    dst = files[0]
    with _other_forms(source):
        tensors, config = to_reference(vit, family=to, dropouts=False)
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"DST {dst} cannot be made: {fault.strerror}") from fault
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=dst.parent) as folder:
        parts = [Path(folder) / path.name for path in files]
        write_tensors(tensors, parts[0])
        known = {"preprocessing": source.view, "class_names": source.class_names}
        description = {"family": to, "config": config, **known}
        write_whole(parts[1], without_home(json.dumps(description, indent=2, ensure_ascii=False) + "\n"))
        again = open_source(parts[0], make_network=network_in_file, key="DST").network
        difference = largest_difference(vit, again, shape)
        for part, path in zip(reversed(parts), reversed(files), strict=True):  # the weights come last
            os.replace(part, path)
    return difference
