"""The tables of an ablation's report, and how a table is written: Markdown, CSV."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from vit_lightning.errors import counted
from vit_lightning.report.analysis import Analysis, Arm, Line, lines
from vit_lightning.report.checks import Check
from vit_lightning.report.study import Study, written
from vit_lightning.report.units import NONE, unit_of
from vit_lightning.report.wording import SUM, WORDS, following, level_of, reference, said, settings, show_p, tuned
from vit_lightning.storage.folder import to_csv

COSTS = {
    "parameters": "parameters",
    "flops": "FLOPs per image",
    "images_per_second": "images/s",
    "train_seconds": "training, s",
    "seconds": "run, s",
    "peak_memory_mb": "memory, MB",
}
"""Header of each cost in ``results.json``; training determines the first two alone."""
Row = TypeVar("Row")
Column = tuple[str, Callable[[Row], str]]
"""Header of a column, and the text of a row's cell."""


@dataclass(frozen=True)
class Table:
    """Table of text; the first column names the row."""

    caption: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    outcomes: list[str] | None = None
    """Outcome of each row's verdict, which colours it on a page."""

    def to_markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(markdown(cell.replace("\n", " ")) for cell in cells) + " |"

        lines = [line(self.header), "|---" * len(self.header) + "|", *map(line, self.rows)]
        note = ["", markdown(self.note)] if self.note else []
        return "\n".join([f"**{markdown(self.caption)}**", "", *lines, *note])


def markdown(text: str) -> str:
    """Escapes what Markdown would read as markup."""
    return re.sub(r"([\\`*_<|])", r"\\\1", text)


def tabulate(caption: str, rows: Iterable[Row], columns: Sequence[Column[Row]], note: str = "") -> Table:
    """Makes a table from its columns."""
    return Table(caption, [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows], note)


def verdict_table(analysis: Analysis) -> Table:
    """A line for each arm: the answer."""
    tuning, rules, unit, level = analysis.study.tuning, analysis.rules, analysis.rules.unit, level_of(analysis)
    found = {line: said(analysis, line, briefly=rules.arms == "baseline") for line in lines(analysis)}
    about = " about these values" if tuning is not None and not tuning.replicates else ""
    alpha = f"{100 * rules.alpha:g} %"
    risk = f"The probability that any verdict{about} is false is at most {alpha}."
    share = 0.0 if analysis.luck is None else float((analysis.luck > 0).mean())
    if share > rules.alpha or any("tuning luck" in verdict for verdict in found.values()):
        risk += f" Tuning luck: arms exactly alike, each tuned, are called better or worse in {100 * share:.0f} % of "
        risk += f"studies; the {alpha} leave it out (tune.replicates counts it in)."

    columns: list[tuple[str, Callable[[Line], str], str]] = [  # header, cell and note
        ("arm", lambda line: line.arm.name + tuned(analysis, line.arm.name), ""),
        ("verdict", lambda line: found[line], risk),
        ("holds", lambda line: line.holds or NONE, "New images: test images of the same kind, drawn anew."),
        ("settings", lambda line: settings(analysis, line) or NONE, ""),
        ("failed", lambda line: f"{n} of {len(line.arm.runs)}" if (n := len(line.arm.failed)) else NONE, ""),
        (unit.label("mean"), lambda line: unit.value(line.arm.mean), "Means are over all runs of an arm."),
        (
            unit.difference_label("difference"),
            lambda line: unit.signed(line.comparison.mean) if line.comparison else NONE,
            "Differences are over the seeds that both have run.",
        ),
        (
            unit.difference_label(f"{level} range"),
            lambda line: unit.interval(line.comparison.low, line.comparison.high) if line.comparison else NONE,
            f"Range: where the difference would end with ever more seeds, {level} sure at all looks.",
        ),
        ("pairs", lambda line: str(line.comparison.n) if line.comparison and line.comparison.n else NONE, ""),
        ("what next", lambda line: following(analysis, line) or NONE, ""),
    ]
    shown = [one for one in columns if any(one[1](line) != NONE for line in found)]
    caption = f"{rules.metric} against {reference(analysis)}, best first"
    table = tabulate(caption, found, [one[:2] for one in shown], " ".join(filter(None, (one[2] for one in shown))))
    return replace(table, outcomes=[WORDS[line.kind].outcome for line in found])


def arm_table(analysis: Analysis) -> Table:
    """Results of each arm."""
    rules, unit = analysis.rules, analysis.rules.unit
    baseline = analysis.study.baseline if rules.arms == "baseline" else None
    return tabulate(
        f"{unit.label(rules.metric)} of each arm",
        analysis.ranked,
        [
            ("arm", lambda arm: arm.name + (" (baseline)" if arm.name == baseline else "")),
            ("runs", lambda arm: str(arm.n)),
            ("failed", lambda arm: str(len(arm.failed))),
            ("mean", lambda arm: unit.value(arm.mean)),
            ("sd", lambda arm: unit.value(arm.sd)),
            ("lowest", lambda arm: unit.value(min(arm.values.values(), default=math.nan))),
            ("highest", lambda arm: unit.value(max(arm.values.values(), default=math.nan))),
        ],
    )


def tuning_table(analysis: Analysis) -> Table:
    """Validation metric of each value that was tried."""
    study, tuning = analysis.study, analysis.study.tuning
    if tuning is None:
        return Table("Tuning", [], [])
    unit, mean, chosen = unit_of(study.metric), tuning.mean, tuning.chosen

    def shown(values: dict[str, Any], arm: Arm) -> str:
        anew = [one[arm.name] for one in tuning.choices if arm.name in one]
        times = f" (chosen in {anew.count(values)} of {len(anew)} runs)" * (values in anew)
        return unit.value(mean(arm.name, values)) + (times or " (chosen)" * (values == chosen.get(arm.name)))

    columns: list[Column[Arm]] = [(written(values), partial(shown, values)) for values in tuning.tried]
    trials, seeds = counted(len(columns) * len(tuning.seeds), "trial"), ", ".join(map(str, tuning.seeds))
    if tuning.replicates:
        seeds = f"{tuning.seeds[0]} to {max((trial.seed for trial in tuning.trials), default=tuning.seeds[-1])}"
    return tabulate(
        f"Tuning: {unit.label(study.metric)}",
        analysis.ranked,
        [("arm", lambda arm: arm.name), *columns],
        f"Mean {study.metric} over the seeds {seeds}, which are not those of the comparison; every "
        f"{'run' if tuning.replicates else 'arm'} had the same {trials}, which saw no test image.",
    )


def difference_table(analysis: Analysis) -> Table:
    """Each comparison: the numbers behind the verdict."""
    rules, unit, level = analysis.rules, analysis.rules.unit, analysis.comparisons[0].design.level
    return tabulate(
        f"Comparisons by {unit.difference_label(rules.metric)}",
        [*analysis.between_arms, *analysis.interactions],
        [
            ("arm", lambda one: one.arm),
            ("against", lambda one: SUM if one.is_interaction else one.other),
            ("verdict", lambda one: one.verdict),
            ("difference", lambda one: unit.signed(one.mean)),
            ("sd", lambda one: unit.value(one.sd)),
            ("interval", lambda one: unit.interval(*one.interval)),
            ("on new images", lambda one: unit.interval(*analysis.for_new_images(one))),
            ("p", lambda one: show_p(one.p)),
            ("pairs", lambda one: str(one.n)),
            ("next analysis", lambda one: NONE if one.next is None or one.blocked else f"{one.next} pairs"),
        ],
        "Numbers are those of the analysis that decided a comparison, else of the latest. Interval: where the "
        "confidence intervals of all analyses so far overlap (the latest one where the mean lies outside of that); it "
        f"misses the true difference with a probability of at most {show_p(level)}, whenever one looks. The range of "
        "the first table is the same, but for an end that not better or not worse rules out: there it is the one-sided "
        "bound of that verdict. On new images: also if test images were drawn anew. p, of a difference from 0, is "
        f"corrected for all comparisons and analyses: compare it with {rules.alpha:g}.",
    )


def cost_table(analysis: Analysis) -> Table:
    """Costs of each arm."""

    def shown(key: str, arm: Arm) -> str:
        value = arm.median(key)
        digits = 1 if key.endswith("seconds") and value < 100 else 0
        return NONE if math.isnan(value) else f"{value:,.{digits}f}"

    columns: list[Column[Arm]] = [
        (text, partial(shown, key))
        for key, text in COSTS.items()
        if any(not math.isnan(arm.median(key)) for arm in analysis.ranked)
    ]
    return tabulate(
        "Costs of a run",
        analysis.ranked,
        [("arm", lambda arm: arm.name), *columns],
        "Medians over the runs. FLOPs: forward pass, a multiply-add counts as two. Times and images/s also depend on "
        "how many runs shared the machine.",
    )


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_table(checks: Sequence[Check]) -> Table:
    words = {True: "yes", False: "NO", None: "not known"}
    rows = [[check.name, words[check.ok], check.text] for check in checks]
    return Table("Checks of the run folders", ["check", "holds", "found"], rows)


def failed_table(study: Study) -> Table:
    """Runs that failed, with their causes, and runs that have not finished."""
    without = [run for run in study.runs if run.state != "done"]
    rows = [[run.arm, str(run.seed), run.state, run.cause or "", run.folder] for run in without]
    return Table("Failed or missing", ["arm", "seed", "state", "cause", "folder"], rows)


def results_csv(study: Study) -> str:
    """Returns the results of each finished run that training determines; the same bytes for the same training."""
    names = sorted({name for run in study.done for name in run.results} - {*[*COSTS][2:], "seed", "sha256"})
    keys = list(dict.fromkeys(key for overrides in study.arms.values() for key in overrides))
    rows: list[list[Any]] = []
    for run in study.done:
        overrides = {key: _as_yaml(value) for key, value in study.arms[run.arm].items()}
        values = [*(overrides.get(key, "") for key in keys), *(run.results.get(name, "") for name in names)]
        rows.append([run.arm, run.seed, *values])
    return to_csv(["arm", "seed", *keys, *names], rows)
