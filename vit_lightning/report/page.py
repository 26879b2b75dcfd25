"""The HTML page of an ablation: one file that loads nothing else, for a screen, a phone and paper."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from matplotlib.figure import Figure

from vit_lightning.report.checks import Check
from vit_lightning.report.figures import inline_svg
from vit_lightning.report.report import Report
from vit_lightning.report.study import Run, Study

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --faint: #666; --line: #d5d5d5; --wash: #f5f5f2;
  --link: #0050a0; --bad: #b00020; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --faint: #a3a3a3; --line: #3b3b3b;
  --wash: #222; --link: #8ab8ff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 60rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.15rem; font-weight: 600; color: var(--faint); margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
a { color: var(--link); }
.answer { font-size: 1.6rem; line-height: 1.25; font-weight: 650; margin: 0 0 .8rem; }
.note, figcaption, .how { color: var(--faint); font-size: .86rem; }
.bad { color: var(--bad); font-weight: 600; }
ul { padding-left: 1.2rem; }
figure { margin: 1rem 0; } figure svg { width: 100%; max-width: 36rem; height: auto; display: block; }
.wide { overflow-x: auto; margin: 1rem 0 .3rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0 0 .3rem; }
th, td { padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: normal; }
thead th { font-weight: 500; color: var(--faint); } tbody th { font-weight: 600; }
td { max-width: 26rem; } .short { white-space: nowrap; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
code { background: var(--wash); padding: .1em .3em; font-size: .86em; }
@media print { body { font-size: 10.5pt; max-width: none; padding: 0; color: #000; background: #fff; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; }
  table { font-size: 8pt; } th, td { padding-right: .4rem; } a { color: inherit; } }
"""

CAPTIONS = {
    "seeds": "Every run. Grey lines join the runs of one seed.",
    "differences": "Paired differences: small points are seeds, the large point their mean, the bar its interval. "
    "The grey band holds differences too small to matter.",
    "curves_0": "Learning curves: thin for each run, thick for the mean of an arm.",
    "curves_1": "Training: thin for each run, thick for the mean of an arm.",
    "costs": "Result (mean, standard error) against cost (median). The line joins arms that no other beats in both.",
}


def make_page(report: Report) -> str:
    """Returns the whole page."""
    study = report.study
    drawn = {name: _figure(name, figure) for name, figure in report.figures.items()}
    made = {name: table.to_html() for name, table in report.tables.items()}
    curves = "".join(drawn.get(f"curves_{number}", "") for number in range(2))
    answer = drawn["seeds"] + drawn.get("differences", "") + made.get("differences", "") + made["arms"]
    details = "".join(made.get(name, "") for name in ("beside", "components", "single_runs"))
    sections = {
        "Seeds and differences": answer,
        "Factors": made.get("effects"),
        "Learning curves": curves,
        "Costs": drawn.get("costs", "") + made["costs"],
        "Config differences": made.get("config"),
        "Checks": made["checks"],
        "Runs without a result": made.get("failed"),
        "Further tests": details,
        "Runs": _runs(study),
    }
    shown = [f"<section><h2>{title}</h2>{content}</section>\n" for title, content in sections.items() if content]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(study.name)}: {escape(report.headline)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Ablation {escape(study.name)}</h1>
<p class="answer">{escape(report.headline)}</p>
<ul>{"".join(f"<li>{escape(sentence)}</li>" for sentence in report.sentences)}</ul>
{_warnings(report.checks)}
<p class="how">{escape(report.rule) if report.analysis.comparisons else ""}</p>
{"".join(shown)}
</main>
</body>
</html>
"""


def _figure(name: str, figure: Figure) -> str:
    caption = CAPTIONS[name]
    return f"<figure>{inline_svg(figure, name, escape(caption))}<figcaption>{escape(caption)}</figcaption></figure>\n"


def _warnings(checks: Sequence[Check]) -> str:
    failed = [check for check in checks if check.ok is False]
    items = "".join(
        f"<li><span class='bad'>Does not hold: {escape(c.name)}.</span> {escape(c.text)}</li>" for c in failed
    )
    return f"<ul>{items}</ul>" if items else ""


def _runs(study: Study) -> str:
    """Links to the run folders, which lie beside the page, and the commands that continue the study."""
    arms = {arm: [_link(study, run) for run in study.runs if run.arm == arm] for arm in study.arms}
    lines = [f"<li>{escape(arm)}: {', '.join(links)}</li>" for arm, links in arms.items()]
    commands = {"Write this page again": f"lightning report {shlex.quote(str(study.folder))}"}
    if study.plan_file is not None:
        resume = shlex.join(["lightning", "ablate", study.plan_file, f"--out={study.folder}"])
        commands |= {"Run what is missing": resume} if study.missing else {}
    shown = "".join(f"<li>{text}: <code>{escape(command)}</code></li>" for text, command in commands.items())
    return f"<ul>{''.join(lines)}</ul><ul>{shown}</ul>"


def _link(study: Study, run: Run) -> str:
    text = f"seed {run.seed}" + ("" if run.state == "done" else f" ({run.state})")
    return f'<a href="{quote(run.folder)}/">{text}</a>' if (study.folder / run.folder).is_dir() else text
