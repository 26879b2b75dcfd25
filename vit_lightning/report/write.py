"""The files of an ablation's report: a page, a text, tables, figures and data for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vit_lightning.report.analysis import Analysis
from vit_lightning.report.figures import to_svg
from vit_lightning.report.page import CAPTIONS, make_page
from vit_lightning.report.report import Report
from vit_lightning.report.tables import costs_csv, markdown, paper_table, results_csv
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
    """Returns the contents of ``verdicts.json``; differences in the metric's own units, null for unknown numbers."""
    names = ("mean", "low", "high", "p")
    return [
        {
            "arm": one.arm,
            "other": one.other,
            "metric": analysis.study.compare.metric,
            "n": one.n,
            **{name: None if math.isnan(value := getattr(one, name)) else value for name in names},
            "verdict": one.verdict,
            "decided": one.decided,
            "next": one.next,
        }
        for one in analysis.comparisons
    ]


def make_markdown(report: Report) -> str:
    """Returns the report as Markdown, with links to the figures."""
    parts = [f"# Ablation {markdown(report.study.name)}", f"**{markdown(report.headline)}**"]
    parts.append("\n".join(f"- {markdown(sentence)}" for sentence in report.sentences))
    parts += [markdown(str(check)) for check in report.checks if check.ok is False]
    parts.append(markdown(report.rule))
    parts += [f"![{CAPTIONS[name]}](figures/{name}.svg)" for name in report.figures]
    parts += [table.to_markdown() for table in report.tables.values()]
    return "\n\n".join(parts) + "\n"
