"""The report of an ablation: a page, a text, tables, figures and files for machines, all from its folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vit_lightning.report.analysis import Analysis, analyse
from vit_lightning.report.checks import Check, config_differences, read_pages, run_checks, warnings_of
from vit_lightning.report.figures import draw_figures, to_svg
from vit_lightning.report.page import CAPTIONS, write_page
from vit_lightning.report.study import Study
from vit_lightning.report.tables import (
    Table,
    arm_table,
    beside_table,
    check_table,
    component_table,
    config_table,
    cost_table,
    costs_csv,
    difference_table,
    effect_table,
    failed_table,
    markdown,
    paper_table,
    results_csv,
    single_run_table,
)
from vit_lightning.report.wording import headline, rule, sentences
from vit_lightning.storage.folder import write_whole


def write_report(study: Study) -> list[Path]:
    """Writes all files of the report into the study's folder, each whole; returns them, the page first."""
    analysis = analyse(study)
    pages = read_pages(study)
    differences = config_differences(study, pages)
    checks = run_checks(analysis, pages, differences)
    made: dict[str, Table | None] = {
        "differences": difference_table(analysis),
        "arms": arm_table(analysis),
        "effects": effect_table(analysis),
        "costs": cost_table(analysis),
        "config": config_table(analysis, differences),
        "checks": check_table(checks),
        "failed": failed_table(analysis),
        "beside": beside_table(analysis),
        "components": component_table(analysis),
        "single_runs": single_run_table(analysis),
    }
    tables = {name: table for name, table in made.items() if table is not None and table.rows}
    figures = draw_figures(analysis)
    texts = {
        "report.html": write_page(analysis, figures, tables, checks),
        "report.md": to_markdown(analysis, tables, checks, list(figures)),
        "table.tex": paper_table(analysis).to_latex() + "\n",
        "results.csv": results_csv(analysis),
        "costs.csv": costs_csv(analysis),
        "verdicts.json": json.dumps(verdicts(analysis), indent=2) + "\n",
        **{f"figures/{name}.svg": to_svg(figure) for name, figure in figures.items()},
    }
    (study.folder / "figures").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(study.folder / name, text)
    return [study.folder / name for name in texts]


def verdict_lines(study: Study) -> list[str]:
    """The answer for a terminal: a line for each arm, once there is one."""
    analysis = analyse(study)
    short = not analysis.against or (analysis.study.missing and study.looks == 1)
    answer = [headline(analysis)] if short else sentences(analysis)
    return [*answer, *warnings_of(analysis)]


def verdicts(analysis: Analysis) -> list[dict[str, Any]]:
    """What ``verdicts.json`` holds; differences in the metric's own units, and null for what cannot be said."""
    study = analysis.study
    found = []
    for one in analysis.against:
        claim = one.claim
        numbers = {
            "difference": claim.difference,
            "low": claim.low,
            "high": claim.high,
            "p": claim.p,
            "p_adjusted": claim.p_adjusted,
        }
        found.append(
            {
                "arm": one.arm,
                "baseline": study.baseline,
                "metric": study.report,
                "n": claim.n,
                **{name: None if math.isnan(value) else value for name, value in numbers.items()},
                "verdict": claim.verdict,
                "seeds_needed": one.seeds_needed,
                "look": study.looks,
                "level": analysis.rules.level,
            }
        )
    return found


def to_markdown(analysis: Analysis, tables: dict[str, Table], checks: list[Check], figures: list[str]) -> str:
    """The same as a text, with the figures from files."""
    parts = [f"# Ablation {markdown(analysis.study.name)}", f"**{markdown(headline(analysis))}**"]
    parts.append("\n".join(f"- {markdown(sentence)}" for sentence in sentences(analysis)))
    parts += [markdown(f"Does not hold: {check.name}. {check.text}") for check in checks if check.ok is False]
    parts.append(markdown(rule(analysis)))
    parts += [f"![{CAPTIONS[name]}](figures/{name}.svg)" for name in figures]
    parts += [table.to_markdown() for table in tables.values()]
    return "\n\n".join(parts) + "\n"
