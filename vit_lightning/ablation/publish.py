"""Commands on the folder of an ablation: its report, its dashboard in W&B, and the upload of all its runs."""

from __future__ import annotations

from pathlib import Path

from vit_lightning.ablation.ledger import read_study
from vit_lightning.commands import sync as one_run
from vit_lightning.errors import UserError
from vit_lightning.report import dashboard as wandb_dashboard
from vit_lightning.report.report import make_report
from vit_lightning.report.study import Run, Trial
from vit_lightning.report.wandb_report import log_report
from vit_lightning.report.write import write_report
from vit_lightning.storage.folder import hold


def report(folder: Path) -> None:
    """Writes the report of an ablation from its runs, and prints the verdicts."""
    study = read_study(folder)
    with hold(folder, "report"):
        made = make_report(study)
        written = write_report(made)
    print("\n".join([*made.lines, str(written[0])]))


def dashboard(folder: Path) -> None:
    """Makes a workspace and a report of an ablation in W&B."""
    wandb_dashboard.dashboard(make_report(read_study(folder)))


def sync(folder: Path) -> None:
    """Sends a run, or the finished runs, trials and the report of an ablation, to W&B.

    Raises:
        UserError: the first run cannot be sent; or, after all others, the runs that could not.
    """
    if not (folder / "ledger.json").is_file():
        one_run.sync(folder)
        return
    study = read_study(folder)
    problems: list[str] = []
    runs: list[Run | Trial] = [*study.runs, *(study.tuning.trials if study.tuning else [])]
    folders = [run.folder for run in runs if run.state == "done"]
    for number, path in enumerate(folders):
        try:
            one_run.sync(folder / path)
        except UserError as error:
            problems += error.problems
            if number == 0:  # without an API key, for example, no other run can be sent either
                raise
    if problems:
        raise UserError(problems)
    print(log_report(make_report(study), send=True))
