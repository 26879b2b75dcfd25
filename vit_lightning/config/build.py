"""A checked experiment from a merged config: each part is read and made once, then what they say about each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn

from vit_lightning.config.adapters import ADAPTERS, read_loss, read_metrics, read_optimizer
from vit_lightning.config.check_values import average_problems, compiler_problems, monitor_problems, trainer_problems
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config
from vit_lightning.config.foreign import OURS
from vit_lightning.config.modules import CONFIGURED, make_module, read_module, takes, unused_problems
from vit_lightning.config.named_weights import weights_problems, without_weights
from vit_lightning.config.names import near
from vit_lightning.config.networks import data_facts, empty_network, network_problems, read_network, without_unknown
from vit_lightning.config.options import COMMAND_OPTIONS, COMPILES, ConfigOptions, NoOptions, RunOptions, Settings
from vit_lightning.config.own_files import where
from vit_lightning.config.signatures import Option, signature_of
from vit_lightning.config.typed import WRONG, Part, Place, Reader, plain, unknown
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.metric_facts import STEP_METRICS, metric_names, with_own
from vit_lightning.sizes import pair
from vit_lightning.storage.checkpoint_files import find_checkpoint, network_weights, read_checkpoint
from vit_lightning.training.fine_tuning import add_lora, freeze_backbone, idle_adapters
from vit_lightning.training.losses import OwnLoss
from vit_lightning.training.optim import group_problems
from vit_lightning.weights.init_from import with_resized_positions

DEFAULT_CLASSES = {"model": "vit_lightning.ViT", "data": "vit_lightning.Digits"}

GROUPS = ("module", "model", "data", "trainer", *Settings._fields)
"""Options that hold options; ``model:`` with nothing under it changes nothing."""

FAULTS = (ValueError, TypeError, OSError, RuntimeError, MisconfigurationException)
"""Errors of classes of others about their arguments."""

OWN_GROUPS = {"optimizer": read_optimizer, "loss": read_loss}
"""Groups of settings in whose place a class of others may stand."""


def build(config: Config, command: str, given: Mapping[str, Any], problems: list[str]) -> Experiment:
    """Returns the experiment of a merged config.

    Args:
        config: the merged config.
        command: the command.
        given: more arguments of ``Experiment``.
        problems: what was wrong with its files, to be told with all other problems.

    Raises:
        UserError: all problems.
    """
    reader = Reader(ADAPTERS, problems, complete=not problems)
    general = _read_general(reader, config, command)
    settings = {key: _read_settings(reader, key, config) for key in Settings._fields}
    data_part, data = _read_data(reader, with_class(config, "data"))
    facts = None if data is None else data_facts(data)
    module = read_module(reader, config)
    has_network = module is not WRONG and takes(module, "model")
    network = read_network(reader, with_class(config, "model"), facts) if has_network else None
    trainer = Part(Trainer, reader.arguments(trainer_options(), config.get("trainer") or {}, "trainer"))
    metrics = read_metrics(reader, config.get("metrics"), 10 if data is None else data.num_classes)

    _, run, options = (_options(reader, kind, general) for kind in option_kinds(command))
    made = {key: _made(reader, key, part) for key, part in settings.items()}
    if module is not WRONG:
        reader.problems += unused_problems(module, config)
    if data is not None and isinstance(made["loss"], OwnLoss):
        found = made["loss"].problems(data.num_classes, mixes=bool(getattr(data, "mixing", None)))
        reader.problems += [f"loss.class_path={settings['loss'].name}: {text}" for text in found]
    if module is not WRONG and not has_network:
        reader.problems += _frozen_without_network(module, made, general)
    if data is not None and isinstance(network, Part):
        network = _with_problems(reader, network, data, made, general, given.get("initial"))
    if data is not None and module is not WRONG and module.name and not reader.problems:
        _try_module(reader, module, network, {**data_facts(data), **made, "metrics": {}, "distillation": None})
    reader.problems += [*trainer_problems(trainer.arguments), *average_problems(trainer, made["ema"])]
    reader.problems += compiler_problems() if general.get("compile") and command in COMPILES else []
    if data is not None and module is not WRONG and not module.name:
        own = with_own({item.name: item.metric for item in metrics})
        known = [*metric_names("val", "train", classes=data.num_classes, table=own), *STEP_METRICS]
        reader.problems += monitor_problems(trainer, made["checkpoint"], known)
    refuse(reader.problems)
    assert data is not None

    config = plain(general | {"metrics": [item.plain for item in metrics] or None})
    config = {name: config[name] for name in signature_of(ConfigOptions).options}
    config |= {"experiment": config["experiment"] or "run"}
    config["module"] = plain(module) if module.name else None
    config["model"] = plain(network)
    config["data"] = plain(data_part)
    config |= {key: plain(part) if _is_used(module, key) else None for key, part in settings.items()}
    return Experiment(
        config={**config, "trainer": plain(trainer)},
        data=data,
        network=network,
        module=module,
        trainer_part=trainer,
        settings=Settings(**made),
        options=options,
        metrics={item.name: item.metric for item in metrics},
        **vars(run),
        **given,
    )


def _is_used(module: Part, key: str) -> bool:
    return key not in CONFIGURED or takes(module, key)


def with_class(config: Config, key: str) -> Any:
    """Returns what a merged config says of ``model`` or ``data``, with its class."""
    given = config.get(key) or {}
    return {"class_path": DEFAULT_CLASSES[key], **given} if isinstance(given, Mapping) else given


def _read_general(reader: Reader, config: Config, command: str) -> dict[str, Any]:
    """Returns the values of the options that belong to no group; refuses keys that are nothing."""
    options = {key: option for kind in option_kinds(command) for key, option in signature_of(kind).options.items()}
    own = {key: value for key, value in config.items() if key not in (*GROUPS, "metrics")}
    for name in [name for name in own if name not in options]:
        reader.problems.append(_unknown(name, own.pop(name), config, [*options, *GROUPS]))
    return reader.arguments({name: options[name] for name in options if name != "metrics"}, own, "")


def _unknown(name: str, value: Any, config: Config, names: Sequence[str]) -> str:
    """Returns the problem of a key that is nothing, which may be an option of a group without its group."""
    found = {key: Reader().find(None, with_class(config, key), key) for key in DEFAULT_CLASSES}
    groups: dict[str, Any] = {key: target[1] for key, target in found.items() if target is not None}
    groups |= {"trainer": Trainer, **{key: type(settings) for key, settings in Settings()._asdict().items()}}
    inner = {last: f"{key}.{last}" for key in reversed(groups) for last in signature_of(groups[key]).options}
    likely = near(name, names, 0.8) or [inner[last] for last in near(name.rpartition("-")[2], inner, 0.7)]
    if isinstance(value, dict | list) or not likely:
        return unknown(name, value, "", names)
    return f"{name}={value}: there is no such option (did you mean {likely[0]}?)"


def option_kinds(command: str) -> list[type[Any]]:
    """Returns the classes of the options that belong to no group."""
    return [ConfigOptions, RunOptions, COMMAND_OPTIONS.get(command, NoOptions)]


def is_general_option(command: str, key: str) -> bool:
    """Whether a flag is a config, a group of options or an option that belongs to none."""
    names = {name for kind in option_kinds(command) for name in signature_of(kind).options}
    return key.partition(".")[0].rstrip("+") in {"config", *GROUPS, *names}


def _options(reader: Reader, kind: type[Any], general: Mapping[str, Any]) -> Any:
    return _made(
        reader, "", Part(kind, {name: general[name] for name in signature_of(kind).options if name in general})
    )


def trainer_options() -> dict[str, Option]:
    """Returns the options of ``trainer``."""
    options = {key: item for key, item in signature_of(Trainer).options.items() if key not in OURS}
    options["precision"] = Option("precision", _PRECISION_INPUT | Literal["auto"] | None, None)
    return options | {"enable_model_summary": Option("enable_model_summary", bool | None, False)}


def _read_settings(reader: Reader, key: str, config: Config) -> Any:
    """Returns a group of settings; of loss and optimizer also a class of others in its place."""
    given = {} if config.get(key) is None else config[key]
    kind = type(getattr(Settings(), key))
    options = signature_of(kind).options
    if not isinstance(given, Mapping) and not (key in OWN_GROUPS and "." in str(given)):
        name = options.get("name")
        meant = f"; did you mean {key}.name={given}?" if name is not None and given in get_args(name.kind) else ""
        reader.problems.append(f"{key}={given}: give its options ({', '.join(options)}){meant}")
        return WRONG
    if key in OWN_GROUPS:
        return OWN_GROUPS[key](reader, given)
    if "class_path" in given:
        text = f"{key} takes no class (choose {', '.join(options)})"
        reader.problems.append(f"{key}.class_path={given['class_path']}: {text}")
        return WRONG
    return reader.part(Place(kind), given, key)


def _read_data(reader: Reader, given: Any) -> tuple[Any, ImageData | None]:
    """Returns the data of a config and makes it, or None."""
    part = reader.part(Place(ImageData), given, "data")
    if (data := _made_data(reader, part)) is None:
        return part, None
    before = len(reader.problems)
    with problems_of(reader, "data"):
        data.check()
    if len(reader.problems) > before:
        return part, None
    with problems_of(reader, "data"):
        data.check_augment()
    return replace(part, arguments={**part.arguments, **data.pinned()}), data


def _made_data(reader: Reader, part: Any) -> ImageData | None:
    """Returns the data; where values are refused, with those of its defaults, so that all else can be checked."""
    for _ in range(3 if isinstance(part, Part) else 0):
        before = len(reader.problems)
        data: ImageData | None = _made(reader, "data", part)
        wrong = {text.split("=")[0].split(".")[1] for text in reader.problems[before:] if text.startswith("data.")}
        if data is not None or not wrong & part.arguments.keys() - signature_of(part.target).required:
            return data
        part = replace(part, arguments={name: item for name, item in part.arguments.items() if name not in wrong})
    return None


@contextlib.contextmanager
def problems_of(reader: Reader, key: str) -> Iterator[None]:
    """Adds what a part of the config finds wrong when it is made to the other problems."""
    prefix = f"{key}." if key else ""
    try:
        yield
    except UserError as error:
        reader.problems += [f"{prefix}{text}" for text in error.problems]
    except Exception as fault:
        if (place := where(fault)) is None and not isinstance(fault, FAULTS):
            raise
        reader.problems.append(f"{key}: {place or ' '.join(str(fault).split())}")


def _made(reader: Reader, key: str, part: Any) -> Any:
    """Returns what is made of a part; None, with its problems, if it cannot be made."""
    if part is not WRONG and part is not None and reader.complete:
        with problems_of(reader, key):
            return part.make()
    return None


def _with_problems(
    reader: Reader, part: Part, data: ImageData, made: Mapping[str, Any], general: Mapping[str, Any], initial: Any
) -> Part:
    """Returns the network without arguments that it does not take; finds what does not fit data, optimizer and weights.

    Args:
        reader: gets the problems.
        part: the network.
        data: the data.
        made: settings by their keys.
        general: options that belong to no group.
        initial: the source of the initial weights.
    """

    def make(part: Part) -> nn.Module:
        network: nn.Module = without_weights(part).make()
        return network

    if found := weights_problems(part, general.get("init_from")):
        reader.problems += found
        return part
    before = len(reader.problems)
    if signature_of(part.target).others:
        part = without_unknown(part, make, reader.problems)
    facts = data_facts(data)
    shape, classes = (facts["in_channels"], *pair(data.image_size)), data.num_classes
    with problems_of(reader, ""):
        network = empty_network(partial(make, part))
        if len(reader.problems) > before:
            return part
        reader.problems += network_problems(network, shape, classes)
        lora, freeze = made["lora"], general.get("freeze")
        if lora is not None:
            with torch.device("meta"):
                add_lora(network, lora)
            if lora.rank and freeze:
                text = "adapters freeze the backbone already (leave freeze out)"
                reader.problems.append(f"freeze={freeze} beside lora.rank={lora.rank}: {text}")
            if lora.rank and (idle := idle_adapters(network, shape)):
                reads = (
                    f"{type(network).__name__} reads the weights of {', '.join(idle)} itself, not through an adapter"
                )
                reader.problems.append(f"lora.targets: {reads} (leave them out)")
        if freeze:
            freeze_backbone(network)
        if made["optimizer"] is not None:
            with contextlib.suppress(UserError):  # its own problems are told elsewhere
                reader.problems += [f"optimizer.{text}" for text in group_problems(network, made["optimizer"])]
        method = general.get("resize_positions", "bicubic")
        if general.get("ckpt") is not None:
            path = find_checkpoint(general["ckpt"])
            checkpoint, _ = with_resized_positions(read_checkpoint(path), network, data.image_size, method)
            network_weights(network, checkpoint, path)
        elif initial is not None:
            initial.fitted(network, method)
    teacher = "" if made["distillation"] is None else made["distillation"].teacher or ""
    if teacher and not teacher.startswith(("torchvision:", "timm:", "hf-hub:")) and not Path(teacher).exists():
        with problems_of(reader, ""):
            find_checkpoint(teacher, "distillation.teacher")
    return part


def _frozen_without_network(module: Part, made: Mapping[str, Any], general: Mapping[str, Any]) -> list[str]:
    """Returns what asks to freeze a part of the network of a module that takes none."""
    given = [f"freeze={general['freeze']}"] if general.get("freeze") else []
    given += [f"lora.rank={made['lora'].rank}"] if made["lora"] is not None and made["lora"].rank else []
    return [f"{', '.join(given)}: module.class_path={module.name} takes no network"] if given else []


def _try_module(reader: Reader, module: Part, network: Any, available: Mapping[str, Any]) -> None:
    """Makes a module of the user's own on the meta device; finds why it cannot be made."""
    with problems_of(reader, ""):
        made = None if network is None else empty_network(lambda: without_weights(network).make())
        empty_network(lambda: make_module(module, {**available, "network": made}), "module")
