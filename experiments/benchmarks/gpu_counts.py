"""What a GPU would wait for and launch in a training step, counted on a machine without one.

python experiments/benchmarks/gpu_counts.py [--only NAME ...] [--images 256] [--small] [--where]

Tensors say that they lie on a GPU while their values lie in host memory, so that the code takes the ways that it takes
there, and each operator that reaches the device is seen, those of the backward pass too. Counted are

- crossings: what makes the host wait for the device (``item``, ``bool``, ``cpu``, ``nonzero``, indices by a mask) or
  copies host data to it before going on (``torch.tensor(..., device=...)``, ``.to(device)`` without ``non_blocking``);
- eager launches: operators that are no views and do not only allocate. One operator may be several kernels.

Not in it: Lightning's loop, logging and callbacks (``trainer_counts.py`` has them), decoding, and kernels of compiled
code. Casts of autocast are by a CPU's lists of operators; attention is one launch, as flash attention is.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import vit_lightning
from vit_lightning.commands.module import make_module
from vit_lightning.config.resolve import resolve
from vit_lightning.data.batches import Batch, Request
from vit_lightning.data.images import Images
from vit_lightning.random_keys import sample_keys
from vit_lightning.training import classifier
from vit_lightning.training.optim import optimizer_and_schedule

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu", 0)
"""Index 0 tells a copy to the host from one of autograd's, which takes the device of its tensors for the CPU."""
EXPERIMENTS = Path(__file__).parents[1]
sys.path.append(str(EXPERIMENTS))  # schedules of the published recipes
CONFIGS = {
    path.stem: path
    for path in sorted([*EXPERIMENTS.glob("cifar*.yaml"), *EXPERIMENTS.glob("imagenet/*.yaml")])
    if "accelerator: cpu" not in path.read_text()
}
AUGMENTATIONS: dict[str, Callable[[], Any]] = {
    "RandomCrop": vit_lightning.RandomCrop,
    "HorizontalFlip": vit_lightning.HorizontalFlip,
    "RandomResizedCrop": vit_lightning.RandomResizedCrop,
    "RandomErasing": vit_lightning.RandomErasing,
    "RandomAffine": vit_lightning.RandomAffine,
    "AutoAugment": vit_lightning.AutoAugment,
    "RandAugment": vit_lightning.RandAugment,
    "TimmRandAugment": vit_lightning.TimmRandAugment,
    "ThreeAugment": vit_lightning.ThreeAugment,
}
WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive"}
"""Operators whose result the host needs, be it only its size."""
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
HIDDEN_VIEWS = {"_unsafe_view"}
"""Views whose schema does not say so; how many of them a product of matrices has differs between versions of torch."""


class OnDevice(Tensor):
    """A tensor that says that it lies on a GPU; its values lie in host memory, and autograd takes it for one there."""

    values: Tensor
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        made = Tensor._make_wrapper_subclass(cls, values.shape, **layout)
        made.values = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return calculate(func, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == HOST.type:
            return torch.ops.aten._to_copy(self, dtype=dtype, device=HOST, non_blocking=non_blocking)
        return self if dtype in (None, self.dtype) else torch.ops.aten._to_copy(self, dtype=dtype)

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.to(HOST)  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self) -> Any:  # type: ignore[override]
        raise TypeError("a tensor on a GPU is no array of numpy")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({tuple(self.shape)})"


def calculate(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operator gives, on the device if its arguments lie there or it is asked to make it there."""
    if func.name() in ("aten::pin_memory", "aten::_pin_memory"):
        return args[0]
    device = kwargs.get("device")
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)]
    stays = device is None or (str(func.overloadpacket) == "aten._to_copy" and device != HOST)
    is_there = bool(inputs) if inputs and stays else device is not None and torch.device(device).type == DEVICE.type
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if device is not None:
        kwargs["device"] = HOST
    inner, options = tree_map_only(OnDevice, lambda tensor: tensor.values, (args, kwargs))
    made = func(*inner, **options)
    if str(func.overloadpacket) == "aten.copy_":
        return args[0]
    if not is_there:
        return made
    known = {id(tensor.values): tensor for tensor in inputs}
    return tree_map_only(Tensor, lambda made: known[id(made)] if id(made) in known else OnDevice(made), made)


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(part.alias_info is not None and not part.alias_info.is_write for part in returns)


class Counter(TorchDispatchMode):
    """Crossings by place, and the number of launches, of what runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings: collections.Counter[str] = collections.Counter()
        self.operators: collections.Counter[str] = collections.Counter()

    @property
    def launches(self) -> int:
        return self.operators.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket).removeprefix("aten.")
        made = calculate(func, args, kwargs)
        given, given_out = tree_leaves((args, kwargs)), tree_leaves(made)
        from_there = any(isinstance(leaf, OnDevice) for leaf in given)
        if not from_there and not any(isinstance(leaf, OnDevice) for leaf in given_out):
            return made
        if self.crosses(name, args, kwargs, made, from_there):
            self.crossings[f"{place()} {name}"] += 1
        elif name not in ALLOCATES | HIDDEN_VIEWS and not is_view(func):
            self.operators[name] += 1
        return made

    def crosses(self, name: str, args: Any, kwargs: Any, made: Any, from_there: bool) -> bool:
        """Whether an operator makes the host wait."""
        if name in WAITS:
            return True
        if name == "_to_copy":
            return from_there != isinstance(made, OnDevice) and not kwargs.get("non_blocking")
        if name == "copy_":
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice) and blocking
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [index for index in args[1] if index is not None]
            is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
            return is_mask or not all(isinstance(index, OnDevice) for index in indices)
        return False


def place() -> str:
    """Returns file and line of the package that runs."""
    root, frame = str(Path(vit_lightning.__file__).parent), sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(root):
            return f"{Path(frame.f_code.co_filename).relative_to(root)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside of the package"


def groups_on_device(*args: Any) -> dict[Any, Any]:
    """Groups tensors as torch does, whose own code takes their device for the CPU."""
    groups = _foreach_utils._group_tensors_by_device_and_dtype(*args)
    return {(DEVICE, dtype): group for (_, dtype), group in groups.items()}


def pretend_device() -> None:
    """Lets torch take tensors for those of a GPU, where there is none."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):  # the latter in 2.10
        setattr(torch_optimizer.Optimizer, name, lambda self: None)
    for module in (torch_optimizer, _foreach_utils):
        module._foreach_supported_types = [*module._foreach_supported_types, OnDevice]
    clip_grad._group_tensors_by_device_and_dtype = groups_on_device
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=...) would not be seen
    torch.__future__.set_overwrite_module_params_on_conversion(True)


def count(run: Callable[[], Any]) -> Counter:
    """Counts what the second call of a function does; the first fills caches."""
    with Counter():
        run()
    with Counter() as counter:
        run()
    return counter


def count_augmentation(make: Callable[[], Any], images: int) -> Counter:
    """Counts one augmentation of images of 32 pixels; launches do not depend on their size."""
    change, generator = make(), torch.Generator().manual_seed(0)
    batch = torch.randint(0, 256, (images, 3, 32, 32), generator=generator, dtype=torch.uint8)
    keys = sample_keys(0, 0, torch.arange(images))
    return count(lambda: change(OnDevice(batch), OnDevice(keys)))


def few_images(root: Path, classes: int) -> Path:
    """Writes a folder of a few black images of each class; the images of a step are random ones."""
    for split in ("train", "val", "test"):
        for label in range(classes):
            (root / split / f"{label:03d}").mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (32, 32)).save(root / split / f"{label:03d}" / f"{number}.png")
    return root


def read_config(path: Path, folder: Path, *, small: bool = False) -> Any:
    """Returns the experiment of a config whose images are those of ``few_images``.

    Args:
        path: the config.
        folder: where its images and a copy of it are written.
        small: whether there are two blocks of width 16, and photographs have 32 pixels a side.
    """
    config = yaml.safe_load(path.read_text())
    given = config["data"]["init_args"]
    is_cifar = config["data"]["class_path"].startswith("vit_lightning.CIFAR")
    root = few_images(folder / path.stem, 100 if "100" in path.stem else 10)
    if is_cifar:
        whole = {"image_size": 32, "min_area": 1.0, "centre_share": 1.0}
        kept = {name: given[name] for name in ("batch_size", "augment", "mixing") if name in given}
        config["data"] = {"class_path": "vit_lightning.ImageFolder", "init_args": {"root": "", **whole, **kept}}
    config["data"]["init_args"]["root"] = str(root)
    config.pop("init_from", None)
    if small:
        if not path.stem.startswith("cifar"):
            config["data"]["init_args"]["image_size"] = 32
        if "class_path" not in config["model"]:
            config["model"] |= {"emb_size": 16, "depth": 2, "num_heads": 2}
    written = folder / f"{path.stem}.yaml"
    written.write_text(yaml.safe_dump(config))
    return resolve([f"--config={written}"])


def step_parts(
    experiment: Any, images: int, put: Callable[[Tensor], Tensor], *, device: torch.device = DEVICE, autocast: str
) -> dict[str, Callable[[], None]]:
    """Returns the parts of a training step, to be called in their order, step after step.

    They are a batch from the loader to the network, the forward pass of two of its images with loss and metrics, the
    backward pass, and clipping with optimizer and averaged weights.

    Args:
        experiment: the experiment.
        images: number of images of a batch.
        put: copies a tensor to the device.
        device: the device.
        autocast: type of device whose list of operators run in bf16.
    """
    data, settings, trainer = experiment.data, experiment.settings, experiment.trainer
    size, generator = tuple(data.image_size), torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, *size), generator=generator, dtype=torch.uint8)
    labels = torch.arange(images) % data.num_classes
    keys = sample_keys(0, 0, torch.arange(images))
    in_memory = Images(pixels, labels)
    if data.min_area == 1.0:  # else photographs, which workers read
        in_memory._on_device = put(pixels), put(labels)
    made: dict[str, Any] = {}
    module: Any = make_module(experiment).train().to(device)
    optimizer, _ = optimizer_and_schedule(module.network, settings.optimizer, total_steps=10**6, steps_per_epoch=100)
    if module.average is not None:
        module.average.start(module.network)

    def load() -> None:
        batch = in_memory.__getitems__(Request(list(range(images)), keys.tolist()))
        assert isinstance(batch, Batch)
        made["batch"] = data.model_input(batch.to(device), 0)

    def forward() -> None:
        two = {name: part[:2] for name, part in vars(made["batch"]).items() if isinstance(part, Tensor)}
        with torch.autocast(autocast, torch.bfloat16):
            made["loss"] = module.training_step(made["batch"].replace(**two), 0)

    def backward() -> None:
        made["loss"].backward()

    def update() -> None:
        if trainer["gradient_clip_val"]:
            torch.nn.utils.clip_grad_norm_(module.parameters(), trainer["gradient_clip_val"])
        optimizer.step()
        optimizer.zero_grad()
        if module.average is not None:
            module.average.update(module.network)

    return {"data": load, "forward": forward, "backward": backward, "optimizer": update}


def count_step(experiment: Any, images: int) -> dict[str, Counter]:
    """Counts the parts of a training step; the first step fills caches."""
    with Counter():
        parts = step_parts(experiment, images, OnDevice, autocast="cpu")
        for part in parts.values():
            part()
    counters = {}
    for name, part in parts.items():
        with Counter() as counters[name]:
            part()
    return counters


def show(name: str, counters: list[Counter], *, where: bool) -> None:
    crossings = sum((counter.crossings for counter in counters), collections.Counter[str]())
    print(
        f"| {name} | {crossings.total()} | {' | '.join(f'{counter.launches:,}' for counter in counters)} |", flush=True
    )
    if where:
        for text, number in crossings.most_common():
            print(f"    {number} {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*AUGMENTATIONS, *CONFIGS], default=[*AUGMENTATIONS, *CONFIGS])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--small", action="store_true", help="networks of two narrow blocks, for a test")
    parser.add_argument("--where", action="store_true", help="file and line of each crossing")
    given = parser.parse_args()
    os.environ["PL_GLOBAL_SEED"] = "0"  # draws MixUp or CutMix, which differ by a launch
    print(f"torch {torch.__version__}, {given.images} images\n")
    classifier.log_again = lambda *args, **kwargs: None  # type: ignore[assignment]  # Lightning's part, without a Trainer
    pretend_device()
    with tempfile.TemporaryDirectory() as folder:
        print("| augmentation | crossings | launches |\n|---|---|---|")
        for name in (name for name in given.only if name in AUGMENTATIONS):
            show(name, [count_augmentation(AUGMENTATIONS[name], given.images)], where=given.where)
        print(
            "\n| config | crossings | data | forward, loss, metrics | backward | optimizer |\n|---|---|---|---|---|---|"
        )
        for name in (name for name in given.only if name in CONFIGS):
            experiment = read_config(CONFIGS[name], Path(folder), small=given.small)
            show(name, [*count_step(experiment, given.images).values()], where=given.where)


if __name__ == "__main__":
    main()
