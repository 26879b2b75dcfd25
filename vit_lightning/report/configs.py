"""Configs of runs, as their folders have them, and how those of an ablation differ."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vit_lightning.config.files import PER_RUN, Config, changes, options_of
from vit_lightning.report.study import Study
from vit_lightning.storage.folder import is_plain

Configs = dict[tuple[str, int], dict[str, Any]]
"""Config of each run, by arm and seed."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Reads ten times as fast where PyYAML has libyaml."""


@dataclass(frozen=True)
class ConfigDifference:
    """Key that is not the same in all runs."""

    key: str
    values: dict[str, list[Any]]
    """Values in the runs of each arm, each value once."""
    planned: bool
    """Whether runs of an arm agree, and so do all arms that do not change the key."""


def read_configs(study: Study) -> Configs:
    """Returns the configs of an ablation's runs that have one."""
    read = {(run.arm, run.seed): config_of_run(study.folder / run.folder) for run in study.runs}
    return {run: config for run, config in read.items() if config}


def config_of_run(folder: Path) -> Config:
    """Returns the config of a run that may be anybody's; an empty one if it cannot be read."""
    path = folder / "config.yaml"
    try:
        config = yaml.load(path.read_text("utf-8"), LOADER) if is_plain(path, folder) else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def config_differences(study: Study, configs: Configs) -> list[ConfigDifference]:
    """Returns the keys in which runs differ, apart from those that identify a run."""
    if not configs:
        return []
    tuning = study.tuning
    of_a_run = (*PER_RUN, *(["data.split_seed"] if study.split_varies else []))
    of_a_run += (*tuning.options,) if tuning is not None and tuning.replicates else ()
    named = {arm: study.given(arm) for arm in study.arms}
    first = next(iter(configs.values()))
    options = {run: options_of(config) for run, config in configs.items()}
    keys = {key for config in configs.values() for key in changes(first, config) if not _changes(of_a_run, key)}
    found = []
    for key in sorted(keys):
        values: dict[str, list[Any]] = {}
        for (arm, _), given in options.items():
            if given.get(key) not in values.setdefault(arm, []):
                values[arm].append(given.get(key))
        others = [own for arm, own in values.items() if not _changes(named[arm], key)]
        planned = all(len(own) == 1 for own in values.values()) and all(own == others[0] for own in others)
        found.append(ConfigDifference(key, values, planned))
    return found


def _changes(overrides: Iterable[str], key: str) -> bool:
    """Whether some overrides change a key or a group that it belongs to."""
    names = (".".join(part for part in name.split(".") if part != "init_args") for name in overrides)
    return any(f"{key}.".startswith(f"{name.removesuffix('+')}.") for name in names)
