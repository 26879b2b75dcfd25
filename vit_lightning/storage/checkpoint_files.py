"""Checkpoint files: complete or absent, checked when they are read, and read as data alone.

A checkpoint is the zip file of ``torch.save``, which has a checksum (CRC-32) of each of its records.
"""

import contextlib
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn

from vit_lightning.errors import CannotResume, UserError, counted, first_line, gathered, named, near
from vit_lightning.storage.wandb_sources import WANDB, artifact_path

LAST, PREVIOUS, BEST = (Path(f"checkpoints/{name}.ckpt") for name in ("last", "previous", "best"))
DOWNLOADS = Path("data/checkpoints")

_UNREADABLE = (
    "a checkpoint of this run could not be loaded again, since it holds more than tensors and plain data "
    "(state of a callback?)"
)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning plugin that writes a checkpoint beside its path and then renames it, so that it is complete or absent.

    Lightning's own plugin writes to the temporary folder of the machine, may leave a truncated file if that is on
    another disk, and does not flush it. Here a new last checkpoint also renames the one before it to ``previous.ckpt``,
    and the first two files are read back before they are renamed.

    A save packs the contents of the file in memory, and a thread writes them; what training on a GPU saves is copied to
    pinned memory by the GPU, for which nobody waits, and packed by the thread. Each save waits for the one before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_background = False
        """Whether a save returns before its file is written; ``finish`` then waits for it."""
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[Path, Future[None]] | None = None
        self._read_back: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self.finish()
        target = Path(path)
        for key in {"hyper_parameters", "datamodule_hyper_parameters"} & checkpoint.keys():  # of save_hyperparameters
            checkpoint[key] = {name: value for name, value in checkpoint[key].items() if is_plain(value)}
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        pack = _copied_by_gpu(checkpoint) if on_gpu else _packed_now(checkpoint)
        self._writing = target, self._thread.submit(self._write, pack, target)
        if not self.in_background:
            self.finish()

    def finish(self) -> None:
        """Waits for the file that is being written.

        Raises:
            UserError: the disk does not take it, or the file cannot be loaded again.
        """
        if self._writing is None:
            return
        target, writing = self._writing
        try:
            writing.result()
        except OSError as fault:
            text = f"{target} was not written ({fault.strerror or fault}); what was written before is intact"
            raise UserError(f"{text}: make space, and resume the run") from fault
        finally:
            if writing.done():  # else a signal has ended the wait
                self._writing = None

    def teardown(self) -> None:
        """Waits for a file that is still being written since an error ends training, and lets that error be told."""
        with contextlib.suppress(Exception):
            self.finish()

    def _write(self, pack: Callable[[], BytesIO], target: Path) -> None:
        part = target.with_name(f".{target.name}.part")
        try:
            contents = pack()
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(contents.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            if len(self._read_back) < 2 and target.name not in self._read_back:  # the trial, and the first with moments
                with named(f"{_UNREADABLE}: "):
                    read_checkpoint(part)
                self._read_back.add(target.name)
            if target.name == LAST.name and target.is_file():
                os.replace(target, target.with_name(PREVIOUS.name))
            os.replace(part, target)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns a checked checkpoint of tensors and plain data; loads no code, whatever ``weights_only`` is."""
        return read_checkpoint(Path(path), mmap=False)


def _unsavable(entries: Mapping[str, Any]) -> str:
    """Returns the keys, as ``callbacks.Name.key``, of the first value that cannot be saved."""
    for key, value in entries.items():
        try:
            torch.save(value, BytesIO())
        except Exception:  # pickle raises many types
            return f"{key}.{_unsavable(value)}".rstrip(".") if isinstance(value, Mapping) else str(key)
    return ""


def _packed(checkpoint: dict[str, Any]) -> BytesIO:
    """Returns the contents of a file, which no later step of training changes."""
    contents = BytesIO()
    try:
        torch.save(_with_plain_numbers(checkpoint), contents)
    except Exception as fault:  # pickle raises many types
        place = _unsavable(checkpoint)
        raise UserError(f"a checkpoint of this run cannot be written: {place}: {first_line(fault)}") from fault
    contents.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(contents):
        raise UserError(f"{_UNREADABLE}: {', '.join(unsafe)}")
    return contents


def _packed_now(checkpoint: dict[str, Any]) -> Callable[[], BytesIO]:
    contents = _packed(checkpoint)
    return lambda: contents


def _copied_by_gpu(checkpoint: dict[str, Any]) -> Callable[[], BytesIO]:
    """Returns a function that packs a checkpoint as it is now; the host does not wait for the copies of its tensors."""
    as_now, done = _copied(checkpoint), torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def pack() -> BytesIO:
        done.synchronize()
        return _packed(as_now)

    return pack


def _copied(value: Any) -> Any:
    """Returns a copy on the host, of what is on a GPU in pinned memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", non_blocking=True, copy=True)
    if isinstance(value, dict):
        entries = copy(value)  # with the versions that a state_dict has beside its entries
        entries.update({key: _copied(item) for key, item in value.items()})
        return entries
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _with_plain_numbers(value: Any) -> Any:
    """Returns numbers of numpy, such as the mean that a callback keeps, as those of Python: these are plain data."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_with_plain_numbers(key): _with_plain_numbers(item) for key, item in value.items()}
    return type(value)(map(_with_plain_numbers, value)) if type(value) in (list, tuple) else value


def is_plain(value: Any) -> bool:
    """Whether a value can be loaded as data alone."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)


def read_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Returns the contents of a checkpoint; reads tensors and plain data only, and loads no code.

    Args:
        path: the file.
        mmap: whether tensors are mapped from the file; not for tensors that will be written to.

    Raises:
        UserError: the file is missing, damaged, or holds more than tensors and plain data.
    """
    return check_checkpoint(path, read_archive(path, mmap=mmap))


class _Unread:
    """Stands for an object of a class that is neither tensors nor plain data: nothing of it is imported or run."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def read_archive(path: Path, *, mmap: bool = True) -> Any:
    """Returns the contents of any file of ``torch.save``, whose checksums are right.

    What others keep beside weights (paths, numbers of numpy, configs) may be of any class, and is not read. Arguments
    and errors are those of ``read_checkpoint``.
    """
    try:
        with path.open("rb") as file:
            is_old = file.read(1) == b"\x80"  # of torch before 1.6: no zip file
        others = [] if is_old else _others_in(path)
        others = [name for name in others if not name.startswith(("builtins.", "io.", "_io."))]  # as who means harm
        unread: list[Any] = [(type(name, (_Unread,), {}), name) for name in others]
        with warnings.catch_warnings(), torch.serialization.safe_globals(unread):
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # it is read, or refused in our words
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and not is_old)
        if isinstance(contents, _Unread) or (others and _is_of_a_run(contents)):
            raise UnpicklingError
        return contents
    except UserError:
        raise
    except UnpicklingError as fault:  # its own text advises to load it anyway
        text = "it holds more than tensors and plain data (of a whole network save its state_dict() instead)"
        raise UserError(f"{path} cannot be read: {text}") from fault
    except Exception as fault:  # torch raises a dozen types for damaged files
        raise UserError(
            f"{path} cannot be read as a checkpoint of tensors and plain data ({first_line(fault)})"
        ) from fault


def _is_of_a_run(contents: Any) -> bool:
    """Whether a file is a checkpoint of a run of ours, all of which is plain data."""
    return isinstance(contents, dict) and {"config", "between_steps"} <= contents.keys()


def check_checkpoint(path: Path, checkpoint: Any) -> dict[str, Any]:
    """Returns the contents of a file as a checkpoint; raises UserError if it is none."""
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UserError(f"{path} is no Lightning checkpoint: it has no state_dict")
    for name, value in checkpoint["state_dict"].items():  # metrics have lists of tensors
        parts = value if isinstance(value, list) else [value]
        if not (str(name).endswith("_extra_state") or all(isinstance(part, Tensor) for part in parts)):
            raise UserError(f"{path} is damaged: it has {name} as {_shape(value)}")
    if not isinstance(checkpoint.get("test_view"), dict | None):
        raise UserError(f"{path} is no checkpoint of ours: its test_view is no mapping")
    return checkpoint


def _others_in(path: Path) -> list[str]:
    """Returns the classes in a zip file of ``torch.save`` that are neither tensors nor plain data.

    Raises:
        UserError: it is no zip file, is compressed, or one of its checksums is wrong.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} cannot be read as a checkpoint: it is no zip file of torch.save, or was cut short")
    with zipfile.ZipFile(path) as archive:  # else what is compressed is mapped as numbers
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise UserError(f"{path} cannot be read as a checkpoint: it is compressed (TorchScript: save state_dict())")
        if damaged := archive.testzip():
            raise UserError(f"{path} is damaged: the checksum of its {damaged} is not that of its contents")
    return torch.serialization.get_unsafe_globals_in_checkpoint(path)


class Restored(NamedTuple):
    """Checkpoint from which a run resumes."""

    path: Path
    checkpoint: dict[str, Any]
    complaints: list[str]
    """Problems of newer ones."""


def newest_checkpoint(folder: Path) -> Restored | None:
    """Returns the last readable checkpoint of a run, or that before it, or the best; None if there are no files.

    Raises:
        CannotResume: none of the files can be read.
    """
    complaints: list[str] = []
    for name in (LAST, PREVIOUS, BEST):
        path = folder / name
        if not path.is_file():
            complaints.append(f"{path} is missing")
            continue
        with gathered(complaints):
            checkpoint = read_checkpoint(path)
            if checkpoint.get("between_steps", True):
                return Restored(path, checkpoint, complaints)
            complaints.append(f"{path} was written between two batches of a step")
    if any((folder / name).exists() for name in (LAST, PREVIOUS, BEST)):
        raise CannotResume([*complaints, f"{folder} holds no checkpoint to resume from, nothing was changed"])
    return None


def find_checkpoint(source: str | Path, key: str = "ckpt") -> Path:
    """Returns the checkpoint file of a run folder (the best, or else the last), of a file, or of a W&B artifact.

    Args:
        source: run folder, file, or wandb:ENTITY/PROJECT/ARTIFACT:ALIAS, which is kept in ``data/checkpoints``.
        key: option that errors name.
    """
    path = artifact_path(str(source), key, DOWNLOADS) if str(source).startswith(WANDB) else Path(source)
    if path.is_dir():
        found = [path / name for name in (BEST, LAST) if (path / name).is_file()]
        if not found:
            raise UserError(f"{key}={path}: the folder holds neither {BEST} nor {LAST}{newest_run(path)}")
        return found[0]
    if not path.is_file():
        raise UserError(f"{key}={path} is neither a run folder nor a file{_near(path) or newest_run(path)}")
    return path


def _near(path: Path) -> str:
    """Returns the file or folder whose name is like that of one that is not there; as a hint in brackets."""
    names = {other.stem: other for other in path.parent.glob("*")}
    return "".join(f" (did you mean {names[name]}?)" for name in near(path.stem, names)[:1])


def newest_run(path: Path) -> str:
    """Returns the newest run in a folder, or beside a path that is not there, as a hint in brackets; or nothing."""
    folder = path if path.is_dir() else path.parent
    begun = [found.parent for found in folder.glob("*/config.yaml")] if folder != Path() else []
    runs = [run for run in begun if (run / BEST).is_file() or (run / LAST).is_file()]
    if not runs:
        return ""
    newest = max(runs, key=lambda run: (run.stat().st_mtime_ns, run.name))
    return f" (did you mean {newest}? the newest of {counted(len(runs), 'run')} in {folder})"


def run_folder_of(checkpoint: Path) -> Path | None:
    """Returns the run folder of a checkpoint file; None if it is in none."""
    folder = checkpoint.absolute().parent.parent
    if not (folder / "config.yaml").is_file():
        return None
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def network_state(checkpoint: Mapping[str, Any], prefix: str = "network.") -> dict[str, Tensor]:
    """Returns the weights of the network in a checkpoint, under the names that it gives them."""
    state: dict[str, Tensor] = checkpoint["state_dict"]
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def network_weights(
    network: nn.Module, checkpoint: dict[str, Any], path: Path, prefix: str = "network."
) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint for a network of the same architecture.

    Args:
        network: the network.
        checkpoint: contents of the file.
        path: the file, for errors.
        prefix: begin of the names of the network's weights in the checkpoint.

    Raises:
        UserError: names or shapes differ.
    """
    weights, own = network_state(checkpoint, prefix), network.state_dict()
    problems = [
        *(f"it lacks {name}" for name in own if name not in weights),
        *(f"it has {name}, which the model lacks" for name in weights if name not in own),
        *(
            f"it has {name} as {_shape(weights[name])}, the model as {_shape(own[name])}"
            for name in own
            if name in weights and getattr(weights[name], "shape", None) != own[name].shape
        ),
    ]
    if problems:
        more = f" (and {len(problems) - 3} more differences)" if len(problems) > 3 else ""
        raise UserError(f"{path} is of another architecture than the model: {'; '.join(problems[:3])}{more}")
    return weights


def load_network(network: nn.Module, checkpoint: dict[str, Any], path: Path, prefix: str = "network.") -> None:
    """Loads the weights of a checkpoint into a network of the same architecture; arguments as of network_weights."""
    weights = network_weights(network, checkpoint, path, prefix)
    if any(weight.dtype == torch.float64 for weight in weights.values()):
        network.double()  # precision 64-true
    network.load_state_dict(weights)


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"no tensor ({type(value).__name__})"
    return "x".join(map(str, value.shape)) or "one number"
