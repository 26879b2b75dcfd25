"""Runs that an ablation needs: for each comparison that is open, the seeds up to its next analysis and none beyond.

Only the results of finished runs decide, in the order of the plan's seeds, never the order in which runs end: all
processes that share an ablation come to the same runs, however often they are killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vit_lightning.report.comparisons import ArmComparison, design_of
from vit_lightning.report.comparisons import compare as compare_arms
from vit_lightning.report.study import Compare, Study


@dataclass(frozen=True)
class Schedule:
    """Runs that the analyses of a study need by now."""

    seeds: dict[str, int]
    """Number of seeds of each arm, the first ones of the plan."""
    open: list[str]
    """Arms of comparisons that are not decided and can be."""
    comparisons: list[ArmComparison]

    @property
    def next_analysis(self) -> int | None:
        """Seeds of the next analysis; None if there is none."""
        return min((self.seeds[arm] for arm in self.open), default=None)


def analyses_of(compare: Compare) -> tuple[int, ...]:
    """Returns the numbers of seeds of all analyses."""
    return design_of(compare, 2).analyses


def runs_left(study: Study, comparisons: Sequence[ArmComparison], *, until_last: bool = False) -> set[tuple[str, int]]:
    """Returns arms and seeds of the runs that comparisons need for their next analyses, or for their last."""
    ended = {(run.arm, run.seed) for run in study.runs if run.state != "missing"}
    needed = {
        (arm, seed)
        for one in comparisons
        for arm in (one.arm, one.other)
        for seed in study.seeds[: one.seeds_for(one.design.max_pairs if until_last else one.next or one.n)]
    }
    return needed - ended


def make_schedule(study: Study) -> Schedule:
    """Plans the runs of a study's next analyses.

    Args:
        study: runs that are missing may be left out of it.
    """
    analyses, comparisons = analyses_of(study.compare), compare_arms(study)
    seeds = dict.fromkeys(study.arms, analyses[0])
    if study.compare.arms == "best":
        seeds = _race(study)
    else:
        for one in comparisons:
            needed = one.seeds_for(one.n if one.decided else one.next or analyses[-1])
            seeds |= {arm: max(seeds[arm], needed) for arm in (one.arm, one.other)}
    return Schedule(seeds, _open_arms(study, comparisons), comparisons)


def _race(study: Study) -> dict[str, int]:
    """Returns the seeds of each arm, where all arms that may be the best must reach an analysis before it takes place.

    Else the order in which runs end would decide how far an arm goes that another one is about to beat.
    """
    ended = {(run.arm, run.seed) for run in study.runs if run.state != "missing"}
    count, racing = analyses_of(study.compare)[0], list(study.arms)
    seeds = dict.fromkeys(racing, count)
    while racing and all((arm, seed) in ended for arm in racing for seed in study.seeds[:count]):
        begun = {*study.seeds[:count]}
        comparisons = compare_arms(replace(study, runs=[run for run in study.runs if run.seed in begun]))
        count = max((one.seeds_for(one.next) for one in comparisons if one.is_open and one.next), default=0)
        racing = _open_arms(study, comparisons)
        seeds |= dict.fromkeys(racing, count)
    return seeds


def _open_arms(study: Study, comparisons: Sequence[ArmComparison]) -> list[str]:
    """Returns the arms of comparisons that more runs may decide."""
    left = [one for one in comparisons if one.is_open]
    return [arm for arm in study.arms if any(arm in (one.arm, one.other) for one in left)]
