"""The tables of an ablation's report, and how a table is written: HTML, Markdown, LaTeX, CSV."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from vit_lightning.config.files import word
from vit_lightning.report.analysis import Analysis, Arm
from vit_lightning.report.checks import Check
from vit_lightning.report.configs import ConfigDifference
from vit_lightning.report.study import Study
from vit_lightning.report.variance import Effect
from vit_lightning.report.wording import (
    MINUS,
    NONE,
    PLUS_MINUS,
    Line,
    counted,
    lines,
    show_fraction,
    show_p,
    show_r,
    unit_of,
)
from vit_lightning.storage.folder import to_csv

COSTS = ("train_seconds", "seconds", "images_per_second", "peak_memory_mb")
"""Keys of ``results.json`` that training does not determine."""
LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    | {MINUS: "$-$", NONE: "--", PLUS_MINUS: r"$\pm$", "\N{MULTIPLICATION SIGN}": r"$\times$"}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"[": "{[}"}  # behind \\ it would be an argument
)
"""LaTeX for the characters that it would read as markup."""
KINDS = {
    **dict.fromkeys(("better", "the best", "among the best"), "better"),
    **dict.fromkeys(("worse", "not the best"), "worse"),
    **dict.fromkeys(("equivalent", "not better", "not worse"), "same"),
    "failed": "failed",
}
"""Classes of the verdicts on a page."""
Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """Table of text; the first column names the row."""

    caption: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    kinds: list[str] | None = None
    """Class of each row on a page."""

    def to_html(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in self.header)
        body = "".join(map(self._row, self.rows, self.kinds or [""] * len(self.rows)))
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        caption = f"<caption>{html.escape(self.caption)}</caption>"
        inner = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
        return f'<div class="wide" tabindex="0">{inner}</div>{note}'

    def _row(self, row: Sequence[str], kind: str) -> str:
        cells = [f'<th scope="row">{html.escape(row[0])}</th>']
        for name, cell in zip(self.header[1:], row[1:], strict=True):
            style = "none" if cell == NONE else "short" if len(cell) < 24 else "long"
            cells.append(f'<td class="{style}" data-label="{html.escape(name)}">{html.escape(cell)}</td>')
        return f'<tr class="{kind}">{"".join(cells)}</tr>\n'

    def to_markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(markdown(cell.replace("\n", " ")) for cell in cells) + " |"

        lines = [line(self.header), "|---" * len(self.header) + "|", *map(line, self.rows)]
        note = ["", markdown(self.note)] if self.note else []
        return "\n".join([f"**{markdown(self.caption)}**", "", *lines, *note])

    def to_latex(self) -> str:
        """Returns a LaTeX table with the rules of ``booktabs``."""
        head, *body = [" & ".join(map(_latex, cells)) + r" \\" for cells in (self.header, *self.rows)]
        lines = "\n".join([head, r"\midrule", *body])
        return rf"""\begin{{table}}
\centering
\caption{{{_latex(self.caption)}. {_latex(self.note)}}}
\begin{{tabular}}{{l{"r" * (len(self.header) - 1)}}}
\toprule
{lines}
\bottomrule
\end{{tabular}}
\end{{table}}"""


def markdown(text: str) -> str:
    """Escapes what Markdown would read as markup."""
    return re.sub(r"([\\`*_<|])", r"\\\1", text)


def _latex(text: str) -> str:
    return text.translate(LATEX)


def tabulate(
    caption: str, rows: Iterable[Row], columns: Sequence[tuple[str, Callable[[Row], str]]], note: str = ""
) -> Table:
    """Makes a table from its columns, each a header and the text of a row's cell."""
    return Table(caption, [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows], note)


def verdict_table(analysis: Analysis) -> Table:
    """A line for each arm: the answer."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    found, share = lines(analysis), 100 * (1 - study.compare.alpha)
    by_baseline = study.compare.arms == "baseline"
    against = {"baseline": study.baseline, "pairs": analysis.ranked[0].name, "best": "the best other arm"}
    columns: list[tuple[str, Callable[[Line], str]]] = [
        ("arm", lambda line: line.arm),
        ("verdict", lambda line: line.kind if by_baseline and line.verdict != "open" else line.verdict),
        (f"mean{unit.sign and f',{unit.sign}'}", lambda line: unit.value(line.mean)),
        ("difference" + (f",{unit.suffix}" if unit.suffix else ""), lambda line: unit.signed(line.difference)),
        (f"{share:g}\N{NO-BREAK SPACE}%\N{NO-BREAK SPACE}interval", lambda line: unit.interval(line.low, line.high)),
        ("p", lambda line: show_p(line.p)),
        ("what next", lambda line: line.following or NONE),
    ]
    if study.compare.arms == "best":
        columns = [column for column in columns if column[0] != "p"]
    if study.compare.arms == "best":
        note = "Intervals of arms that are not the best end at zero."
    else:
        note = f"p is for a difference from zero, which is claimed where p is at most {study.compare.alpha:g}."
    note += (
        f" All intervals hold together with {share:g} %, whenever an arm stopped. Differences are over the seeds that "
        "were compared, means over all seeds of an arm."
    )
    if any(line.kind in ("not better", "not worse") for line in found):
        note += (
            " Not better and not worse are tested on one side only, which takes less than a two-sided interval shows: "
            "that may reach beyond the smallest effect."
        )
    table = tabulate(
        f"{study.compare.metric} against {against[study.compare.arms]}, the best mean first", found, columns, note
    )
    return replace(table, kinds=[KINDS.get(line.kind, "open") for line in found])


def arm_table(analysis: Analysis) -> Table:
    """Results of each arm."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    baseline = study.baseline if study.compare.arms == "baseline" else None

    def collapsed(arm: Arm) -> str:
        found = arm.collapsed
        if found is None:
            return NONE
        return f"{len(found.seeds)} of {found.runs} (up to {show_fraction(found.highest)})"

    return tabulate(
        f"{study.compare.metric}{unit.sign and f' in{unit.sign}'} of each arm",
        analysis.ranked,
        [
            ("arm", lambda arm: arm.name + (" (baseline)" if arm.name == baseline else "")),
            ("runs", lambda arm: str(arm.n)),
            ("failed", lambda arm: str(len(arm.failed))),
            ("mean", lambda arm: unit.value(arm.mean)),
            ("sd", lambda arm: unit.value(arm.sd)),
            ("lowest", lambda arm: unit.value(min(arm.values.values(), default=math.nan))),
            ("highest", lambda arm: unit.value(max(arm.values.values(), default=math.nan))),
            ("collapsed", collapsed),
        ],
        "Collapsed: runs below the midpoint between chance and the median of their arm; in brackets, the highest rate "
        "of collapse that is compatible with that (one-sided, 95 %).",
    )


def run_table(analysis: Analysis) -> Table:
    """Results of each run."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    rows = [
        [str(seed), *(unit.value(arm.values.get(seed, math.nan)) for arm in analysis.ranked)]
        for seed in sorted({run.seed for run in study.runs})
    ]
    return Table(f"{study.compare.metric} of each run", ["seed", *(arm.name for arm in analysis.ranked)], rows)


def tuning_table(analysis: Analysis) -> Table:
    """Validation metric of each value that was tried."""
    study, tuning = analysis.study, analysis.study.tuning
    if tuning is None:
        return Table("Tuning", [], [])
    unit, tried = unit_of(study.metric), tuning.tried
    rows = []
    for arm in analysis.ranked:
        means = [tuning.mean(arm.name, values) for values in tried]
        shown = [unit.value(mean) for mean in means]
        chosen = tuning.chosen.get(arm.name)
        rows.append(
            [arm.name, *(text + " (chosen)" * (values == chosen) for text, values in zip(shown, tried, strict=True))]
        )
    note = (
        f"Mean {study.metric} over the seeds {', '.join(map(str, tuning.seeds))}, which are not those of the "
        f"comparison; every arm had the same {counted(len(tried) * len(tuning.seeds), 'trial')}, none was tested."
    )
    header = ["arm", *(", ".join(f"{key}={word(value)}" for key, value in values.items()) for values in tried)]
    return Table(f"Tuning: {study.metric}{unit.sign and f' in{unit.sign}'}", header, rows, note)


def difference_table(analysis: Analysis) -> Table:
    """Each comparison: the numbers behind the verdict."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    level = analysis.comparisons[0].design.level if analysis.comparisons else math.nan
    return tabulate(
        f"Comparisons by {study.compare.metric}{f' in{unit.suffix}' if unit.suffix else ''}",
        analysis.ordered,
        [
            ("arm", lambda one: one.arm),
            ("against", lambda one: one.other),
            ("verdict", lambda one: one.verdict),
            ("difference", lambda one: unit.signed(one.mean)),
            ("sd", lambda one: unit.value(one.sd)),
            ("interval", lambda one: unit.interval(one.low, one.high)),
            ("p", lambda one: show_p(one.p)),
            ("pairs", lambda one: str(one.n)),
            ("next analysis", lambda one: NONE if one.next is None or one.blocked else f"{one.next} pairs"),
        ],
        f"Numbers are those of the analysis that decided a comparison, else of the latest. Each comparison has the "
        f"level {show_p(level)}; its repeated confidence interval covers the true difference with 1 minus that at all "
        f"analyses together. p is corrected for all comparisons and analyses: compare it with {study.compare.alpha:g}.",
    )


def beside_table(analysis: Analysis) -> Table:
    """Tests beside those that give the verdict."""
    return tabulate(
        f"Other tests of {analysis.study.compare.metric}",
        analysis.beside,
        [
            ("arm", lambda one: one.comparison.arm),
            ("against", lambda one: one.comparison.other),
            ("p, sign-flip", lambda one: show_p(one.p_sign_flip)),
            ("p, Welch", lambda one: show_p(one.p_welch)),
            ("r over seeds", lambda one: show_r(one.correlation)),
        ],
        "Not corrected for the number of arms and analyses; nothing is claimed of them. The sign-flip test is exact up "
        "to 16 pairs; Welch's t-test ignores the pairing. r: correlation over the seeds; at 0 or below, pairing gains "
        "nothing.",
    )


def paper_table(analysis: Analysis) -> Table:
    """Arms, differences and verdicts for a paper."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    arms = {arm.name: arm for arm in analysis.arms}

    def difference(line: Line) -> str:
        interval = "" if math.isnan(line.low) else f" [{unit.signed(line.low)}, {unit.signed(line.high)}]"
        return unit.signed(line.difference) + interval

    against = {"baseline": study.baseline, "pairs": analysis.ranked[0].name, "best": "the best other arm"}
    return tabulate(
        f"{study.name}: {study.compare.metric} against {against[study.compare.arms]}",
        lines(analysis),
        [
            ("arm", lambda line: line.arm),
            ("runs", lambda line: str(arms[line.arm].n)),
            (
                f"{study.compare.metric}{unit.sign}",
                lambda line: f"{unit.value(line.mean)} {PLUS_MINUS} {unit.value(arms[line.arm].sd)}",
            ),
            ("difference", difference),
            ("p", lambda line: show_p(line.p)),
            ("verdict", lambda line: line.verdict),
        ],
        "Mean and standard deviation over seeds; paired difference with its repeated confidence interval; p for all "
        f"arms and analyses together, compared with {study.compare.alpha:g}.",
    )


def cost_table(analysis: Analysis) -> Table:
    """Costs of each arm."""

    def shown(key: str, arm: Arm) -> str:
        value = arm.median(key)
        digits = 1 if key.endswith("seconds") and value < 100 else 0
        return NONE if math.isnan(value) else f"{value:,.{digits}f}"

    columns: list[tuple[str, Callable[[Arm], str]]] = [
        (text, partial(shown, key))
        for key, text in {
            "parameters": "parameters",
            "flops": "FLOPs per image",
            "images_per_second": "images/s",
            "train_seconds": "training, s",
            "seconds": "run, s",
            "peak_memory_mb": "memory, MB",
        }.items()
        if any(not math.isnan(arm.median(key)) for arm in analysis.arms)
    ]
    return tabulate(
        "Costs of a run",
        analysis.ranked,
        [("arm", lambda arm: arm.name), *columns],
        "Medians over the runs. FLOPs: forward pass, a multiply-add counts as two. Times and images/s also depend on "
        "how many runs shared the machine.",
    )


def component_table(analysis: Analysis) -> Table:
    """Sources of the variance, for each arm and each difference."""
    unit = unit_of(analysis.study.compare.metric)
    found = [(arm.name, arm.components) for arm in analysis.arms]
    found += [(f"{one.comparison.arm} {MINUS} {one.comparison.other}", one.components) for one in analysis.beside]
    return tabulate(
        "Variance components",
        [(name, parts) for name, parts in found if parts is not None],
        [
            ("", lambda row: row[0]),
            ("sd of runs", lambda row: unit.value(row[1].run_sd)),
            ("sd of seeds alone", lambda row: unit.value(row[1].seed ** 0.5)),
            ("fraction of seeds", lambda row: show_fraction(row[1].seed_fraction)),
            ("error: new seeds", lambda row: unit.value(row[1].error_new_seeds)),
            ("error: new seeds and images", lambda row: unit.value(row[1].error_new_images)),
        ],
        "Two-way random model of correctness over seeds and test images. Fraction of seeds: of the variance of runs, "
        "the part that would remain with infinitely many test images. Error: standard error of the "
        "mean for new seeds on this test set, as in the intervals above, and for new seeds on new images of the same "
        "kind.",
    )


def effect_table(analysis: Analysis) -> Table:
    """Main effects of a grid, the largest first."""
    effects = [effect for effect in analysis.effects if not effect.is_interaction]
    note = (
        "A level against the baseline's, averaged over the other factors. Differences within each seed, t-intervals "
        "over seeds, corrected for the number of effects (Bonferroni) but not for the time of stopping: a description, "
        "nothing is claimed of them."
    )
    n = min((effect.n for effect in effects), default=0)
    seeds = len({run.seed for run in analysis.study.runs})
    if n < seeds:
        note += f" {n} of {seeds} seeds have a result for every combination; only these count here."
    largest = sorted(effects, key=lambda effect: -abs(effect.effect) if effect.n else 0.0)
    return _effects("Effect of each factor", analysis, largest, note)


def interaction_table(analysis: Analysis) -> Table:
    """Interactions of two factors of a grid."""
    effects = [effect for effect in analysis.effects if effect.is_interaction]
    note = "Change of the difference between two levels of one factor with a level of another; nothing is claimed."
    return _effects("Interactions of two factors", analysis, effects, note)


def _effects(caption: str, analysis: Analysis, effects: Sequence[Effect], note: str) -> Table:
    metric = analysis.study.compare.metric
    unit = unit_of(metric)
    return tabulate(
        f"{caption} on {metric}{f' in{unit.suffix}' if unit.suffix else ''}",
        effects,
        [
            ("effect", lambda effect: effect.name),
            ("difference", lambda effect: unit.signed(effect.effect)),
            ("interval", lambda effect: unit.interval(effect.low, effect.high)),
            ("p corrected", lambda effect: show_p(effect.p_adjusted) if effect.n > 1 else NONE),
            ("seeds", lambda effect: str(effect.n)),
        ],
        note,
    )


def config_table(analysis: Analysis, differences: Sequence[ConfigDifference]) -> Table:
    """Keys that differ between the configs of the runs; a row for each key, or for each arm if those are more."""
    arms = [arm.name for arm in analysis.arms]
    keys = [difference.key + ("" if difference.planned else " (not in the plan)") for difference in differences]
    cells = [
        [", ".join(map(_as_yaml, difference.values.get(arm, []))) or NONE for arm in arms] for difference in differences
    ]
    caption = "Keys that differ between the runs' config.yaml"
    if len(arms) <= len(keys) or not keys:
        return Table(caption, ["key", *arms], [[key, *row] for key, row in zip(keys, cells, strict=True)])
    return Table(
        caption, ["arm", *keys], [[arm, *row] for arm, row in zip(arms, zip(*cells, strict=True), strict=True)]
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


def single_run_table(analysis: Analysis) -> Table:
    """Pairs of single runs on the test images."""
    rows = [
        [
            one.comparison.arm,
            one.comparison.other,
            str(seed),
            str(pair.only_first),
            str(pair.only_second),
            show_p(pair.p),
        ]
        for one in analysis.beside
        for seed, pair in one.single_runs.items()
    ]
    header = ["arm", "against", "seed", "only arm right", "only other right", "p, McNemar"]
    note = "McNemar's exact test compares two trained networks on new images, not two recipes with new seeds."
    return Table("Pairs of single runs", header, rows, note)


def results_csv(study: Study) -> str:
    """Returns the results of each finished run that training determines; the same bytes for the same training."""
    metrics = {name for run in study.done for name in run.results} - {*COSTS, "seed", "sha256"}
    keys = dict.fromkeys(key for overrides in study.arms.values() for key in overrides)
    return _csv(study, list(keys), sorted(metrics))


def costs_csv(study: Study) -> str:
    """Returns the costs of each finished run, which depend on the machine and its load."""
    measured = [name for name in COSTS if any(name in run.results for run in study.done)]
    return _csv(study, [], ["parameters", "flops", *measured])


def _csv(study: Study, keys: list[str], names: list[str]) -> str:
    rows: list[list[Any]] = []
    for run in study.done:
        overrides = {key: _as_yaml(value) for key, value in study.arms[run.arm].items()}
        values = [*(overrides.get(key, "") for key in keys), *(run.results.get(name, "") for name in names)]
        rows.append([run.arm, run.seed, *values])
    return to_csv(["arm", "seed", *keys, *names], rows)
