"""Numbers of an ablation: its arms, their comparisons, the sources of variance."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_lightning.report.comparisons import ArmComparison, checksum, compare, opened, read_predictions
from vit_lightning.report.configs import ConfigDifference, Configs, config_differences, read_configs
from vit_lightning.report.forecast import measured_sd, tuning_luck
from vit_lightning.report.study import Run, Study
from vit_lightning.report.variance import Components, components, crossed_interval, spread
from vit_lightning.storage.metrics import read_metrics

Correct = Mapping[tuple[str, int], NDArray[np.bool_]]
"""Correctness of the prediction for each test image, by arm and seed."""


@dataclass(frozen=True)
class Arm:
    """An arm with the results of its runs."""

    name: str
    runs: list[Run]
    values: dict[int, float]
    """The compared metric by seed, of the runs that are done."""

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

    def median(self, key: str) -> float:
        """Returns the median of a cost over the runs; nan where no run has it."""
        costs = [run.results.get(key) for run in self.runs if run.seed in self.values]
        return float(np.median(found)) if (found := [cost for cost in costs if cost is not None]) else math.nan


@dataclass(frozen=True)
class TestSets:
    """Correctness on the test images, as the runs have kept it."""

    why: str = ""
    """Reason why correctness cannot be compared over seeds; empty where it can."""
    correct: Correct = field(default_factory=dict)
    differ: bool = False
    """Whether arms have other test images with the same seed."""

    @property
    def same(self) -> bool:
        """Whether all runs have the same test images."""
        return not self.why


@dataclass(frozen=True, eq=False)
class Analysis:
    """All numbers of a report."""

    study: Study
    arms: list[Arm]
    comparisons: list[ArmComparison]
    components: dict[tuple[str, str], Components]
    """Variance components of the differences in correctness over seeds and test images, by arm and other."""
    tested: TestSets
    configs: Configs
    """Config of each run, by arm and seed."""
    differences: list[ConfigDifference]
    is_first: bool = True
    """Whether it is that of the first metric, by which arms are chosen."""
    then: Analysis | None = None
    """That of the next metric, with the comparisons that are made by it too; None where there are none."""

    @functools.cached_property
    def luck(self) -> NDArray[np.float64] | None:
        """Differences of arms exactly alike by tuning alone, in many studies; 0 where they are not called different."""
        return None if (sd := measured_sd(self.study)) is None else tuning_luck(self.study, sd)

    @functools.cached_property
    def ranked(self) -> list[Arm]:
        """Arms with the best mean first, those without results last."""
        sign = -1 if self.study.goal == "maximize" else 1
        return sorted(self.arms, key=lambda arm: (not arm.n, sign * arm.mean if arm.n else 0.0))

    def by_metric(self) -> Iterator[Analysis]:
        """Yields this analysis and those of further metrics."""
        yield self
        yield from () if self.then is None else self.then.by_metric()

    @property
    def reference(self) -> str:
        """Arm or arms that the differences on the first screen are to."""
        return self.study.baseline if self.study.compare.arms == "baseline" else self.ranked[0].name

    def for_new_images(self, one: ArmComparison) -> tuple[float, float]:
        """Returns the interval of a comparison for new test images as well; nan where nothing is known of images."""
        return crossed_interval(one, parts) if (parts := self._parts(one)) else (math.nan, math.nan)

    def reached(self, arm: str, seed: int, step: int) -> float:
        """Returns the last validation of a run by a step, by the metric that selects checkpoints; nan without one."""
        folders = [self.study.folder / run.folder for run in self.study.done if (run.arm, run.seed) == (arm, seed)]
        rows = [row for one in folders if (one / "metrics.jsonl").is_file() for row in read_metrics(one)]
        known = [row[self.study.metric] for row in rows if self.study.metric in row and row["step"] < step]
        return float(known[-1]) if known else math.nan

    def is_same(self, one: ArmComparison) -> bool:
        """Whether the runs of each pair have the same predictions."""
        parts = self._parts(one)
        return parts is not None and one.mean == parts.image == parts.rest == 0

    def _parts(self, one: ArmComparison) -> Components | None:
        return self.components.get((one.arm, one.other)) or self.components.get((one.other, one.arm))

    @functools.cached_property
    def ordered(self) -> list[ArmComparison]:
        """Comparisons of two arms in the order of ``ranked``; of pairs, the arm with the better mean comes first."""
        place = {arm.name: number for number, arm in enumerate(self.ranked)}
        found = [one for one in self.comparisons if not one.is_interaction]
        if self.study.compare.arms == "pairs":
            found = [one if place[one.arm] < place[one.other] else one.mirrored() for one in found]
        return sorted(found, key=lambda one: (place[one.arm], place[one.other]))

    @property
    def interactions(self) -> list[ArmComparison]:
        """Comparisons of two levels together with the sum of what each does."""
        return [one for one in self.comparisons if one.is_interaction]


def analyse(study: Study, asked: Collection[tuple[str, str]] | None = None) -> Analysis:
    """Compares the arms of a study; ``asked`` has arm and other of the comparisons that are made, None of all."""
    tested, comparisons, configs = _read_test_sets(study), compare(study, asked), read_configs(study)
    compared = {arm for one in comparisons for arm in one.terms}
    arms = [_arm(study, name) for name in study.arms if asked is None or name in compared]
    more = opened(comparisons)
    return Analysis(
        study=study,
        arms=arms,
        comparisons=comparisons,
        components=_components(comparisons, tested),
        tested=tested,
        configs=configs,
        differences=config_differences(study, configs),
        is_first=asked is None,
        then=analyse(study.next, more) if study.next and more else None,
    )


def _arm(study: Study, name: str) -> Arm:
    runs = [run for run in study.runs if run.arm == name]
    values = {run.seed: float(run.results[study.compare.metric]) for run in runs if run.state == "done"}
    return Arm(name, runs, values)


def _components(comparisons: Sequence[ArmComparison], tested: TestSets) -> dict[tuple[str, str], Components]:
    """Returns the variance components of the comparisons with at least two pairs of runs on the same test images."""
    kept, found = tested.correct, {}
    for one in comparisons if tested.same else ():
        seeds = [seed for seed in one.counted if {(arm, seed) for arm in one.terms} <= kept.keys()]
        gaps = [sum(sign * kept[arm, seed].astype(float) for arm, sign in one.terms.items()) for seed in seeds]
        if len(gaps) > 1:
            found[one.arm, one.other] = components(np.stack(gaps))
    return found


def _read_test_sets(study: Study) -> TestSets:
    """Reads the correctness of each run on each test image."""
    if not re.fullmatch("test/([^/]+/)?acc", study.compare.metric):
        return TestSets(f"{study.compare.metric} is not an accuracy")
    correct: dict[tuple[str, int], NDArray[np.bool_]] = {}
    sets: dict[int, tuple[NDArray[Any], ...]] = {}  # index and label by seed
    for run in study.done:
        predictions = read_predictions(study.folder / run.folder)
        if study.compare.metric not in predictions:
            continue
        if not (kept := predictions[study.compare.metric]):
            return TestSets(f"the predictions of {run.folder} cannot be read")
        if run.predictions not in (None, checksum(predictions)):  # those of a second result do not count
            continue
        *images, prediction = kept
        if not all(map(np.array_equal, images, sets.setdefault(run.seed, tuple(images)))):
            which = f"{run.arm} with seed {run.seed}"
            return TestSets(f"{which} has other test images than the other arms with this seed", differ=True)
        correct[run.arm, run.seed] = images[1] == prediction
    if not sets:
        return TestSets("no run has kept its predictions of the test images")
    first, *others = sets.values()
    same = all(all(map(np.array_equal, first, images)) for images in others)
    return TestSets("" if same else "each seed has test images of its own", correct)
