"""The files of an ablation's report: a page that loads nothing else, a text, tables, figures, data for programs."""

import json
import re
import shlex
from html import escape
from pathlib import Path
from typing import Any

from vit_lightning.figures.style import STYLE, template_of
from vit_lightning.report.analysis import Analysis, lines
from vit_lightning.report.figures import inline_svg
from vit_lightning.report.report import Report
from vit_lightning.report.tables import markdown, results_csv
from vit_lightning.report.units import NONE
from vit_lightning.report.wording import SUM, command, quoted, rule
from vit_lightning.storage.folder import write_whole

FIGURE = "figures/differences.svg"
CAPTION = (
    "Differences with their ranges, thin lines for new images as well; small points, if any, are seeds. The grey band "
    "holds differences too small to matter."
)


def make_page(report: Report) -> str:
    """Returns the whole page."""
    study, names = report.study, [quoted(line.arm.name) for line in lines(report.analysis)]
    answer = escape(report.headline, quote=False)
    advice, found, options = report.recommendation.partition(command(study))
    return template_of(Path(__file__).with_name("page.html")).render(
        report=report,
        study=study,
        style=STYLE,
        answer=re.sub("|".join(re.escape(escape(name, quote=False)) for name in names), r"<b>\g<0></b>", answer),
        advice=advice,
        command=found + options,
        caption=CAPTION,
        figure=report.figure and inline_svg(report.figure, escape(CAPTION)),
        rule=rule(report.analysis),
        again=f"lightning report {shlex.quote(str(study.folder))}",
        nothing=NONE,
    )


def write_report(report: Report) -> list[Path]:
    """Writes all files of a report into the study's folder, each whole; returns their paths, the page first."""
    folder = report.study.folder
    texts = {
        "report.html": make_page(report),
        "report.md": make_markdown(report),
        "results.csv": results_csv(report.study),
        "verdicts.json": json.dumps(verdicts(report.analysis), indent=2) + "\n",
        **({FIGURE: report.figure} if report.figure else {}),
    }
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def verdicts(analysis: Analysis) -> list[dict[str, Any]]:
    """Returns the contents of ``verdicts.json``: a line for each comparison.

    Differences are in the metric's own units, null where they are unknown.
    """
    keys = ("arm", "other", "metric", "n", "mean", "low", "high", "p", "verdict", "claims", "decided", "next")
    found = []
    for one in (one for by in analysis.by_metric() for one in by.comparisons):
        values = {key: getattr(one, key) for key in keys} | ({"other": SUM} if one.is_interaction else {})
        found.append({key: None if value != value else value for key, value in values.items()})  # nan
    return found


def make_markdown(report: Report) -> str:
    """Returns the report as Markdown, with links to the figures."""
    study = report.study
    parts = [f"# {markdown(study.question or f'Ablation {study.name}')}", f"**{markdown(report.headline)}**"]
    tables = {name: table.to_markdown() for name, table in report.tables.items()}
    first = [name for name in tables if name.startswith("verdicts")]
    parts += [*map(markdown, [report.recommendation, *report.caveats]), *map(tables.pop, first)]
    parts.append("\n".join(f"- {markdown(text)}" for text in report.warnings))
    parts += [f"![{CAPTION}]({FIGURE})"] * bool(report.figure)
    parts.append("\n".join(f"- {name}: {markdown(text)}" for name, text in report.facts.items()))
    parts.append(markdown(rule(report.analysis)))
    return "\n\n".join(filter(None, [*parts, *tables.values()])) + "\n"
