"""A checked experiment from a merged config: each part is read and made once, then what they say about each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.pytorch import LightningModule, Trainer

from vit_lightning.config.adapters import ADAPTERS, Chosen, read_loss, read_metrics, read_optimizer, with_class_weights
from vit_lightning.config.check_network import check_network, optimizer_problems
from vit_lightning.config.check_values import (
    average_problems,
    callbacks_of,
    compiler_problems,
    mode_problems,
    monitor_problems,
    replay_problems,
    trainer_problems,
    with_mode,
)
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, flatten, value_at
from vit_lightning.config.foreign import OURS, as_lightning_trains, lacks_optimizer
from vit_lightning.config.merge import Merged, Trained
from vit_lightning.config.names import find_class, near
from vit_lightning.config.networks import (
    CONFIGURED,
    data_facts,
    empty_network,
    fact_problems,
    make_teacher,
    module_from,
    problems_of,
    read_module,
    read_network,
    takes,
    unused_problems,
)
from vit_lightning.config.options import (
    COMPILES,
    DEFAULT_CLASSES,
    GROUPS,
    TRAINED,
    ConfigOptions,
    RunOptions,
    Settings,
)
from vit_lightning.config.signatures import Option, signature_of
from vit_lightning.config.typed import WRONG, Part, Place, Reader, plain, unknown
from vit_lightning.data.base import ImageData
from vit_lightning.data.image_files import ImageFiles
from vit_lightning.data.wrapped import WrappedDataModule
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.metric_facts import STEP_METRICS, Goal, goal_of, metric_names, with_own
from vit_lightning.training.compiled import REPLAYS
from vit_lightning.training.losses import OwnLoss
from vit_lightning.training.own_state import callback_problems

OPTION_KINDS: tuple[type[Any], type[Any]] = (ConfigOptions, RunOptions)
"""Classes of the options that belong to no group."""

OWN_GROUPS = {"optimizer": read_optimizer, "loss": read_loss}
"""Groups of settings in whose place a class of others may stand."""


def build(merged: Merged, command: str, **of_call: Any) -> Experiment:
    """Returns the experiment of a merged config.

    Args:
        merged: the config, with the weights that it names and what is wrong with its files.
        command: the command.
        of_call: fields of ``Experiment`` that the command line alone decides.

    Raises:
        UserError: all problems.
    """
    config = merged.config
    reader = Reader(ADAPTERS, merged.problems, complete=not merged.problems)
    general = _read_general(reader, config)
    module = read_module(reader, config)
    if module is not WRONG:
        config = as_lightning_trains(config, module.target)
    data_part, data, unread = _read_data(reader, with_class(config, "data", complete=merged.complete), command, merged)
    needs_data = not general.get("print_config")
    if needs_data:
        reader.problems += unread
    trained = merged.trained
    if data is not None and trained is not None:
        trained, data = _for_classes_of(reader, trained, data)
    config = {**config, "loss": with_class_weights(reader, config.get("loss"), data)}
    setting_parts = {key: _read_settings(reader, key, config) for key in Settings._fields}
    facts = None if data is None else data_facts(data)
    if module is not WRONG and facts is not None:
        reader.problems += fact_problems(module, config.get("module"), facts)
    has_network = module is not WRONG and takes(module, "model") and not (module.name and config.get("model") is None)
    model = with_class(config, "model", complete=merged.complete)
    network = read_network(reader, model, facts) if has_network else None
    trainer = Part(Trainer, reader.arguments(trainer_options(), _options_of_trainer(reader, config), "trainer"))
    metrics = read_metrics(reader, config.get("metrics"), 10 if facts is None else facts["num_classes"])
    logged = {} if data is None else _logged(data, metrics)
    if setting_parts["checkpoint"] is not WRONG:
        setting_parts["checkpoint"] = with_mode(setting_parts["checkpoint"], logged)

    _, run = (_make(reader, "", _part_of(kind, general)) for kind in OPTION_KINDS)
    settings = {key: _make(reader, key, part) for key, part in setting_parts.items()}
    if module is not WRONG:
        reader.problems += [*unused_problems(module, config), *_frozen_problems(module, settings, general)]
    if command == "test" or (command == "fit" and general.get("test")):
        reader.problems += _test_problems(module, data)
    teacher, initial = None, None
    if data is not None:
        reader.problems += _loss_problems(settings["loss"], data)
        network, empty, initial = check_network(reader, network, data, settings, general, merged)
        if module is not WRONG and module.name and not reader.problems:
            filled = {**data_facts(data), **settings, "network": empty, "metrics": {}, "distillation": None}
            with problems_of(reader, "", module, "module"):
                made = empty_network(lambda: module_from(module, filled), "module")
                if lacks_optimizer(module.target):
                    reader.problems += optimizer_problems(made, settings["optimizer"])
        if command == "fit" and settings["distillation"] is not None and settings["distillation"].teacher:
            with problems_of(reader, "", None):
                teacher = make_teacher(settings["distillation"].teacher, data, trust=general.get("trust", False))
    reader.problems += [*trainer_problems(trainer.arguments), *average_problems(trainer, settings["ema"])]
    reader.problems += callback_problems(callback.target for callback in callbacks_of(trainer))
    # a run that is resumed keeps what it began with
    is_new = command == "fit" and general.get("resume") != "must" and not of_call.get("allowed_changes")
    reader.problems += compiler_problems() if general.get("compile") and command in COMPILES else []
    if general.get("compile") == REPLAYS and command in COMPILES and module is not WRONG:
        reader.problems += replay_problems(trainer, module)
    if data is not None and module is not WRONG and command not in TRAINED:
        known = {} if module.name else logged
        reader.problems += monitor_problems(trainer, settings["checkpoint"], known)
        reader.problems += mode_problems(trainer, settings["checkpoint"], known) if is_new else []
    refuse(_without_consequences(reader.problems))
    assert data is not None or not needs_data

    used = {key: part if key not in CONFIGURED or takes(module, key) else None for key, part in setting_parts.items()}
    general |= {"experiment": general["experiment"] or "run", "metrics": [item.plain for item in metrics] or None}
    parts = {"module": module if module.name else None, "model": network, "data": data_part, **used, "trainer": trainer}
    return Experiment(
        config=plain({**{name: general[name] for name in signature_of(ConfigOptions).options}, **parts}),
        data=data,  # type: ignore[arg-type]  # None where the config alone is printed
        network=network,
        module=module,
        trainer_part=trainer,
        settings=Settings(**settings),
        metrics={item.name: item.metric for item in metrics},
        trained=trained,
        initial=initial,
        teacher=teacher,
        replaced=(*merged.replaced, *unread),
        **vars(run),
        **of_call,
    )


def with_class(config: Config, key: str, *, complete: bool = True) -> Any:
    """Returns what a merged config says of ``model`` or ``data``, with its class.

    Where a file of the config could not be read (not ``complete``), it may name another class than the default: then
    options that the default does not have are left out, and nothing is said about them, unless they are near its own.
    """
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        return given
    default = DEFAULT_CLASSES[key]
    if complete or "class_path" in given:
        return {"class_path": default, **given}
    known = signature_of(find_class(default)).options
    return {"class_path": default, **{name: given[name] for name in given if name in known or near(name, known, 0.7)}}


def _without_consequences(problems: Sequence[str]) -> list[str]:
    """Returns problems without those of an option that another one was meant to be: it has not got its value yet.

    A value of a wrong type is one by itself.
    """
    meant = [name for text in problems for name in re.findall(r"\(did you mean ([\w.]+)\?\)$", text)]
    begins = tuple(f"{name}{end}" for name in meant for end in ("=", " is missing"))
    return [text for text in problems if " must be " in text or not begins or not text.startswith(begins)]


def _read_general(reader: Reader, config: Config) -> dict[str, Any]:
    """Returns the values of the options that belong to no group; refuses keys that are nothing."""
    options = {key: option for kind in OPTION_KINDS for key, option in signature_of(kind).options.items()}
    own = {key: value for key, value in config.items() if key not in (*GROUPS, "metrics")}
    for name in [name for name in own if name not in options]:
        reader.problems.append(_unknown(name, own.pop(name), config, [*options, *GROUPS]))
    return reader.arguments({name: options[name] for name in options if name != "metrics"}, own, "")


def _unknown(name: str, value: Any, config: Config, names: Sequence[str]) -> str:
    """Returns the problem of a key that is nothing, which may be an option of a group without its group."""
    found = {key: Reader().find(None, with_class(config, key), key) for key in DEFAULT_CLASSES}
    groups: dict[str, Any] = {key: one.target for key, one in found.items() if one is not None}
    groups |= {"trainer": Trainer, **{key: type(settings) for key, settings in Settings()._asdict().items()}}
    inner = {last: f"{key}.{last}" for key in reversed(groups) for last in signature_of(groups[key]).options}
    likely = near(name, names, 0.8) or [inner[last] for last in near(name.rpartition("-")[2], inner, 0.7)]
    if name == "ckpt":
        instead = "--init_from=SOURCE starts from its weights, lightning fit --resume=RUN resumes a run"
        return f"{name}={value}: there is no such option ({instead})"
    if isinstance(value, dict | list) or not likely:
        return unknown(name, value, "", names)
    return f"{name}={value}: there is no such option (did you mean {likely[0]}?)"


def is_general_option(command: str, key: str) -> bool:
    """Whether a flag is a config, a group of options or an option that belongs to none."""
    names = {name for kind in OPTION_KINDS for name in signature_of(kind).options}
    more = ["ckpt"] if command in TRAINED else []
    return key.partition(".")[0].rstrip("+") in {"config", *more, *GROUPS, *names}


def _part_of(kind: type[Any], general: Mapping[str, Any]) -> Part:
    return Part(kind, {name: general[name] for name in signature_of(kind).options if name in general})


def trainer_options() -> dict[str, Option]:
    """Returns the options of ``trainer``."""
    options = {key: item for key, item in signature_of(Trainer).options.items() if key not in OURS}
    options["precision"] = Option("precision", Literal["auto"] | _PRECISION_INPUT | None, None)
    return options | {"enable_model_summary": Option("enable_model_summary", bool | None, False)}


def _options_of_trainer(reader: Reader, config: Config) -> Mapping[str, Any]:
    given = config.get("trainer") or {}
    if isinstance(given, Mapping):
        return given
    reader.problems.append(f"trainer={given}: give its options (max_epochs, precision, callbacks ...)")
    return {}


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


def _read_data(reader: Reader, given: Any, command: str, merged: Merged) -> tuple[Any, ImageData | None, list[str]]:
    """Returns the data of a config, and makes it or says why its files cannot be read."""
    part = reader.part(Place(ImageData), given, "data")
    if (data := _made_data(reader, part)) is None:
        return part, None, []
    if merged.trained is not None:
        data.wanted = "val" if command == "validate" else "test"
        checkpoint = merged.trained.checkpoint
        root = value_at(flatten(checkpoint.get("config")), "data.root")
        if root is None or Path(root).resolve() != Path(getattr(data, "root", "")).resolve():
            data.learned = str(checkpoint.get("images"))
    before = len(reader.problems)
    with problems_of(reader, "data", part):
        data.check()
    if unread := reader.problems[before:]:
        del reader.problems[before:]
        return part, None, unread
    if data.wanted is None:
        with problems_of(reader, "data", part):
            data.check_augment()
    return replace(part, arguments={**part.arguments, **data.pinned()}), data, []


def _for_classes_of(reader: Reader, trained: Trained, data: ImageData) -> tuple[Trained, ImageData | None]:
    """Gives images of a trained model its labels, by the names of its classes; None for images of other classes."""
    if isinstance(data, ImageFiles):  # which have no labels
        return trained, data
    names = (trained.checkpoint.get("test_view") or {}).get("class_names")
    try:
        note = data.take_classes(names, f"the model of ckpt={trained.path}")
    except UserError as error:
        reader.problems += error.problems
        return trained, None
    return trained._replace(notes=(*trained.notes, *[note] * bool(note))), data


def _made_data(reader: Reader, part: Any) -> ImageData | None:
    """Returns the data; where values are refused, with those of its defaults, so that all else can be checked."""
    for _ in range(3 if isinstance(part, Part) else 0):
        before = len(reader.problems)
        data: ImageData | None = _make(reader, "data", part)
        wrong = {text.split("=")[0].split(".")[1] for text in reader.problems[before:] if text.startswith("data.")}
        if data is not None or not wrong & part.arguments.keys() - signature_of(part.target).required:
            return data
        part = replace(part, arguments={name: item for name, item in part.arguments.items() if name not in wrong})
    return None


def _make(reader: Reader, key: str, part: Any) -> Any:
    """Returns what is made of a part; None, with its problems, if it cannot be made."""
    if part is not WRONG and part is not None and reader.complete:
        with problems_of(reader, key, part):
            return part.make()
    return None


def _test_problems(module: Any, data: ImageData | None) -> list[str]:
    """Returns what a test needs and a LightningModule or LightningDataModule of the user's lacks."""
    problems = []
    if module is not WRONG and module.target.test_step is LightningModule.test_step:
        problems.append(f"module.class_path={module.name} has no test_step (give it one, or fit with test=false)")
    if isinstance(data, WrappedDataModule) and not data.has_test:
        problems.append(f"data.{data.title} has no test_dataloader (give it one, or fit with test=false)")
    return problems


def _frozen_problems(module: Part, settings: Mapping[str, Any], general: Mapping[str, Any]) -> list[str]:
    """Returns what asks to freeze a part of the network of a module that takes none."""
    given = [f"freeze={general['freeze']}"] if general.get("freeze") else []
    given += [f"lora.rank={settings['lora'].rank}"] if settings["lora"] is not None and settings["lora"].rank else []
    refused = given and not takes(module, "model")
    return [f"{', '.join(given)}: module.class_path={module.name} takes no network"] if refused else []


def _loss_problems(loss: Any, data: ImageData) -> list[str]:
    """Returns why a loss of others does not take the targets of the data."""
    found = (
        loss.problems(len(data.label_names), mixes=bool(getattr(data, "mixing", None))) if type(loss) is OwnLoss else []
    )
    return [f"loss.class_path={loss.name}: {text}" for text in found]


def _logged(data: ImageData, metrics: Sequence[Chosen]) -> dict[str, Goal | None]:
    """Returns the names of all that ViTClassifier logs, with their goals."""
    table = with_own({item.name: item.metric for item in metrics})
    names = [*metric_names("val", "train", classes=len(data.label_names), table=table), *STEP_METRICS]
    own = {f"val/{item.name}": item.plain["init_args"]["goal"] for item in metrics}
    return {name: own[name] if name in own else goal_of(name) for name in names}
