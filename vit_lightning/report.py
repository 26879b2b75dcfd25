"""Stand-in while branches are apart."""
import csv
from pathlib import Path
from vit_lightning.study import Study

def write_report(study: Study) -> list[Path]:
    path = study.folder / "results.csv"
    keys = sorted({k for t in study.trials for k in t.results if "second" not in k and "memory" not in k})
    with path.open("w") as f:
        w = csv.writer(f); w.writerow(["arm", "seed", *keys])
        for t in study.trials: w.writerow([t.arm, t.seed, *(t.results.get(k) for k in keys)])
    return [path]

def verdict_lines(study: Study) -> list[str]:
    return [f"{t.arm} {t.seed} {t.state} {t.cause or ''} {t.results.get(study.report)}" for t in study.trials]
