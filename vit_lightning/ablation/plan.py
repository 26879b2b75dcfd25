"""The plan of an ablation: a file with the config, the arms, and the rules by which they are compared."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentParser

from vit_lightning.config.check_options import find_problems
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, parse_yaml, read_config, word
from vit_lightning.config.help import explained, options_of
from vit_lightning.config.merge import GROUPS as OPTION_GROUPS
from vit_lightning.config.resolve import resolve
from vit_lightning.config.shipped import find_config
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import facts_of, metric_names, with_own
from vit_lightning.report.sequential import FIRST
from vit_lightning.report.study import TUNING, Compare

Item = TypeVar("Item")
MOST_SEEDS = 1000
"""Most seeds of a plan: the boundaries of so many analyses take a minute."""
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
"""Options that no arm may change: they identify the run or choose the images that measure it."""
_NO_ARM = "it identifies the run or chooses the images that measure it, and is the same for all arms"
NOT_AN_ARM = ("report", TUNING, "null", "")
"""Names that no arm may have: those of other runs in W&B, and no name."""


@dataclass(frozen=True)
class Seeds:
    """Seeds of an ablation, the same for each arm.

    Args:
        first: first seed; the others follow it.
        split: with varies each seed has a split of its own (data.split_seed is the seed), the same for all arms, and
            the answer is one for new images too; with fixed all runs have the config's.
    """

    first: int = 0
    split: Literal["fixed", "varies"] = "fixed"


@dataclass(frozen=True)
class Tune:
    """Tuning of each arm before the comparison: each has the same trials, of which validation chooses.

    Args:
        options: values of each option; all combinations are tried.
        seeds: seeds of the trials, none of them one of the comparison.
    """

    options: dict[str, list[Any]]
    seeds: list[int]

    @property
    def combinations(self) -> list[dict[str, Any]]:
        """Values of the trials, in order."""
        return _combinations(self.options)


@dataclass(frozen=True)
class PlanFile:
    """Contents of the file of a plan.

    Args:
        config: config file of all arms, from the working folder, else beside the plan; of several, later ones win.
        compare: how the arms are compared.
        name: name of the ablation; that of the file by default.
        question: what the ablation asks; heads its report.
        arms: options that each arm changes, by its name.
        grid: values of each option, in place of arms, all combinations of which are arms.
        fixed: options that all arms share.
        baseline: arm that the others are compared with; of a grid, its value of each option.
        seeds: seeds of the runs.
        tune: tuning of each arm before the comparison.
    """

    config: str | list[str]
    compare: Compare
    name: str | None = None
    question: str = ""
    arms: dict[str, dict[str, Any]] | None = None
    grid: dict[str, list[Any]] | None = None
    fixed: dict[str, Any] | None = None
    baseline: str | dict[str, Any] | None = None
    seeds: Seeds | None = None
    tune: Tune | None = None


GROUPS: dict[str, type[Compare | Seeds | Tune]] = {"compare": Compare, "seeds": Seeds, "tune": Tune}
"""Options of a plan that hold options."""


@dataclass(frozen=True)
class Plan:
    """Runs of an ablation and the rules by which it is judged."""

    name: str
    question: str
    """What the ablation asks; may be empty."""
    file: str
    config_files: list[str]
    flags: list[str]
    """Config files and options that all arms share, as words of a command."""
    metric: str
    """Validation metric by which the config selects the best checkpoint, and by which tuning chooses."""
    compare: Compare
    baseline: str
    """Arm that the others are compared with; the first one where all are compared with each other."""
    arms: dict[str, dict[str, Any]]
    """Dotted options that each arm changes; the baseline comes first."""
    factors: dict[str, list[Any]]
    """Values of each option of a full grid; empty where arms are named one by one."""
    seeds: list[int]
    """All seeds that may be run."""
    split_varies: bool
    """Whether each seed has a split of its own, the same for all arms."""
    tune: Tune | None
    trusted: bool
    """Whether configs may name classes of any package."""
    experiments: dict[str, Experiment]
    """The experiment of each arm, with the first seed and not tuned."""
    _tuned: dict[str, Experiment] = field(default_factory=dict, init=False)
    """The experiments of tuned arms with the first seed, by their commands."""

    def words(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}) -> list[str]:
        """Returns the options of one run, as flags.

        Args:
            arm: its arm.
            seed: its seed.
            chosen: options that tuning has chosen for the arm.
        """
        overrides = [f"--{key}={word(value)}" for key, value in {**self.arms[arm], **chosen}.items()]
        seeds = [f"--seed_everything={seed}", *([f"--data.split_seed={seed}"] if self.split_varies else [])]
        return [*self.flags, *overrides, *seeds, *wandb_words(self.name, arm, seed)]

    def arguments(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}) -> list[str]:
        """Returns the arguments of ``lightning fit`` for one run."""
        return [*self.words(arm, seed, chosen), *(["--trust-config"] if self.trusted else [])]

    def command(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}) -> str:
        """Returns the command that repeats one run alone."""
        return shlex.join(["lightning", "fit", *self.arguments(arm, seed, chosen)])

    def experiment(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}) -> Experiment:
        """Returns the experiment of one run: what ``arguments`` resolve to."""
        if self.split_varies:
            return self._resolve(arm, self.arguments(arm, seed, chosen))
        known = self.experiments[arm]
        if chosen:
            first = self.command(arm, self.seeds[0], chosen)
            if first not in self._tuned:
                self._tuned[first] = self._resolve(arm, self.arguments(arm, self.seeds[0], chosen))
            known = self._tuned[first]
        return known.with_seed(seed, _tags(self.name, arm, seed))

    def trial_arguments(self, arm: str, values: Mapping[str, Any], seed: int) -> list[str]:
        """Returns the arguments of ``lightning fit`` for a run that tunes an arm; it is not tested."""
        return [*self.arguments(arm, seed, values), f"--wandb.job_type={TUNING}", "--test=false"]

    def trial_experiment(self, arm: str, values: Mapping[str, Any], seed: int) -> Experiment:
        """Returns the experiment of a run that tunes an arm: what ``trial_arguments`` resolve to."""
        return self._resolve(arm, self.trial_arguments(arm, values, seed))

    def _resolve(self, arm: str, arguments: list[str]) -> Experiment:
        """Returns the experiment of a command line, with the images of its arm where the data is the same."""
        found = resolve(arguments, folders=[Path(self.file).parent])
        known = self.experiments.get(arm)
        same = known is not None and known.config["data"] == found.config["data"]
        return replace(found, data=known.data) if known is not None and same else found


def plan_help() -> str:
    """Returns the options of a plan's file with their explanations."""
    told = []
    for module, kind in ((__name__, PlanFile), *((group.__module__, group) for group in GROUPS.values())):
        prefix = next((f"{key}." for key, group in GROUPS.items() if group is kind), "")
        options = [option for option in options_of(module, kind.__name__) if prefix or option.name not in GROUPS]
        told += [explained(option, f"{prefix}").replace("--", "", 1) for option in options]
    return "\n".join(told)


def slug(text: str) -> str:
    """Returns a name for a folder, of at most 80 characters."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower() or "arm"
    return name if len(name) <= 80 else f"{name[:71]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def read_plan(path: Path, *, trust: bool = False) -> Plan:
    """Reads a plan, checked against the config that it changes.

    Raises:
        UserError: all that is wrong with it.
    """
    path = find_config(path)
    given = read_config(path, "plan")
    if not given.keys() & {"arms", "grid", "compare"} and given.keys() & {"model", "data", "trainer"}:
        raise UserError(
            f"{path} is a config, not a plan: a plan has a config, arms and compare, such as "
            f"lightning configs pooling prints (to train it: lightning fit --config {path})"
        )
    problems = [_unknown(key) for key in given if key not in _names(PlanFile)]
    compare = _compare(given, problems)
    seeds = _group("seeds", Seeds, given, problems) or Seeds()
    runs = _seeds(seeds, compare, problems)
    tune = _group("tune", Tune, given, problems)
    factors, arms = _arms(given, problems)
    fixed = _options("fixed", given.get("fixed") or {}, problems)
    baseline = _baseline(given.get("baseline"), arms, factors, compare, problems)
    tune = _tune(tune, fixed, arms, runs, problems)
    twice = {key: name for name, arm in reversed(arms.items()) for key in arm if key in fixed}
    problems += [f"fixed.{key}: arm {name} changes it too (leave out one)" for key, name in twice.items()]
    config_files = _config_files(given.get("config"), path, problems)
    plan = Plan(
        name=_name(given.get("name", path.stem), problems),
        question=_question(given.get("question", ""), problems),
        file=str(path),
        config_files=config_files,
        flags=[f"--config={file}" for file in config_files] + [f"--{key}={word(item)}" for key, item in fixed.items()],
        metric="",
        compare=compare,
        baseline=baseline,
        arms={name: arms[name] for name in sorted(arms, key=lambda name: name != baseline)},
        factors=factors,
        seeds=runs,
        split_varies=seeds.split == "varies",
        tune=tune,
        trusted=trust,
        experiments={},
    )
    if config_files and arms:  # their options are checked although something else is wrong: all problems at once
        problems += _resolve_arms(plan)
    if problems:
        raise UserError([f"{path}: {text}" for text in problems])
    return replace(plan, metric=plan.experiments[baseline].settings.checkpoint.monitor)


Group = TypeVar("Group", Compare, Seeds, Tune)


def _group(
    key: str, kind: type[Group], given: Config, problems: list[str], instead: Mapping[str, Any] = {}
) -> Group | None:
    """Returns a group of a plan's options; None if it is not given, or something is wrong with it.

    Args:
        key: its name.
        kind: its class.
        given: the plan.
        problems: gets the problems.
        instead: values of required options that are wrong, for a group all the same.
    """
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        problems.append(f"{key}={value} must hold {', '.join(_names(kind))}")
        return None
    foreign = [name for name, item in value.items() if name not in _names(kind) and isinstance(item, dict)]
    problems += [f"{key}.{name} is a mapping: an arm goes under arms, beside {key}" for name in foreign]
    value = {name: item for name, item in value.items() if name not in foreign}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, key)
    found, valid = find_problems({key: value}, parser)
    missing = [item.name for item in fields(kind) if item.default is MISSING and item.name not in value]
    problems += [problem.text for problem in found if not problem.missing]
    problems += [f"{key}.{name} is missing" for name in missing]
    if found and not instead:
        return None
    return kind(**vars(vars(parser.parse_object({key: {**instead, **valid.get(key, {})}}))[key]))


def _names(kind: type) -> list[str]:
    return [item.name for item in fields(kind)]


def _unknown(key: str) -> str:
    """Returns the problem of an option that plans do not have."""
    inner = {name: f"{group}.{name}" for group, kind in GROUPS.items() for name in _names(kind)}
    known = {**inner, **{name: name for name in _names(PlanFile)}}
    near = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {known[near[0]]}?" if near else f"choose {', '.join(_names(PlanFile))}"
    if not near and ("." in str(key) or key in OPTION_GROUPS):
        hint = "options that all arms share go under fixed"
    return f"{key}: there is no such option of a plan ({hint})"


def _compare(given: Config, problems: list[str]) -> Compare:
    """Returns the rules of the comparison, or others where something is wrong with them."""
    if given.get("compare") is None:
        problems.append("compare is missing: {metric: test/acc, smallest_effect: 0.005, max_seeds: 40}, for example")
    instead = {"metric": "", "smallest_effect": 0.01, "max_seeds": FIRST}
    found = _group("compare", Compare, given, problems, instead)
    if found is None:
        return Compare("", 0.0, FIRST)
    facts = facts_of(found.metric)
    high = 1.0 if facts is not None and facts.percent else math.inf
    for name, below in (("smallest_effect", high), ("alpha", 0.5), ("disagreement", 1.0)):
        value = getattr(found, name)
        if not 0 < value < below:
            limit = "" if below == math.inf else f" and below {below:g}"
            example = " (0.005 is half a point)" if below == high == 1 else ""
            problems.append(f"compare.{name}={value:g} must be above 0{limit}{example}")
    if found.until == "not better" and found.arms != "baseline":
        problems.append(f"compare.until=not better asks about arms beside a baseline, not compare.arms={found.arms}")
    if found.max_seeds < FIRST:
        reason = f"the first analysis takes {FIRST} pairs, and before it nothing is claimed"
        problems.append(f"compare.max_seeds={found.max_seeds} must be at least {FIRST}: {reason}")
    if found.max_seeds > MOST_SEEDS:
        problems.append(f"compare.max_seeds={found.max_seeds} must be at most {MOST_SEEDS}")
        return replace(found, max_seeds=FIRST)
    return found


def _seeds(seeds: Seeds, compare: Compare, problems: list[str]) -> list[int]:
    """Returns all seeds that may be run."""
    last = seeds.first + max(compare.max_seeds, 1) - 1
    if seeds.first < 0:
        problems.append(f"seeds.first={seeds.first} must be at least 0")
    if last >= 2**32:
        problems.append(f"seeds.first={seeds.first}: the last of {compare.max_seeds} seeds is above 2**32 - 1")
        return [0]
    return list(range(seeds.first, last + 1))


def _options(key: str, given: Any, problems: list[str]) -> dict[str, Any]:
    """Returns dotted options and their values, without those that no arm may change."""
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        problems.append(f"{key}={given} must hold {{OPTION: VALUE}}, such as {{model.pool: mean}}")
        return {}
    problems += [f"{key}.{name}: {_NO_ARM}" for name in given if name in NOT_FOR_ARMS]
    return given


def _values(key: str, given: Any, problems: list[str]) -> dict[str, list[Any]]:
    """Returns the values of each dotted option; without any if something is wrong."""
    before, options = len(problems), _options(key, given, problems)
    for name, values in options.items():
        if not isinstance(values, list) or not values:
            problems.append(f"{key}.{name}={values} must be a list of values")
        else:
            problems += [f"{key}.{name}: {text} comes twice" for text in _repeated(map(word, values))]
    return options if len(problems) == before else {}


def _repeated(values: Iterable[Item]) -> list[Item]:
    return [value for value, count in Counter(values).items() if count > 1]


def _combinations(values: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]


def _arms(given: Config, problems: list[str]) -> tuple[dict[str, list[Any]], dict[str, dict[str, Any]]]:
    """Returns the factors of a grid, and the options that each arm changes."""
    factors: dict[str, list[Any]] = {}
    arms: dict[str, dict[str, Any]] = {}
    before = len(problems)
    if (given.get("arms") is None) == (given.get("grid") is None):
        problems.append("give arms: {NAME: {OPTION: VALUE}} or grid: {OPTION: [VALUES]}, one of the two")
    elif given.get("grid") is not None:
        factors = _values("grid", given["grid"], problems)
        arms = {grid_name(arm): arm for arm in _combinations(factors)} if factors else {}
    elif not isinstance(given["arms"], dict):
        problems.append(f"arms={given['arms']} must hold {{NAME: {{OPTION: VALUE}}}}")
    else:
        for name, options in given["arms"].items():
            if not isinstance(name, str):
                problems.append(f"arm {name}: a name is a text: write it in quotes")
            elif name in NOT_AN_ARM:
                problems.append(f"arm {name}: this name has a meaning of its own (choose another)")
            arms[str(name)] = _options(f"arms.{name}", options or {}, problems)
    if len(arms) < 2 and len(problems) == before:
        problems.append("there is one arm only: nothing to compare")
    if len({slug(name) for name in arms}) < len(arms):
        problems.append(f"arms {', '.join(arms)}: two names give the same folder (letters, digits and dots count)")
    same = [(a, b) for a, b in itertools.combinations(arms, 2) if arms[a] == arms[b]]
    problems += [f"arms {a} and {b} change the same options to the same values" for a, b in same]
    return factors, arms


def grid_name(arm: Mapping[str, Any]) -> str:
    """Names an arm of a grid, such as "cls, depth=3": text as it is, other values with their option."""
    return ", ".join(
        value if isinstance(value, str) else f"{key.rpartition('.')[2]}={word(value)}" for key, value in arm.items()
    )


def _baseline(
    given: Any, arms: Mapping[str, Mapping[str, Any]], factors: Mapping[str, Any], compare: Compare, problems: list[str]
) -> str:
    """Returns the name of the baseline."""
    first = next(iter(arms), "")
    name = next((name for name, arm in arms.items() if given == (arm if factors else name)), None)
    if name is None and arms and (given is not None or compare.arms == "baseline"):
        shown = "baseline is missing: it" if given is None else f"baseline={word(given)}"
        if factors:
            problems.append(f"{shown} must give a value of each of {', '.join(factors)}, such as {word(arms[first])}")
        else:
            problems.append(f"{shown} must be an arm (choose {'; '.join(arms)})")
    return first if name is None else name


def _tune(
    tune: Tune | None, fixed: dict[str, Any], arms: dict[str, dict[str, Any]], seeds: list[int], problems: list[str]
) -> Tune | None:
    """Returns a tuning; None if its options cannot be tried.

    Args:
        tune: the tuning, if there is one.
        fixed, arms: options that are given there.
        seeds: seeds of the comparison.
        problems: gets the problems.
    """
    if tune is None:
        return None
    options = _values("tune.options", tune.options, problems)
    if options and len(tune.combinations) < 2:
        problems.append("tune.options must hold at least two values of an option: there is nothing to choose")
    places = {"fixed": fixed, **{f"arm {name}": arm for name, arm in arms.items()}}
    twice = {key: place for place, given in reversed(places.items()) for key in given if key in options}
    problems += [f"tune.options.{key}: {place} gives it too (leave out one)" for key, place in twice.items()]
    if not tune.seeds or not all(0 <= seed < 2**32 for seed in tune.seeds):
        problems.append(f"tune.seeds={tune.seeds} must be a list of ints, at least 0 and below 2**32")
    problems += [f"tune.seeds: {seed} comes twice" for seed in _repeated(tune.seeds)]
    if shared := sorted({*tune.seeds} & {*seeds}):
        reason = f"the comparison has the seeds {seeds[0]} to {seeds[-1]}, and tuning needs others"
        problems.append(f"tune.seeds: {', '.join(map(str, shared))}: {reason}")
    trials = [f"{arm}, {grid_name(values)}" for arm in arms for values in _combinations(options)]
    if len({slug(trial) for trial in trials}) < len(trials):
        problems.append("tune.options: two values give the same folder (letters, digits and dots count)")
    return tune if options else None


def _config_files(given: Any, plan: Path, problems: list[str]) -> list[str]:
    """Returns the paths of the config files, from the working folder."""
    texts = given if isinstance(given, list) else [given]
    if not texts or not all(isinstance(text, str) for text in texts):
        problems.append("config is missing" if given is None else f"config={given} must be a path or a list of paths")
        return []
    beside = [(text, plan.parent / text) for text in texts]
    return [str(path) if not Path(text).exists() and path.exists() else text for text, path in beside]


def _name(given: Any, problems: list[str]) -> str:
    if not isinstance(given, str) or Path(given).name != given or given in ("", ".", ".."):
        problems.append(f"name={given} must be a plain name, without slashes")
    return str(given)


def _question(given: Any, problems: list[str]) -> str:
    if not isinstance(given, str):
        problems.append(f"question={given} must be a text (in quotes where it has a colon)")
    return str(given)


def _resolve_arms(plan: Plan) -> list[str]:
    """Fills in the experiments; returns all problems, those that all arms share once."""
    found: dict[str, list[str]] = {}
    for arm in plan.arms:
        try:
            plan.experiments[arm] = plan._resolve(arm, plan.arguments(arm, plan.seeds[0]))
            problems = _problems_of(plan, plan.experiments[arm])
        except UserError as error:
            split = "data.split_seed="  # given by nothing else
            problems = [f"seeds.split=varies: {text}" if text.startswith(split) else text for text in error.problems]
        for text in problems:
            found.setdefault(text, []).append(arm)
    tried = [f"tune.options: {text}" for text in _problems_of_tuning(plan) if text not in found]
    told = [text if len(arms) == len(plan.arms) else f"arm {arms[0]}: {text}" for text, arms in found.items()]
    return told + tried if found else _problems_between(plan) + tried


def _problems_of_tuning(plan: Plan) -> list[str]:
    """Returns the problems of each value that is tried, and of the baseline."""
    problems: list[str] = []
    for values in plan.tune.combinations if plan.tune else []:
        if plan.tune and sum(value != plan.tune.options[key][0] for key, value in values.items()) < 2:  # each once
            try:
                plan.trial_experiment(plan.baseline, values, plan.seeds[0])
            except UserError as error:
                problems += error.problems
    return list(dict.fromkeys(problems))


def _problems_between(plan: Plan) -> list[str]:
    """Returns the problems of arms that are right one by one."""
    configs = {arm: {**item.config, "wandb": {}} for arm, item in plan.experiments.items()}
    problems = [
        f"{one} and {other} come to the same config: there is nothing to compare"
        for one, other in itertools.combinations(configs, 2)
        if configs[one] == configs[other]
    ]
    checkpoints = [item.settings.checkpoint for item in plan.experiments.values()]
    if len(by := {f"{item.monitor} ({item.mode})" for item in checkpoints}) > 1:
        problems.append(f"checkpoint.monitor: all arms must select by the same metric, not by {', '.join(sorted(by))}")
    return problems


def _problems_of(plan: Plan, experiment: Experiment) -> list[str]:
    """Returns the problems of an arm's experiment: its metrics, its test, its split."""
    classes, table = experiment.data.num_classes, with_own(experiment.metrics)
    selecting, reported = (metric_names(stage, classes=classes, table=table) for stage in ("val", "test"))
    monitor, metric = experiment.settings.checkpoint.monitor, plan.compare.metric
    own = experiment.config["module"] is not None  # which may log metrics of its own
    problems = []
    if monitor not in selecting and not own:
        choices = ", ".join(selecting)
        problems.append(
            f"checkpoint.monitor={monitor} must be a metric of validation in an ablation (choose {choices})"
        )
    if metric and metric not in reported and not own:
        problems.append(f"compare.metric={metric} must be a metric of test (choose {', '.join(reported)})")
    if not experiment.test or experiment.trainer["limit_test_batches"] == 0:
        problems.append("test=false or trainer.limit_test_batches=0: without a test there is nothing to compare")
    if runs := experiment.trainer["fast_dev_run"]:
        problems.append(f"trainer.fast_dev_run={runs} leaves no results")
    return problems


def wandb_words(ablation: str, arm: str, seed: int | str) -> list[str]:
    """Returns the flags for W&B, which groups runs by ablation, then by arm."""
    tags = json.dumps(_tags(ablation, arm, seed), ensure_ascii=False)
    return [f"--wandb.group={_quoted(ablation)}", f"--wandb.job_type={_quoted(arm)}", f"--wandb.tags={tags}"]


def _tags(ablation: str, arm: str, seed: int | str) -> list[str]:
    return [ablation[:64], arm[:64], f"seed{seed}"]  # W&B takes no longer ones


def _quoted(value: str) -> str:
    """Returns a text as the value of a flag, in quotes where it would be read as something else."""
    try:
        same = parse_yaml(value, value) == value
    except UserError:
        same = False
    return value if same else json.dumps(value, ensure_ascii=False)
