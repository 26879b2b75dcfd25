"""Checkpoint files: complete or absent, with a checksum, and read as data alone.

A checkpoint is the zip file of ``torch.save``. Its comment holds the SHA-256 of all that comes before the comment, so
that a file carries its own checksum wherever it is copied, and any zip reader still opens it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import warnings
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn

from vit_lightning.errors import CannotResume, UserError, first_line

LAST, PREVIOUS, BEST = (Path(f"checkpoints/{name}.ckpt") for name in ("last", "previous", "best"))
DOWNLOADS = Path("data/checkpoints")
FAILURES = 3
"""Saves in a row that may fail before training stops."""

_TAG = b"sha256="
_COMMENT = len(_TAG) + 64
_TAIL = 2 + _COMMENT  # what the checksum leaves out: the length of the comment, and the comment


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and then puts it there, so that it is complete or absent.

    Lightning's own goes through the temporary folder of the machine, is cut short if that lies on another disk, and is
    not told to reach the disk. Here the last checkpoint also makes the one before it ``previous.ckpt``, the first file
    of each name is read back before it takes its place, and a disk that is full ends training only when it stays full.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        """Saves in a row that failed."""
        self._proved: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        target = Path(path)
        part = target.with_name(f".{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._write(checkpoint, part)
            if len(self._proved) < 2 and target.name not in self._proved:  # the trial, and the first with an optimizer
                _prove(part)
                self._proved.add(target.name)
            if target.name == LAST.name and target.is_file():
                os.replace(target, target.with_name(PREVIOUS.name))
            os.replace(part, target)
            _flush_folder(target.parent)
        except OSError as fault:
            self._failed(part, target, fault)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        else:
            self.failures = 0

    def _write(self, checkpoint: dict[str, Any], part: Path) -> None:
        with part.open("w+b") as file:
            try:
                torch.save(checkpoint, file)
            except OSError:
                raise
            except Exception as fault:  # pickle has many ways to say that it cannot
                raise UserError(f"a checkpoint of this run cannot be written: {first_line(fault)}") from fault
            seal(file)
            file.flush()
            os.fsync(file.fileno())

    def _failed(self, part: Path, target: Path, fault: OSError) -> None:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        self.failures += 1
        text = f"{target} was not written ({fault.strerror or fault}); what was there before is intact"
        if self.failures >= FAILURES:
            raise UserError(f"{text}. {self.failures} saves in a row failed: training stops here") from fault
        warnings.warn(f"{text}, and training goes on", stacklevel=2)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors and plain data, checked; nothing in the file can run, whatever ``weights_only`` says."""
        return read_checkpoint(Path(path), mmap=False)


def _prove(part: Path) -> None:
    """What cannot be loaded again is found now, not after a crash."""
    try:
        read_checkpoint(part)
    except UserError as error:
        raise UserError(
            "a checkpoint of this run could not be loaded again, since it holds more than tensors and plain data "
            f"(state of a callback?): {error}"
        ) from error


def _flush_folder(folder: Path) -> None:
    """Makes the names in a folder reach the disk."""
    with contextlib.suppress(OSError):  # some file systems know no such thing
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def seal(file: BinaryIO) -> None:
    """Puts its checksum into the comment of a zip file that is open for reading and writing."""
    size = file.seek(0, os.SEEK_END) - 2  # without a comment, its length is the last two bytes
    digest = _digest(file, size)
    file.seek(size)
    file.write(struct.pack("<H", _COMMENT) + _TAG + digest)


def sealed(path: Path) -> bool:
    """Whether a file holds a checksum, and it is right.

    Raises:
        UserError: the checksum is wrong.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _TAIL
        if size < 0:
            return False
        file.seek(size)
        tail = file.read(_TAIL)
        if tail[:2] != struct.pack("<H", _COMMENT) or not tail[2:].startswith(_TAG):
            return False
        if _digest(file, size) != tail[2 + len(_TAG) :]:
            raise UserError(f"{path} is damaged: its checksum is not that of its contents")
        return True


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the first ``size`` bytes."""
    sha = hashlib.sha256()
    file.seek(0)
    while size > 0 and (part := file.read(min(size, 1 << 20))):
        sha.update(part)
        size -= len(part)
    return sha.hexdigest().encode()


def read_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """The contents of a checkpoint; only tensors and plain data are read, nothing in it can run.

    Args:
        path: the file.
        mmap: whether tensors are read when they are used; not for those that will be written to.

    Raises:
        UserError: the file is missing, damaged, or more than tensors and plain data.
    """
    try:
        _refuse_archive(path)
        has_checksum = sealed(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except UserError:
        raise
    except UnpicklingError as fault:  # its own text advises to load it all the same
        raise UserError(f"{path} cannot be read: it holds more than tensors and plain data") from fault
    except Exception as fault:  # torch raises a dozen types for damaged files
        raise UserError(
            f"{path} cannot be read as a checkpoint of tensors and plain data ({first_line(fault)})"
        ) from fault
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UserError(f"{path} is no Lightning checkpoint: it has no state_dict")
    if not has_checksum and ("page" in checkpoint or {"config", "between_steps"} <= checkpoint.keys()):
        raise UserError(f"{path} is damaged: it has no checksum (or a version of long ago wrote it)")
    if "page" in checkpoint:  # its name in earlier runs
        checkpoint["config"] = checkpoint.pop("page")
    return checkpoint


def _refuse_archive(path: Path) -> None:
    """Only what ``torch.save`` writes: a zip file, nothing in it compressed, so that it cannot grow when it is read."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} cannot be read as a checkpoint: it is no zip file of torch.save, or was cut short")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise UserError(f"{path} cannot be read as a checkpoint: it is compressed, which torch.save never does")
    if sum(record.file_size for record in records) > path.stat().st_size:
        raise UserError(f"{path} cannot be read as a checkpoint: its parts are larger than the file")


class Restored(NamedTuple):
    """A checkpoint to go on from."""

    path: Path
    checkpoint: dict[str, Any]
    complaints: list[str]
    """What is wrong with newer ones."""


def newest_checkpoint(folder: Path) -> Restored | None:
    """The newest checkpoint of a run that can be read; None without any.

    Raises:
        CannotResume: there are files, but none can be read.
    """
    complaints: list[str] = []
    for name in (LAST, PREVIOUS, BEST):
        path = folder / name
        if not path.is_file():
            complaints.append(f"{path} is missing")
            continue
        try:
            checkpoint = read_checkpoint(path)
            if checkpoint.get("between_steps", True):
                return Restored(path, checkpoint, complaints)
            complaints.append(f"{path} was written between two batches of a step")
        except UserError as error:
            complaints += error.problems
    if any((folder / name).exists() for name in (LAST, PREVIOUS, BEST)):
        raise CannotResume([*complaints, f"{folder} holds no checkpoint that can be read, nothing was changed"])
    return None


def find_checkpoint(place: str | Path, key: str = "ckpt") -> Path:
    """The file to load for a run folder (its best checkpoint, or its last if it has no best), a file or an address."""
    if "://" in str(place):
        return download(str(place), key)
    place = Path(place)
    if place.is_dir():
        found = [place / name for name in (BEST, LAST) if (place / name).is_file()]
        if not found:
            raise UserError(f"{key}={place}: the folder holds neither {BEST} nor {LAST}")
        return found[0]
    if not place.is_file():
        raise UserError(f"{key}={place} is neither a run folder nor a file")
    return place


def download(address: str, key: str = "ckpt") -> Path:
    """The file of an address that ends in ``#sha256=`` and the checksum of the file; kept in ``data/checkpoints``."""
    found = re.fullmatch(r"(https?://[^#]+)#sha256=([0-9a-f]{64})", address)
    if found is None:
        raise UserError(f"{key}={address} needs the file's checksum behind it: http(s)://...#sha256=<64 hex digits>")
    url, digest = found.groups()
    path = DOWNLOADS / f"{digest}.ckpt"
    if path.is_file():
        with path.open("rb") as file:
            if _digest(file, path.stat().st_size).decode() == digest:
                return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest)
    except Exception as fault:  # of urllib, of sockets, and RuntimeError for another checksum
        raise UserError(f"{key}={address} cannot be had: {first_line(fault)}") from fault
    return path


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint file lies in, if it lies in one."""
    folder = checkpoint.absolute().parent.parent
    if not (folder / "config.yaml").is_file():
        return None
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def network_weights(network: nn.Module, checkpoint: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint for a network, which must be of the same architecture."""
    prefix = "network."
    weights: dict[str, Tensor] = {
        name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items() if name.startswith(prefix)
    }
    own = network.state_dict()
    problems = [
        *(f"it lacks {name}" for name in own if name not in weights),
        *(f"it has {name}, which the model lacks" for name in weights if name not in own),
        *(
            f"it has {name} as {_shape(weights[name])}, the model as {_shape(own[name])}"
            for name in own
            if name in weights and weights[name].shape != own[name].shape
        ),
    ]
    if problems:
        more = f" (and {len(problems) - 3} more differences)" if len(problems) > 3 else ""
        raise UserError(f"{path} is of another architecture than the model: {'; '.join(problems[:3])}{more}")
    return weights


def load_network(network: nn.Module, checkpoint: dict[str, Any], path: Path) -> None:
    """Puts the weights of a checkpoint into a network of the same architecture."""
    weights = network_weights(network, checkpoint, path)
    if any(weight.dtype == torch.float64 for weight in weights.values()):
        network.double()  # precision 64-true
    network.load_state_dict(weights)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
