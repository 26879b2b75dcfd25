"""The tables of an ablation's report, and how a table is written: HTML, Markdown, LaTeX, CSV."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from vit_lightning.report.analysis import Analysis, Arm
from vit_lightning.report.checks import Check, ConfigDifference
from vit_lightning.report.study import Study
from vit_lightning.report.wording import MINUS, NONE, PLUS_MINUS, show_fraction, show_p, show_r, unit_of
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
Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """Table of text; the first column names the row."""

    caption: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def to_html(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in self.header)
        body = "".join(
            f'<tr><th scope="row">{html.escape(row[0])}</th>'
            + "".join(f"<td{' class=short' if len(cell) < 20 else ''}>{html.escape(cell)}</td>" for cell in row[1:])
            + "</tr>\n"
            for row in self.rows
        )
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        caption = f"<caption>{html.escape(self.caption)}</caption>"
        inner = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
        return f'<div class="wide" tabindex="0">{inner}</div>{note}'

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


def arm_table(analysis: Analysis) -> Table:
    """Results of each arm."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    seeds = sorted({run.seed for run in study.runs})
    return tabulate(
        f"{study.compare.metric}{unit.sign and f' in{unit.sign}'} of each run",
        analysis.arms,
        [
            ("arm", lambda arm: arm.name + (" (baseline)" if arm.name == study.baseline else "")),
            ("n", lambda arm: str(arm.n)),
            ("mean", lambda arm: unit.value(arm.mean)),
            ("sd", lambda arm: unit.value(arm.sd)),
            (
                f"seeds {', '.join(map(str, seeds))}",
                lambda arm: "  ".join(unit.value(arm.values.get(seed, math.nan)) for seed in seeds),
            ),
        ],
    )


def difference_table(analysis: Analysis) -> Table:
    """Each comparison: the numbers behind the verdict."""
    study, unit = analysis.study, unit_of(analysis.study.compare.metric)
    return tabulate(
        f"Differences of {study.compare.metric}{f' in{unit.suffix}' if unit.suffix else ''}",
        analysis.comparisons,
        [
            ("arm", lambda one: one.arm),
            ("against", lambda one: one.other),
            ("verdict", lambda one: one.verdict),
            ("difference", lambda one: unit.signed(one.mean)),
            ("interval", lambda one: unit.interval(one.low, one.high)),
            ("p", lambda one: show_p(one.p)),
            ("pairs", lambda one: str(one.n)),
            ("next analysis", lambda one: NONE if one.next is None else str(one.next)),
        ],
        f"Intervals are valid at every analysis at once; p is compared with {study.compare.alpha:g}.",
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
    claims = {one.arm: one for one in analysis.comparisons if one.other == study.baseline}

    def difference(arm: Arm) -> str:
        if (one := claims.get(arm.name)) is None:
            return NONE
        interval = "" if math.isnan(one.low) else f" [{unit.signed(one.low)}, {unit.signed(one.high)}]"
        return unit.signed(one.mean) + interval

    return tabulate(
        f"{study.name}: {study.compare.metric} against {study.baseline}",
        analysis.arms,
        [
            ("arm", lambda arm: arm.name),
            ("runs", lambda arm: str(arm.n)),
            (
                f"{study.compare.metric}{unit.sign}",
                lambda arm: f"{unit.value(arm.mean)} {PLUS_MINUS} {unit.value(arm.sd)}",
            ),
            ("difference", difference),
            ("p", lambda arm: show_p(claims[arm.name].p) if arm.name in claims else NONE),
            ("verdict", lambda arm: claims[arm.name].verdict if arm.name in claims else "baseline"),
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
        analysis.arms,
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
    """Main effects and interactions of a grid."""
    unit = unit_of(analysis.study.compare.metric)
    note = (
        "Main effects: a level against the baseline's, averaged over the other factors. Interactions: change of that "
        "difference with a level of another factor. Contrasts within each seed, t-tests over seeds, corrected for the "
        "number of effects (Bonferroni) but not for the choice of the time to stop: nothing is claimed of them."
    )
    n = min((effect.n for effect in analysis.effects), default=0)
    seeds = len({run.seed for run in analysis.study.runs})
    if n < seeds:
        note += f" {n} of {seeds} seeds have a result for every combination; only these count here."
    return tabulate(
        "Factors",
        analysis.effects,
        [
            ("effect", lambda effect: effect.name),
            ("seeds", lambda effect: str(effect.n)),
            ("size", lambda effect: unit.signed(effect.effect)),
            ("interval", lambda effect: unit.interval(effect.low, effect.high)),
            ("p", lambda effect: show_p(effect.p)),
            ("p corrected", lambda effect: show_p(effect.p_adjusted) if effect.n > 1 else NONE),
        ],
        note,
    )


def config_table(analysis: Analysis, differences: Sequence[ConfigDifference]) -> Table:
    """Keys that differ between the configs of the runs."""
    arms = [arm.name for arm in analysis.arms]
    rows = []
    for difference in differences:
        values = [", ".join(map(_as_yaml, difference.values.get(arm, []))) or NONE for arm in arms]
        rows.append([difference.key + ("" if difference.planned else " (not in the plan)"), *values])
    return Table("Keys that differ between the runs' config.yaml", ["key", *arms], rows)


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
