"""What a run of an ablation costs beyond its training, validation and test loops.

    python experiments/benchmarks/ablation_cost.py --runs 10

Runs of two epochs of digits, forked one after the other as ``lightning ablate`` does, without W&B and with it offline.
The loops are timed inside (from the start of training to its end, and the test), the whole from fork to end of the
process. Seconds of the clock, and of the processor, which other work on the machine does not stretch so much; W&B's own
process is not in the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from lightning.pytorch import Callback

from vit_lightning.ablation.attempts import Attempts, read_images
from vit_lightning.ablation.ledger import Planned, open_ledger
from vit_lightning.ablation.plan import read_plan
from vit_lightning.ablation.workers import warm_up
from vit_lightning.commands.console import quiet

PLAN = """
name: cost
config: {page}
grid: {{model.pool: [cls, mean]}}
fixed: {{trainer.max_epochs: 2, optimizer.warmup_epochs: 0, trainer.accelerator: cpu, wandb.mode: {mode},
  trainer.callbacks: [{{class_path: ablation_cost.Loops}}]}}
baseline: {{model.pool: cls}}
compare: {{metric: test/acc, smallest_effect: 0.01, max_seeds: 40}}
"""


class Loops(Callback):
    """Times the loops, by the clock and by the processor."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def _take(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def on_fit_start(self, *args: object) -> None:
        self._take()

    def on_fit_end(self, *args: object) -> None:
        self._take()

    def on_test_start(self, *args: object) -> None:
        self._take()

    def on_test_end(self, *args: object) -> None:
        self._take()
        sums = [sum(self.times[n + 1][kind] - self.times[n][kind] for n in (0, 2)) for kind in (0, 1)]
        Path(os.environ["LOOPS"]).write_text(json.dumps(sums))


def measure(mode: str, runs: int, page: Path) -> list[tuple[float, float]]:
    """Seconds beyond the loops of each run, (clock, processor)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.yaml").write_text(PLAN.format(page=page, mode=mode))
        os.environ["LOOPS"] = str(folder / "loops.json")
        plan = read_plan(folder / "plan.yaml")
        ledger, _ = open_ledger(folder / "out", plan, threads=1)
        read_images(plan.experiments)
        warm_up(plan, ledger.folder)
        attempts = Attempts(ledger, plan, devices=None, patience=600.0)
        costs = []
        for seed in range(runs):
            run = Planned("cls", seed)
            claim = ledger.claim(run)
            assert claim is not None
            clock, processor = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            attempts.begin(run, claim)
            while not attempts.collect():
                time.sleep(0.002)
            clock, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - processor.ru_utime - processor.ru_stime
            loops = json.loads((folder / "loops.json").read_text())
            costs.append((clock - loops[0], used - loops[1]))
        return costs


def main() -> None:
    """Measures both and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    os.environ.pop("WANDB_MODE", None)
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    quiet()
    page = Path(__file__).parents[1] / "digits_short.yaml"
    print("| W&B | clock: median, least and most | processor: median | runs |\n|---|---|---|---|")
    for mode in ("disabled", "offline"):
        costs = measure(mode, runs, page)
        clock, processor = [c for c, _ in costs], [p for _, p in costs]
        print(
            f"| {mode} | {median(clock):.2f} s ({min(clock):.2f} to {max(clock):.2f}) "
            f"| {median(processor):.2f} s | {runs} |"
        )


if __name__ == "__main__":
    main()
