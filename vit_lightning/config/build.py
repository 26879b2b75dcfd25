"""A checked experiment from a merged config: each group is read and made once, then what they say about each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.pytorch import Trainer, callbacks

from vit_lightning.classes import are_named
from vit_lightning.config import networks
from vit_lightning.config.adapters import ADAPTERS, chosen_metrics, read_loss, read_optimizer, with_class_weights
from vit_lightning.config.check_network import check_network, optimizer_problems
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, flatten, value_at
from vit_lightning.config.from_weights import options_of_data, other_cuts
from vit_lightning.config.lightning_cli import SET_BY_RUN, as_lightning_trains
from vit_lightning.config.merge import merge
from vit_lightning.config.names import find_class, is_same_class
from vit_lightning.config.networks import CONFIGURED, empty_network, make_teacher, module_from, takes
from vit_lightning.config.options import DEFAULT_CLASSES, GROUPS, TRAINED, ConfigOptions, RunOptions, Settings
from vit_lightning.config.signatures import Option, signature_of
from vit_lightning.config.together import RULES, Groups, Merged
from vit_lightning.config.typed import Part, Place, Reader, plain, shown, unknown
from vit_lightning.data.base import ImageData
from vit_lightning.data.image_files import ImageFiles
from vit_lightning.errors import UserError, gathered
from vit_lightning.limits import Limit, choice, is_plain_name, near, problems_of, refuse
from vit_lightning.metric_facts import goal_of
from vit_lightning.training.checkpoints import CheckpointConfig
from vit_lightning.training.classifier import ConfiguredOptimizer

OPTION_KINDS: tuple[type[Any], type[Any]] = (ConfigOptions, RunOptions)
"""Classes of the options that belong to no group."""

OWN_GROUPS = {"optimizer": read_optimizer, "loss": read_loss}
"""Groups of settings in whose place a class of others may stand."""

_AT_LEAST: dict[str, float] = dict.fromkeys(("max_epochs", "max_steps", "num_nodes", "check_val_every_n_epoch"), 1)
_AT_LEAST |= {"accumulate_grad_batches": 1, "limit_train_batches": 1e-9}
_AT_LEAST |= dict.fromkeys(("min_epochs", "min_steps", "log_every_n_steps", "gradient_clip_val"), 0)


def build(merged: Merged, command: str, **of_call: Any) -> Experiment:
    """Returns the experiment of a merged config.

    Args:
        merged: the config, with the weights that it names and what is wrong with its files.
        command: the command.
        of_call: fields of ``Experiment`` that the command line alone decides.

    Raises:
        UserError: all problems.
    """
    reader = Reader(ADAPTERS, merged.problems, complete=merged.complete)
    groups = Groups(merged, command, reader, merged.config, may_differ=bool(of_call.get("allowed_changes")))
    for read in ORDER:
        read(groups)
    reader.problems += [problem for rule in RULES for problem in rule(groups)]
    refuse(_without_consequences(_of_no_class(groups.config, reader.problems)))
    module, general, parts = groups.module, groups.general, groups.setting_parts
    assert module is not None
    assert groups.data is not None or general["print_config"]
    used = {key: part if key not in CONFIGURED or takes(module, key) else None for key, part in parts.items()}
    general |= {"experiment": general["experiment"] or "run"}
    general["metrics"] = [item.plain for item in groups.metrics] or None
    written = {name: general[name] for name in signature_of(ConfigOptions).options}
    written |= {"module": module if module.name else None, "model": groups.network, "data": groups.data_part, **used}
    return Experiment(
        config=plain({**written, "trainer": groups.trainer}),
        given=merged.config,
        data=groups.data,  # type: ignore[arg-type]  # None where the config alone is printed
        network=groups.network,
        module=module,
        trainer_part=groups.trainer,
        settings=Settings(**groups.settings),
        metrics={item.name: item.metric for item in groups.metrics},
        trained=groups.trained,
        initial=groups.initial,
        teacher=groups.teacher,
        unread=tuple(groups.unread),
        **{name: general[name] for name in ("resume", "out", "print_config")},
        **of_call,
    )


def read_general(groups: Groups) -> None:
    """Reads and makes the options that belong to no group; refuses keys that are nothing."""
    reader, config = groups.reader, groups.config
    options = {key: option for kind in OPTION_KINDS for key, option in signature_of(kind).options.items()}
    own = {key: value for key, value in config.items() if key not in (*GROUPS, "metrics")}
    for name in [name for name in own if name not in options]:
        reader.problems.append(_unknown(name, own.pop(name), config, [*options, *GROUPS]))
    groups.general = reader.arguments({name: options[name] for name in options if name != "metrics"}, own, "")
    known = {name: groups.general[name] for name in signature_of(ConfigOptions).options if name in groups.general}
    _make(reader, "", Part(ConfigOptions, known))


def _unknown(name: str, value: Any, config: Config, names: Sequence[str]) -> str:
    """Returns the problem of a key that is nothing, which may be an option of a group without its group."""
    groups = option_groups(config)
    inner = {last: f"{key}.{last}" for key in reversed(groups) for last in signature_of(groups[key]).options}
    likely = near(name, names, 0.8) or [inner[last] for last in near(name.rpartition("-")[2], inner, 0.7)]
    if name == "ckpt":
        instead = "--init_from=SOURCE starts from its weights, lightning fit --resume=RUN resumes a run"
        return f"{name}={value}: there is no such option ({instead})"
    if name == "fit":
        return "fit: there is no such option (its keys belong at the top of the config)"
    if hasattr(callbacks, kind := name.title().replace("_", "").removeprefix("My")) and kind != "Callback":
        return f"{name}: there is no such option (in trainer.callbacks: [{{class_path: {kind}, ...}}])"
    if isinstance(value, dict | list) or not likely:
        return unknown(name, value, "", names)
    return f"{name}={shown(value)}: there is no such option (did you mean {likely[0]}?)"


def option_groups(config: Config | None = None) -> dict[str, Any]:
    """Returns the groups of options, each with its class, that of a merged config if it names one."""
    found = {key: Reader().find(None, with_class(config or {}, key), key) for key in DEFAULT_CLASSES}
    groups = {key: one.target for key, one in found.items() if one is not None}
    return {**groups, **{key: type(settings) for key, settings in Settings()._asdict().items()}, "trainer": Trainer}


def is_general_option(command: str, key: str) -> bool:
    """Whether a flag is a config, a group of options or an option that belongs to none."""
    names = {name for kind in OPTION_KINDS for name in signature_of(kind).options}
    more = ["ckpt"] if command in TRAINED else []
    return key.partition(".")[0].rstrip("+") in {"config", *more, *GROUPS, *names}


def read_module(groups: Groups) -> None:
    """Reads the LightningModule, by which LightningCLI fills in what is not given."""
    groups.module = networks.part_of_module(groups.reader, groups.config)
    if groups.module is not None:
        groups.config = as_lightning_trains(groups.config, groups.module.target)


def read_data(groups: Groups) -> None:
    """Reads and makes the data, or says why its files cannot be read."""
    reader = groups.reader
    given = with_class(groups.config, "data", complete=groups.merged.complete)
    also = given.pop("also_test", None) if isinstance(given, dict) else None
    groups.data_part = reader.part(Place(ImageData), given, "data")
    if (data := _made_data(reader, groups.data_part)) is None:
        return
    before = len(reader.problems)
    _find_images(groups, data, given)
    if also and groups.command in ("fit", "test"):
        also = _read_further(groups, data, also, given)
    found = {"also_test": also} if also else {}
    if unread := reader.problems[before:]:
        groups.unread = unread
        if groups.general.get("print_config"):
            del reader.problems[before:]
    else:
        if data.wanted is None:
            with reader.trying("data"):
                data.check_augment()
        groups.data, found = data, {**found, **data.pinned()}
    groups.data_part = groups.data_part.with_arguments(found)


def _find_images(groups: Groups, data: ImageData, given: Config) -> None:
    """Looks for the images, of which a trained model must not be measured on those that it learned from.

    Args:
        groups: the groups; their problems grow.
        data: the data of the config.
        given: what the config says of it.
    """
    reader, trained, (folder, images) = groups.reader, groups.merged.trained, _learned(groups, data)
    if trained is not None:
        data.wanted = "val" if groups.command == "validate" else "test"
        data.learned = None if _is_in(folder, data) else images
    before = len(reader.problems)
    with reader.trying("data"):
        data.check()
    if trained is None or len(reader.problems) > before or data.wanted not in data.cut_splits:
        return
    if not has_images_of(value_at(flatten(trained.checkpoint.get("config")), "data"), flatten(given), data):
        return
    with reader.trying():
        unkept: dict[str, Any] = {"in_memory": False} if "in_memory" in signature_of(type(data)).options else {}
        if replace(data, **unkept).fingerprint() != trained.checkpoint.get("images"):
            some = "some would be of the training (give others, or these as they were)"
            raise UserError(
                f"{data.place}: its images are no longer those that the model learned from, and those of "
                f"{data.wanted} are cut from them: {some}"
            )


def _learned(groups: Groups, data: ImageData) -> tuple[Any, str]:
    """Returns folder and fingerprint of the images that the model learns or learned from; empty before training."""
    if (trained := groups.merged.trained) is None:
        return getattr(data, "root", None), ""
    return value_at(flatten(trained.checkpoint.get("config")), "data.root"), str(trained.checkpoint.get("images"))


def _read_further(groups: Groups, data: ImageData, also: Any, given: Config) -> dict[str, Part]:
    """Reads and makes further test sets, whose images and labels become those that the model takes.

    Args:
        groups: the groups; their problems grow.
        data: the data of the config, which gets them.
        also: a folder, or options in place of those of the data, by name.
        given: what the config says of the data.
    """
    if wrong := [str(name) for name in also if not is_plain_name(str(name))] if isinstance(also, dict) else [str(also)]:
        groups.reader.problems.append(
            f"data.also_test={', '.join(wrong)} must hold {{NAME: FOLDER}} or {{NAME: {{OPTION: VALUE}}}}"
        )
        return {}
    parts = {name: _read_one_further(groups, data, name, entry, given) for name, entry in also.items()}
    return {name: part for name, part in parts.items() if part is not None}


def _read_one_further(groups: Groups, data: ImageData, name: str, entry: Any, given: Config) -> Part | None:
    """Reads and makes one of the further test sets; None, with its problems, if its images are not there."""
    reader, key, (learned, fingerprint) = groups.reader, f"data.also_test.{name}", _learned(groups, data)
    folder = {"class_path": "vit_lightning.ImageFolder", "root": entry}
    own = merge({"data": given}, {"data": entry if isinstance(entry, dict) else folder})["data"]
    if own["class_path"] == given["class_path"]:
        reader.problems += other_cuts(given, own, key)
    view = {**data.test_view(), "batch_size": data.batch_size, "num_workers": getattr(data, "num_workers", 0)}
    known = options_of_data(own["class_path"]) - {"class_names", "mean", "std"}
    part: Part = reader.part(Place(ImageData), {**{k: view[k] for k in view if k in known}, **own}, key)
    if (other := _make(reader, key, part)) is None:
        return None
    other.wanted, other.mean, other.std = "test", data.mean, data.std
    other.learned = None if _is_in(learned, other) else fingerprint
    before = len(reader.problems)
    with reader.trying(key):
        other.check()
    if len(reader.problems) > before:
        return None
    with reader.trying():
        trained = groups.merged.trained
        other.take_classes(data.class_names if trained is None else trained.class_names, "the model")
    shapes = [f"{one.in_channels} x {' x '.join(map(str, one.image_size))}" for one in (other, data)]
    if shapes[0] != shapes[1]:
        reader.problems.append(f"{key}: its images are {shapes[0]}, and those of data are {shapes[1]}")
    data.further[name] = other
    return part.with_arguments(other.pinned())


def read_labels(groups: Groups) -> None:
    """Gives the data the labels of a trained model, in the order of its outputs."""
    groups.trained = trained = groups.merged.trained
    data = groups.data
    if data is None or trained is None or isinstance(data, ImageFiles):  # which have no labels
        return
    names = trained.class_names
    is_known = are_named(names) or "data" in (trained.checkpoint.get("config") or {})
    if not is_known and len(names or ()) == data.num_classes:
        names = None  # only its outputs have numbers
    groups.data = None
    with gathered(groups.reader.problems):
        note = data.take_classes(names, f"the model of ckpt={trained.path}")
        groups.trained, groups.data = trained._replace(notes=(*trained.notes, *[note] * bool(note))), data


def has_images_of(source: Config | None, given: Config, data: ImageData) -> bool:
    """Whether some data are taken from the same images as those of another config, as far as the options tell."""
    before, now = _source(source), _source(given)
    if not is_same_class(str(before.get("class_path")), now["class_path"]):
        return False
    return _is_in(before["root"], data) if before.get("root") else before == now


def _source(data: Config | None) -> Config:
    """Returns what a config says of the images themselves."""
    return {key: value for key, value in (data or {}).items() if key not in signature_of(ImageData).options}


def _is_in(root: Any, data: ImageData) -> bool:
    """Whether images of a folder are those of some data."""
    return root is not None and Path(root).resolve() == Path(getattr(data, "root", "")).resolve()


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


def _of_no_class(config: Config, problems: Sequence[str]) -> Sequence[str]:
    """Returns problems with one for all options of a class that the config, as many of LightningCLI, does not name."""
    for key, name in DEFAULT_CLASSES.items():
        lost = [text for text in problems if re.match(rf"{key}\.\w+\b.*: there is no such option \(choose", text)]
        if "class_path" not in (config.get(key) or {}) and len(lost) > 1:
            names = ", ".join(re.findall(r"^\w+\.(\w+)", text)[0] for text in lost)
            one = f"{key}: {name} has no {names} (options of another class need its name: class_path: my.Class)"
            problems = [one, *(text for text in problems if text not in lost)]
    return problems


def _without_consequences(problems: Sequence[str]) -> list[str]:
    """Returns problems without those of an option that another one was meant to be: it has not got its value yet.

    A value of a wrong type is one by itself.
    """
    meant = [name for text in problems for name in re.findall(r"\(did you mean ([\w.]+)\?\)$", text)]
    begins = tuple(f"{name}{end}" for name in meant for end in ("=", " is missing"))
    return [text for text in problems if " must be " in text or not begins or not text.startswith(begins)]


def _made_data(reader: Reader, part: Any) -> ImageData | None:
    """Returns the data; where values are refused, with those of its defaults, so that all else can be checked."""
    for _ in range(3 if part is not None else 0):
        before = len(reader.problems)
        data: ImageData | None = _make(reader, "data", part)
        wrong = {text.split("=")[0].split(".")[1] for text in reader.problems[before:] if text.startswith("data.")}
        if data is not None or not wrong & part.arguments.keys() - signature_of(part.target).required:
            return data
        part = replace(part, arguments={name: item for name, item in part.arguments.items() if name not in wrong})
    return None


def _make(reader: Reader, key: str, part: Part | None) -> Any:
    """Returns what is made of a part; None, with its problems, if it cannot be made."""
    if part is not None and reader.complete:
        with reader.trying(key):
            return part.make()
    return None


def read_list_of_metrics(groups: Groups) -> None:
    """Reads and tries the metrics."""
    classes = 10 if groups.data is None else len(groups.data.label_names)
    groups.metrics = chosen_metrics(groups.reader, groups.config.get("metrics"), classes)


def read_settings(groups: Groups) -> None:
    """Reads and makes the groups of settings."""
    reader, config = groups.reader, groups.config
    loss = with_class_weights(reader, config.get("loss"), groups.data)
    for key, default in Settings()._asdict().items():
        part = _read_settings(reader, key, type(default), loss if key == "loss" else config.get(key))
        if key == "checkpoint" and part is not None:
            part = _with_mode(part, groups)
        groups.setting_parts[key], groups.settings[key] = part, _make(reader, key, part)


def _read_settings(reader: Reader, key: str, kind: Any, given: Any) -> Any:
    """Returns a group of settings; of loss and optimizer also a class of others in its place."""
    given, options = {} if given is None else given, signature_of(kind).options
    if not isinstance(given, Mapping) and not (key in OWN_GROUPS and "." in str(given)):
        name = options.get("name")
        meant = f"; did you mean {key}.name={given}?" if name is not None and given in get_args(name.kind) else ""
        return reader.refused(f"{key}={given}: give its options ({', '.join(options)}){meant}")
    if key in OWN_GROUPS:
        return OWN_GROUPS[key](reader, given)
    if "class_path" in given:
        text = f"{key} takes no class (choose {', '.join(options)})"
        return reader.refused(f"{key}.class_path={given['class_path']}: {text}")
    return reader.part(Place(kind), given, key)


def _with_mode(checkpoint: Part, groups: Groups) -> Part:
    """Returns the options of checkpoints with the mode of their metric, where none is given and it is known."""
    monitor = checkpoint.arguments.get("monitor", CheckpointConfig.monitor)
    goal = groups.logged.get(monitor) or goal_of(monitor)
    if goal is None or checkpoint.arguments.get("mode") is not None:
        return checkpoint
    return checkpoint.with_arguments({"mode": goal[:3]})


def read_trainer(groups: Groups) -> None:
    """Reads the arguments of Lightning's Trainer."""
    reader, given = groups.reader, groups.config.get("trainer") or {}
    if not isinstance(given, Mapping):
        reader.problems.append(f"trainer={given}: give its options (max_epochs, precision, callbacks ...)")
        given = {}
    groups.trainer = Part(Trainer, reader.arguments(trainer_options(), given, "trainer"))
    reader.problems += _out_of_range(groups.trainer.arguments)


def _out_of_range(trainer: Mapping[str, Any]) -> list[str]:
    """Returns arguments of the Trainer that have the right types, but cannot work."""
    given = {name: value for name, value in trainer.items() if value is not None}
    devices, longest, algorithm = map(given.get, ("devices", "max_time", "gradient_clip_algorithm"))
    is_one = devices not in (0, "0", [])
    limits: list[Limit] = [("trainer.devices", devices, is_one, "at least 1 (or auto, or -1 for all)")]
    for name, least in _AT_LEAST.items():
        endless = name in ("max_epochs", "max_steps")
        value = given.get(name, least)
        fits = (math.isfinite(value) and value >= least) or (endless and value == -1)
        rule = f"{f'at least {least}' if least == int(least) else 'above 0'}{' (or -1 for no end)' * endless}"
        limits.append((f"trainer.{name}", value, fits, rule))
    is_time = longest is None or re.search("[1-9]", str(longest)) is not None
    limits.append(("trainer.max_time", longest, is_time, "a time above 0 (days:hours:minutes:seconds)"))
    problems = problems_of(*limits) + choice("trainer.gradient_clip_algorithm", algorithm, ("norm", "value"))
    if algorithm in ("norm", "value") and "gradient_clip_val" not in given:
        problems.append(f"trainer.gradient_clip_algorithm={algorithm} does nothing without trainer.gradient_clip_val")
    return problems


def trainer_options() -> dict[str, Option]:
    """Returns the options of ``trainer``."""
    options = {key: item for key, item in signature_of(Trainer).options.items() if key not in SET_BY_RUN}
    options["precision"] = Option("precision", Literal["auto"] | _PRECISION_INPUT | None, None)
    return options | {"enable_model_summary": Option("enable_model_summary", bool | None, False)}


def read_network(groups: Groups) -> None:
    """Reads the network with the facts of the data."""
    module = groups.module
    if module is not None and takes(module, "model") and not (module.name and groups.config.get("model") is None):
        reader = replace(groups.reader, complete=groups.merged.names_network)
        given = with_class(groups.config, "model", complete=reader.complete)
        groups.network = networks.part_of_network(reader, given, groups.facts)


def try_module(groups: Groups) -> None:
    """Makes a LightningModule of the user's around the network on the meta device, if nothing is wrong so far."""
    reader, module, data, settings = groups.reader, groups.module, groups.data, groups.settings
    if data is not None and module is not None and module.name and not reader.problems:
        filled = {**(groups.facts or {}), **settings, "network": groups.empty, "metrics": {}, "distillation": None}
        with reader.trying():
            made: Any = empty_network(lambda: module_from(module, filled), "module")
            if type(made).configure_optimizers is ConfiguredOptimizer.configure_optimizers:
                reader.problems += optimizer_problems(made.optimized(), settings["optimizer"])


def read_teacher(groups: Groups) -> None:
    """Opens the teacher of a distillation."""
    distillation, data = groups.settings["distillation"], groups.data
    if data is not None and groups.command == "fit" and distillation is not None and distillation.teacher:
        with groups.reader.trying():
            groups.teacher = make_teacher(distillation.teacher, data, trust=groups.general.get("trust", False))


ORDER: tuple[Callable[[Groups], None], ...] = (
    read_general,
    read_module,
    read_data,
    read_labels,
    read_list_of_metrics,
    read_settings,
    read_trainer,
    read_network,
    check_network,
    try_module,
    read_teacher,
)
"""The groups in the order in which they are read: each may use what those before it have become."""
