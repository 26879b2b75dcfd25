"""Configs merged: later ones win key by key, and all flags of a command line are one config.

A class keeps its arguments until another one is named. A network's sizes win over its preset, and its preset over the
defaults, wherever they are given.
"""

from collections.abc import Sequence
from typing import Any

from vit_lightning.config.files import ARGUMENTS, Config, as_list, flatten
from vit_lightning.config.names import can_be_class, is_same_class
from vit_lightning.config.options import BESIDE_OTHER_CLASS, DEFAULT_CLASSES
from vit_lightning.errors import UserError
from vit_lightning.models.presets import PRESETS
from vit_lightning.storage.parsing import parse_yaml


def merge(base: Config, config: Config, group: str = "") -> Config:
    """Returns ``base`` updated by ``config``, without arguments of a replaced class; ``key+`` appends to a list.

    Args:
        base: the earlier config.
        config: the later one.
        group: dotted key of what the configs are the arguments of; empty for whole configs.
    """
    merged = dict(base)
    for key, value in config.items():
        if str(key).endswith("+"):
            merged[key[:-1]] = [*as_list(merged.get(key[:-1])), *as_list(value)]
        else:
            merged[key] = _merge_value(merged.get(key), value, f"{group}.{key}" if group else key)
    return merged


def _merge_value(before: Any, value: Any, key: str) -> Any:
    """Returns a value where a later config changes it: arguments alone leave the class as it was.

    Another class has its own arguments, and those of the earlier one that stay beside any class.
    """
    if isinstance(before, str) and isinstance(value, dict) and "class_path" not in value:
        return {"class_path": before, **value}
    is_class = isinstance(value, dict) or (
        isinstance(value, str) and (can_be_class(value) or key not in BESIDE_OTHER_CLASS)
    )
    if not isinstance(before, dict) or not is_class:
        return merge({}, value) if isinstance(value, dict) else value
    if isinstance(value, dict) and _keeps_class(before, value, key):
        return merge(before, value, key)
    kept = {name: item for name, item in before.items() if name in BESIDE_OTHER_CLASS.get(key, ())}
    if isinstance(value, str):
        return {**kept, "class_path": value} if kept else value
    return {**kept, **merge({}, value)}


def _keeps_class(before: Config, value: Config, key: str) -> bool:
    """Whether the arguments of a later config are for the class of an earlier one."""
    old, new = before.get("class_path", DEFAULT_CLASSES.get(key)), value.get("class_path")
    if new is None:  # optimizer.name chooses one of ours again
        return old is None or key not in BESIDE_OTHER_CLASS or "name" not in value
    return old is not None and is_same_class(str(old), str(new))


def overruled_preset(model: Config, before: Config) -> list[str]:
    """Returns a preset that sizes of an earlier config win over, as a problem: the network would stay as it was."""
    preset = PRESETS.get(str(model.get("preset")).partition("/")[0])
    sizes = zip(("emb_size", "depth", "num_heads"), preset or (), strict=False)
    kept = [name for name, size in sizes if name not in model and before.get(name) not in (None, size)]
    if not kept or model.get("class_path") not in (None, before.get("class_path")):
        return []
    beside = ", ".join(f"model.{name}={before[name]}" for name in kept)
    return [f"model.preset={model['preset']}: {beside} of an earlier config win over it (give null for the preset's)"]


def config_of_flags(flags: Sequence[tuple[str, str]]) -> Config:
    """Returns all flags but the config files as one config."""
    merged: Config = {}
    for key, value in sorted(
        flags, key=lambda flag: len([part for part in flag[0].split(".") if part != "class_path"])
    ):
        if key != "config":
            _add(merged, config_of_flag(key, value))
    return merged


def _add(merged: Config, more: Config, prefix: str = "") -> None:
    for key, value in more.items():
        before = merged.get(key)
        if key in merged and before is None and isinstance(value, dict):
            raise UserError(f"{prefix}{key}=null before options of it: give one of them")
        if isinstance(before, str) and isinstance(value, dict):
            merged[key] = {"class_path": before, **value}
        elif isinstance(before, dict) and isinstance(value, dict):
            _add(before, value, f"{prefix}{key}.")
        else:
            merged[key] = [*as_list(before), *as_list(value)] if key.endswith("+") else value


def config_of_flag(key: str, value: str) -> Config:
    """Returns a flag as a config; ``--model=CLASS`` and ``--data=CLASS`` name a class."""
    # other values stay words, which are read as what the option's type needs
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    given: Any = flatten(parse_yaml(value, f"{key}={value}")) if value[:1] in ("[", "{") or quoted else value
    given = None if value in ("null", "None") else given  # the second as Python, and so agents of sweeps, write it
    parts = [part for part in key.split(".") if part not in ARGUMENTS]
    if len(parts) == 1 and parts[0] in ("module", *DEFAULT_CLASSES) and isinstance(given, str):
        given = {"class_path": given}
    for part in reversed(parts):
        given = {part: given}
    config: Config = given
    return config
