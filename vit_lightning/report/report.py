"""The report of an ablation as plain data: analysed once, then written to files, the terminal and W&B."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from vit_lightning.report import tables
from vit_lightning.report.analysis import Analysis, analyse
from vit_lightning.report.checks import Check, Configs, config_differences, read_configs, run_checks
from vit_lightning.report.figures import draw_figures
from vit_lightning.report.study import Study
from vit_lightning.report.tables import Table
from vit_lightning.report.wording import collapses, headline, rule, sentences


@dataclass(frozen=True)
class Report:
    """Analysis of an ablation with everything that shows it."""

    analysis: Analysis
    configs: Configs
    """Config of each run, by arm and seed."""
    headline: str
    """The answer, in one line."""
    sentences: list[str]
    """The claims with their numbers."""
    rule: str
    """The rule behind the claims."""
    checks: list[Check]
    tables: dict[str, Table]
    """Tables that have rows, in the order in which they are shown."""
    figures: dict[str, Figure]

    @property
    def study(self) -> Study:
        return self.analysis.study

    @property
    def warnings(self) -> list[str]:
        """Checks that failed, one line each; that runs are missing is none."""
        checks = self.checks[1:] if self.study.missing else self.checks
        return [str(check) for check in checks if check.ok is False]

    @property
    def lines(self) -> list[str]:
        """The answer for a terminal: a line for each arm once there is an answer, then warnings."""
        return [*([] if self.analysis.comparisons else [self.headline]), *self.sentences, *self.warnings]


def make_report(study: Study) -> Report:
    """Analyses a study and makes all sentences, tables and figures of its report."""
    analysis, configs = analyse(study), read_configs(study)
    differences = config_differences(study, configs)
    checks = run_checks(analysis, configs, differences)
    made = {
        "differences": tables.difference_table(analysis),
        "arms": tables.arm_table(analysis),
        "effects": tables.effect_table(analysis),
        "costs": tables.cost_table(analysis),
        "config": tables.config_table(analysis, differences),
        "checks": tables.check_table(checks),
        "failed": tables.failed_table(study),
        "beside": tables.beside_table(analysis),
        "components": tables.component_table(analysis),
        "single_runs": tables.single_run_table(analysis),
    }
    return Report(
        analysis=analysis,
        configs=configs,
        headline=headline(analysis),
        sentences=[*sentences(analysis), *collapses(analysis)],
        rule=rule(analysis),
        checks=checks,
        tables={name: table for name, table in made.items() if table.rows},
        figures=draw_figures(analysis),
    )
