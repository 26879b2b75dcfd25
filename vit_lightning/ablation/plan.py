"""The plan of an ablation: a file with the config, the arms, and the rules by which they are compared."""

import hashlib
import itertools
import math
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning.pytorch.callbacks import EarlyStopping, Timer

from vit_lightning.classes import differences
from vit_lightning.commands.help import HelpItem, explained, help_items
from vit_lightning.config.adapters import recorded_goal
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, as_list, find_config, read_config, word
from vit_lightning.config.options import Settings
from vit_lightning.config.resolve import resolve
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import WRONG, Reader
from vit_lightning.errors import UserError, is_plain_name, near, problems_of, refuse
from vit_lightning.metric_facts import facts_of, metric_names, with_own
from vit_lightning.report.comparisons import most_seeds
from vit_lightning.report.sequential import FIRST
from vit_lightning.report.study import MOST_SEEDS, SIZES, TUNING, Compare, arm_name, combinations, level_name
from vit_lightning.training.checkpoints import CheckpointConfig

NOT_FOR_ARMS = {
    "config",
    "out",
    "resume",
    "ckpt",
    "print_config",
    "experiment",
    "seed_everything",
    "data.split_seed",
    "data.also_test",
    "test",
}
"""Options that no arm may change: they identify the run or choose the images that measure it."""
SET_BY_TIME = {"trainer.max_epochs", "trainer.max_steps", "trainer.val_check_interval"}
"""Options that follow from equal time."""
NOT_AN_ARM = ("report", TUNING, "null", "")
"""Names that no arm may have: those of other runs in W&B, and no name."""


@dataclass(frozen=True)
class Seeds:
    """Seeds of an ablation, the same for each arm.

    Args:
        first: first seed; the others follow it, without those of the tuning.
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
        seeds: seeds of the trials; the comparison leaves them out.
        replicates: tune each arm anew for each seed of the comparison, with further seeds for the trials; as many as
            ``compare.max_seeds``. The answer is then about the arms with their tuning; without it each arm is tuned
            once, and the answer is about the values that were chosen.
    """

    options: dict[str, list[Any]]
    seeds: list[int]
    replicates: int | None = None

    def seeds_of(self, replicate: int) -> list[int]:
        """Returns the seeds of the trials of a replicate, from 0 on; without replicates they are the same for all."""
        step = max(self.seeds) - min(self.seeds) + 1 if self.seeds and self.replicates else 0
        return [seed + replicate * step for seed in self.seeds]

    def taken(self) -> set[int]:
        """Returns the seeds of all trials of the longest plan, so that raising ``compare.max_seeds`` meets none."""
        return {seed for replicate in range(most_seeds(MOST_SEEDS)) for seed in self.seeds_of(replicate)}

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
        sizes: options of each size, by its name: each arm is compared with the baseline of its size, and whether the
            difference changes with the size is claimed too.
        grid: values of each option, in place of arms, all combinations of which are arms; of two options, whether their
            effects add up is claimed too.
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
    sizes: dict[str, dict[str, Any]] | None = None
    grid: dict[str, list[Any]] | None = None
    fixed: dict[str, Any] | None = None
    baseline: str | dict[str, Any] | None = None
    seeds: Seeds | None = None
    tune: Tune | None = None


GROUPS: dict[str, type[Compare | Seeds | Tune]] = {"compare": Compare, "seeds": Seeds, "tune": Tune}
"""Options of a plan that hold options."""
NOT_GIVEN = (*GROUPS, "compare.extended")
"""Names that are no options of a plan: groups, which hold options, and what the ledger keeps."""


@dataclass(frozen=True)
class Plan:
    """Runs of an ablation and the rules by which it is judged."""

    name: str
    question: str
    """What the ablation asks; may be empty."""
    file: str
    config_files: list[str]
    fixed: dict[str, Any]
    """Dotted options that all arms share."""
    compare: Compare
    baseline: str
    """Arm that the others are compared with; the first one where all are compared with each other."""
    arms: dict[str, dict[str, Any]]
    """Dotted options that each arm changes; the baseline comes first."""
    factors: dict[str, list[Any]]
    """Values of each option of a full grid, or names of arms and sizes; empty where arms are named one by one."""
    seeds: list[int]
    """All seeds that may be run: those behind the first ``compare.max_seeds`` replace those with a failed run."""
    split_varies: bool
    """Whether each seed has a split of its own, the same for all arms."""
    tune: Tune
    _resolved: dict[str, Experiment] = field(default_factory=dict, init=False)
    """Experiments by their arguments with the first seed; those of the same data share its images."""

    @property
    def experiments(self) -> dict[str, Experiment]:
        """The experiment of each arm, with the first seed and not tuned."""
        return {arm: self.experiment(arm, self.seeds[0]) for arm in self.arms}

    @property
    def checkpoint(self) -> CheckpointConfig:
        """Options by which all arms select the best checkpoint, and tuning its values."""
        return self.experiment(self.baseline, self.seeds[0]).settings.checkpoint

    @property
    def flags(self) -> list[str]:
        """Config files and options that all arms share, as words of a command."""
        return [*(f"--config={file}" for file in self.config_files), *flags_of(self.fixed)]

    def arguments(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}, *, trial: bool = False) -> list[str]:
        """Returns the arguments of ``lightning fit`` for one run.

        Args:
            arm: its arm.
            seed: its seed.
            chosen: options that tuning has chosen for the arm, or that a trial tries.
            trial: whether it tunes the arm; then it is not tested.
        """
        split = {"data.split_seed": seed} if self.split_varies else {}
        # W&B groups runs by ablation, then by arm
        wandb = {"group": self.name, "job_type": TUNING if trial else arm, "tags": _tags(self.name, arm, seed)}
        per_run = {"seed_everything": seed, **split, "wandb": wandb, **({"test": False} if trial else {})}
        return [*self.flags, *flags_of({**self.arms[arm], **chosen}), *flags_of(per_run)]

    def command(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}) -> str:
        """Returns the command that repeats one run alone."""
        return shlex.join(["lightning", "fit", *self.arguments(arm, seed, chosen)])

    def experiment(self, arm: str, seed: int, chosen: Mapping[str, Any] = {}, *, trial: bool = False) -> Experiment:
        """Returns the experiment of one run: what ``arguments`` resolve to."""
        arguments = self.arguments(arm, seed if self.split_varies else self.seeds[0], chosen, trial=trial)
        key = shlex.join(arguments)
        if key not in self._resolved:
            found = resolve(arguments, folders=[Path(self.file).parent])
            for one in self._resolved.values():
                if one.config["data"] == found.config["data"]:
                    same_teacher = one.config["distillation"] == found.config["distillation"]
                    found = replace(found, data=one.data, teacher=one.teacher if same_teacher else found.teacher)
            self._resolved[key] = found
        return self._resolved[key].with_seed(seed, _tags(self.name, arm, seed))


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Returns options as words of a command."""
    return [f"--{key}={word(value)}" for key, value in options.items()]


def _tags(ablation: str, arm: str, seed: int) -> list[str]:
    return [ablation[:64], arm[:64], f"seed{seed}"]  # W&B takes no longer ones


def plan_help() -> str:
    """Returns the options of a plan's file with their explanations."""
    return "\n".join(explained(option).replace("--", "", 1) for option in plan_options())


def plan_options() -> list[HelpItem]:
    """Returns the options of a plan's file, those of its groups with dotted names."""
    found = []
    for prefix, kind in {"": PlanFile, **{f"{key}.": kind for key, kind in GROUPS.items()}}.items():
        options = help_items(kind)
        found += [option._replace(name=f"{prefix}{option.name}") for option in options]
    return [option for option in found if option.name not in NOT_GIVEN]


def slug(text: str) -> str:
    """Returns a name for a folder, of at most 80 bytes."""
    kept = (c if c.isalnum() or c == "." or unicodedata.category(c)[0] == "M" else "-" for c in text)  # M: vowel signs
    name = re.sub("-+", "-", "".join(kept)).strip("-.").lower() or "arm"
    if len(name.encode()) <= 80:
        return name
    return f"{name.encode()[:71].decode(errors='ignore')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


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
            f"lightning configs pooling prints (to train it: lightning fit --config {shlex.quote(str(path))})"
        )
    reader = PlanReader(given=given)
    reader.refuse_unknown()
    compare = reader.compare()
    factors, arms = reader.arms()
    fixed = reader.options("fixed", given.get("fixed") or {})
    reader.refuse_twice("fixed", fixed, {f"arm {name}": arm for name, arm in arms.items()})
    baseline = reader.baseline(arms, factors, compare)
    tune = reader.tune(fixed, arms, compare)
    seeds, split = reader.seeds(compare, tune)
    name = path.stem if given.get("name") is None else str(given["name"])
    reader.problems += problems_of(("name", name, is_plain_name(name), "a plain name, without slashes"))
    plan = Plan(
        name=name,
        question=reader.value(str, given.get("question", ""), "question"),
        file=str(path),
        config_files=reader.config_files(path.parent),
        fixed=fixed,
        compare=compare,
        baseline=baseline,
        arms={name: arms[name] for name in sorted(arms, key=lambda name: name != baseline)},
        factors=factors,
        seeds=seeds,
        split_varies=split == "varies",
        tune=tune,
    )
    if plan.config_files and arms:  # their options are checked although something else is wrong: all problems at once
        reader.problems += _problems_of_configs(plan)
    refuse(reader.problems, prefix=f"{path}: ")
    return plan


def _written_options(given: Config, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of options, also of those in mappings, without ``init_args``."""
    for name, value in given.items():
        key = f"{prefix}{name}".replace(".init_args", "")
        yield key
        for one in as_list(value):  # of a grid or a tuning
            if isinstance(one, dict):
                yield from _written_options(one, f"{key}.")


Group = TypeVar("Group", Compare, Seeds, Tune)


@dataclass
class PlanReader(Reader):
    """Reader of a plan's options: each method reads one, and keeps what is wrong with it as a problem."""

    given: Config = field(default_factory=dict)

    def refuse_unknown(self) -> None:
        """Refuses options that plans do not have."""
        options = signature_of(PlanFile).options
        inner = {name: f"{group}.{name}" for group, kind in GROUPS.items() for name in signature_of(kind).options}
        known = inner | {name: name for name in options}
        for key in [str(key) for key in self.given if key not in options]:
            meant = near(key, known)
            hint = f"did you mean {known[meant[0]]}?" if meant else f"choose {', '.join(options)}"
            if "." in key or key in (*Settings._fields, "model", "data", "trainer"):
                hint = "options that all arms share go under fixed"
            self.problems.append(f"{key}: there is no such option of a plan ({hint})")

    def group(self, key: str, instead: Group) -> Group:
        """Returns a group of options; values of ``instead`` stand in place of those that are missing or wrong."""
        value, options = self.given.get(key), signature_of(type(instead)).options
        if isinstance(value, dict):
            return replace(instead, **self.arguments(options, value, key))
        if value is not None:
            self.problems.append(f"{key}={value} must hold {', '.join(options)}")
        return instead

    def compare(self) -> Compare:
        """Returns the rules of the comparison."""
        if self.given.get("compare") is None:
            example = "{metric: test/acc, smallest_effect: 0.005, max_seeds: 40}"
            self.problems.append(f"compare is missing: {example}, for example")
        found = self.group("compare", Compare("", 0.01, FIRST))
        count, effects = found.max_seeds, {"smallest_effect": (found.metric, found.smallest_effect)}
        effects |= {f"then.{name}": (name, effect) for name, effect in found.then.items()}
        for key, (name, effect) in effects.items():
            percent = (facts := facts_of(name)) is not None and facts.percent
            most = " and below 1 (0.005 is half a point)" if percent else ""
            holds = 0 < effect < (1.0 if percent else math.inf)
            self.problems += problems_of((f"compare.{key}", f"{effect:g}", holds, f"above 0{most}"))
        self.problems += [f"compare.then: {found.metric} is compare.metric (leave it out)"] * (
            found.metric in found.then
        )
        least = f"at least {FIRST}: the first analysis takes {FIRST} pairs, and before it nothing is claimed"
        self.problems += problems_of(
            ("compare.alpha", f"{found.alpha:g}", 0 < found.alpha < 0.5, "above 0 and below 0.5"),
            ("compare.disagreement", f"{found.disagreement:g}", 0 < found.disagreement < 1, "above 0 and below 1"),
            ("compare.max_seeds", count, count >= FIRST, least),
            ("compare.max_seeds", count, count <= MOST_SEEDS, f"at most {MOST_SEEDS}"),
        )
        if found.extended:
            self.problems.append("compare.extended is kept by the ledger (to go on, raise compare.max_seeds)")
        if self.given.get("sizes") and (found.arms == "pairs" or self.given.get("grid")):
            self.problems.append("sizes: arms beside a baseline have sizes, neither compare.arms=pairs nor a grid")
        if found.arms == "pairs":
            rest = "arms beside a baseline, not compare.arms=pairs"
            self.problems += [f"compare.then compares {rest}"] * bool(found.then)
            self.problems += [f"compare.until=not better asks about {rest}"] * (found.until == "not better")
        return replace(found, max_seeds=min(count, MOST_SEEDS))

    def seeds(self, compare: Compare, tune: Tune) -> tuple[list[int], str]:
        """Returns all seeds that may be run, and which splits they have."""
        seeds, taken = self.group("seeds", Seeds()), tune.taken()
        others = (seed for seed in itertools.count(seeds.first) if seed not in taken)
        runs = [*itertools.islice(others, most_seeds(max(compare.max_seeds, 1)))]
        last = f"the last of {len(runs)} seeds is above 2**32 - 1"
        self.problems += problems_of(("seeds.first", seeds.first, seeds.first >= 0, "at least 0"))
        self.problems += [f"seeds.first={seeds.first}: {last}"] if runs[-1] >= 2**32 else []
        return runs, seeds.split

    def options(self, key: str, given: Any) -> dict[str, Any]:
        """Returns dotted options and their values, as they are written: a config that they change reads them."""
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            self.problems.append(f"{key}={given} must hold {{OPTION: VALUE}}, such as {{model.pool: mean}}")
            return {}
        reason = "it identifies the run or chooses the images that measure it, and is the same for all arms"
        cure = {"data.split_seed": " (for another split of each seed: seeds.split=varies)"}
        names = [name for name in _written_options(given) if name in NOT_FOR_ARMS]
        self.problems += [f"{key}.{name}: {reason}{cure.get(name, '')}" for name in names]
        return given

    def values(self, key: str, given: Any) -> dict[str, list[Any]]:
        """Returns the values of each dotted option; without any if something is wrong."""
        before, options = len(self.problems), self.options(key, given)
        for name, values in options.items():
            if isinstance(values, list) and values:
                self.refuse_repeated(f"{key}.{name}", map(word, values))
            else:
                self.problems.append(f"{key}.{name}={values} must be a list of values")
        return options if len(self.problems) == before else {}

    def refuse_repeated(self, key: str, values: Iterable[Any]) -> None:
        """Refuses values that come twice."""
        self.problems += [f"{key}: {value} comes twice" for value, count in Counter(values).items() if count > 1]

    def refuse_twice(self, key: str, options: Mapping[str, Any], places: dict[str, dict[str, Any]]) -> None:
        """Refuses options that another place gives too."""
        twice = {name: place for place, given in reversed(places.items()) for name in given if name in options}
        self.problems += [f"{key}.{name}: {place} gives it too (leave out one)" for name, place in twice.items()]

    def refuse_same_folder(self, key: str, names: Collection[str]) -> None:
        """Refuses names of which two give the same folder."""
        if len({*map(slug, names)}) < len(names):
            self.problems.append(f"{key} give the same folder (letters in any case, digits and dots count)")

    def arms(self) -> tuple[dict[str, list[Any]], dict[str, dict[str, Any]]]:
        """Returns the factors of a grid, and the options that each arm changes."""
        named, grid = self.given.get("arms"), self.given.get("grid")
        factors: dict[str, list[Any]] = {}
        arms: dict[str, dict[str, Any]] = {}
        sizes: dict[str, dict[str, Any]] = {}
        before = len(self.problems)
        if (named is None) == (grid is None):
            self.problems.append("give arms: {NAME: {OPTION: VALUE}} or grid: {OPTION: [VALUES]}, one of the two")
        elif grid is not None:
            factors = self.values("grid", grid)
            arms = {grid_name(arm): arm for arm in combinations(factors)} if factors else {}
        elif not isinstance(named, dict):
            self.problems.append(f"arms={named} must hold {{NAME: {{OPTION: VALUE}}}}")
        else:
            arms = self.named("arm", named)
            taken = [name for name in named if name in NOT_AN_ARM]
            self.problems += [f"arm {name}: this name has a meaning of its own (choose another)" for name in taken]
            sizes = self.sizes(arms)
        if len(arms) < 2 and len(self.problems) == before:
            self.problems.append("there is one arm only: nothing to compare")
        if sizes:
            factors = {"arms": [*arms], SIZES: [*sizes]}
            arms = {arm_name(arm, size): {**arms[arm], **sizes[size]} for arm in arms for size in sizes}
        self.refuse_same_folder(f"arms {', '.join(arms)}: two names", arms)
        return factors, arms

    def named(self, kind: str, given: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
        """Returns the options of each arm or size by its name."""
        found = {str(name): self.options(f"{kind}s.{name}", options or {}) for name, options in given.items()}
        texts = [name for name in given if not isinstance(name, str)]
        self.problems += [f"{kind} {name}: a name is a text: write it in quotes" for name in texts]
        return found

    def sizes(self, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the options of each size; none where all arms are of one size."""
        given = self.given.get("sizes")
        if given is None:
            return {}
        if not isinstance(given, dict) or len(given) < 2:
            self.problems.append(f"sizes={word(given)} must hold {{NAME: {{OPTION: VALUE}}}}, of two sizes or more")
            return {}
        sizes = self.named("size", given)
        for name, options in sizes.items():
            self.refuse_twice(f"sizes.{name}", options, {f"arm {arm}": own for arm, own in arms.items()})
        return sizes

    def baseline(self, arms: Mapping[str, Mapping[str, Any]], factors: Mapping[str, Any], compare: Compare) -> str:
        """Returns the name of the baseline."""
        given, first, names = self.given.get("baseline"), next(iter(arms), ""), "; ".join(factors.get("arms", arms))
        wanted = given
        if SIZES in factors:
            wanted, factors = given and arm_name(str(given), factors[SIZES][0]), {}
        name = next((name for name, arm in arms.items() if wanted == (arm if factors else name)), None)
        if name is None and arms and (given is not None or compare.arms == "baseline"):
            shown = "baseline is missing: it" if given is None else f"baseline={word(given)}"
            values = f"give a value of each of {', '.join(factors)}, such as {word(arms[first])}"
            self.problems.append(f"{shown} must {values if factors else f'be an arm (choose {names})'}")
        return first if name is None else name

    def tune(self, fixed: dict[str, Any], arms: dict[str, dict[str, Any]], compare: Compare) -> Tune:
        """Returns the tuning, without options if they cannot be tried.

        Args:
            fixed, arms: options that are given there.
            compare: rules of the comparison.
        """
        before, none = len(self.problems), Tune({}, [])
        tune = self.group("tune", none)
        if tune is none or len(self.problems) > before:
            return none
        options = self.values("tune.options", self.given["tune"]["options"])  # a class in it stays as it is written
        tune = replace(tune, options=options)
        if options and len(tune.combinations) < 2:
            self.problems.append("tune.options must hold at least two values of an option: there is nothing to choose")
        self.refuse_twice("tune.options", options, {"fixed": fixed, **{f"arm {name}": arms[name] for name in arms}})
        replicates = range(most_seeds(max(compare.max_seeds, 1)))
        trials = [seed for replicate in replicates for seed in tune.seeds_of(replicate)]
        if not trials or not 0 <= min(trials) <= max(trials) < 2**32:
            self.problems.append(f"tune.seeds={tune.seeds} must be a list of ints, at least 0 and below 2**32")
        self.refuse_repeated("tune.seeds", tune.seeds)
        if tune.replicates not in (None, compare.max_seeds):
            pair = f"must be compare.max_seeds={compare.max_seeds}: each replicate is one pair of runs"
            self.problems.append(f"tune.replicates={tune.replicates} {pair}")
        names = [f"{arm}, {grid_name(values)}" for arm in arms for values in tune.combinations]
        self.refuse_same_folder("tune.options: two values", names)
        return tune

    def config_files(self, folder: Path) -> list[str]:
        """Returns the paths of the config files, from the working folder or beside the plan."""
        value = self.given.get("config") or []
        if not value:
            self.problems.append("config is missing")
        files = [self.value(Path, item, "config") for item in as_list(value)]
        beside = [(file, folder / file) for file in files if file is not WRONG]
        return [str(path) if not file.exists() and path.exists() else str(file) for file, path in beside]


def grid_name(arm: Mapping[str, Any]) -> str:
    """Names an arm of a grid."""
    return arm_name(*(level_name(key, value) for key, value in arm.items()))


def _problems_of_configs(plan: Plan) -> list[str]:
    """Returns the problems of all arms, and of each value that is tried, those that all arms share once."""
    arms = {f"arm {arm}": (arm, dict[str, Any]()) for arm in plan.arms}
    changed = {key: values[0] for key, values in plan.tune.options.items()}  # each other value is tried beside these
    tried = [one for one in plan.tune.combinations if sum(one[key] != changed[key] for key in one) < 2]
    found: dict[str, list[str]] = {}
    for place, (arm, values) in [*arms.items(), *(("tune.options", (plan.baseline, one)) for one in tried)]:
        try:
            problems = _problems_of(plan, plan.experiment(arm, plan.seeds[0], values))
        except UserError as error:
            split = "data.split_seed="  # given by nothing else
            problems = [f"seeds.split=varies: {text}" if text.startswith(split) else text for text in error.problems]
        for text in problems:
            found.setdefault(text, []).append(place)
    shown = [text if {*places} >= {*arms} else f"{places[0]}: {text}" for text, places in found.items()]
    return shown if any({*places} & {*arms} for places in found.values()) else _problems_between(plan) + shown


def _problems_between(plan: Plan) -> list[str]:
    """Returns the problems of arms that are right one by one."""
    configs = {arm: {**item.config, "wandb": {}} for arm, item in plan.experiments.items()}
    problems = [
        f"{one} and {other} come to the same config: there is nothing to compare"
        for one, other in itertools.combinations(configs, 2)
        if configs[one] == configs[other]
    ]
    sources = {repr(item.config["data"]): (arm, item.data.class_names) for arm, item in plan.experiments.items()}
    (first, ours), *others = sources.values()
    for arm, names in others:
        problems += differences(first, ours, arm, names, "their metrics cannot be compared")
    given = {f"arm {arm}": own for arm, own in plan.arms.items()} | {"tune.options": plan.tune.options}
    own = [f"{place}: {key}" for place, options in given.items() for key in SET_BY_TIME & {*options}]
    problems += [f"{text}: compare.equal=time sets it (leave it out)" for text in own * bool(plan.compare.equal)]
    checkpoints = [item.settings.checkpoint for item in plan.experiments.values()]
    if len(by := {f"{item.monitor} ({item.mode})" for item in checkpoints}) > 1:
        problems.append(f"checkpoint.monitor: all arms must select by the same metric, not by {', '.join(sorted(by))}")
    return problems


def _problems_of(plan: Plan, experiment: Experiment) -> list[str]:
    """Returns the problems of an arm's experiment: its metrics, its test, its split."""
    classes, table = experiment.data.num_classes, with_own(experiment.metrics)
    selecting, reported = (metric_names(stage, classes=classes, table=table) for stage in ("val", "test"))
    reported += [name.replace("/", f"/{other}/") for other in experiment.data.further for name in reported]
    monitor, metric = experiment.settings.checkpoint.monitor, plan.compare.metric
    foreign = experiment.config["module"] is not None  # a module of the user, which may log other metrics
    problems = []
    if monitor not in selecting and not foreign:
        choices = ", ".join(selecting)
        problems.append(
            f"checkpoint.monitor={monitor} must be a metric of validation in an ablation (choose {choices})"
        )
    known, goal = recorded_goal(metric, [experiment.config]), plan.compare.goal
    wrong = [] if foreign else [name for name in plan.compare.then if name not in reported]
    problems += [f"compare.then.{name} must be a metric of test (choose {', '.join(reported)})" for name in wrong]
    vague = [name for name in plan.compare.then if name not in wrong and not recorded_goal(name, [experiment.config])]
    problems += [f"compare.then.{name}: nothing tells whether higher or lower values are better" for name in vague]
    if metric and metric not in reported and not foreign:
        problems.append(f"compare.metric={metric} must be a metric of test (choose {', '.join(reported)})")
    elif known and goal not in (None, known):
        problems.append(f"compare.goal={goal}: that of {metric} is {known} (leave it out)")
    elif metric and not (known or goal):
        either = f"whether higher (maximize) or lower values (minimize) of {metric} are better"
        problems.append(f"compare.goal is missing: {either}")
    if not experiment.config["test"] or experiment.trainer["limit_test_batches"] == 0:
        problems.append("test=false or trainer.limit_test_batches=0: without a test there is nothing to compare")
    if plan.compare.equal:
        callbacks = as_list(experiment.trainer_part.arguments.get("callbacks"))
        ends = [one.target.__name__ for one in callbacks if issubclass(one.kind, EarlyStopping | Timer)]
        ends += ["trainer.max_time"] * bool(experiment.trainer["max_time"])
        problems += [f"compare.equal=time: {name} ends a schedule before its time (leave it out)" for name in ends]
        several = experiment.trainer["devices"] not in ("auto", 1, "1")
        problems += ["compare.equal=time: runs need one device (trainer.devices=1)"] * several
    if runs := experiment.trainer["fast_dev_run"]:
        problems.append(f"trainer.fast_dev_run={runs} leaves no results")
    return problems
