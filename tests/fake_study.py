"""An ablation that nobody trained: run folders with the files of real ones, made from random numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vit_lightning.report.study import Compare, Run, Study

ARMS: dict[str, dict[str, Any]] = {
    "cls": {"model.pool": "cls", "optimizer.lr": 0.002},
    "mean": {"model.pool": "mean", "optimizer.lr": 0.002},
    "mean without class token": {"model.pool": "mean", "model.class_token": False, "optimizer.lr": 0.003},
}


def make_study(
    folder: Path,
    *,
    gains: Sequence[float] = (0.0, 0.6, 0.0),
    seeds: int = 8,
    max_seeds: int | None = None,
    images: int = 360,
    failed: Mapping[tuple[str, int], str] | None = None,
    missing: Sequence[tuple[str, int]] = (),
    arms: Mapping[str, dict[str, Any]] = ARMS,
    random: int = 0,
    arms_compared: str = "baseline",
    **rules: Any,
) -> Study:
    """A study with its run folders.

    Args:
        folder: where.
        gains: what each arm adds to the logit of being right, the baseline first.
        seeds: that have been run.
        max_seeds: that may be run; by default no more.
        images: in the test set.
        failed: causes of runs that failed.
        missing: runs that are not there.
        arms: their keys, the baseline first.
        random: another number makes another study.
        arms_compared: ``Compare.arms``.
        rules: further fields of ``Compare``.
    """
    draw = np.random.default_rng(random)
    ease = draw.normal(3.5, 1.5, images)
    runs = []
    for seed in range(seeds):
        luck = draw.normal(0, 0.15)
        for (arm, overrides), gain in zip(arms.items(), gains, strict=True):
            name = f"runs/{arm.replace(' ', '-')}-seed{seed}"
            chance = 1 / (1 + np.exp(-(ease + gain + luck + draw.normal(0, 0.15))))
            right = draw.random(images) < chance
            if (arm, seed) in missing:
                runs.append(Run(arm, seed, name, "missing"))
                continue
            cause = (failed or {}).get((arm, seed))
            results = {} if cause else _results(seed, right, arm, draw)
            _write_run(folder / name, seed, overrides, results, right, draw)
            state = "failed" if cause else "done"
            runs.append(Run(arm, seed, name, state, cause, results))
    runs.sort(key=lambda run: (list(arms).index(run.arm), run.seed))
    made = bare_study({arm: [] for arm in arms}, max_seeds=max_seeds or seeds, arms=arms_compared, **rules)
    question = "What should go to the head, the class token or the mean of the patches?"
    made = replace(made, question=question, folder=folder, config="experiments/digits_short.yaml", runs=runs)
    return replace(made, arms=dict(arms))


def bare_study(
    results: Mapping[str, Sequence[float | None]],
    *,
    images: int | None = 360,
    compare: Compare | None = None,
    **rules: Any,
) -> Study:
    """A study without files, of these results by arm, one for each seed; None is a run that failed."""
    compare = compare or Compare(**{"metric": "test/acc", "smallest_effect": 0.005, "max_seeds": 20, **rules})
    runs = [
        Run(arm, seed, f"{arm}-{seed}", "failed", "diverged")
        if value is None
        else Run(arm, seed, f"{arm}-{seed}", "done", results={compare.metric: value, "test_images": images})
        for arm, values in results.items()
        for seed, value in enumerate(values)
    ]
    return Study(
        **{"name": "pooling", "question": "", "folder": Path("nowhere"), "config": "c.yaml", "metric": "val/acc"},
        **{"goal": "maximize", "compare": compare, "baseline": next(iter(results)), "split_varies": False},
        **{"arms": {arm: {} for arm in results}, "seeds": list(range(compare.max_seeds)), "runs": runs},
    )


def _results(seed: int, right: np.ndarray, arm: str, draw: np.random.Generator) -> dict[str, Any]:
    seconds = 14.0 + len(arm) / 10 + draw.normal(0, 0.3)
    accuracy, is_smaller = float(right.mean()), "without" in arm
    losses = {f"{split}/loss": round(0.6 + draw.normal(0, 0.02), 7) for split in ("val", "test")}
    costs = {"parameters": 302_154 - 64 * is_smaller, "flops": 2_996_992 - 600_000 * is_smaller}
    costs |= {"peak_memory_mb": 612.0, "images_per_second": round(38_000 / seconds, 1)}
    costs |= {"train_seconds": round(seconds, 3), "seconds": round(seconds + 0.9, 3)}
    about = {"seed": seed, "epochs": 30, "steps": 630, "best_step": 609, "train_images": 1294}
    about |= {"test_images": len(right), "val/acc": round(accuracy - 0.002, 7), "test/acc": round(accuracy, 7)}
    return {**about, **losses, **costs}


def _write_run(
    folder: Path,
    seed: int,
    overrides: Mapping[str, Any],
    results: Mapping[str, Any],
    right: np.ndarray,
    draw: np.random.Generator,
) -> None:
    folder.mkdir(parents=True)
    model = {"patch_size": 4, "emb_size": 64, "pool": "cls", "class_token": True}
    model |= {key[len("model.") :]: value for key, value in overrides.items() if key.startswith("model.")}
    config = {
        "experiment": "pooling",
        "seed_everything": seed,
        "model": {"class_path": "vit_lightning.ViT", "init_args": model},
        "optimizer": {"lr": overrides.get("optimizer.lr", 0.002)},
        "checkpoint": {"monitor": "val/acc", "mode": "max"},
        "wandb": {"group": "pooling", "job_type": "an arm", "tags": [f"seed{seed}"]},
        "trainer": {"max_epochs": 30},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = []
    for epoch in range(30 if results else 11):
        accuracy = 0.97 - (0.8 - 0.1 * len(overrides)) * np.exp(-epoch / (6 - len(overrides))) + draw.normal(0, 0.006)
        rows.append({"step": 21 * epoch + 20, "epoch": epoch, "val/acc": round(accuracy, 7), "time": 0.0})
        loss = 0.55 + 1.7 * np.exp(-epoch / 7) + draw.normal(0, 0.01)
        rows.append({"step": 21 * epoch + 20, "epoch": epoch, "train/loss": round(loss, 7), "time": 0.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not results:
        return
    (folder / "results.json").write_text(json.dumps(results))
    place = {"processor": "a processor", "cores": 2, "gpus": [], "threads": 1, "python": "3.12", "packages": {}}
    place |= {"started": "2026-11-22T01:00:00+0000", "git": {"package": {"commit": "0123456789abcdef", "changed": []}}}
    (folder / "environment.json").write_text(json.dumps(place))
    labels = np.arange(len(right), dtype=np.int32) % 10
    prediction = np.where(right, labels, (labels + 1) % 10)
    np.savez_compressed(
        folder / "test_predictions.npz",
        index=np.arange(len(right), dtype=np.int32),
        label=labels,
        prediction=prediction,
    )
