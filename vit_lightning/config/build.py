"""A checked experiment from a merged config: each group is read and made once, then what they say about each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.pytorch import Trainer, callbacks

from vit_lightning.config.adapters import ADAPTERS, chosen_metrics, with_class_weights
from vit_lightning.config.check_network import check_network, try_module
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config
from vit_lightning.config.images import read_data, with_labels
from vit_lightning.config.lightning_cli import SET_BY_RUN, as_lightning_trains
from vit_lightning.config.merge import merge
from vit_lightning.config.names import class_of
from vit_lightning.config.networks import CONFIGURED, data_facts, make_teacher, part_of_module, part_of_network, takes
from vit_lightning.config.options import DEFAULT_CLASSES, GROUPS, TRAINED, ConfigOptions, RunOptions, Settings
from vit_lightning.config.signatures import Option, Part, plain, signature_of
from vit_lightning.config.together import RULES, Groups, Merged, logged_metrics
from vit_lightning.config.typed import Place, Reader
from vit_lightning.data.base import ImageData
from vit_lightning.errors import Limit, at_least, choice, near, problems_of, refuse, unknown
from vit_lightning.metric_facts import Goal, goal_of
from vit_lightning.training.checkpoints import CheckpointConfig
from vit_lightning.training.losses import Teacher

OPTION_KINDS: tuple[type[Any], type[Any]] = (ConfigOptions, RunOptions)
"""Classes of the options that belong to no group."""


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
    general, config = read_general(reader, merged.config)
    config = as_lightning_trains(config)
    data_part, data, unread = read_data(reader, config, merged.trained, command)
    reader.problems += [] if general.get("print_config") else unread
    trained, data = with_labels(reader, merged.trained, data)
    metrics = chosen_metrics(reader, config.get("metrics"), 10 if data is None else len(data.label_names))
    parts = read_settings(reader, config, data, logged_metrics(data, metrics))
    settings = {key: reader.make(part, key) for key, part in parts.items()}
    trainer = read_trainer(reader, config)
    facts = None if data is None else data_facts(data)
    module = part_of_module(reader, config, facts)
    network = None
    if module is not None and takes(module, "model") and not (module.name and config.get("model") is None):
        teller = replace(reader, complete=merged.names_network)
        network = part_of_network(teller, config.get("model") or {}, facts)
    groups = Groups(command, config, general, module, data, settings, trainer, metrics)
    network, empty, initial = check_network(reader, groups, network, merged)
    try_module(reader, groups, empty)
    teacher = open_teacher(reader, groups)
    reader.problems += [problem for rule in RULES for problem in rule(groups)]
    refuse(reader.problems)
    assert module is not None
    assert data is not None or general["print_config"]
    written = {name: general.get(name) for name in signature_of(ConfigOptions).options}
    written |= {"experiment": general["experiment"] or "run", "metrics": [item.plain for item in metrics] or None}
    written |= {"module": module if module.name else None, "model": network, "data": data_part}
    written |= {key: part if key not in CONFIGURED or takes(module, key) else None for key, part in parts.items()}
    return Experiment(
        config=plain({**written, "trainer": trainer}),
        data=data,  # type: ignore[arg-type]  # None where the config alone is printed
        network=network,
        module=module,
        trainer_part=trainer,
        settings=Settings(**settings),
        metrics={item.name: item.metric for item in metrics},
        trained=trained,
        initial=initial,
        teacher=teacher,
        unread=tuple(unread),
        **{name: general[name] for name in ("resume", "out", "print_config")},
        **of_call,
    )


def read_general(reader: Reader, config: Config) -> tuple[dict[str, Any], Config]:
    """Returns the options that belong to no group, and the config without keys that are nothing.

    A misspelt key is read as the one that is meant, see ``Reader.arguments``.
    """
    options = {key: option for kind in OPTION_KINDS for key, option in signature_of(kind).options.items()}
    for name in [name for name in config if name not in (*GROUPS, *options)]:
        value, config = config[name], {key: item for key, item in config.items() if key != name}
        problem, meant = _unknown(name, value, config, [*options, *GROUPS])
        reader.problems.append(problem)
        config = merge(meant, config)
    own = {key: value for key, value in config.items() if key not in (*GROUPS, "metrics")}
    general = reader.arguments({name: options[name] for name in options if name != "metrics"}, own, "")
    known = {name: general[name] for name in signature_of(ConfigOptions).options if name in general}
    reader.make(Part(ConfigOptions, known), "")
    return general, config


def _unknown(name: str, value: Any, config: Config, names: Sequence[str]) -> tuple[str, Config]:
    """Returns the problem of a key that is nothing, and what it means, also an option of a group without its group."""
    if name == "ckpt":
        instead = "--init_from=SOURCE starts from its weights, lightning fit --resume=RUN resumes a run"
        return f"{name}={value}: there is no such option ({instead})", {}
    if name == "fit":
        return "fit: there is no such option (its keys belong at the top of the config)", {}
    if hasattr(callbacks, kind := name.title().replace("_", "").removeprefix("My")) and kind != "Callback":
        return f"{name}: there is no such option (in trainer.callbacks: [{{class_path: {kind}, ...}}])", {}
    groups = option_groups(config) if not isinstance(value, dict | list) else {}
    inner = {last: (key, one) for key in reversed(groups) for last, one in signature_of(groups[key]).options.items()}
    likely = near(name, names, 0.8) or near(name.rpartition("-")[2], inner, 0.7) or near(name, names, 0.5)
    if not likely or likely[0] in names:
        return unknown(name, value, "", names, likely), dict.fromkeys(likely[:1], value)
    key, option = inner[likely[0]]
    meant = {key: {option.name: value}} if Reader().takes(option, value) else {}
    return unknown(name, value, "", names, [f"{key}.{option.name}"]), meant


def option_groups(config: Config | None = None) -> dict[str, Any]:
    """Returns the groups of options, each with its class, that of a merged config if it names one."""
    given = {key: (config or {}).get(key) or {} for key in DEFAULT_CLASSES}
    found = {key: Reader().find(None, given[key], key, class_of(name)) for key, name in DEFAULT_CLASSES.items()}
    groups = {key: one.target for key, one in found.items() if one is not None}
    return {**groups, **{key: type(settings) for key, settings in Settings()._asdict().items()}, "trainer": Trainer}


def is_general_option(command: str, key: str) -> bool:
    """Whether a flag is a config, a group of options or an option that belongs to none."""
    names = {name for kind in OPTION_KINDS for name in signature_of(kind).options}
    more = ["ckpt"] if command in TRAINED else []
    return key.partition(".")[0].rstrip("+") in {"config", *more, *GROUPS, *names}


def read_settings(
    reader: Reader, config: Config, data: ImageData | None, logged: Mapping[str, Goal | None]
) -> dict[str, Part | None]:
    """Reads the groups of settings.

    Args:
        reader: the reader.
        config: the config.
        data: the data, by the names of whose classes a loss may have weights.
        logged: metrics with their goals, which tell the mode of checkpoints.
    """
    given = {**config, "loss": with_class_weights(reader, config.get("loss"), data)}
    parts = {key: _read_settings(reader, key, type(one), given.get(key)) for key, one in Settings()._asdict().items()}
    if (checkpoint := parts["checkpoint"]) is not None and checkpoint.arguments.get("mode") is None:
        monitor = checkpoint.arguments.get("monitor", CheckpointConfig.monitor)
        goal = logged.get(monitor) or goal_of(monitor)
        parts["checkpoint"] = checkpoint.with_arguments({"mode": goal[:3]} if goal else {})
    return parts


def _read_settings(reader: Reader, key: str, kind: Any, given: Any) -> Any:
    """Returns a group of settings; of loss and optimizer also a class of others in its place."""
    given, options = {} if given is None else given, signature_of(kind).options
    if not isinstance(given, Mapping) and not (kind in ADAPTERS and "." in str(given)):
        name = options.get("name")
        meant = f"; did you mean {key}.name={given}?" if name is not None and given in get_args(name.kind) else ""
        return reader.refused(f"{key}={given}: give its options ({', '.join(options)}){meant}")
    if kind not in ADAPTERS and "class_path" in given:
        text = f"{key} takes no class (choose {', '.join(options)})"
        return reader.refused(f"{key}.class_path={given['class_path']}: {text}")
    return reader.part(Place(kind), given, key)


def read_trainer(reader: Reader, config: Config) -> Part:
    """Reads the arguments of Lightning's Trainer."""
    given = config.get("trainer") or {}
    if not isinstance(given, Mapping):
        reader.problems.append(f"trainer={given}: give its options (max_epochs, precision, callbacks ...)")
        given = {}
    arguments = reader.arguments(trainer_options(), given, "trainer")
    reader.problems += _out_of_range(arguments)
    return Part(Trainer, arguments)


def _out_of_range(trainer: Mapping[str, Any]) -> list[str]:
    """Returns arguments of the Trainer that have the right types, but cannot work."""
    given = {name: value for name, value in trainer.items() if value is not None}
    one = ("num_nodes", "check_val_every_n_epoch", "accumulate_grad_batches")
    none = ("min_epochs", "min_steps", "log_every_n_steps", "gradient_clip_val")
    problems = at_least(1, **{f"trainer.{name}": given.get(name) for name in one})
    problems += at_least(0, **{f"trainer.{name}": given.get(name) for name in none})
    devices, share, longest = given.get("devices"), given.get("limit_train_batches", 1), str(given.get("max_time", 1))
    limits: list[Limit] = [
        ("trainer.devices", devices, devices not in (0, "0", []), "at least 1 (or auto, or -1 for all)"),
        ("trainer.limit_train_batches", share, share > 0, "above 0"),
        ("trainer.max_time", longest, bool({*longest} & {*"123456789"}), "a time above 0 (days:hours:minutes:seconds)"),
    ]
    for name in ("max_epochs", "max_steps"):
        end = given.get(name, -1)
        limits.append((f"trainer.{name}", end, end == -1 or end >= 1, "at least 1 (or -1 for no end)"))
    problems += problems_of(*limits)
    algorithm = given.get("gradient_clip_algorithm")
    problems += choice("trainer.gradient_clip_algorithm", algorithm, ("norm", "value"))
    if algorithm in ("norm", "value") and "gradient_clip_val" not in given:
        problems.append(f"trainer.gradient_clip_algorithm={algorithm} does nothing without trainer.gradient_clip_val")
    return problems


def trainer_options() -> dict[str, Option]:
    """Returns the options of ``trainer``."""
    options = {key: item for key, item in signature_of(Trainer).options.items() if key not in SET_BY_RUN}
    options["precision"] = Option("precision", Literal["auto"] | _PRECISION_INPUT | None, None)
    return options | {"enable_model_summary": Option("enable_model_summary", bool | None, False)}


def open_teacher(reader: Reader, groups: Groups) -> Teacher | None:
    """Opens the teacher of a distillation."""
    distillation, data = groups.settings["distillation"], groups.data
    if data is not None and groups.command == "fit" and distillation is not None and distillation.teacher:
        with reader.trying():
            return make_teacher(distillation.teacher, data, trust=groups.general.get("trust", False))
    return None
