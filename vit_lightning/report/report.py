"""The report of an ablation as plain data: analysed once, then written to files, the terminal and W&B."""

from dataclasses import dataclass

from vit_lightning.report import tables
from vit_lightning.report.analysis import Analysis, analyse, lines
from vit_lightning.report.checks import Check, read_facts, run_checks
from vit_lightning.report.figures import draw_differences, to_svg
from vit_lightning.report.study import Study
from vit_lightning.report.tables import Table
from vit_lightning.report.wording import caveats, headline, notes, recommendation, sentence


@dataclass(frozen=True)
class Report:
    """Analysis of an ablation with everything that shows it."""

    analysis: Analysis
    headline: str
    """The answer, in one line."""
    recommendation: str
    """What to do now."""
    caveats: list[str]
    """What the answer holds for, and what would bend it: one line each, beside the answer."""
    sentences: list[str]
    """A line for each arm, the best mean first, and for each interaction."""
    notes: list[str]
    """What one must know beside the verdicts."""
    facts: dict[str, str]
    """How the runs were made."""
    checks: list[Check]
    tables: dict[str, Table]
    """Tables that have rows, in the order in which they are shown."""
    figure: str
    """The answer, drawn as SVG; empty before there is a difference."""

    @property
    def study(self) -> Study:
        return self.analysis.study

    @property
    def warnings(self) -> list[str]:
        """Notes, and checks that failed, one line each."""
        said = "; ".join(self.study.plan_changed)  # beside the answer
        failed = [check for check in self.checks if check.ok is False and check.text != said]
        return [*self.notes, *(f"Check failed: {check.name}. {check.text}" for check in failed)]

    @property
    def lines(self) -> list[str]:
        """The answer for a terminal."""
        question = [self.study.question] if self.study.question else []
        return [*question, *self.sentences, *self.caveats, *self.warnings, self.recommendation]


def make_report(study: Study) -> Report:
    """Analyses a study and makes all sentences, tables and the figure of its report."""
    analysis = analyse(study)
    chain = [*analysis.by_metric()]
    checks, facts, figure = run_checks(analysis), read_facts(analysis), draw_differences(analysis)
    made = {
        **{f"verdicts{n or ''}": tables.verdict_table(one) for n, one in enumerate(chain)},
        "arms": tables.arm_table(analysis),
        "tuning": tables.tuning_table(analysis),
        "costs": tables.cost_table(analysis),
        "failed": tables.failed_table(study),
        "checks": tables.check_table(checks),
        **{f"differences{n or ''}": tables.difference_table(one) for n, one in enumerate(chain)},
    }
    return Report(
        analysis=analysis,
        headline=headline(analysis),
        recommendation=recommendation(analysis),
        caveats=caveats(analysis, facts),
        sentences=[sentence(one, line) for one in chain for line in lines(one)],
        notes=notes(analysis),
        facts=facts,
        checks=checks,
        tables={name: table for name, table in made.items() if table.rows},
        figure=to_svg(figure) if figure else "",
    )
