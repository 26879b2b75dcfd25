"""Config files, the config of a checkpoint and flags, merged: later ones win, flags come last."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit_lightning.config.experiment import network_in_file
from vit_lightning.config.files import Config, as_list, flatten, full_name, parse_yaml, read_config, value_at, word
from vit_lightning.config.options import TRAINED, Settings
from vit_lightning.config.own_parts import OWN_GROUPS, Dropped, with_full_part_names, without_replaced
from vit_lightning.config.parser import DEFAULT_CLASSES
from vit_lightning.config.shipped import find_config
from vit_lightning.config.trust import find_class
from vit_lightning.data.image_files import data_of_files
from vit_lightning.errors import UserError
from vit_lightning.models.presets import Preset
from vit_lightning.models.vit import ViT
from vit_lightning.storage.checkpoint_files import find_checkpoint, read_checkpoint
from vit_lightning.weights.init_from import FROM_DATA, open_initial_weights

GROUPS = ("model", "data", "trainer", *Settings._fields)
"""Options that hold options; ``model:`` with nothing under it changes nothing."""


class Merged(NamedTuple):
    """The config of a command line."""

    config: Config
    unreadable: list[str]
    """Problems of config files that could not be read."""
    replaced: list[str]
    """A sentence for each class or preset that put values of an earlier config file out of use."""


def merge_all(flags: Sequence[tuple[str, str]], command: str, *, files: bool = False) -> Merged:
    """Merges config files and flags; flags are one source, in which an argument holds wherever its class is named.

    Args:
        flags: options and values of the command line, in order.
        command: the command; if it uses a trained model, the config of its checkpoint comes first.
        files: whether image files replace the data of that config.
    """
    configs: list[tuple[Path, Config]] = []
    unreadable: list[str] = []
    names = [value for key, value in flags if key == "config"]
    for text in names:
        try:
            path = find_config(text)
            config = read_config(path)
            if "compare" in config or {"method", "parameters"} <= config.keys():
                raise UserError(f"config={text} is the plan of an ablation, not a config: lightning ablate {text}")
            configs.append((path, config))
        except UserError as error:
            unreadable += error.problems
    merged: Config = {}
    dropped: list[Dropped] = []
    trained: list[Config] = []
    try:
        read = _config_of_checkpoint(flags, files=files) if command in TRAINED else _config_of_source(flags, configs)
        trained.append(read)
    except UserError as error:
        if command in TRAINED:
            raise
        unreadable += error.problems
    for config in (*trained, *(config for _, config in configs)):
        given = {key: value for key, value in config.items() if value is not None or key not in GROUPS}
        given = with_full_part_names(given)
        merged = merge(without_replaced(merged, given, dropped), given, dropped=dropped)
    if names and "experiment" not in merged:
        merged["experiment"] = Path(names[-1]).stem
    own = [config_of_flag(key, value) for key, value in flags if key.split(".")[0] in OWN_GROUPS]
    merged = without_replaced(merged, functools.reduce(merge, map(with_full_part_names, own), {}), dropped)
    for key, value in sorted(flags, key=lambda flag: _rank(flag[0])):
        if key != "config":
            merged = merge(merged, with_full_part_names(config_of_flag(key, value)), dropped=dropped)
    for config in trained:
        _check_split(config, merged)
    return Merged(merged, unreadable, _sentences(dropped, configs))


def _rank(key: str) -> tuple[int, bool]:
    """Ranks flags: a class before its arguments, and a preset before the sizes beside it."""
    parts = [part for part in key.split(".") if part not in ("class_path", "init_args")]
    return len(parts), parts != ["model", "preset"]


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


def _config_of_checkpoint(flags: Sequence[tuple[str, str]], *, files: bool) -> Config:
    paths = [value for key, value in flags if key == "ckpt"]
    if not paths:
        raise UserError("ckpt is missing: give --ckpt RUN_FOLDER or --ckpt FILE")
    checkpoint = read_checkpoint(find_checkpoint(paths[-1]))
    config = flatten(checkpoint.get("config") or {})
    if not isinstance(config, dict):
        raise UserError(f"ckpt={paths[-1]} holds no config")
    if files:
        config["data"] = data_of_files(paths[-1], checkpoint)
    config.pop("distillation", None)  # its teacher may be gone
    if isinstance(config.get("model"), dict):  # these come from the data, which may give other sizes
        config["model"] = {name: value for name, value in config["model"].items() if name not in FROM_DATA[:2]}
    return {**config, "init_from": None}  # the weights are the checkpoint's own


def _config_of_source(flags: Sequence[tuple[str, str]], configs: Sequence[tuple[Path, Config]]) -> Config:
    """Returns the architecture of the source of the initial weights; empty without one."""
    given = [config["init_from"] for _, config in configs if "init_from" in config]
    given += [parse_yaml(value, f"init_from={value}") for key, value in flags if key == "init_from"]
    if not given or given[-1] is None:
        return {}
    models = [config.get("model") for _, config in configs]
    models += [config_of_flag(key, value).get("model") for key, value in flags if key.split(".")[0] == "model"]
    named = [path for model in models if (path := _class_of(model or {})) is not None]
    told: Config = functools.reduce(merge, (model for model in models if isinstance(model, dict)), {})
    attention = told.get("attention")
    heads = {"num_heads": told.get("num_heads")}
    heads["dim_head"] = attention.get("dim_head") if isinstance(attention, dict) else None
    initial = open_initial_weights(str(given[-1]), network_in_file)
    return {"model": flatten(initial.model(for_vit=not named or find_class(named[-1]) is ViT, heads=heads))}


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
    if (
        group == "model"
        and config.get("preset") is not None
        and _is_own(merged.get("class_path", DEFAULT_CLASSES["model"]))
    ):
        sizes = [name for name in Preset._fields if name in merged]
        dropped += [Dropped(f"model.preset={config['preset']}", group, name, merged.pop(name)) for name in sizes]
    for key, value in config.items():
        before = merged.get(key)
        if key.endswith("+"):
            merged[key[:-1]] = [*as_list(merged.get(key[:-1])), *as_list(value)]
        elif isinstance(before, str) and isinstance(value, dict) and "class_path" not in value:
            merged[key] = {"class_path": before, **value}
        elif isinstance(before, dict) and isinstance(value, dict | str):
            dotted = f"{group}.{key}" if group else key
            old, new = before.get("class_path", defaults.get(key)), _class_of(value)
            if isinstance(value, dict) and (new is None or (old is not None and full_name(old) == full_name(new))):
                merged[key] = merge(before, value, {}, dotted, dropped)
                continue
            merged[key] = value
            reason = f"{dotted}.class_path={new}" if isinstance(value, dict) else f"{dotted}={new}"
            dropped += [Dropped(reason, dotted, name, item) for name, item in before.items() if name != "class_path"]
        else:
            merged[key] = value
    return merged


def _class_of(value: Config | str) -> Any:
    return value.get("class_path") if isinstance(value, dict) else value


def _is_own(class_path: Any) -> bool:
    return str(full_name(class_path)).startswith("vit_lightning.")


def config_of_flag(key: str, value: str) -> Config:
    """Returns a flag as a config; ``--model=CLASS`` and ``--data=CLASS`` name a class."""
    # other values stay words: jsonargparse reads them as what the option's type needs
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    given: Any = flatten(parse_yaml(value, f"{key}={value}")) if value[:1] in ("[", "{") or quoted else value
    parts = [part for part in key.split(".") if part != "init_args"]
    if len(parts) == 1 and parts[0] in ("module", *DEFAULT_CLASSES) and isinstance(given, str):
        given = {"class_path": given}
    for part in reversed(parts):
        given = {part: given}
    config: Config = given
    return config
