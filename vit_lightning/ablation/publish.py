"""Commands on folders of runs and of ablations: the report, the dashboard in W&B, and the upload of all runs."""

from __future__ import annotations

from pathlib import Path

from vit_lightning.ablation.ledger import read_study
from vit_lightning.commands.resume import read_run_config
from vit_lightning.errors import UserError, foreign
from vit_lightning.report import dashboard as wandb_dashboard
from vit_lightning.report.page import write_report
from vit_lightning.report.report import Report, make_report
from vit_lightning.report.study import Study
from vit_lightning.report.wandb_report import log_report
from vit_lightning.storage.folder import hold, refuse_links, runs_in
from vit_lightning.storage.metrics import read_results
from vit_lightning.storage.wandb_mirror import WandbConfig, WandbMirror, run_id


def report(folder: Path) -> None:
    """Writes the report of an ablation from its runs, and prints the verdicts."""
    read_study(folder)  # before a folder that is no ablation is locked
    with hold(folder, "report"):
        publish(folder, mirrored=False)


def publish(folder: Path, *, mirrored: bool) -> Report:
    """Writes the report of an ablation, also to W&B where it is ``mirrored``, and prints the verdicts."""
    made = _read_report(folder)
    with foreign(folder):
        lines = [*made.lines, str(write_report(made)[0]), log_report(made) if mirrored else ""]
    print("\n".join(filter(None, lines)), flush=True)
    return made


def dashboard(folder: Path) -> None:
    """Makes workspaces and a report of a run, a folder of runs or an ablation in W&B."""
    if _is_ablation(folder):
        wandb_dashboard.dashboard(_read_report(folder))
    else:
        wandb_dashboard.runs_dashboard(folder)


def sync(folder: Path) -> None:
    """Sends a run, the runs in a folder, or the finished runs, trials and the report of an ablation, to W&B.

    Raises:
        UserError: the first run cannot be sent; or, after all others, the runs that could not.
    """
    problems: list[str] = []
    for number, path in enumerate(_finished(read_study(folder)) if _is_ablation(folder) else runs_in(folder)):
        try:
            sync_run(path)
        except UserError as error:
            problems += error.problems
            if number == 0:  # without an API key, for example, no other run can be sent either
                raise
    if problems:
        raise UserError(problems)
    if _is_ablation(folder):
        print(log_report(_read_report(folder), send=True))


def sync_run(folder: Path) -> None:
    """Sends a run's ``metrics.jsonl``, figures and results to W&B, which drops the steps that it already has.

    Raises:
        UserError: the folder holds no run, or W&B cannot be reached.
    """
    refuse_links(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is not a run folder: it has no metrics.jsonl")
    config = read_run_config(folder)  # plain data: no class that it names is imported
    with foreign(folder / "config.yaml"):
        settings = WandbConfig(**{**(config.get("wandb") or {}), "mode": "online"})
    mirror = WandbMirror(folder, run_id(folder), settings, config)
    mirror.start(otherwise=())
    if mirror.mode == "online":
        with foreign(folder):
            mirror.catch_up(folder)
            if results := read_results(folder):
                mirror.log_results(results)
            else:
                mirror.log_tables()
    mirror.finish()
    if mirror.mode != "online" or mirror.reason:
        raise UserError(f"{folder} was not sent: {mirror.reason} (for an API key: wandb login)")
    print(f"{folder} is in W&B as {settings.project}/{mirror.run_id}")


def _read_report(folder: Path) -> Report:
    with foreign(folder):
        return make_report(read_study(folder))


def _is_ablation(folder: Path) -> bool:
    return (folder / "ledger.json").is_file()


def _finished(study: Study) -> list[Path]:
    """Returns the folders of an ablation's finished runs and trials; without those that were deleted since."""
    runs = [*study.runs, *(study.tuning.trials if study.tuning else [])]
    folders = [study.folder / run.folder for run in runs if run.state == "done"]
    return [folder for folder in folders if folder.is_dir()]
