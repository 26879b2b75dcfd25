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
from vit_lightning.config.files import parse_yaml, read_flags, word
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
    if path.exists():
        raise UserError(f"wandb-sweep={path} is there already (choose a new file)")
    arms = [{"name": arm, **options, **chosen.get(arm, {})} for arm, options in plan.arms.items()]
    rules = {"name": plan.name, "split": "varies" if plan.split_varies else "fixed"}
    trust = ["--trust-config"] if plan.trusted else []
    sweep = {
        "program": "vit_lightning",
        "command": ["lightning", "fit", *plan.flags, *trust, "${args}"],
        "method": "grid",
        "metric": {"name": plan.metric, "goal": GOALS[plan.experiments[plan.baseline].settings.checkpoint.mode]},
        "parameters": {
            "arm": {"values": arms},
            "seed_everything": {"values": plan.seeds},
            "ablation": {"value": rules},
        },
    }
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
    if not given.keys() & {"ablation", "arm"}:
        return list(flags)
    if missing := {"ablation", "arm"} - given.keys():
        there, value = next((key, given[key]) for key in ("arm", "ablation") if key in given)
        raise UserError(f"{there}={value} is for a run of an ablation: --{missing.pop()} is missing")
    rest = [(key, _plain_word(value)) for key, value in flags if key not in ("ablation", "arm")]
    rules, arm = _mapping("ablation", given["ablation"]), _mapping("arm", given["arm"])
    name, seed = str(arm.pop("name", "arm")), given.get("seed_everything", "0")
    split = [("data.split_seed", seed)] if rules.get("split") == "varies" else []
    options = [(key, word(value)) for key, value in arm.items()]
    return [*rest, *options, *split, *read_flags(wandb_words(str(rules.get("name")), name, seed))]


def _plain_word(text: str) -> str:
    """Turns a value that W&B's agent wrote as Python into the text of a flag."""
    if text not in ("True", "False", "None") and not text.startswith(("[", "{")):
        return text
    try:
        return word(ast.literal_eval(text))
    except (ValueError, SyntaxError):  # not Python
        return text


def _mapping(key: str, text: str) -> dict[str, Any]:
    try:
        value = ast.literal_eval(text)  # the agent writes values as Python does
    except (ValueError, SyntaxError):
        value = parse_yaml(text, f"{key}={text}")
    if not isinstance(value, dict):
        raise UserError(f"{key}={value} must be a mapping, as a sweep file has it")
    return value
