"""The groups of a config together: what each has become, and what they say of each other."""

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

from vit_lightning.config.adapters import Chosen
from vit_lightning.config.files import Config, as_list, as_map
from vit_lightning.config.from_weights import Trained
from vit_lightning.config.networks import CONFIGURED, takes
from vit_lightning.config.options import COMPILES, TRAINED
from vit_lightning.config.signatures import Part, signature_of
from vit_lightning.data.base import ImageData
from vit_lightning.data.wrapped import WrappedDataModule
from vit_lightning.metric_facts import STEP_METRICS, Goal, goal_of, metric_names, with_own
from vit_lightning.storage.credentials import secrets_of_environment
from vit_lightning.training.compiled import REPLAYS, changed_steps
from vit_lightning.training.losses import OwnLoss
from vit_lightning.training.mae import MAE
from vit_lightning.training.own_state import callback_problems
from vit_lightning.training.probes import KNNProbe
from vit_lightning.training.resources import AUTO
from vit_lightning.weights.init_from import InitialWeights


class Merged(NamedTuple):
    """The config of a command line."""

    config: Config
    problems: list[str]
    """What is wrong with config files and the source of the initial weights."""
    trained: Trained | None = None
    initial: InitialWeights | None = None
    """The source of the initial weights."""
    complete: bool = True
    """Whether all config files could be read, among them that of a trained model."""

    @property
    def names_network(self) -> bool:
        """Whether also the source of the initial weights, which may name the network, could be read."""
        return self.complete and (self.initial is not None or self.config.get("init_from") is None)


@dataclass(frozen=True)
class Groups:
    """Groups of a config as they have been read; None where one is wrong, or the config has none."""

    command: str
    config: Config
    general: Mapping[str, Any]
    """Options that belong to no group."""
    module: Part | None
    data: ImageData | None
    settings: Mapping[str, Any]
    trainer: Part
    metrics: Sequence[Chosen]

    @property
    def callbacks(self) -> list[Part]:
        return [one for one in as_list(self.trainer.arguments.get("callbacks")) if isinstance(one, Part)]


def logged_metrics(data: ImageData | None, metrics: Sequence[Chosen]) -> dict[str, Goal | None]:
    """Returns the names of all that ViTClassifier logs, with their goals."""
    if data is None:
        return {}
    table = with_own({item.name: item.metric for item in metrics})
    names = [*metric_names("val", "train", classes=len(data.label_names), table=table), *STEP_METRICS]
    own = {f"val/{item.name}": item.plain["init_args"]["goal"] for item in metrics}
    return {name: own[name] if name in own else goal_of(name) for name in names}


def secret_problems(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Returns the values that hold a secret of the environment, which would be written to the run's files."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [text for name, item in items for text in secret_problems(item, (*path, str(name)))]
    return [
        f"{'.'.join(path)} holds the value of {name}: no secret belongs in a config, W&B reads it from the environment"
        for name, text in secrets_of_environment().items()
        if text in str(value)
    ]


def not_taken_by_module(groups: Groups) -> Iterator[str]:
    """Yields the options that are given, but that the module does not take."""
    if (module := groups.module) is None:
        return
    keys = [key for key in (*CONFIGURED, "model") if groups.config.get(key) is not None and not takes(module, key)]
    given = [f"{key}.{name}={value}" for key in keys for name, value in as_map(groups.config[key]).items()]
    if given:
        words = " or ".join("network" if key == "model" else key for key in keys)
        without = " ".join(f"--{key}=null" for key in keys)
        why = f"module.class_path={module.name} takes no {words} ({without}, or give the class that argument)"
        yield f"{', '.join(given)}: {why}"
    freeze, lora = groups.general.get("freeze"), groups.settings["lora"]
    frozen = [f"freeze={freeze}"] * bool(freeze) + ([f"lora.rank={lora.rank}"] if lora and lora.rank else [])
    if frozen and not takes(module, "model"):
        yield f"{', '.join(frozen)}: module.class_path={module.name} takes no network"


def test_of_others(groups: Groups) -> Iterator[str]:
    """Yields what a validation or test needs and a LightningModule or LightningDataModule of the user's lacks."""
    module, data = groups.module, groups.data
    if groups.command == "test" or (groups.command == "fit" and groups.general.get("test")):
        if module is not None and module.target.test_step is LightningModule.test_step:
            yield f"module.class_path={module.name} has no test_step (give it one, or fit with test=false)"
        if isinstance(data, WrappedDataModule) and not data.has("test"):
            yield f"data.{data.title} has no test_dataloader (give it one, or fit with test=false)"
    validates = module is None or module.target.validation_step is not LightningModule.validation_step
    if groups.command == "fit" and isinstance(data, WrappedDataModule) and not data.has("val") and validates:
        yield f"data.{data.title} has no val_dataloader (give it one; a module without a validation_step needs none)"


def loss_of_data(groups: Groups) -> Iterator[str]:
    """Yields why a loss of others, or MAE's, does not take the targets of the data."""
    loss, data, mixes = groups.settings["loss"], groups.data, bool(getattr(groups.data, "mixing", None))
    if data is not None and type(loss) is OwnLoss:
        for text in loss.problems(len(data.label_names), mixes=mixes):
            yield f"loss.class_path={loss.name}: {text}"
    if mixes and groups.module is not None and issubclass(groups.module.kind, MAE):
        yield "data.mixing: MAE would learn to reconstruct mixed images (give data.mixing=null)"


def average_beside_callbacks(groups: Groups) -> Iterator[str]:
    """Yields callbacks that average the weights beside ``ema``."""
    ema = groups.settings["ema"]
    if ema is not None and ema.decay is not None:
        for name in (one.target.__name__ for one in groups.callbacks):
            if name.endswith("WeightAveraging"):
                yield f"ema.decay={ema.decay} beside trainer.callbacks.{name}: give one of the two"


def compiled(groups: Groups) -> Iterator[str]:
    """Yields what ``torch.compile`` lacks on this machine, and what CUDA graphs cannot train with.

    What ``auto`` takes of them is decided with the devices.
    """
    option = groups.general.get("compile")
    if option in (False, None, AUTO) or groups.command not in COMPILES:
        return
    yield from compiler_problems()
    if option == REPLAYS and groups.module is not None and (texts := beside_replays(groups.trainer, groups.module)):
        rule = "CUDA graphs need one GPU, a ViTClassifier's steps, images of one size and gradients of one batch"
        yield f"compile={REPLAYS} beside {', '.join(texts)}: {rule} (give compile=true)"


def beside_replays(trainer: Part, module: Part) -> list[str]:
    """Returns the options beside which there are no CUDA graphs.

    All batches of a shape share memory in them, also that of gradients.
    """
    given = {name: value for name, value in trainer.arguments.items() if value is not None}
    found = [name for name, values in _REPLAYS_WITH.items() if name in given and given[name] not in values]
    devices = given.get("devices")
    found += ["devices"] if (len(devices) if isinstance(devices, list) else devices) in range(2, 10**6) else []
    texts = [f"trainer.{name}={getattr(given[name], 'name', given[name])}" for name in found]
    kinds = [one.kind for one in as_list(given.get("callbacks")) if isinstance(one, Part)]
    texts += [f"trainer.callbacks.{kind.__name__}" for kind in kinds if issubclass(kind, _REPLAYS_WITHOUT)]
    return texts + [f"{module.name}.{name}" for name in changed_steps(module.target)]


_REPLAYS_WITH: dict[str, tuple[Any, ...]] = {"accelerator": ("auto", "gpu", "cuda"), "strategy": ("auto",)}
_REPLAYS_WITH |= dict.fromkeys(("num_nodes", "accumulate_grad_batches"), (1,))
_REPLAYS_WITHOUT = (GradientAccumulationScheduler, StochasticWeightAveraging)


def compiler_problems() -> list[str]:
    """Returns what ``torch.compile`` lacks on this machine."""
    if sys.platform == "win32":  # found by torch in its own way
        return []
    compiler = shlex.split(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))[0]
    missing = [] if shutil.which(compiler) else [f"a C++ compiler ({compiler} is not there; CXX can name another)"]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("the headers of Python (python3-dev)")
    text = f"compile=true needs {' and '.join(missing)} (install what is missing, or give compile=false)"
    return [text] if missing else []


def monitored(groups: Groups) -> Iterator[str]:
    """Yields metrics of checkpoints and callbacks that nothing logs, and modes by which the worst would be the best.

    A module or a callback of others may log anything, and what its arguments mean is its own.
    """
    if groups.data is None or groups.module is None or groups.command in TRAINED:
        return
    callbacks, checkpoint = groups.callbacks, groups.settings["checkpoint"]
    known = {} if groups.module.name else logged_metrics(groups.data, groups.metrics)
    probes = ["val/knn_acc" for one in callbacks if issubclass(one.kind, KNNProbe)]
    ours = all(one.name.startswith(("lightning.", "vit_lightning.")) for one in callbacks)
    found = [("checkpoint", checkpoint.monitor, checkpoint.mode)] if checkpoint else []
    for one in callbacks:
        metric, option = one.arguments.get("monitor"), signature_of(one.target).options.get("mode")
        if one.name.startswith("lightning.") and metric is not None:
            mode = one.arguments.get("mode", option and option.default)
            found.append((f"trainer.callbacks.{one.target.__name__}", metric, mode))
    for key, metric, mode in found:
        goal = known.get(metric) or goal_of(metric)
        if known and ours and metric not in {*known, *probes}:
            yield f"{key}.monitor={metric} is not logged (choose {', '.join([*known, *probes])})"
        if groups.command != "fit" or (known and metric not in known):
            continue
        if goal and mode in {"max", "min"} - {goal[:3]}:
            better = f"{'lower' if mode == 'max' else 'higher'} values of {metric} are better"
            yield f"{key}.mode={mode}: {better} (give mode={goal[:3]})"
        elif not (goal or mode):
            yield f"{key}.mode is missing: whether higher (max) or lower (min) values of {metric} are better"


def resumable(groups: Groups) -> Iterator[str]:
    """Yields callbacks with which no run can be resumed."""
    yield from callback_problems(one.kind for one in groups.callbacks)


RULES: tuple[Callable[[Groups], Iterator[str]], ...] = (
    not_taken_by_module,
    test_of_others,
    loss_of_data,
    average_beside_callbacks,
    resumable,
    compiled,
    monitored,
)
"""What is checked once all groups have been read."""
