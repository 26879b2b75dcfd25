"""Config files, those of the package by name, and flags: read strictly, as plain data, and compared.

A class in a config is ``{class_path: NAME, init_args: {...}}``, or without ``class_path`` the arguments of the default
class. A flat config has one mapping for both, with the arguments beside ``class_path``.
"""

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vit_lightning
from vit_lightning.errors import UserError, near
from vit_lightning.storage.parsing import at_home, parse_yaml

Config = dict[str, Any]

CONFIG_FILES = (".yaml", ".yml")
_ROOT = Path(vit_lightning.__file__).parent

ARGUMENTS = ("init_args", "dict_kwargs")
"""Keys under which LightningCLI has the arguments of a class: those of its signature, and those that it passes on."""

SWITCHES = ("print_config", "trust", "reset_head", "dry-run", "retry")
"""Flags that need no value: a word behind one is its value only if it is true or false."""

VALUED = ("config", "ckpt", "out", "resume", "experiment", "init_from", "allow-config-change")
"""Flags whose value is a text, so that true would pass for one."""


def read_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Returns options and values of ``--key=value`` and ``--key value``, in order; a key without a value is "true"."""
    flags, words = split_words(arguments)
    refuse_words(words)
    return flags


def refuse_words(words: Sequence[str]) -> None:
    """Refuses words of a command line that are neither options nor config files."""
    if not words:
        return
    first = words[0]
    name = first.strip("-")
    if first.startswith("-") and name:
        raise UserError(f"{first}: an option has two dashes and its full name: --{name}")
    if Path(first).is_dir():
        raise UserError(f"{first}: unexpected argument, a folder (a run's is given as --resume or --ckpt)")
    meant = f", did you mean --{first}?" if "=" in first else ""
    if not first.startswith("-") and find_config(first).is_file():
        meant = f", did you mean --config {first}?"
    raise UserError(f"{first}: unexpected argument{meant} (options are given as --key=value)")


def split_words(arguments: Sequence[str], command: str = "") -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the flags, as ``read_flags`` does, and the words that are neither flags nor their values.

    A YAML file among the words is a config, but of ``predict``, whose words are images. Switches are spelled as in
    ``SWITCHES``, given with - or _.
    """
    flags: list[tuple[str, str]] = []
    words: list[str] = []
    rest = [*map(at_home, arguments)]
    while rest:
        word = rest.pop(0)
        word = f"--config{word[2:]}" if word == "-c" or word.startswith("-c=") else word  # as in Lightning
        if not word.startswith("--") or word == "--":
            if word.endswith(CONFIG_FILES) and command != "predict":
                flags.append(("config", word))
            else:
                words.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        key = next((switch for switch in SWITCHES if key.replace("_", "-") == switch.replace("_", "-")), key)
        if not equals:
            takes = rest[:1] in (["true"], ["false"]) if key in SWITCHES else rest and not rest[0].startswith("--")
            value = rest.pop(0) if takes else "true"
            if not takes and key in VALUED:
                raise UserError(f"--{key} needs a value (--{key}=...)")
        elif not value and rest and not rest[0].startswith("-"):
            raise UserError(f"{word} {rest[0]}: there must be no space after the equals sign: {word}{rest[0]}")
        flags.append((key, at_home(value)))
    return flags, words


@functools.cache
def shipped_configs() -> dict[str, Path]:
    """Returns the files by name: of the folder ``experiments`` in a clone, of ``vit_lightning/configs`` installed."""
    folder = next(filter(Path.is_dir, (_ROOT / "configs", _ROOT.parent / "experiments")), _ROOT)
    paths = [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]  # not those of runs, which lie deeper
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "digits", "/" in item[0], item[0])))


def shipped_config(name: str) -> Path | None:
    """Returns the file of a config of the package, None if there is none of this name."""
    if name.startswith("experiments/"):  # as it is written in a clone
        name = name.removeprefix("experiments/").removesuffix(".yaml")
    return next((file for known, file in shipped_configs().items() if name in (known, file.stem)), None)


def find_config(text: str | Path) -> Path:
    """Returns the file of a config: of a path, or else of a name; the path itself where there is none.

    ``NAME.yaml`` in the working folder comes before the package's config ``NAME``.
    """
    for path in (Path(text), Path(f"{text}.yaml")):
        if os.path.isfile(path):  # also false for a text that is too long for a path
            return path
    return shipped_config(str(text)) or Path(text)


def near_configs(path: Path, *, here: bool = True) -> str:
    """Returns the configs that could be meant by a path where there is no file: of its folder, if ``here``, or ours."""
    files = sorted((path if path.is_dir() else path.parent).glob("*")) if here else []
    known = {file.stem: str(file) for file in files if file.suffix in CONFIG_FILES}
    likely = list(known)[:4] if path.is_dir() else near(path.stem, known)[:1]
    if likely:
        return f" (did you mean {', '.join(known[name] for name in likely)}?)"
    shipped = {file.stem: name for name, file in shipped_configs().items()}
    hint = "".join(f"did you mean {shipped[name]}? " for name in near(path.stem, shipped)[:1])
    return f" ({hint}lightning configs lists those of the package)"


def read_config(path: Path, key: str = "config") -> Config:
    """Returns a YAML file as a flat config; errors call it ``key``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "it is no text"
        raise UserError(f"{key}={path} cannot be read: {reason}{near_configs(path)}") from fault
    config = parse_yaml(text, f"{key}={path}")
    if not isinstance(config, dict):
        raise UserError(f"{key}={path} {'is empty: it' if config is None else 'is no mapping: it'} holds no keys")
    flat: Config = {str(option): value for option, value in flatten(config).items()}
    return flat


def flatten(value: Any) -> Any:
    """Returns a config with the arguments of each class beside its ``class_path``."""
    if isinstance(value, list):
        return [flatten(item) for item in value]
    if not isinstance(value, dict):
        return value
    flat: Config = {key: flatten(item) for key, item in value.items() if key not in ARGUMENTS}
    for key in ARGUMENTS:
        arguments = flatten(value.get(key))
        flat |= arguments if isinstance(arguments, dict) else {}
    return flat


def as_map(given: Any) -> Config:
    """Returns what a flat config says of a class as a mapping, also where it is named alone."""
    return given if isinstance(given, dict) else {} if given is None else {"class_path": given}


def without_nulls(config: Config, *names: str) -> Config:
    """Returns a config without those of these options that are null."""
    return {key: value for key, value in config.items() if value is not None or key not in names}


def value_at(config: Any, key: str) -> Any:
    """Returns the value of a dotted option of a config, None if it has none."""
    for part in key.split("."):
        config = config.get(part) if hasattr(config, "get") else None
    return config


def as_list(value: Any) -> list[Any]:
    """Returns the items of an option that takes one or several."""
    return value if isinstance(value, list) else [] if value is None else [value]


def word(value: Any) -> str:
    """Returns a value as it is written in a flag."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_flag(text: str) -> str:
    """Returns a message that shows the argument ``config`` of Python as the flag of the command line."""
    return re.sub(r"config=\{(.*?)\}", lambda found: "--config='{" + found[1].replace("'", "") + "}'", text)


ALWAYS = ("data.num_workers", "pictures_every_n_epochs", "watchdog_minutes")
"""Options that may change within a run: its weights and metrics do not depend on them."""


PER_RUN = ("seed_everything", "experiment", "wandb")
"""Keys that identify a run and change nothing else."""


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the options whose values differ between two configs, with both values; without those of ``ALWAYS``."""
    old, new = options_of(before), options_of(after)
    found = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    return {key: pair for key, pair in found.items() if pair[0] != pair[1] and key not in ALWAYS}


def differing_options(configs: Sequence[Config]) -> list[str]:
    """Returns the options in which configs differ, apart from those that identify a run."""
    known = [config for config in configs if config]
    found = {key for config in known[1:] for key in changes(known[0], config)}
    return sorted(key for key in found if key.partition(".")[0] not in PER_RUN)


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config by their dotted keys."""
    return by_key(flatten(dict(config)))


def by_key(node: Any, path: str = "") -> dict[str, Any]:
    """Returns the values of a flat config by their dotted keys; lists as a whole."""
    if not isinstance(node, dict) or not node:
        return {path: node}
    return {
        dotted: value
        for key, item in node.items()
        for dotted, value in by_key(item, f"{path}.{key}" if path else str(key)).items()
    }
