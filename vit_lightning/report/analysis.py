"""Numbers of an ablation by each metric: its arms, their comparisons, what run folders tell beside them; and what is
claimed of each arm against the reference, the lines of the first screen. ``wording`` has the words for them."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_lightning.report.comparisons import ArmComparison, base_of, compare_by_metric
from vit_lightning.report.configs import ConfigDifference, Configs, config_differences, read_configs
from vit_lightning.report.forecast import measured_sd, tuning_luck
from vit_lightning.report.predictions import TestSets, read_test_sets
from vit_lightning.report.study import Compare, Run, Study
from vit_lightning.report.variance import Components, components, crossed_interval, spread
from vit_lightning.storage.folder import read_json
from vit_lightning.storage.metrics import read_metrics

HERE = "on these images only"


@dataclass(frozen=True)
class Arm:
    """An arm with the results of its runs."""

    name: str
    runs: list[Run]
    metric: str

    @functools.cached_property
    def values(self) -> dict[int, float]:
        """The compared metric by seed, of the runs that are done."""
        return {run.seed: float(run.results[self.metric]) for run in self.runs if run.state == "done"}

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return float(np.mean([*self.values.values()])) if self.values else math.nan

    @property
    def sd(self) -> float:
        return spread(np.array([*self.values.values()]))

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.state == "failed"]

    def costs(self, key: str) -> dict[int, float]:
        """Returns a cost by seed, of the runs that have it."""
        found = {run.seed: run.results.get(key) for run in self.runs if run.seed in self.values}
        return {seed: cost for seed, cost in found.items() if cost is not None}

    def median(self, key: str) -> float:
        """Returns the median of a cost over the runs; nan where no run has it."""
        return float(np.median([*found.values()])) if (found := self.costs(key)) else math.nan


@dataclass(frozen=True, eq=False)
class Analysis:
    """All numbers of a report by one metric."""

    study: Study
    arms: dict[str, Arm]
    """Arms that are compared, by name."""
    comparisons: list[ArmComparison]
    components: dict[frozenset[str], Components]
    """Variance components of the differences in correctness over seeds and test images, by both arms."""
    tested: TestSets
    configs: Configs
    """Config of each run, by arm and seed."""
    differences: list[ConfigDifference]
    then: "Analysis | None"
    """That of the next metric, with the comparisons that are made by it too; None where there are none."""
    is_first: bool
    """Whether it is that of the first metric, by which arms are chosen."""

    def by_metric(self) -> Iterator["Analysis"]:
        """Yields this analysis and those of further metrics."""
        yield self
        yield from () if self.then is None else self.then.by_metric()

    @property
    def rules(self) -> Compare:
        return self.study.compare

    @functools.cached_property
    def environments(self) -> list[tuple[str, dict[str, Any]]]:
        """Arm and ``environment.json`` of each finished run that has one."""
        read = [(run.arm, read_json(self.study.folder / run.folder / "environment.json")) for run in self.study.done]
        return [(arm, environment) for arm, environment in read if environment]

    @functools.cached_property
    def luck(self) -> NDArray[np.float64] | None:
        """Differences of arms exactly alike by tuning alone, in many studies; 0 where they are not called different."""
        return None if (sd := measured_sd(self.study)) is None else tuning_luck(self.study, sd)

    @functools.cached_property
    def ranked(self) -> list[Arm]:
        """Arms with the best mean first, those without results last."""
        sign = -1 if self.study.goal == "maximize" else 1
        return sorted(self.arms.values(), key=lambda arm: (not arm.n, sign * arm.mean if arm.n else 0.0))

    def reference_of(self, arm: str) -> str:
        """Returns the arm that an arm is compared with on the first screen; of pairs, the one with the best mean."""
        return self.ranked[0].name if self.rules.arms == "pairs" else base_of(self.study, arm)

    @functools.cached_property
    def between_arms(self) -> list[ArmComparison]:
        """Comparisons of two arms in the order of ``ranked``; of pairs, the arm with the better mean comes first."""
        place = {arm.name: number for number, arm in enumerate(self.ranked)}
        found = [one for one in self.comparisons if not one.is_interaction]
        if self.rules.arms == "pairs":
            found = [one if place[one.arm] < place[one.other] else one.mirrored() for one in found]
        return sorted(found, key=lambda one: (place[one.arm], place[one.other]))

    @property
    def interactions(self) -> list[ArmComparison]:
        """Comparisons of two levels together with the sum of what each does."""
        return [one for one in self.comparisons if one.is_interaction]

    def for_new_images(self, one: ArmComparison) -> tuple[float, float]:
        """Returns the interval of a comparison for new test images as well; nan where nothing is known of images."""
        parts = self.components.get(frozenset((one.arm, one.other)))
        return (math.nan, math.nan) if parts is None else crossed_interval(one, parts)

    def predicts_the_same(self, one: ArmComparison) -> bool:
        """Whether the runs of each pair have the same predictions."""
        parts = self.components.get(frozenset((one.arm, one.other)))
        return parts is not None and one.mean == parts.image == parts.rest == 0

    def reached(self, arm: str, seed: int, step: int) -> float:
        """Returns the last validation of a run by a step, by the metric that selects checkpoints; nan without one."""
        run, metric = self.study.results.get((arm, seed)), self.study.metric
        folder = None if run is None else self.study.folder / run.folder
        rows = read_metrics(folder) if folder and (folder / "metrics.jsonl").is_file() else []
        known = [row[metric] for row in rows if metric in row and row["step"] < step]
        return float(known[-1]) if known else math.nan


def analyse(study: Study) -> Analysis:
    """Compares the arms of a study by each metric, and reads what their run folders tell; that of the first metric."""
    configs, found = read_configs(study), None
    differences = config_differences(study, configs)
    for by, comparisons in reversed([*compare_by_metric(study)]):
        tested, metric = read_test_sets(by), by.compare.metric
        runs = {arm: [run for run in by.runs if run.arm == arm] for arm in by.arms}
        compared = by.arms.keys() if by is study else {arm for one in comparisons for arm in one.terms}
        found = Analysis(
            study=by,
            arms={arm: Arm(arm, own, metric) for arm, own in runs.items() if arm in compared},
            comparisons=comparisons,
            components=_components(comparisons, tested),
            tested=tested,
            configs=configs,
            differences=differences,
            then=found,
            is_first=by is study,
        )
    assert found is not None, "a study has two arms or more"
    return found


def _components(comparisons: Sequence[ArmComparison], tested: TestSets) -> dict[frozenset[str], Components]:
    """Returns the variance components of the comparisons with at least two pairs of runs on the same test images."""
    kept, found = tested.correct, {}
    for one in comparisons if tested.same else ():
        seeds = [seed for seed in one.counted if {(arm, seed) for arm in one.terms} <= kept.keys()]
        gaps = [sum(sign * kept[arm, seed].astype(float) for arm, sign in one.terms.items()) for seed in seeds]
        if len(gaps) > 1:
            found[frozenset((one.arm, one.other))] = components(np.stack(gaps))
    return found


@dataclass(frozen=True, eq=False)
class Line:
    """An arm on the first screen, or an interaction: an arm without runs of its own."""

    arm: Arm
    kind: str
    """The verdict, as ``kind_of``, against the reference; that itself is the baseline or, of pairs, the leader."""
    comparison: ArmComparison | None
    """Comparison with the reference; None for the reference."""
    comparisons: list[ArmComparison]
    """All comparisons of the arm; none of the baseline."""
    holds: str
    """Whether all that they claim holds on new images, too; empty where nothing is known of these, or claimed."""

    @property
    def is_interaction(self) -> bool:
        return self.comparison is not None and self.comparison.is_interaction


@functools.lru_cache(maxsize=4)
def lines(analysis: Analysis) -> list[Line]:
    """Returns a line for each arm, the best mean first, then for each interaction."""
    both = [*analysis.between_arms, *(one.mirrored() for one in analysis.between_arms)]
    found: list[Line] = []
    for arm in analysis.ranked:
        reference, own = analysis.reference_of(arm.name), [one for one in both if one.arm == arm.name]
        one = next((one for one in own if one.other == reference), None)
        if one is not None:
            found.append(Line(arm, kind_of(one), one, own, holds(analysis, own)))
        elif reference == arm.name and analysis.rules.arms == "pairs":
            found.append(Line(arm, "leader", None, own, holds(analysis, own)))
        elif reference == arm.name:
            found.append(Line(arm, "baseline", None, [], ""))
    for one in analysis.interactions:
        found.append(Line(Arm(one.arm, [], one.metric), kind_of(one), one, [one], holds(analysis, [one])))
    return found


def kind_of(one: ArmComparison) -> str:
    """Returns the verdict by all that is claimed: beside a difference also whether it matters, or is shown not to.

    A difference that is claimed and whose interval lies beyond the smallest effect matters; a claim of that is false
    with less than half the level of a comparison, where nothing else that is claimed on its side can be false.
    """
    if not one.differs:
        return one.verdict
    if f"not {one.verdict}" in one.claims:
        return f"slightly {one.verdict}"
    matters = min(abs(one.low), abs(one.high)) >= one.design.smallest_effect
    return f"clearly {one.verdict}" if matters else one.verdict


def holds(analysis: Analysis, comparisons: Sequence[ArmComparison]) -> str:
    """Says whether all that is claimed also holds by the ranges for new images; an empty text without images."""
    claimed = [one for one in comparisons if one.claims and analysis.tested.same]
    for one in claimed:
        low, high = (0.0, 0.0) if analysis.predicts_the_same(one) else analysis.for_new_images(one)
        effect = one.design.smallest_effect
        shown = {"better": low > 0, "worse": high < 0, "not better": high < effect, "not worse": low > -effect}
        matters = min(abs(low), abs(high)) >= effect
        if not all(shown[claim] for claim in one.claims) or (kind_of(one).startswith("clearly") and not matters):
            return HERE
    return "also on new images" if claimed else ""
