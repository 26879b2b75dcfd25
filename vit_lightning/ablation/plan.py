"""The plan of an ablation: a file with the config, the arms, and the rules by which they are compared."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, parse_yaml, read_config, word
from vit_lightning.config.help import explained, options_of
from vit_lightning.config.names import near
from vit_lightning.config.options import Settings
from vit_lightning.config.resolve import resolve
from vit_lightning.config.shipped import find_config
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import WRONG, Reader
from vit_lightning.errors import UserError
from vit_lightning.limits import problems_of
from vit_lightning.metric_facts import facts_of, metric_names, with_own
from vit_lightning.report.sequential import FIRST
from vit_lightning.report.study import TUNING, Compare, combinations

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
        return combinations(self.options)


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
    experiments: dict[str, Experiment]
    """The experiment of each arm, with the first seed and not tuned."""
    _tuned: dict[str, Experiment] = field(default_factory=dict, init=False)
    """The experiments of tuned arms with the first seed, by their commands."""

    def arguments(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}, *, trial: bool = False) -> list[str]:
        """Returns the arguments of ``lightning fit`` for one run.

        Args:
            arm: its arm.
            seed: its seed.
            chosen: options that tuning has chosen for the arm, or that a trial tries.
            trial: whether it tunes the arm; then it is not tested.
        """
        overrides = [f"--{key}={word(value)}" for key, value in {**self.arms[arm], **chosen}.items()]
        seeds = [f"--seed_everything={seed}", *([f"--data.split_seed={seed}"] if self.split_varies else [])]
        untested = [f"--wandb.job_type={TUNING}", "--test=false"] if trial else []
        return [*self.flags, *overrides, *seeds, *wandb_words(self.name, arm, seed), *untested]

    def command(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}) -> str:
        """Returns the command that repeats one run alone."""
        return shlex.join(["lightning", "fit", *self.arguments(arm, seed, chosen)])

    def experiment(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}, *, trial: bool = False) -> Experiment:
        """Returns the experiment of one run: what ``arguments`` resolve to."""
        if trial or self.split_varies:
            return self._resolve(arm, self.arguments(arm, seed, chosen, trial=trial))
        known = self.experiments[arm]
        if chosen:
            first = self.command(arm, self.seeds[0], chosen)
            if first not in self._tuned:
                self._tuned[first] = self._resolve(arm, self.arguments(arm, self.seeds[0], chosen))
            known = self._tuned[first]
        return known.with_seed(seed, _tags(self.name, arm, seed))

    def _resolve(self, arm: str, arguments: list[str]) -> Experiment:
        """Returns the experiment of a command line, with the images of its arm where the data is the same."""
        found = resolve(arguments, folders=[Path(self.file).parent])
        known = self.experiments.get(arm)
        same = known is not None and known.config["data"] == found.config["data"]
        return replace(found, data=known.data) if known is not None and same else found


def plan_help() -> str:
    """Returns the options of a plan's file with their explanations."""
    lines = []
    for prefix, kind in {"": PlanFile, **{f"{key}.": kind for key, kind in GROUPS.items()}}.items():
        options = [option for option in options_of(kind.__module__, kind.__name__) if option.name not in GROUPS]
        lines += [explained(option, prefix).replace("--", "", 1) for option in options]
    return "\n".join(lines)


def slug(text: str) -> str:
    """Returns a name for a folder, of at most 80 characters."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower() or "arm"
    return name if len(name) <= 80 else f"{name[:71]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def read_plan(path: Path) -> Plan:
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
    reader = Reader()
    problems = reader.problems
    problems += [_unknown(key) for key in given if key not in signature_of(PlanFile).options]
    compare = _compare(given, reader)
    seeds = _group("seeds", Seeds(), given, reader)
    runs = _seeds(seeds, compare, problems)
    factors, arms = _arms(given, problems)
    fixed = _options("fixed", given.get("fixed") or {}, problems)
    baseline = _baseline(given.get("baseline"), arms, factors, compare, problems)
    tune = _tune(given, fixed, arms, runs, reader)
    twice = {key: name for name, arm in reversed(arms.items()) for key in arm if key in fixed}
    problems += [f"fixed.{key}: arm {name} changes it too (leave out one)" for key, name in twice.items()]
    config_files = _config_files(given, path, reader)
    name = given.get("name", path.stem)
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        problems.append(f"name={name} must be a plain name, without slashes")
    plan = Plan(
        name=str(name),
        question=reader.value(str, given.get("question", ""), "question"),
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
        experiments={},
    )
    if config_files and arms:  # their options are checked although something else is wrong: all problems at once
        problems += _resolve_arms(plan)
    if problems:
        raise UserError([f"{path}: {text}" for text in problems])
    return replace(plan, metric=plan.experiments[baseline].settings.checkpoint.monitor)


Group = TypeVar("Group", Compare, Seeds, Tune)


def _group(key: str, instead: Group, given: Config, reader: Reader) -> Group:
    """Returns a group of a plan's options.

    Args:
        key: its name.
        instead: the group whose values stand in place of those that are missing or wrong.
        given: the plan.
        reader: gets the problems.
    """
    value, options = given.get(key), signature_of(type(instead)).options
    if value is None:
        return instead
    if not isinstance(value, dict):
        reader.problems.append(f"{key}={value} must hold {', '.join(options)}")
        return instead
    return replace(instead, **reader.arguments(options, value, key))


def _unknown(key: Any) -> str:
    """Returns the problem of an option that plans do not have."""
    options = signature_of(PlanFile).options
    inner = {name: f"{group}.{name}" for group, kind in GROUPS.items() for name in signature_of(kind).options}
    known = inner | {name: name for name in options}
    meant = near(str(key), known)
    hint = f"did you mean {known[meant[0]]}?" if meant else f"choose {', '.join(options)}"
    if "." in str(key) or key in Settings._fields or key in ("model", "data", "trainer"):
        hint = "options that all arms share go under fixed"
    return f"{key}: there is no such option of a plan ({hint})"


def _compare(given: Config, reader: Reader) -> Compare:
    """Returns the rules of the comparison, or others where something is wrong with them."""
    if given.get("compare") is None:
        example = "{metric: test/acc, smallest_effect: 0.005, max_seeds: 40}"
        reader.problems.append(f"compare is missing: {example}, for example")
    found = _group("compare", Compare("", 0.01, FIRST), given, reader)
    facts, effect = facts_of(found.metric), found.smallest_effect
    percent = facts is not None and facts.percent
    most = " and below 1 (0.005 is half a point)" if percent else ""
    least = f"at least {FIRST}: the first analysis takes {FIRST} pairs, and before it nothing is claimed"
    reader.problems += problems_of(
        ("compare.smallest_effect", f"{effect:g}", 0 < effect < (1.0 if percent else math.inf), f"above 0{most}"),
        ("compare.alpha", f"{found.alpha:g}", 0 < found.alpha < 0.5, "above 0 and below 0.5"),
        ("compare.disagreement", f"{found.disagreement:g}", 0 < found.disagreement < 1, "above 0 and below 1"),
        ("compare.max_seeds", found.max_seeds, found.max_seeds >= FIRST, least),
        ("compare.max_seeds", found.max_seeds, found.max_seeds <= MOST_SEEDS, f"at most {MOST_SEEDS}"),
    )
    if found.until == "not better" and found.arms != "baseline":
        text = f"compare.until=not better asks about arms beside a baseline, not compare.arms={found.arms}"
        reader.problems.append(text)
    return replace(found, max_seeds=min(found.max_seeds, MOST_SEEDS))


def _seeds(seeds: Seeds, compare: Compare, problems: list[str]) -> list[int]:
    """Returns all seeds that may be run."""
    count = max(compare.max_seeds, 1)
    if seeds.first < 0:
        problems.append(f"seeds.first={seeds.first} must be at least 0")
    if seeds.first + count > 2**32:
        problems.append(f"seeds.first={seeds.first}: the last of {count} seeds is above 2**32 - 1")
        return [0]
    return list(range(seeds.first, seeds.first + count))


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


def _arms(given: Config, problems: list[str]) -> tuple[dict[str, list[Any]], dict[str, dict[str, Any]]]:
    """Returns the factors of a grid, and the options that each arm changes."""
    factors: dict[str, list[Any]] = {}
    arms: dict[str, dict[str, Any]] = {}
    before = len(problems)
    if (given.get("arms") is None) == (given.get("grid") is None):
        problems.append("give arms: {NAME: {OPTION: VALUE}} or grid: {OPTION: [VALUES]}, one of the two")
    elif given.get("grid") is not None:
        factors = _values("grid", given["grid"], problems)
        arms = {grid_name(arm): arm for arm in combinations(factors)} if factors else {}
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
    given: Config, fixed: dict[str, Any], arms: dict[str, dict[str, Any]], seeds: list[int], reader: Reader
) -> Tune | None:
    """Returns the tuning; None if there is none, or its options cannot be tried.

    Args:
        given: the plan.
        fixed, arms: options that are given there.
        seeds: seeds of the comparison.
        reader: gets the problems.
    """
    problems, before = reader.problems, len(reader.problems)
    tune = _group("tune", Tune({}, []), given, reader)
    if given.get("tune") is None or len(problems) > before:
        return None
    options = _values("tune.options", given["tune"]["options"], problems)  # a class in it stays as it is written
    tune = replace(tune, options=options)
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
    trials = [f"{arm}, {grid_name(values)}" for arm in arms for values in tune.combinations]
    if len({slug(trial) for trial in trials}) < len(trials):
        problems.append("tune.options: two values give the same folder (letters, digits and dots count)")
    return tune if options else None


def _config_files(given: Config, plan: Path, reader: Reader) -> list[str]:
    """Returns the paths of the config files, from the working folder."""
    value = given.get("config")
    found = [] if value is None else reader.value(Path | list[Path], value, "config")
    if value is None or value == []:
        reader.problems.append("config is missing")
    files = [] if found is WRONG else found if isinstance(found, list) else [found]
    beside = [(file, plan.parent / file) for file in files]
    return [str(path) if not file.exists() and path.exists() else str(file) for file, path in beside]


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
                plan.experiment(plan.baseline, plan.seeds[0], values, trial=True)
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
