"""The tables of an ablation's report, and how a table is written: HTML, Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vit_lightning.report.analysis import Analysis, Arm
from vit_lightning.report.checks import Check, ConfigDifference
from vit_lightning.report.statistics import LEAST_PAIRS
from vit_lightning.report.wording import MINUS, NONE, show_level, show_p, show_share, unit_of

COSTS = ("train_seconds", "seconds", "images_per_second", "peak_memory_mb")
"""What ``results.json`` says of a run that training does not determine."""


@dataclass(frozen=True)
class Table:
    """A table of words; the first column names the row."""

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
        """With the rules of ``booktabs``."""
        lines = [" & ".join(map(_latex, cells)) + r" \\" for cells in (self.header, *self.rows)]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(self.caption)}. {_latex(self.note)}}}",
                rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
            ]
        )


def markdown(text: str) -> str:
    """A text whose signs mean nothing else in Markdown."""
    return re.sub(r"([\\`*_<|])", r"\\\1", text)


def _latex(text: str) -> str:
    plain = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    signs = {
        "\N{MINUS SIGN}": "$-$",
        NONE: "--",
        "\N{PLUS-MINUS SIGN}": r"$\pm$",
        "\N{MULTIPLICATION SIGN}": r"$\times$",
    }
    escaped = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"[": "{[}"}  # behind \\ it would be an argument
    return "".join({**plain, **signs, **escaped}.get(letter, letter) for letter in text)


def to_csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def arm_table(analysis: Analysis) -> Table:
    """Each arm by itself."""
    study, unit = analysis.study, unit_of(analysis.study.report)
    seeds = [*study.seeds, *study.added_seeds]
    rows = [
        [
            arm.name + (" (baseline)" if arm.name == study.baseline else ""),
            str(arm.n),
            unit.value(arm.mean),
            unit.value(arm.sd),
            "  ".join(unit.value(arm.values.get(seed, math.nan)) for seed in seeds),
        ]
        for arm in analysis.arms
    ]
    header = ["arm", "n", "mean", "sd", f"seeds {', '.join(map(str, seeds))}"]
    return Table(f"{study.report}{unit.sign and f' in{unit.sign}'} of each run", header, rows)


def difference_table(analysis: Analysis) -> Table:
    """Each arm against the baseline: what gives the verdict."""
    study, unit = analysis.study, unit_of(analysis.study.report)
    rows = []
    for one in analysis.against:
        claim = one.claim
        interval = f"{unit.signed(claim.low)} to {unit.signed(claim.high)}" if claim.n > 1 else NONE
        needed = NONE if one.seeds_needed is None else str(one.seeds_needed)
        p_values = [show_p(p) if claim.n > 1 else NONE for p in (claim.p, claim.p_adjusted, claim.p_equivalence)]
        difference = unit.signed(claim.difference)
        rows.append([one.arm, claim.verdict, difference, interval, *p_values, str(claim.n), needed])
    header = ["arm", "verdict", "difference", f"{100 * (1 - study.alpha):g} % interval", "p", "p, Holm"]
    header += ["p equivalence, Holm", "pairs", "more seeds needed"]
    where = f" in{unit.suffix}" if unit.suffix else ""
    note = (
        f"Paired t-test; p after Holm's correction is held against {show_level(analysis.rules.level)}. More seeds: "
        f"until {unit.plain(study.smallest_effect)} of difference, or none, is told with 80 % power at this spread; "
        "where there are enough for that, until a difference as large as the one that was seen is told."
    )
    return Table(f"{study.report} against {study.baseline}{where}", header, rows, note)


def beside_table(analysis: Analysis) -> Table:
    """Other tests beside those that give the verdict, and what the study could see."""
    study, unit, level = analysis.study, unit_of(analysis.study.report), analysis.rules.level
    rows = []
    for one in analysis.against:
        claim = one.claim
        claimed = f"{unit.signed(claim.claim_low)} to {unit.signed(claim.claim_high)}" if claim.n > 1 else NONE
        exact = show_p(one.p_sign_flip) + ("" if one.sign_flip_can or claim.n == 0 else " *")
        r = NONE if math.isnan(one.correlation) else f"{one.correlation:+.2f}".replace("-", MINUS)
        nothing = math.isnan(one.visible) or claim.n < LEAST_PAIRS
        seen = NONE if nothing else unit.plain(float(f"{one.visible:.2g}"))
        rows.append([one.arm, f"{claimed} ({show_level(claim.claim_level)})", exact, show_p(one.p_welch), r, seen])
    header = ["arm", "interval of the claim (its level)", "p, sign-flip", "p, Welch", "r between seeds", "could see"]
    note = (
        "The interval of the claim is without zero exactly if a difference is claimed, given pairs enough. The "
        "sign-flip test is exact up to 16 pairs; Welch's t-test does without the pairing. r: correlation with the "
        "baseline over the seeds; at 0 or below, pairing gains nothing and Welch's test says as much. Could see: the "
        "true difference that so many pairs see with 80 % power."
    )
    if any(one.claim.n and not one.sign_flip_can for one in analysis.against):
        least = f"{show_level(level / len(analysis.against))} ({show_level(level)} for {len(analysis.against)} arms)"
        note += f" *: with so few pairs the sign-flip test cannot get down to {least}."
    return Table(f"Beside it: {study.report} against {study.baseline}", header, rows, note)


def paper_table(analysis: Analysis) -> Table:
    """What goes into a paper."""
    study, unit = analysis.study, unit_of(analysis.study.report)
    against = {one.arm: one.claim for one in analysis.against}
    rows = []
    for arm in analysis.arms:
        row = [arm.name, str(arm.n), f"{unit.value(arm.mean)} \N{PLUS-MINUS SIGN} {unit.value(arm.sd)}"]
        if (claim := against.get(arm.name)) is None:
            rows.append([*row, NONE, NONE, "baseline"])
        else:
            interval = f" [{unit.signed(claim.low)}, {unit.signed(claim.high)}]" if claim.n > 1 else ""
            rows.append([*row, unit.signed(claim.difference) + interval, show_p(claim.p_adjusted), claim.verdict])
    header = ["arm", "runs", f"{study.report}{unit.sign}", "difference", "p", "verdict"]
    covers = 100 * (1 - analysis.rules.interval_level)
    note = (
        f"Mean and standard deviation over seeds; paired difference with {covers:.3g} % t-interval; "
        f"p after Holm's correction, held against {show_level(analysis.rules.level)} (look {study.looks} of at most 2)."
    )
    return Table(f"{study.name}: {study.report} against {study.baseline}", header, rows, note)


def cost_table(analysis: Analysis) -> Table:
    """What each arm costs."""
    keys = {
        "parameters": "parameters",
        "flops": "FLOPs an image",
        "images_per_second": "images/s",
        "train_seconds": "training, s",
        "seconds": "run, s",
        "peak_memory_mb": "memory, MB",
    }
    shown = {key: text for key, text in keys.items() if any(not math.isnan(arm.median(key)) for arm in analysis.arms)}
    rows = [[arm.name, *(_cost(key, arm) for key in shown)] for arm in analysis.arms]
    note = (
        "Medians over the runs. FLOPs: forward, a multiply and an add are two. Times and images/s also depend on how "
        "many runs shared the machine."
    )
    return Table("Costs of a run", ["arm", *shown.values()], rows, note)


def _cost(key: str, arm: Arm) -> str:
    value = arm.median(key)
    if math.isnan(value):
        return NONE
    return f"{value:,.1f}" if key.endswith("seconds") and value < 100 else f"{value:,.0f}"


def component_table(analysis: Analysis) -> Table | None:
    """Where the spread comes from, by arm and for each difference."""
    unit = unit_of(analysis.study.report)
    found = [(arm.name, arm.components) for arm in analysis.arms]
    found += [(f"{one.arm} {chr(0x2212)} {analysis.study.baseline}", one.components) for one in analysis.against]
    rows = [
        [
            name,
            *(unit.value(number) for number in (parts.run_sd, parts.seed**0.5)),
            show_share(parts.seed_share),
            *(unit.value(number) for number in (parts.error_new_seeds, parts.error_new_images)),
        ]
        for name, parts in found
        if parts is not None
    ]
    if not rows:
        return None
    header = [
        "",
        "sd of runs",
        "sd of seeds alone",
        "share of seeds",
        "error: new seeds",
        "error: new seeds and images",
    ]
    note = (
        "Two-way random model of right and wrong over seeds and test images. The spread of runs has two parts: what "
        "seeds would still do with endless test images (share of seeds), and the luck of each network with these "
        "images. Error: standard error of the mean for new seeds on this test set, as in the intervals above, and for "
        "new seeds on new images of the same kind."
    )
    return Table("Where the spread comes from", header, rows, note)


def effect_table(analysis: Analysis) -> Table | None:
    """Main effects and interactions of a grid."""
    if not analysis.effects:
        return None
    unit = unit_of(analysis.study.report)
    rows = [
        [
            effect.name,
            str(effect.n),
            unit.signed(effect.effect),
            f"{unit.signed(effect.low)} to {unit.signed(effect.high)}" if effect.n > 1 else NONE,
            show_p(effect.p),
            show_p(effect.p_adjusted) if effect.n > 1 else NONE,
        ]
        for effect in analysis.effects
    ]
    header = ["effect", "seeds", "size", f"{100 * (1 - analysis.study.alpha):g} % interval", "p", "p Holm"]
    note = (
        "Main effects: a level against the baseline's, averaged over the other factors. Interactions: how much that "
        "changes with a level of another factor. Contrasts within each seed, t-tests over seeds; p after Holm's "
        f"correction over this table, held against {show_level(analysis.rules.level)}."
    )
    n, seeds = analysis.effects[0].n, len(analysis.study.seeds) + len(analysis.study.added_seeds)
    if n < seeds:
        note += f" {n} of {seeds} seeds have a result of every combination, and only those count here."
    return Table("Factors", header, rows, note)


def config_table(analysis: Analysis, differences: Sequence[ConfigDifference]) -> Table:
    """Keys that differ between the runs' own pages."""
    arms = [arm.name for arm in analysis.arms]
    rows = [
        [
            difference.key + ("" if difference.planned else " (not in the plan)"),
            *(", ".join(map(_plain, difference.values.get(arm, []))) or NONE for arm in arms),
        ]
        for difference in differences
    ]
    return Table("Keys that differ in the run folders' config.yaml", ["key", *arms], rows)


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_table(checks: Sequence[Check]) -> Table:
    words = {True: "yes", False: "NO", None: "not known"}
    return Table(
        "Read from the run folders",
        ["check", "holds", "what was found"],
        [[c.name, words[c.ok], c.text] for c in checks],
    )


def results_csv(analysis: Analysis) -> str:
    """What training determines of each run that is done; the same bytes for the same training."""
    study = analysis.study
    done = [(arm, trial) for arm in analysis.arms for trial in arm.trials if trial.state == "done"]
    keys = list(dict.fromkeys(key for overrides in study.arms.values() for key in overrides))
    metrics = sorted({name for _, trial in done for name in trial.results} - {*COSTS, "seed", "sha256"})
    rows = [
        [
            arm.name,
            trial.seed,
            *(_plain(arm.overrides[key]) if key in arm.overrides else "" for key in keys),
            *(trial.results.get(name, "") for name in metrics),
        ]
        for arm, trial in done
    ]
    return to_csv(["arm", "seed", *keys, *metrics], rows)


def costs_csv(analysis: Analysis) -> str:
    """What depends on the machine and its day."""
    done = [(arm, trial) for arm in analysis.arms for trial in arm.trials if trial.state == "done"]
    names = ["parameters", "flops", *(name for name in COSTS if any(name in trial.results for _, trial in done))]
    rows = [[arm.name, trial.seed, *(trial.results.get(name, "") for name in names)] for arm, trial in done]
    return to_csv(["arm", "seed", *names], rows)


def failed_table(analysis: Analysis) -> Table:
    """Runs that failed, with what they said, and runs that are not there yet."""
    rows = [
        [arm.name, str(trial.seed), trial.state, trial.cause or "", trial.folder]
        for arm in analysis.arms
        for trial in arm.trials
        if trial.state != "done"
    ]
    return Table("Failed, or still to come", ["arm", "seed", "state", "cause", "folder"], rows)


def single_run_table(analysis: Analysis) -> Table:
    """Pairs of single runs on the test images."""
    rows = [
        [one.arm, str(seed), str(pair.only_first), str(pair.only_second), show_p(pair.p)]
        for one in analysis.against
        for seed, pair in one.single_runs.items()
    ]
    base = analysis.study.baseline
    note = "McNemar's exact test speaks of two trained networks on new images, not of two recipes with new seeds."
    return Table(
        "Pairs of single runs", ["arm", "seed", "only arm right", f"only {base} right", "p, McNemar"], rows, note
    )
