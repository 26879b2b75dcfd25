"""An ablation run by W&B's agents: the sweep file of a plan, and the flags that an agent gives a run.

W&B's schema takes no keys of others at the top, but any value of a parameter. So the values of a parameter ``arm`` hold
what runs of an arm have in common. The agent hands one to ``lightning fit`` as a flag, which ``plain_flags`` turns into
options of a config.
"""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vit_lightning.ablation.plan import Plan, flags_of, options_of_run
from vit_lightning.config.files import read_flags
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.storage.folder import write_whole


def write_sweep(plan: Plan, path: Path, chosen: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes the sweep file of a plan; returns what to do with it.

    Args:
        plan: the plan.
        path: the file, which must not be there.
        chosen: options of each arm that tuning has chosen.

    Raises:
        UserError: an arm is not tuned yet, or the file cannot be written.
    """
    if plan.tune.replicates or plan.compare.equal:
        cannot = "tune each pair of runs anew (tune.replicates), nor time arms (compare.equal)"
        raise UserError(f"wandb-sweep={path}: W&B's agents cannot {cannot}")
    tried = plan.tune.combinations
    if missing := [arm for arm in plan.arms if chosen.get(arm, {}) not in tried]:  # not yet, or by an earlier plan
        raise UserError(
            f"wandb-sweep={path}: W&B's agents cannot tune {', '.join(missing)}: run lightning ablate "
            f"{shlex.quote(plan.file)} until tuning has finished, or write the values into the arms and leave out tune"
        )
    common = {"ablation": plan.name, "split_varies": plan.split_varies}
    arms = [{**common, "arm": arm, "options": {**plan.arms[arm], **chosen.get(arm, {})}} for arm in plan.arms]
    seeds, chooser = plan.seeds[: plan.compare.max_seeds], plan.checkpoint
    sweep = {
        "program": "vit_lightning",
        "command": ["lightning", "fit", *plan.flags, "${args}"],
        "metric": {"name": chooser.monitor, "goal": f"{chooser.mode}imize"},
        "method": "grid",
        "parameters": {"arm": {"values": arms}, "seed_everything": {"values": seeds}},
    }
    refuse([f"wandb-sweep={path} is there already (choose a new file)"] * path.exists())
    try:
        write_whole(path, yaml.safe_dump(sweep, sort_keys=False, default_flow_style=None, width=120))
    except OSError as fault:
        raise UserError(f"wandb-sweep={path} cannot be written: {fault.strerror}") from fault
    what = f"{len(arms) * len(seeds)} runs, all that the plan compares, since agents do not stop arms that are decided"
    return f"wandb sweep {shlex.quote(str(path))}, then wandb agent on any number of machines: {what}"


def plain_flags(flags: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Turns the flags that W&B's agent gives a run into options of a config: those of its arm, and its place in W&B.

    Raises:
        UserError: the arm is none of a sweep file.
    """
    given = dict(flags)
    place = [  # wandb takes no other there
        (f"wandb.{name}", os.environ[variable])
        for name, variable in (("project", "WANDB_PROJECT"), ("entity", "WANDB_ENTITY"))
        if "WANDB_SWEEP_ID" in os.environ and os.environ.get(variable)
    ]
    if "arm" not in given:
        return [*flags, *place]
    try:
        arm, seed = ast.literal_eval(given["arm"]), int(given["seed_everything"])  # a mapping, as Python writes it
        per_run = options_of_run(arm["ablation"], arm["arm"], seed, split_varies=arm["split_varies"])
        options = read_flags(flags_of({**arm["options"], **per_run}))
    except (ValueError, SyntaxError, TypeError, KeyError) as fault:
        raise UserError(
            f"arm={given['arm']} must be a value of arm in a sweep file, beside --seed_everything"
        ) from fault
    return [flag for flag in flags if flag[0] not in ("arm", "seed_everything")] + options + place
