"""Config files, the config of a checkpoint and flags, merged: later ones win, flags come last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_lightning.config.files import Config, flatten, full_name, parse_yaml, read_config
from vit_lightning.config.options import TRAINED, Settings
from vit_lightning.config.parser import DEFAULT_CLASSES
from vit_lightning.data.image_files import data_of_files
from vit_lightning.errors import UserError
from vit_lightning.storage.checkpoint_files import find_checkpoint, read_checkpoint

GROUPS = ("model", "data", "trainer", *Settings._fields)
"""Options that hold options; ``model:`` with nothing under it changes nothing."""


def merge_all(flags: Sequence[tuple[str, str]], command: str, *, files: bool = False) -> tuple[Config, list[str]]:
    """Returns the merged config of a command line, and the problems of config files that could not be read.

    Args:
        flags: options and values of the command line, in order.
        command: the command; if it uses a trained model, the config of its checkpoint comes first.
        files: whether image files replace the data of that config.
    """
    configs: list[Config] = [_config_of_checkpoint(flags, files=files)] if command in TRAINED else []
    trained = configs[:1]
    unreadable: list[str] = []
    paths = [Path(value) for key, value in flags if key == "config"]
    for path in paths:
        try:
            configs.append(read_config(path))
        except UserError as error:
            unreadable += error.problems
    merged: Config = {}
    for config in configs:
        given = {key: value for key, value in config.items() if value is not None or key not in GROUPS}
        merged = merge(merged, given)
    if paths and "experiment" not in merged:
        merged["experiment"] = paths[-1].stem
    for key, value in flags:
        if key != "config":
            merged = merge(merged, config_of_flag(key, value))
    for config in trained:
        _check_split(config, merged)
    return merged, unreadable


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
    return {**config, "init_from": None}  # the weights are the checkpoint's own


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


def merge(base: Config, config: Config, defaults: Mapping[str, str] = DEFAULT_CLASSES) -> Config:
    """Returns ``base`` updated by ``config``; the arguments of a class that is replaced by another are dropped.

    ``key+`` appends to a list.

    Args:
        base: the earlier config.
        config: the later one.
        defaults: class of each key whose class need not be named.
    """
    merged = dict(base)
    for key, value in config.items():
        before = merged.get(key)
        if key.endswith("+"):
            merged[key[:-1]] = [*_as_list(merged.get(key[:-1])), *_as_list(value)]
        elif isinstance(before, str) and isinstance(value, dict) and "class_path" not in value:
            merged[key] = {"class_path": before, **value}
        elif isinstance(before, dict) and isinstance(value, dict):
            old, new = before.get("class_path", defaults.get(key)), value.get("class_path")
            same = new is None or (old is not None and full_name(old) == full_name(new))
            merged[key] = merge(before, value, {}) if same else value
        else:
            merged[key] = value
    return merged


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def config_of_flag(key: str, value: str) -> Config:
    """Returns a flag as a config; ``--model=CLASS`` and ``--data=CLASS`` name a class."""
    # other values stay words: jsonargparse reads them as what the option's type needs
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    given: Any = flatten(parse_yaml(value, f"{key}={value}")) if value[:1] in ("[", "{") or quoted else value
    parts = [part for part in key.split(".") if part != "init_args"]
    if len(parts) == 1 and parts[0] in DEFAULT_CLASSES and isinstance(given, str):
        given = {"class_path": given}
    for part in reversed(parts):
        given = {part: given}
    config: Config = given
    return config
