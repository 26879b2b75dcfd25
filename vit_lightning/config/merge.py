"""Config files, the config of a checkpoint and flags, merged: later ones win, flags come last."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit_lightning.config.adapters import KEPT
from vit_lightning.config.build import DEFAULT_CLASSES, GROUPS
from vit_lightning.config.experiment import network_in_file
from vit_lightning.config.files import Config, as_list, flatten, parse_yaml, read_config, value_at, word
from vit_lightning.config.foreign import as_ours
from vit_lightning.config.names import HOMES, find_class, full_name
from vit_lightning.config.options import TRAINED
from vit_lightning.config.own_files import also_search
from vit_lightning.config.shipped import find_config
from vit_lightning.data.image_files import data_of_files
from vit_lightning.errors import UserError
from vit_lightning.models.presets import Preset
from vit_lightning.models.vit import ViT
from vit_lightning.storage.checkpoint_files import find_checkpoint, read_checkpoint, run_folder_of
from vit_lightning.weights.init_from import FROM_DATA, InitialWeights, open_initial_weights
from vit_lightning.weights.trust import refuse_untrusted

SHORT = {"optimizer": HOMES["OptimizerConfig"], "loss": HOMES["LossConfig"], "optimizer.schedule": HOMES["LRScheduler"]}
"""Modules of classes that need no module, where a later class may be the same by another name."""


class Dropped(NamedTuple):
    """A value of an earlier config that a later class or preset put out of use."""

    reason: str
    """The later option, such as model.preset=S/16."""
    group: str
    """Dotted key of the class that had the value as an argument."""
    name: str
    value: Any


class Merged(NamedTuple):
    """The config of a command line."""

    config: Config
    problems: list[str]
    """What is wrong with config files and the source of the initial weights."""
    replaced: list[str]
    """A sentence for each class or preset that put values of an earlier config file out of use."""
    initial: InitialWeights | None = None
    """The source of the initial weights."""


def merge_all(flags: Sequence[tuple[str, str]], command: str, *, files: bool = False, trust: bool = False) -> Merged:
    """Merges config files and flags; flags are one source, in which an argument holds wherever its class is named.

    Args:
        flags: options and values of the command line, in order.
        command: the command; if it uses a trained model, the config of its checkpoint comes first.
        files: whether image files replace the data of that config.
        trust: whether files of weights may name any class.
    """
    configs: list[tuple[Path, Config]] = []
    problems: list[str] = []
    names = [value for key, value in flags if key == "config"]
    for text in names:
        try:
            path = find_config(text)
            config = read_config(path)
            if "compare" in config or {"method", "parameters"} <= config.keys():
                raise UserError(f"config={text} is the plan of an ablation, not a config: lightning ablate {text}")
            configs.append((path, as_ours(config, problems)))
        except UserError as error:
            problems += error.problems
    given = as_ours(_together(flags), problems)
    sources = [*(config for _, config in configs), given]
    initial, first = None, {}
    if command in TRAINED:
        first = _config_of_checkpoint(flags, files=files, trust=trust)
    else:
        try:
            initial, first = _config_of_source(sources, trust=trust)
        except UserError as error:
            problems += error.problems
    merged: Config = {}
    dropped: list[Dropped] = []
    for config in (first, *sources):
        merged = merge(merged, {k: v for k, v in config.items() if v is not None or k not in GROUPS}, dropped=dropped)
    if names and "experiment" not in merged:
        merged["experiment"] = Path(names[-1]).stem
    _check_split(first, merged)
    return Merged(merged, problems, _sentences(dropped, configs), initial)


def _together(flags: Sequence[tuple[str, str]]) -> Config:
    """Returns all flags but the config files as one config."""
    together: Config = {}
    for key, value in sorted(
        flags, key=lambda flag: len([part for part in flag[0].split(".") if part != "class_path"])
    ):
        if key != "config":
            _add(together, config_of_flag(key, value))
    return together


def _add(together: Config, more: Config) -> None:
    for key, value in more.items():
        before = together.get(key)
        if isinstance(before, str) and isinstance(value, dict):
            together[key] = {"class_path": before, **value}
        elif isinstance(before, dict) and isinstance(value, dict):
            _add(before, value)
        else:
            together[key] = [*as_list(before), *as_list(value)] if key.endswith("+") else value


def _sentences(dropped: Sequence[Dropped], configs: Sequence[tuple[Path, Config]]) -> list[str]:
    """Returns what is to be told of values that were given in config files; those of a checkpoint are complete."""
    told: dict[str, list[str]] = {}
    for reason, group, name, value in dropped:
        having = [path.name for path, config in configs if value_at(config, f"{group}.{name}") is not None]
        if having and value is not None:
            told.setdefault(f"{reason} replaces {{}} of {having[-1]}", []).append(f"{name}={word(value)}")
    return [
        text.format(", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else ""))
        for text, items in told.items()
    ]


def _config_of_checkpoint(flags: Sequence[tuple[str, str]], *, files: bool, trust: bool) -> Config:
    paths = [value for key, value in flags if key in ("ckpt", "ckpt_path")]
    if not paths:
        raise UserError("ckpt is missing: give --ckpt RUN_FOLDER or --ckpt FILE")
    checkpoint = read_checkpoint(find_checkpoint(paths[-1]))
    config = flatten(checkpoint.get("config") or {})
    if not isinstance(config, dict):
        raise UserError(f"ckpt={paths[-1]} holds no config")
    if files:
        config["data"] = data_of_files(paths[-1], checkpoint)
    config.pop("distillation", None)  # its teacher may be gone
    if not trust:
        refuse_untrusted(config)
    if isinstance(config.get("model"), dict):  # these come from the data, which may give other sizes
        config["model"] = {name: value for name, value in config["model"].items() if name not in FROM_DATA[:2]}
    return {**config, "init_from": None}  # the weights are the checkpoint's own


def _config_of_source(sources: Sequence[Config], *, trust: bool) -> tuple[InitialWeights | None, Config]:
    """Returns the source of the initial weights and its architecture; nothing without one."""
    given = [config["init_from"] for config in sources if "init_from" in config]
    if not given or given[-1] in (None, "null"):
        return None, {}
    models = [config["model"] for config in sources if config.get("model")]
    named = [str(path) for model in models if (path := _class_of(model)) is not None]
    told: Config = functools.reduce(merge, (model for model in models if isinstance(model, dict)), {})
    attention = told.get("attention")
    heads = {"num_heads": told.get("num_heads")}
    heads["dim_head"] = attention.get("dim_head") if isinstance(attention, dict) else None
    initial = open_initial_weights(str(given[-1]), network_in_file, trust=trust)
    if trust and initial.file.path is not None and (folder := run_folder_of(initial.file.path)) is not None:
        also_search(folder)
    for_vit = not named or find_class(full_name(named[-1])) is ViT
    return initial, {"model": flatten(initial.model(for_vit=for_vit, heads=heads))}


def _check_split(trained: Config, given: Config) -> None:
    """Refuses to measure a model on images that it was trained on."""
    before, now = trained.get("data"), given.get("data")
    if not isinstance(before, dict) or not isinstance(now, dict) or before.get("class_path") != now.get("class_path"):
        return
    first, second = str(before.get("split_seed", 0)), str(now.get("split_seed", 0))
    if first != second:
        raise UserError(
            f"data.split_seed={second}: the model learned from split {first}, and so from test images of this one"
        )


def merge(
    base: Config,
    config: Config,
    defaults: Mapping[str, str] = DEFAULT_CLASSES,
    group: str = "",
    dropped: list[Dropped] | None = None,
) -> Config:
    """Returns ``base`` updated by ``config``, without arguments of a replaced class and sizes of a replaced preset.

    ``key+`` appends to a list.

    Args:
        base: the earlier config.
        config: the later one.
        defaults: class of each key whose class need not be named.
        group: dotted key of what the configs are the arguments of; empty for whole configs.
        dropped: gets what is dropped.
    """
    merged, dropped = dict(base), [] if dropped is None else dropped
    is_ours = str(full_name(merged.get("class_path", DEFAULT_CLASSES["model"]))).startswith("vit_lightning.")
    if group == "model" and config.get("preset") is not None and is_ours:
        sizes = [name for name in Preset._fields if name in merged]
        dropped += [Dropped(f"model.preset={config['preset']}", group, name, merged.pop(name)) for name in sizes]
    for key, value in config.items():
        before, dotted = merged.get(key), f"{group}.{key}" if group else key
        if key.endswith("+"):
            merged[key[:-1]] = [*as_list(merged.get(key[:-1])), *as_list(value)]
        elif isinstance(before, str) and isinstance(value, dict) and "class_path" not in value:
            merged[key] = {"class_path": before, **value}
        elif isinstance(before, dict) and isinstance(value, dict | str) and (is_class(value) or dotted not in KEPT):
            old, new, home = before.get("class_path", defaults.get(key)), _class_of(value), SHORT.get(dotted, "")
            by_name = isinstance(value, dict) and old is not None and new is None and dotted in KEPT and "name" in value
            same = new is None or (old is not None and full_name(str(old), home) == full_name(str(new), home))
            if isinstance(value, dict) and same and not by_name:
                merged[key] = merge(before, value, {}, dotted, dropped)
                continue
            given = merge({}, value) if isinstance(value, dict) else {"class_path": value}
            kept = {name: item for name, item in before.items() if name in KEPT.get(dotted, ())}
            merged[key] = {**kept, **given} if kept or isinstance(value, dict) else value
            reason = f"{dotted}={value}" if isinstance(value, str) else f"{dotted}.class_path={new}"
            reason = f"{dotted}.name={given['name']}" if by_name else reason
            lost = [(name, item) for name, item in before.items() if name not in (*kept, "class_path")]
            dropped += [Dropped(reason, dotted, name, item) for name, item in lost]
        else:
            merged[key] = merge({}, value) if isinstance(value, dict) else value
    return merged


def is_class(value: Config | str) -> bool:
    """Whether a value can name a class; words such as adam are none."""
    return isinstance(value, dict) or "." in value or value[:1].isupper()


def _class_of(value: Config | str) -> Any:
    return value.get("class_path") if isinstance(value, dict) else value


def config_of_flag(key: str, value: str) -> Config:
    """Returns a flag as a config; ``--model=CLASS`` and ``--data=CLASS`` name a class."""
    # other values stay words, which are read as what the option's type needs
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    given: Any = flatten(parse_yaml(value, f"{key}={value}")) if value[:1] in ("[", "{") or quoted else value
    parts = [part for part in key.split(".") if part != "init_args"]
    if len(parts) == 1 and parts[0] in ("module", *DEFAULT_CLASSES) and isinstance(given, str):
        given = {"class_path": given}
    for part in reversed(parts):
        given = {part: given}
    config: Config = given
    return config
