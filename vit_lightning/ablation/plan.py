"""The plan of an ablation: a W&B sweep file with the arms, the seeds and the rules of the comparison.

W&B's schema takes no keys of others at the top, but any value of a parameter. So the rules are a parameter with one
value, ``ablation``, and arms that change several keys at once are the values of a parameter ``arm``. W&B's agent hands
both to ``lightning fit`` as flags, which ``sweep_flags.py`` turns into keys of a config.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import parse_yaml, read_config, read_flags, word
from vit_lightning.config.resolve import resolve
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import metric_names, with_own

Item = TypeVar("Item")
KEYS = ("program", "command", "method", "metric", "parameters", "name", "description", "project", "entity", "kind")
RULES = ("name", "baseline", "report", "smallest_effect", "alpha")
GOALS = {"maximize": "max", "minimize": "min"}
NOT_FOR_ARMS = (
    "config",
    "out",
    "resume",
    "ckpt",
    "print_config",
    "seed_everything",
    "experiment",
    "test",
    "data.split_seed",
)
"""Keys that no arm may change: they identify the run or choose the images that measure it."""


@dataclass(frozen=True)
class Plan:
    """Runs of an ablation and the rules by which it is judged."""

    name: str
    file: str
    config_file: str
    flags: list[str]
    """Config file and keys that all arms share, as words of a command."""
    metric: str
    report: str
    baseline: str
    smallest_effect: float
    alpha: float
    arms: dict[str, dict[str, Any]]
    """Dotted keys that each arm changes; the baseline comes first."""
    factors: dict[str, list[Any]]
    """Values of each key of a full grid; empty where arms are named one by one."""
    seeds: list[int]
    trusted: bool
    """Whether configs may name classes of any package."""
    experiments: dict[str, Experiment]
    """The experiment of each arm, with the first seed."""

    def words(self, arm: str, seed: int) -> list[str]:
        """Returns the keys of one run, as flags."""
        overrides = [f"--{key}={word(value)}" for key, value in self.arms[arm].items()]
        return [*self.flags, *overrides, f"--seed_everything={seed}", *wandb_words(self.name, arm, seed)]

    def arguments(self, arm: str, seed: int) -> list[str]:
        """Returns the arguments of ``lightning fit`` for one run."""
        return [*self.words(arm, seed), *(["--trust-config"] if self.trusted else [])]

    def experiment(self, arm: str, seed: int) -> Experiment:
        """Returns the experiment of one run: what ``arguments`` resolve to."""
        return self.experiments[arm].with_seed(seed, _tags(self.name, arm, seed))

    def command(self, arm: str, seed: int) -> str:
        """Returns the command that repeats one run alone."""
        return shlex.join(["lightning", "fit", *self.arguments(arm, seed)])


def slug(text: str) -> str:
    """Returns a name for a folder, of at most 80 characters."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower() or "arm"
    return name if len(name) <= 80 else f"{name[:71]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def read_plan(path: Path, *, trust: bool = False) -> Plan:
    """Reads the plan in a sweep file, checked against the config that it changes.

    Raises:
        UserError: all that is wrong with it.
    """
    sweep = read_config(path, "plan")
    if not sweep.keys() & {"parameters", "method", "command"} and sweep.keys() & {"model", "data", "trainer"}:
        raise UserError(
            f"{path} is a config, not a plan: a plan has arms and seeds under parameters, as "
            f"experiments/ablations/pooling.yaml does (to train it: lightning fit --config {path})"
        )
    problems = [
        f"{key}: an ablation has no such key (choose {', '.join(KEYS)}; its rules go under parameters.ablation.value)"
        for key in sweep
        if key not in KEYS
    ]
    if sweep.get("method") != "grid":
        problems.append(f"method={sweep.get('method')} must be grid: an ablation runs every arm with every seed")
    metric = sweep.get("metric")
    if not isinstance(metric, dict):
        problems.append(f"metric={metric} must be {{name: val/METRIC, goal: maximize or minimize}}")
        metric = {}
    shared = _shared_words(sweep.get("command"), problems)
    parameters = _parameters(sweep.get("parameters"), problems)
    rules = _rules(parameters, problems)
    seeds = _seeds(parameters, problems)
    constants, factors = _factors(parameters, rules.get("baseline"), problems)
    arms = _arms(factors, problems)
    baseline = _baseline(rules.get("baseline"), arms, factors, problems)
    plan = Plan(
        name=str(rules.get("name")),
        file=str(path),
        config_file=next((value for key, value in read_flags(shared) if key == "config"), ""),
        flags=[*shared, *(f"--{key}={word(value)}" for key, value in constants.items())],
        metric=str(metric.get("name")),
        report=str(rules.get("report")),
        baseline=baseline,
        smallest_effect=0.0 if problems else float(rules["smallest_effect"]),
        alpha=0.0 if problems else float(rules["alpha"]),
        arms={name: arms[name] for name in sorted(arms, key=lambda name: name != baseline)},
        factors={} if "arm" in factors else factors,
        seeds=seeds or [0],
        trusted=trust,
        experiments={},
    )
    if plan.config_file:  # its keys are checked although something else is wrong: all problems at once
        problems += _resolve_arms(plan, str(metric.get("goal")))
    if problems:
        raise UserError([f"{path}: {text}" for text in problems])
    return plan


def _parameters(given: Any, problems: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the parameters of the sweep that are mappings."""
    if not isinstance(given, dict):
        problems.append(f"parameters={given} must hold keys with {{value: ...}} or {{values: [...]}}")
        return {}
    found = {key: value for key, value in given.items() if isinstance(value, dict)}
    wrong = [f"parameters.{key}={value}" for key, value in given.items() if key not in found]
    problems += [f"{text} must be {{value: ...}} or {{values: [...]}}" for text in wrong]
    return found


def _shared_words(command: Any, problems: list[str]) -> list[str]:
    """Returns the flags of ``lightning fit`` that the sweep's command gives to every run."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    if "fit" not in words or words[-1:] != ["${args}"]:
        problems.append('command must be [lightning, fit, --config, CONFIG.yaml, "${args}"], as a list')
        return []
    flags = words[words.index("fit") + 1 : -1]
    if not any(key == "config" for key, _ in read_flags(flags)):
        problems.append("command names no config: --config, CONFIG.yaml is missing")
    return flags


def _rules(parameters: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    rules = parameters.get("ablation", {}).get("value")
    if not isinstance(rules, dict):
        problems.append(f"parameters.ablation.value is missing: it holds {', '.join(RULES)}")
        return {}
    problems += [
        f"ablation.{key}: there is no such option (choose {', '.join(RULES)})" for key in rules if key not in RULES
    ]
    problems += [f"ablation.{key} is missing" for key in RULES if key not in rules]
    name = rules.get("name", "ablation")
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        problems.append(f"ablation.name={name} must be a plain name, without slashes")
    for key, below, limit in (("smallest_effect", math.inf, ""), ("alpha", 0.5, " and below 0.5")):
        value = rules.get(key, 0.1)
        if type(value) not in (int, float) or not 0 < value < below:
            problems.append(f"ablation.{key}={value} must be a number above 0{limit}")
    return rules


def _seeds(parameters: Mapping[str, Any], problems: list[str]) -> list[int]:
    seeds = parameters.get("seed_everything", {}).get("values")
    if not isinstance(seeds, list) or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds) or not seeds:
        problems.append("parameters.seed_everything.values must be a list of ints, at least 0")
        return []
    if twice := sorted(_repeated(seeds)):
        problems.append(f"seed_everything: {', '.join(map(str, twice))} comes twice: it would be the same run again")
    return seeds


def _repeated(values: Iterable[Item]) -> list[Item]:
    return [value for value, count in Counter(values).items() if count > 1]


def _factors(
    parameters: Mapping[str, Any], baseline: Any, problems: list[str]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Returns keys with one value, and keys with several in the order in which the baseline names them."""
    constants: dict[str, Any] = {}
    factors: dict[str, list[Any]] = {}
    for key, given in parameters.items():
        if key in ("ablation", "seed_everything"):
            continue
        if set(given) == {"value"}:
            constants[key] = given["value"]
        elif set(given) == {"values"} and isinstance(given["values"], list) and given["values"]:
            factors[key] = given["values"]
            problems += [f"parameters.{key}: {text} comes twice" for text in _repeated(map(word, given["values"]))]
        else:
            problems.append(f"parameters.{key} must hold value or values: an ablation draws nothing")
    problems += [f"parameters.{key}: {_NO_ARM}" for key in (*constants, *factors) if key in NOT_FOR_ARMS]
    if not factors:
        problems.append("parameters: nothing differs between the arms: give a key several values, or name arms")
    if "arm" in factors and len(factors) > 1:
        others = ", ".join(key for key in factors if key != "arm")
        problems.append(f"parameters.arm beside {others}: write all combinations as arms, or none")
    if isinstance(baseline, dict):  # all that W&B's agent has to name an arm by
        factors = {key: factors[key] for key in sorted(factors, key=[*baseline, *factors].index)}
    return constants, factors


_NO_ARM = "it identifies the run or chooses the images that measure it, and is the same for all arms"


def _arms(factors: Mapping[str, list[Any]], problems: list[str]) -> dict[str, dict[str, Any]]:
    arms: dict[str, dict[str, Any]] = {}
    for number, given in enumerate(factors.get("arm", []), 1):
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            problems.append(f"arm {number} must be {{name: NAME, KEY: VALUE, ...}}")
            continue
        overrides = dict(given)
        name = overrides.pop("name")
        problems += [f"arm {name}: {key}: {_NO_ARM}" for key in overrides if key in NOT_FOR_ARMS]
        if name in ("report", "null", ""):  # in W&B: the run with the answer, and no name
            problems.append(f"arm {name}: this name has a meaning of its own (choose another)")
        if name in arms:
            problems.append(f"arm {name} comes twice")
        arms[name] = overrides
    if "arm" not in factors:
        grid = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
        arms = {grid_name(arm): arm for arm in grid}
    if factors and len(arms) < 2 and not problems:
        problems.append("there is one arm only: nothing to compare")
    if len({slug(name) for name in arms}) < len(arms):
        problems.append(f"arms {', '.join(arms)}: two names give the same folder (letters, digits and dots count)")
    same = [(a, b) for a, b in itertools.combinations(arms, 2) if arms[a] == arms[b]]
    problems += [f"arms {a} and {b} change the same keys to the same values" for a, b in same]
    return arms


def grid_name(arm: Mapping[str, Any]) -> str:
    """Names an arm of a grid, such as "cls, depth=3": text as it is, other values with their key."""
    return ", ".join(
        value if isinstance(value, str) else f"{key.rpartition('.')[2]}={word(value)}" for key, value in arm.items()
    )


def _baseline(given: Any, arms: Mapping[str, Any], factors: Mapping[str, Any], problems: list[str]) -> str:
    name = str(given)
    if "arm" not in factors and factors:
        if not isinstance(given, dict) or set(given) != set(factors):
            problems.append(f"ablation.baseline={given} must be a value of each of {', '.join(factors)}, as a mapping")
            return next(iter(arms), "")
        name = grid_name({key: given[key] for key in factors})
    if arms and name not in arms:
        problems.append(f"ablation.baseline={name} is no arm (choose {'; '.join(arms)})")
    return name


def _resolve_arms(plan: Plan, goal: str) -> list[str]:
    """Fills in the experiments; returns all problems, those that all arms share once."""
    found: dict[str, list[str]] = {}
    for arm in plan.arms:
        try:
            plan.experiments[arm] = resolve(plan.arguments(arm, plan.seeds[0]), folders=[Path(plan.file).parent])
            problems = _metric_problems(plan, plan.experiments[arm], goal)
        except UserError as error:
            problems = error.problems
        for text in problems:
            found.setdefault(text, []).append(arm)
    configs = {} if found else {arm: {**item.config, "wandb": {}} for arm, item in plan.experiments.items()}
    for one, other in itertools.combinations(configs, 2):
        if configs[one] == configs[other]:
            found[f"{one} and {other} come to the same config: there is nothing to compare"] = list(plan.arms)
    return [text if len(arms) == len(plan.arms) else f"arm {arms[0]}: {text}" for text, arms in found.items()]


def _metric_problems(plan: Plan, experiment: Experiment, goal: str) -> list[str]:
    """Returns the problems of the metrics that select and that are reported."""
    classes = experiment.data.num_classes
    table = with_own(experiment.metrics)
    chosen = metric_names("val", classes=classes, table=table)
    reported = metric_names("test", classes=classes, table=table)
    monitor, mode = experiment.settings.checkpoint.monitor, experiment.settings.checkpoint.mode
    own = experiment.config["module"] is not None  # which may log metrics of its own
    problems = []
    if plan.metric not in chosen and not own:
        problems.append(f"metric.name={plan.metric} is no metric of validation (choose {', '.join(chosen)})")
    elif plan.metric != monitor:
        problems.append(
            f"metric.name={plan.metric}, but the config selects its best checkpoint by {monitor} (make them agree)"
        )
    if goal not in GOALS:
        problems.append(f"metric.goal={goal} must be one of {', '.join(GOALS)}")
    elif plan.metric == monitor and GOALS[goal] != mode:
        problems.append(f"metric.goal={goal}, but the config has checkpoint.mode={mode} (make them agree)")
    if plan.report not in reported and not own:
        problems.append(f"ablation.report={plan.report} is no metric of test (choose {', '.join(reported)})")
    if not experiment.test or experiment.trainer["limit_test_batches"] == 0:
        problems.append("test=false or trainer.limit_test_batches=0: without a test there is nothing to report")
    if runs := experiment.trainer["fast_dev_run"]:
        problems.append(f"trainer.fast_dev_run={runs} leaves no results")
    return problems


def wandb_words(ablation: str, arm: str, seed: int | str) -> list[str]:
    """Returns the flags for W&B, which groups runs by ablation, then by arm."""
    tags = json.dumps(_tags(ablation, arm, seed), ensure_ascii=False)
    return [f"--wandb.group={_text(ablation)}", f"--wandb.job_type={_text(arm)}", f"--wandb.tags={tags}"]


def _tags(ablation: str, arm: str, seed: int | str) -> list[str]:
    return [ablation[:64], arm[:64], f"seed{seed}"]  # W&B takes no longer ones


def _text(value: str) -> str:
    """Returns a text as the value of a flag, in quotes where it would be read as something else."""
    try:
        same = parse_yaml(value, value) == value
    except UserError:
        same = False
    return value if same else json.dumps(value, ensure_ascii=False)
