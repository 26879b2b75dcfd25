"""Commands on folders of runs and of ablations: the report, the dashboard in W&B, and the upload of offline runs."""

import contextlib
import subprocess
import sys
from pathlib import Path

from vit_lightning.ablation.ledger import read_study
from vit_lightning.errors import UserError, reading
from vit_lightning.report import dashboard as wandb_dashboard
from vit_lightning.report.page import write_report
from vit_lightning.report.report import Report, make_report
from vit_lightning.storage.folder import hold


def report(folder: Path) -> None:
    """Writes the report of an ablation from its runs, and prints the verdicts."""
    read_study(folder)  # before a folder that is no ablation is locked
    with hold(folder, "report"):
        publish(folder)


def publish(folder: Path) -> Report:
    """Writes the report of an ablation, and prints the verdicts."""
    made = _read_report(folder)
    with reading(folder):
        lines = [*made.lines, str(write_report(made)[0])]
    print("\n".join(filter(None, lines)), flush=True)
    return made


def dashboard(folder: Path) -> None:
    """Makes workspaces of a run, a folder of runs or an ablation in W&B."""
    if (folder / "ledger.json").is_file():
        wandb_dashboard.dashboard(_read_report(folder))
    else:
        wandb_dashboard.runs_dashboard(folder)


def sync(folder: Path) -> None:
    """Sends the offline runs of a run folder, a folder of runs or an ablation to W&B, by ``wandb sync``.

    Raises:
        UserError: there is none, one is in use, or some were not sent.
    """
    found = {path: path.with_suffix(".wandb.synced") for path in sorted(folder.rglob("wandb/offline-run-*/*.wandb"))}
    if not found:
        raise UserError(f"sync={folder} holds no offline run of W&B, which would be in wandb/ of a run folder")
    left = [path for path, mark in found.items() if not mark.exists()]
    if not left:
        print(f"{folder}: all of its offline runs have been sent")
        return
    with contextlib.ExitStack() as locks:
        for run in {path.parents[2] for path in left}:  # W&B marks a run as sent, though more of it were to come
            locks.enter_context(hold(run, "sync"))
        subprocess.run([sys.executable, "-m", "wandb", "sync", *(str(path.parent) for path in left)], check=False)
    if kept := [str(path.parent) for path in left if not found[path].exists()]:
        raise UserError([f"{path} was not sent (for an API key: wandb login)" for path in kept])
    print(f"sent to W&B: {', '.join(sorted({str(path.parents[2]) for path in left}))}")


def _read_report(folder: Path) -> Report:
    with reading(folder):
        return make_report(read_study(folder))
