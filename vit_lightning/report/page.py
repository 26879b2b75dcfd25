"""The files of an ablation's report: a page that loads nothing else, a text, tables, figures, data for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from matplotlib.figure import Figure

from vit_lightning.figures.style import STYLE
from vit_lightning.report.analysis import Analysis
from vit_lightning.report.figures import inline_svg, to_svg
from vit_lightning.report.report import Report
from vit_lightning.report.study import Run, Study
from vit_lightning.report.tables import markdown, results_csv
from vit_lightning.report.wording import command, headline, quoted, rule
from vit_lightning.storage.folder import write_whole

PAGE_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

CAPTIONS = {
    "differences": "Differences with their ranges, thin lines for new images as well; small points, if any, are seeds. "
    "The grey band holds differences too small to matter.",
    "seeds": "Every run, the best mean first. Grey lines join the runs of one seed.",
    "curves": "The mean of each arm with a band of one standard deviation over seeds; on the right the last "
    "third. Dotted: runs that failed.",
    "costs": "Result (mean, standard error) against cost (median). The line joins arms that no other beats in both.",
}


def caption_of(figure: str) -> str:
    """Returns the caption of a figure by its name, such as curves_1."""
    return CAPTIONS[figure.partition("_")[0]]


def make_page(report: Report) -> str:
    """Returns the whole page."""
    study, made = report.study, {name: table.to_html() for name, table in report.tables.items()}
    drawn = {name: _figure(name, figure) for name, figure in report.figures.items()}
    curves = "".join(figure for name, figure in drawn.items() if name.startswith("curves"))
    statistics = f'<p class="note">{escape(rule(report.analysis))}</p>{made.get("differences", "")}'
    sections = {
        "Notes": _items(report.warnings),
        "How it was done": _facts(report),
        "Every run": drawn["seeds"] + made["arms"],
        "Learning curves": curves,
        "Tuning": made.get("tuning"),
        "Costs": drawn.get("costs", "") + made["costs"],
        "Runs without a result": made.get("failed"),
    }
    folded = {
        "Statistics for experts": statistics if report.analysis.comparisons else "",
        "Config differences": made.get("config"),
        "Checks": made["checks"],
        "Run folders and commands": _runs(study),
    }
    shown = [f"<section><h2>{name}</h2>{content}</section>\n" for name, content in sections.items() if content]
    shown += [f"<details><summary>{name}</summary>{content}</details>\n" for name, content in folded.items() if content]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(study.name)}: {escape(report.headline)}</title>
<style>{STYLE}{PAGE_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(study.question or f"Ablation {study.name}")}</h1>
<p class="answer">{headline(report.analysis, lambda name: f"<b>{escape(quoted(name), quote=False)}</b>")}</p>
<p class="next">{_recommendation(report)}</p>
{"".join(f'<p class="next">{escape(text)}</p>' for text in report.caveats)}
<div class="verdicts">{made["verdicts"]}</div>
{drawn.get("differences", "")}
{"".join(shown)}
</main>
</body>
</html>
"""


def _recommendation(report: Report) -> str:
    """Sets the command apart that continues the study, if there is one."""
    text, found, options = report.recommendation.partition(command(report.study))
    return escape(text) + (f"<code>{escape(found + options)}</code>" if found else "")


def _figure(name: str, figure: Figure) -> str:
    caption = escape(caption_of(name))
    return f"<figure>{inline_svg(figure, name, caption)}<figcaption>{caption}</figcaption></figure>\n"


def _items(texts: Sequence[str]) -> str:
    items = [f"<li{' class=bad' * text.startswith('Check failed')}>{escape(text)}</li>" for text in texts]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _facts(report: Report) -> str:
    facts = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in report.facts.items())
    return f"<dl>{facts}</dl>"


def _runs(study: Study) -> str:
    """Links to the run folders, which lie beside the page, and the command that writes the page again."""
    arms = {arm: ", ".join(_link(study, run) for run in study.runs if run.arm == arm) for arm in study.arms}
    items = [f"<li>{escape(arm)}: {links}</li>" for arm, links in arms.items()]
    again = escape(f"lightning report {shlex.quote(str(study.folder))}")
    return f"<ul>{''.join(items)}<li>Write this page again: <code>{again}</code></li></ul>"


def _link(study: Study, run: Run) -> str:
    text = f"seed {run.seed}" + ("" if run.state == "done" else f" ({run.state})")
    return f'<a href="{quote(run.folder)}/">{text}</a>' if (study.folder / run.folder).is_dir() else text


def write_report(report: Report) -> list[Path]:
    """Writes all files of a report into the study's folder, each whole; returns their paths, the page first."""
    folder = report.study.folder
    texts = {
        "report.html": make_page(report),
        "report.md": make_markdown(report),
        "results.csv": results_csv(report.study),
        "verdicts.json": json.dumps(verdicts(report.analysis), indent=2) + "\n",
        **{f"figures/{name}.svg": to_svg(figure) for name, figure in report.figures.items()},
    }
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def verdicts(analysis: Analysis) -> list[dict[str, Any]]:
    """Returns the contents of ``verdicts.json``: a line for each comparison.

    Differences are in the metric's own units, null where they are unknown.
    """
    known: dict[str, Any] = {"metric": analysis.study.compare.metric}
    keys = ("arm", "other", "metric", "n", "mean", "low", "high", "p", "verdict", "claims", "decided", "next")
    found = []
    for one in analysis.comparisons:
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
