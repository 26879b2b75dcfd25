"""Weights from any place, a file, a folder or a name, read as tensors and plain data alone; and written to files."""

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError, first_line, meant, reading
from vit_lightning.storage.checkpoint_files import (
    BEST,
    DOWNLOADS,
    LAST,
    check_checkpoint,
    find_checkpoint,
    network_state,
    newest_run,
    read_archive,
)
from vit_lightning.storage.wandb_sources import artifact_path
from vit_lightning.weights.descriptions import Described, described, of_args, with_args
from vit_lightning.weights.hubs import LIBRARIES, cfg_of_timm, hub_folder
from vit_lightning.weights.unwrap import unwrapped

PLACES = (*LIBRARIES, "hf-hub", "wandb")
"""What may stand before the colon in the name of a model."""
IN_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights that a folder of ``save_pretrained`` or of an export may hold, in the order in which they count."""
CLASSES = ("class_to_idx", "idx_to_class", "class_names", "classes")
"""Where a file has the names of its classes, itself or among the ``hyper_parameters`` of Lightning."""


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors to a .safetensors file; of a full disk only OSError tells."""
    from safetensors.torch import save

    # copies: it refuses tensors that share memory; transformers wants to know whose they are
    path.write_bytes(save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, {"format": "pt"}))


@dataclass(frozen=True)
class WeightsFile:
    """Weights that were read, and what the file and those beside it say about them.

    Args:
        place: the place that was asked for.
        path: file, or folder of files; None if a library of others fetched the weights.
        tensors: floating-point weights under their names, without wrappers around them and prefixes of all names.
        config: description of the model in or beside the file: config.json, or timm's architecture and pretrained_cfg.
        checkpoint: whole contents of a checkpoint of ours.
        view: preprocessing of images as far as it is known: image_size, in_channels, centre_share, mean, std.
        unread: why a fact of the preprocessing could not be read, by its name.
        notes: sentences on what was chosen and left out.
        network: network of a library of others, which fetched the weights.
    """

    place: str
    path: Path | None
    tensors: dict[str, Tensor]
    config: Mapping[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    view: Mapping[str, Any] | None = None
    unread: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    network: nn.Module | None = None


def read_weights(place: str | Path, key: str = "source") -> WeightsFile:
    """Returns the weights at a place; loads no code.

    Args:
        place: run folder, checkpoint, .safetensors, .pth, .pt, .bin, .pth.tar, .npz, folder of ``save_pretrained`` or
            of an export, hf-hub:owner/name, timm:NAME, torchvision:NAME, or wandb:ENTITY/PROJECT/ARTIFACT:ALIAS.
        key: option that errors name.

    Raises:
        UserError: it is not there, damaged, holds no weights, or holds more than tensors and plain data.
    """
    with naming(key, place):
        return _read(str(place), key)


@contextlib.contextmanager
def naming(key: str, place: str | Path | WeightsFile) -> Iterator[None]:
    """Begins each problem inside with the option and the place of weights."""
    name = place.place if isinstance(place, WeightsFile) else str(place)
    named = f"{key}={name}"
    try:
        with reading(name):
            yield
    except UserError as error:
        problems = [text.removeprefix(f"{key}=") if text.startswith(named) else text for text in error.problems]
        raise UserError(
            f"{key}={text}" if text.startswith(name) else f"{named}: {text}" for text in problems
        ) from error.__cause__


def _read(place: str, key: str) -> WeightsFile:
    library, _, name = place.partition(":")
    if library in LIBRARIES:
        network, about = LIBRARIES[library](name)
        tensors, notes = unwrapped(network.state_dict())
        view, unread = described(about)
        return WeightsFile(place, None, tensors, about, view=view, unread=unread, notes=notes, network=network)
    if name and library not in PLACES and not Path(place).exists():
        raise UserError(f"{library}: is none of {', '.join(PLACES)}{meant(library, PLACES)}")
    path = hub_folder(name) if library == "hf-hub" else Path(place)
    path = artifact_path(place, key, DOWNLOADS) if library == "wandb" else path
    if not path.is_dir() or any((path / name).is_file() for name in (BEST, LAST)):
        path = find_checkpoint(place, key)
    file = _file_in(path) if path.is_dir() else path
    contents = _contents(file)
    if is_ours(contents):
        checkpoint = check_checkpoint(file, contents)
        tensors, config = network_state(checkpoint), checkpoint["config"]
        return WeightsFile(place, path, tensors, config, checkpoint, checkpoint.get("test_view"))
    tensors, notes = unwrapped(contents)
    config, (view, unread) = _described(file, contents)
    more = contents.get("hyper_parameters")
    facts = {**(more if isinstance(more, dict) else {}), **contents}
    config = {**{name: facts[name] for name in CLASSES if name in facts}, **(config or {})} or None
    return WeightsFile(place, path, tensors, config, view=view, unread=unread, notes=notes)


def is_ours(contents: Any) -> bool:
    """Whether the contents of a file are a checkpoint of a run."""
    if not isinstance(contents, dict) or not isinstance(contents.get("state_dict"), dict):
        return False
    config = contents.get("config")
    return isinstance(config, dict) and {"model", "data"} <= config.keys()


def _file_in(folder: Path) -> Path:
    found = [folder / name for name in IN_FOLDER if (folder / name).is_file()]
    if not found and (folder / "adapter_config.json").is_file():
        way_out = "give what its merge_and_unload() and save_pretrained(...) write"
        raise UserError(f"{folder} is an adapter of PEFT: {way_out}")
    places = ("*.distcp", "pytorch_model*/*.distcp")  # of Lightning, and within accelerate's
    if not found and (sharded := next((file.parent for place in places for file in folder.glob(place)), None)):
        lightning = "python -m lightning.pytorch.utilities.consolidate_checkpoint"
        other = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        way_out = f"{lightning} {sharded}" if (sharded / "meta.pt").is_file() else f"{other} {sharded} FILE.pt"
        raise UserError(f"{sharded} is a sharded checkpoint, which {way_out} makes one file")
    if not found and (run := newest_run(folder)):
        raise UserError(f"{folder} holds runs and is none itself{run}")
    if not found:
        inner = [file.parent for name in IN_FOLDER for file in folder.glob(f"*/{name}")]
        within = (f"{inside}{kind}" for inside in ("", "*/", "*/*/") for kind in ("*.ckpt", "*.pth", "*.pth.tar"))
        near = inner or [file for pattern in within for file in folder.glob(pattern)]
        hint = f" (did you mean {max(near, key=lambda path: path.lstat().st_mtime_ns)}?)" if near else ""
        raise UserError(f"the folder holds neither {BEST} nor {LAST} nor {', '.join(IN_FOLDER)}{hint}")
    return found[0]


def _described(file: Path, contents: Any) -> tuple[dict[str, Any] | None, Described]:
    """Returns what a file, or config.json beside it, or NAME.json, says about the model and about its images."""
    whole_file = contents if isinstance(contents, dict) else {}
    config, args, arch = map(whole_file.get, ("config", "args", "arch"))
    if isinstance(config, dict) and isinstance(config.get("model"), dict):  # of ViTClassifier, by any Trainer
        view = contents.get("test_view")
        return {"model": config["model"]}, Described(view if isinstance(view, dict) else {}, {})
    args, inside, whole = vars(args) if isinstance(args, argparse.Namespace) else args, None, True
    if isinstance(args, dict) and isinstance(args.get("model"), str) and "crop_pct" in args:  # of timm's train.py
        cfg = cfg_of_timm(args["model"])
        inside, whole = with_args(args, cfg or {}), cfg is not None
    elif isinstance(args, dict):
        inside = of_args(args)
    if file.name in IN_FOLDER and file.with_name("config.json").is_file():
        config, images = (_read_json(file.with_name(f"{name}.json")) for name in ("config", "preprocessor_config"))
        return inside or config, described(inside or config, images, whole=whole)
    with contextlib.suppress(UserError):  # another file by chance
        inside = inside or _read_json(file.with_suffix(".json"))
    if inside is None and isinstance(arch, str) and (cfg := cfg_of_timm(arch)):  # whose images are usual
        return None, described({"architecture": arch, "pretrained_cfg": cfg})
    return inside, described(inside, whole=whole)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a file; None if there is no file."""
    if not path.is_file():
        return None
    try:
        if isinstance(found := json.loads(path.read_bytes()), dict):
            return found
        raise ValueError(f"it holds {type(found).__name__}")
    except (OSError, ValueError, RecursionError) as fault:
        raise UserError(f"{path} is no JSON of an object ({first_line(fault)})") from fault


def _contents(file: Path) -> Any:
    """Returns what a file of weights holds."""
    if file.name.endswith(".index.json"):
        return _read_shards(file)
    try:
        with file.open("rb") as opened:
            head = opened.read(9)
        if head[8:] == b"{":
            from safetensors.torch import load_file

            with reading(file):
                return load_file(file)
    except OSError as fault:
        raise UserError(f"{file} cannot be read: {first_line(fault)}") from fault
    if head.startswith(b"PK\x03\x04") and file.suffix == ".npz":
        return _read_npz(file)
    if not head.startswith((b"PK\x03\x04", b"\x80")):
        raise UserError(f"{file} holds no weights: it is no file of torch.save, safetensors or numpy (.npz)")
    with torch.serialization.safe_globals([argparse.Namespace]):  # which timm's checkpoints hold
        return read_archive(file)


def _read_shards(index: Path) -> dict[str, Any]:
    """Returns the tensors of the files that an index names, which lie beside it."""
    placed = (_read_json(index) or {}).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise UserError(f"{index} has no weight_map of files")
    tensors: dict[str, Any] = {}
    for name in dict.fromkeys(placed.values()):
        shard = index.with_name(name) if Path(name).name == name and not name.endswith(".json") else None
        if shard is None or not shard.is_file():
            raise UserError(f"{index} names {name}, which is no file beside it")
        contents = _contents(shard)
        tensors |= contents if isinstance(contents, dict) else {}
    if missing := [name for name in placed if name not in tensors]:
        raise UserError(f"{index}: {missing[0]} is not in {placed[missing[0]]}")
    return tensors


def _read_npz(file: Path) -> dict[str, Tensor]:
    """Returns the arrays of a .npz that are numbers."""
    tensors = {}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            for name, array in arrays.items():
                if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bfloat16, which numpy does not have
                    tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
                elif array.dtype.kind in "fiub":
                    tensors[name] = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
    except Exception as fault:  # zipfile, zlib and numpy raise many types for damaged files
        raise UserError(f"{file} cannot be read as numbers of numpy: {first_line(fault)}") from fault
    return tensors
