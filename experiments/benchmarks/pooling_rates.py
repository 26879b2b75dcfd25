"""The rate of each arm of ``experiments/ablations/pooling.yaml``, by validation alone: no test image is looked at.

    python experiments/benchmarks/pooling_rates.py

Prints validation loss and accuracy of the best checkpoint, mean and sd over seeds that the study does not use, for each
arm and rate. A run that is done is not run again (``runs/pooling_rates``).
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch

from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.metrics import read_results

ARMS = {
    "cls": ["--model.pool=cls"],
    "mean": ["--model.pool=mean"],
    "mean without class token": ["--model.pool=mean", "--model.class_token=false"],
}
RATES = {
    "cls": ("1e-3", "2e-3", "4e-3"),
    "mean": ("1e-3", "2e-3", "4e-3"),
    "mean without class token": ("1e-3", "2e-3", "4e-3", "8e-3"),  # the best must not be the last that was tried
}
SEEDS = (100, 101)
FOLDER = Path("runs/pooling_rates")


def run(arm: str, rate: str, seed: int) -> dict[str, float]:
    """One training without a test; its results."""
    torch.set_num_threads(1)
    folder = FOLDER / f"{arm}-{rate}-{seed}".replace(" ", "-")
    flags = [f"--optimizer.lr={rate}", f"--seed_everything={seed}", "--test=false", "--wandb.mode=disabled"]
    page = "--config=experiments/digits_short.yaml"
    return read_results(folder) or fit(resolve([page, *ARMS[arm], *flags, f"--out={folder}", "--resume=auto"]))


def main() -> None:
    """Runs what is missing, two at a time, and prints the table."""
    pairs = [(arm, rate) for arm in ARMS for rate in RATES[arm]]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        planned = {(*pair, seed): pool.submit(run, *pair, seed) for pair, seed in product(pairs, SEEDS)}
        found = {key: future.result() for key, future in planned.items()}
    print("| arm | rate | validation loss | validation accuracy |\n|---|---|---|---|")
    for arm, rate in pairs:
        rows = [found[arm, rate, seed] for seed in SEEDS]
        loss, accuracy = ([row[name] for row in rows] for name in ("val/loss", "val/acc"))
        print(
            f"| {arm} | {rate} | {mean(loss):.4f}, sd {stdev(loss):.4f} "
            f"| {100 * mean(accuracy):.2f} %, sd {100 * stdev(accuracy):.2f} |"
        )


if __name__ == "__main__":
    main()
