"""Weights from any place, a file, a folder or a name, read as tensors and plain data alone; and written to files."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError, first_line, foreign
from vit_lightning.limits import meant
from vit_lightning.storage.checkpoint_files import (
    BEST,
    DOWNLOADS,
    LAST,
    check_checkpoint,
    find_checkpoint,
    newest_run,
    read_archive,
)
from vit_lightning.storage.wandb_sources import artifact_path
from vit_lightning.weights.hubs import LIBRARIES, facts_of_preprocessing, hub_folder

PLACES = (*LIBRARIES, "hf-hub", "wandb")
"""What may stand before the colon in the name of a model."""
IN_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights that a folder of ``save_pretrained`` or of an export may hold, in the order in which they count."""
_WRAPPERS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "network", "module", "student")
"""Keys of dicts around the weights; the average of the weights comes first, as timm takes it."""
_PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "backbone.")
_UNUSED = re.compile(r"(vit\.)?pooler\..*|(vit\.embeddings\.|embeddings\.)?mask_token|opt/state/.*")
"""Tensors of pre-training that the logits do not need."""
_COUNTS = ("train_metrics.", "val_metrics.", "test_metrics.")
"""Prefixes of what ViTClassifier counts."""
_LARGEST_JSON = 1 << 24
_LARGEST_GROWTH = 8
"""Times its size to which a compressed .npz may grow, above the first GiB."""


def _as_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    # copies: it refuses tensors that share memory; transformers wants to know whose they are
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, {"format": "pt"})


def _as_pth(tensors: Mapping[str, Tensor]) -> memoryview:
    file = BytesIO()
    torch.save(dict(tensors), file)
    return file.getbuffer()


def _as_npz(tensors: Mapping[str, Tensor]) -> memoryview:
    file, arrays = BytesIO(), {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getbuffer()


FORMATS: dict[str, Callable[[Mapping[str, Tensor]], bytes | memoryview]] = {
    ".safetensors": _as_safetensors,
    ".pth": _as_pth,
    ".npz": _as_npz,
}
"""Functions that return the contents of a file of tensors, by its suffix."""


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors to a file in the format of its suffix; of a full disk only OSError tells."""
    path.write_bytes(FORMATS[path.suffix](tensors))


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
        notes: sentences on what was chosen and left out.
        network: network of a library of others, which fetched the weights.
    """

    place: str
    path: Path | None
    tensors: dict[str, Tensor]
    config: Mapping[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    view: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    network: nn.Module | None = None


def read_weights(place: str | Path, key: str = "source") -> WeightsFile:
    """Returns the weights at a place; loads no code.

    Args:
        place: run folder, checkpoint, .safetensors, .pth, .pt, .bin, .pth.tar, .npz, folder of ``save_pretrained`` or
            of an export, hf-hub:owner/name, timm:NAME, torchvision:NAME, wandb:ENTITY/PROJECT/ARTIFACT:ALIAS, or
            https://...#sha256=CHECKSUM.
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
        with foreign(name):
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
        tensors, notes = _tidy(network.state_dict())
        return WeightsFile(place, None, tensors, about, view=_view(about), notes=notes, network=network)
    if name and library not in PLACES and not name.startswith("//") and not Path(place).exists():
        raise UserError(f"{library}: is none of {', '.join(PLACES)}{meant(library, PLACES)}")
    path = hub_folder(name) if library == "hf-hub" else Path(place)
    path = artifact_path(place, key, DOWNLOADS) if library == "wandb" else path
    if not path.is_dir() or any((path / name).is_file() for name in (BEST, LAST)):
        path = find_checkpoint(place, key)
    file = _file_in(path) if path.is_dir() else path
    contents, inside, sealed = _contents(file)
    if _is_ours(contents):
        checkpoint = check_checkpoint(file, contents, sealed)
        state: dict[str, Tensor] = checkpoint["state_dict"]
        tensors = {name.removeprefix("network."): state[name] for name in state if name.startswith("network.")}
        return WeightsFile(place, path, tensors, checkpoint["config"], checkpoint, checkpoint.get("test_view"))
    tensors, notes = _tidy(contents)
    config, view = _described(file, contents, inside)
    return WeightsFile(place, path, tensors, config, view=view, notes=notes)


def _is_ours(contents: Any) -> bool:
    if not isinstance(contents, dict) or not isinstance(contents.get("state_dict"), dict):
        return False
    config = contents.get("config")
    return isinstance(config, dict) and {"model", "data"} <= config.keys()


def _file_in(folder: Path) -> Path:
    found = [folder / name for name in IN_FOLDER if (folder / name).is_file()]
    for name, form in {"model.onnx": "ONNX", "model.pt2": "torch.export"}.items():
        if not found and (folder / name).is_file():
            raise UserError(f"{folder} is a {form} export: give an export of the form safetensors or hf")
    if not found and (run := newest_run(folder)):
        raise UserError(f"{folder} holds runs and is none itself{run}")
    if not found:
        raise UserError(f"the folder holds neither {BEST} nor {LAST} nor {', '.join(IN_FOLDER)}")
    return found[0]


def _described(
    file: Path, contents: Any, inside: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns what a file, or config.json beside it, or NAME.json, says about the model and about its images."""
    config = contents.get("config") if isinstance(contents, dict) else None
    if isinstance(config, dict) and isinstance(config.get("model"), dict):  # of ViTClassifier, by any Trainer
        view = contents.get("test_view")
        return {"model": config["model"]}, view if isinstance(view, dict) else {}
    if file.name in IN_FOLDER and file.with_name("config.json").is_file():
        config, images = (_read_json(file.with_name(f"{name}.json")) for name in ("config", "preprocessor_config"))
        return inside or config, _view(inside or config, images)
    with contextlib.suppress(UserError):  # another file by chance
        inside = inside or _read_json(file.with_suffix(".json"))
    return inside, _view(inside)


def _view(config: Mapping[str, Any] | None, images: Mapping[str, Any] | None = None) -> dict[str, Any]:
    given = images or (config or {}).get("preprocessing") or (config or {}).get("pretrained_cfg")
    return facts_of_preprocessing(given) if isinstance(given, Mapping) else {}


def _read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a file; None if there is no file."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError("it is larger than 16 MiB")
        return _json_object(path.read_bytes())
    except (OSError, ValueError, RecursionError) as fault:
        raise UserError(f"{path} is no JSON of an object ({first_line(fault)})") from fault


def _json_object(text: str | bytes) -> dict[str, Any]:
    if not isinstance(found := json.loads(text), dict):
        raise ValueError(f"it holds {type(found).__name__}")
    return found


def _contents(file: Path) -> tuple[Any, dict[str, Any] | None, bool]:
    """Returns what a file of weights holds, the description inside it, and whether it has our checksum."""
    if file.name.endswith(".index.json"):
        return _read_shards(file), None, False
    try:
        with file.open("rb") as opened:
            head = opened.read(9)
    except OSError as fault:
        raise UserError(f"{file} cannot be read: {first_line(fault)}") from fault
    if head[8:] == b"{":
        return *_read_safetensors(file), False
    if head.startswith(b"PK\x03\x04") and _is_npz(file):
        return _read_npz(file), None, False
    if not head.startswith((b"PK\x03\x04", b"\x80")):
        raise UserError(f"{file} holds no weights: it is no file of torch.save, safetensors or numpy (.npz)")
    with torch.serialization.safe_globals([argparse.Namespace]):  # which timm's checkpoints hold
        contents, sealed = read_archive(file)
    return contents, None, sealed


def _is_npz(file: Path) -> bool:
    """Whether a zip file holds arrays of numpy alone; not if it is damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            described = (opened.metadata() or {}).get("config", "")
    except (SafetensorError, OSError, ValueError, TypeError) as fault:
        raise UserError(f"{file} cannot be read as safetensors: {first_line(fault)}") from fault
    with contextlib.suppress(ValueError, RecursionError):  # a description of another kind, or none
        return tensors, _json_object(described)
    return tensors, None


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
        contents = _contents(shard)[0]
        tensors |= contents if isinstance(contents, dict) else {}
    if missing := [name for name in placed if name not in tensors]:
        raise UserError(f"{index}: {missing[0]} is not in {placed[missing[0]]}")
    return tensors


def _read_npz(file: Path) -> dict[str, Tensor]:
    """Returns the arrays of a .npz that are numbers; bounds what a compressed one may grow to."""
    tensors = {}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            sizes = [record.file_size for record in arrays.zip.infolist()]
            if sum(sizes) > (1 << 30) + _LARGEST_GROWTH * file.stat().st_size:
                raise ValueError("it grows too large when it is unpacked")
            for name, array in arrays.items():
                if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bfloat16, which numpy does not have
                    tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
                elif array.dtype.kind in "fiub":
                    tensors[name] = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
    except Exception as fault:  # zipfile, zlib and numpy raise many types for damaged files
        raise UserError(f"{file} cannot be read as numbers of numpy: {first_line(fault)}") from fault
    return tensors


def _tidy(contents: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Returns the weights without what lies around them, and sentences on what was chosen and left out."""
    notes: list[str] = []
    state = _unwrapped(contents, notes)
    found = {str(name): value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    tensors = {name: value for name, value in found.items() if not name.startswith(_COUNTS)}
    if not tensors:
        first = ", ".join(str(name)[:50] for name in list(state)[:3]) or "nothing"
        raise UserError(f"it holds no weights (it has {first})")
    while prefix := next((p for p in _PREFIXES if 2 * sum(n.startswith(p) for n in tensors) > len(tensors)), None):
        shorter = {name.removeprefix(prefix): value for name, value in tensors.items()}
        if len(shorter) < len(tensors):
            break
        tensors = shorter
    names = " ".join(tensors)
    if "embeddings.patch_embeddings.projection.weight" in tensors and ".layernorm_before." in names:  # hf's ViTModel
        tensors = {f"vit.{name}": value for name, value in tensors.items()}
    for reason, chosen in {
        "hold no floating-point numbers": [n for n, value in tensors.items() if not value.is_floating_point()],
        "are not needed for logits": [n for n in tensors if _UNUSED.fullmatch(n) and ".ls1.gamma" not in names],
    }.items():
        if chosen:
            more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
            notes.append(f"left out, since they {reason}: {', '.join(chosen[:3])}{more}")
            tensors = {name: value for name, value in tensors.items() if name not in chosen}
    for name, value in tensors.items():
        stored = value.device.type == "cpu" and value.layout is torch.strided
        if not stored or value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise UserError(f"{name} is no tensor whose numbers are in the file")
    return tensors, tuple(notes)


def _unwrapped(contents: Any, notes: list[str]) -> Mapping[Any, Any]:
    found: Mapping[Any, Any] = {}
    for _ in range(4):  # a dict of pickle may hold itself
        if not isinstance(contents, Mapping):
            raise UserError(f"it holds no weights, but {type(contents).__name__}")
        found = contents
        inside = [key for key in _WRAPPERS if isinstance(found.get(key), Mapping) and found[key]]
        if not inside:
            break
        if len(inside) > 1:
            notes.append(f"the weights are those under {inside[0]}, not those under {', '.join(inside[1:])}")
        contents = found[inside[0]]
    return found
