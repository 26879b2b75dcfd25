"""Plans of earlier versions, which were W&B sweep files: refused, with the same plan as it is written now."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import yaml

from vit_lightning.config.files import Config, parse_yaml, read_flags
from vit_lightning.errors import UserError
from vit_lightning.report.sequential import FIRST

NOT_FIXED = ("config", "trust-config")
"""Flags of a sweep's command that are no options of a config."""


def is_old(given: Config) -> bool:
    """Whether the file of a plan is a sweep file."""
    return bool(given.keys() & {"program", "command", "method", "parameters"})


def refuse_old(path: Path, sweep: Config) -> NoReturn:
    """Refuses a sweep file.

    Raises:
        UserError: always, with the same plan as it is written now.
    """
    text = yaml.safe_dump(_converted(path, sweep), sort_keys=False, default_flow_style=None, width=120)
    raise UserError(
        f"{path} is a sweep file, as plans were in earlier versions. The same plan now; max_seeds may be larger, since "
        f"arms that are decided get no more runs, and --wandb-sweep=FILE writes a sweep file:\n\n{text}"
    )


def _converted(path: Path, sweep: Config) -> Config:
    """Returns a sweep file as a plan; what it lacks is left out."""
    parameters = {key: said for key, said in _mapping(sweep.get("parameters")).items() if isinstance(said, dict)}
    rules = _mapping(parameters.pop("ablation", {}).get("value"))
    seeds = [seed for seed in parameters.pop("seed_everything", {}).get("values") or [] if isinstance(seed, int)]
    command = sweep.get("command")
    words = [str(word) for word in command if word != "${args}"] if isinstance(command, list) else []
    flags = read_flags(words[words.index("fit") + 1 :] if "fit" in words else [])
    configs = [value for key, value in flags if key == "config"]
    named = [arm for arm in parameters.pop("arm", {}).get("values") or [] if isinstance(arm, dict)]
    plan: Config = {
        "name": rules.get("name", path.stem),
        "config": configs[0] if len(configs) == 1 else configs,
        "fixed": {key: parse_yaml(value, f"{key}={value}") for key, value in flags if key not in NOT_FIXED}
        | {key: said["value"] for key, said in parameters.items() if "value" in said},
        "arms": {str(arm.get("name")): {key: arm[key] for key in arm if key != "name"} for arm in named},
        "grid": {key: said["values"] for key, said in parameters.items() if "values" in said},
        "baseline": rules.get("baseline"),
        "seeds": {"first": min(seeds, default=0)},
        "compare": {
            "metric": rules.get("report"),
            **{key: rules[key] for key in ("smallest_effect", "alpha") if key in rules},
            "max_seeds": max(len(seeds), FIRST),
        },
    }
    if plan["name"] == path.stem:
        del plan["name"]
    return {key: value for key, value in plan.items() if value or key == "config"}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
