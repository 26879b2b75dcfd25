"""Keeps an ablation that has ended: its report with figures and tables, and one archive of its runs.

    python experiments/ablations/archive.py runs/ablations/NAME

writes experiments/ablations/NAME/ and experiments/pictures/NAME.png. The archive holds the ledger and of each run
config, results, versions and test predictions (no weights, no curves); from it the study goes on in any clone:

    mkdir -p runs/ablations/NAME && tar -xJf experiments/ablations/NAME/runs.tar.xz -C runs/ablations/NAME
    lightning ablate NAME
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np

from vit_lightning.ablation.ledger import read_study
from vit_lightning.report.analysis import analyse
from vit_lightning.report.figures import draw_differences
from vit_lightning.report.wording import headline

PICTURES = Path(__file__).parents[1] / "pictures"
KEPT = ("report.md", "figures", "results.csv", "verdicts.json")
OF_A_RUN = ("config.yaml", "results.json", "environment.json", "test_predictions*.npz")


def content(path: Path) -> bytes:
    """Returns a file; predictions without confidences and not zipped, since xz is better with many alike."""
    if path.suffix != ".npz":
        return path.read_bytes()
    with np.load(path) as predictions:
        file = io.BytesIO()
        np.savez(file, **{name: predictions[name] for name in ("index", "label", "prediction")})
    return file.getvalue()


def archive(study: Path, file: Path) -> None:
    """Writes the ledger and the runs of a study, in an order and with times that do not change."""
    runs = [path for kind in ("runs", "tuning") for name in OF_A_RUN for path in study.glob(f"{kind}/*/{name}")]
    ledger = study.glob("ledger/**/*.json")
    with tarfile.open(file, "w:xz", preset=9) as tar:
        for path in sorted([*ledger, *study.glob("ledger.json"), *study.glob("changes.jsonl"), *runs]):
            entry = tarfile.TarInfo(path.relative_to(study).as_posix())
            data = content(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def draw(study: Path, file: Path) -> None:
    """Draws the differences for pages that take no SVG, titled with the answer that they show."""
    analysis = analyse(read_study(study))
    figure = draw_differences(analysis)
    assert figure is not None
    figure.savefig(file, dpi=150, metadata={"Title": headline(analysis), "Software": None})


def main(study: Path) -> None:
    subprocess.run(["lightning", "report", str(study)], check=True)
    kept = Path(__file__).parent / study.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    archive(study, kept / "runs.tar.xz")
    for name in KEPT:
        copy = shutil.copytree if (study / name).is_dir() else shutil.copy
        copy(study / name, kept / name)
    draw(study, PICTURES / f"{study.name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
