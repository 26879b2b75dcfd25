"""The files of an ablation's report: a page, a text, tables, figures and data for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vit_lightning.report.analysis import Analysis
from vit_lightning.report.figures import to_svg
from vit_lightning.report.page import caption_of, make_page
from vit_lightning.report.report import Report
from vit_lightning.report.tables import costs_csv, markdown, paper_table, results_csv
from vit_lightning.report.wording import rule
from vit_lightning.storage.folder import write_whole


def write_report(report: Report) -> list[Path]:
    """Writes all files of a report into the study's folder, each whole; returns their paths, the page first."""
    folder = report.study.folder
    texts = {
        "report.html": make_page(report),
        "report.md": make_markdown(report),
        "table.tex": paper_table(report.analysis).to_latex() + "\n",
        "results.csv": results_csv(report.study),
        "costs.csv": costs_csv(report.study),
        "verdicts.json": json.dumps(verdicts(report.analysis), indent=2) + "\n",
        **{f"figures/{name}.svg": to_svg(figure) for name, figure in report.figures.items()},
    }
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def verdicts(analysis: Analysis) -> list[dict[str, Any]]:
    """Returns the contents of ``verdicts.json``: a line for each comparison, for each arm if the best is looked for.

    Differences are in the metric's own units, null where they are unknown.
    """
    known: dict[str, Any] = {"metric": analysis.study.compare.metric}
    keys = ("arm", "other", "metric", "n", "mean", "low", "high", "p", "verdict", "claims", "decided", "next")
    found = []
    for one in analysis.standings or analysis.comparisons:
        values = {key: known.get(key, getattr(one, key, None)) for key in keys}
        found.append({key: None if value != value else value for key, value in values.items()})  # nan
    return found


def make_markdown(report: Report) -> str:
    """Returns the report as Markdown, with links to the figures."""
    study = report.study
    parts = [f"# {markdown(study.question or f'Ablation {study.name}')}", f"**{markdown(report.headline)}**"]
    parts += [*map(markdown, [report.recommendation, *report.caveats]), report.tables["verdicts"].to_markdown()]
    parts.append("\n".join(f"- {markdown(text)}" for text in report.warnings))
    parts += [f"![{caption_of(name)}](figures/{name}.svg)" for name in report.figures]
    parts.append("\n".join(f"- {name}: {markdown(text)}" for name, text in report.facts.items()))
    parts.append(markdown(rule(report.analysis)))
    parts += [table.to_markdown() for name, table in report.tables.items() if name != "verdicts"]
    return "\n\n".join(filter(None, parts)) + "\n"
