"""An ablation run by W&B's agents: the sweep file of a plan, and the flags that an agent gives a run.

W&B's schema takes no keys of others at the top, but any value of a parameter. So what identifies the ablation is a
parameter with one value, ``ablation``, and the arms are the values of a parameter ``arm``. The agent hands both to
``lightning fit`` as flags, which ``plain_flags`` turns into options of a config.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vit_lightning.ablation.plan import Plan, wandb_words
from vit_lightning.config.files import read_flags, word
from vit_lightning.errors import UserError
from vit_lightning.storage.folder import write_whole

GOALS = {"max": "maximize", "min": "minimize"}


def write_sweep(plan: Plan, path: Path, chosen: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes the sweep file of a plan; returns what to do with it.

    Args:
        plan: the plan.
        path: the file, which must not be there.
        chosen: options of each arm that tuning has chosen.

    Raises:
        UserError: an arm is not tuned yet, or the file cannot be written.
    """
    tried = plan.tune.combinations if plan.tune else [{}]
    chosen = chosen if plan.tune else {}
    if missing := [arm for arm in plan.arms if chosen.get(arm, {}) not in tried]:  # not yet, or by an earlier plan
        raise UserError(
            f"wandb-sweep={path}: W&B's agents cannot tune {', '.join(missing)}: run lightning ablate {plan.file} "
            "until tuning has finished, or write the values into the arms and leave out tune"
        )
    arms = [{"name": arm, **options, **chosen.get(arm, {})} for arm, options in plan.arms.items()]
    sweep = {
        "program": "vit_lightning",
        "command": ["lightning", "fit", *plan.flags, "${args}"],
        "method": "grid",
        "metric": {"name": plan.metric, "goal": GOALS[plan.experiments[plan.baseline].settings.checkpoint.mode]},
        "parameters": {
            "arm": {"values": arms},
            "seed_everything": {"values": plan.seeds},
            "ablation": {"value": {"name": plan.name, "split": "varies" if plan.split_varies else "fixed"}},
        },
    }
    if path.exists():
        raise UserError(f"wandb-sweep={path} is there already (choose a new file)")
    try:
        write_whole(path, yaml.safe_dump(sweep, sort_keys=False, default_flow_style=None, width=120))
    except OSError as fault:
        raise UserError(f"wandb-sweep={path} cannot be written: {fault.strerror}") from fault
    return (
        f"wandb sweep {path}, then wandb agent on any number of machines: {len(arms) * len(plan.seeds)} runs, all that "
        "the plan allows, since agents do not stop arms that are decided"
    )


def plain_flags(flags: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Turns the flags that W&B's agent gives a run into options of a config: those of its arm, and its place in W&B.

    Raises:
        UserError: they name an arm but no ablation, or an ablation but no arm.
    """
    given = dict(flags)
    there = [key for key in ("ablation", "arm") if key in given]
    if len(there) == 1:
        [missing] = {"ablation", "arm"} - {*there}
        raise UserError(f"{there[0]}={given[there[0]]} is for a run of an ablation: --{missing} is missing")
    if not there:
        return list(flags)
    rules, arm = (_mapping(key, given[key]) for key in there)
    name, seed = str(arm.pop("name", "arm")), given.get("seed_everything", "0")
    options = [(key, value) for key, value in flags if key not in there] + [(key, word(arm[key])) for key in arm]
    options += [("data.split_seed", seed)] if rules.get("split") == "varies" else []
    return [*options, *read_flags(wandb_words(str(rules.get("name")), name, seed))]


def _mapping(key: str, text: str) -> dict[str, Any]:
    """Reads a mapping as the agent writes it, which is as Python does."""
    try:
        return dict(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError) as fault:
        raise UserError(f"{key}={text} must be a mapping, as a sweep file has it") from fault
