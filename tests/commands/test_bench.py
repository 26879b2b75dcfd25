"""``lightning bench`` in a process of its own, since it sets what a whole process shares."""

from __future__ import annotations

import json
from pathlib import Path

from runs import REPOSITORY, SMALL

DIGITS = f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}"


def test_a_config_beside_its_trainer_and_timm(lightning, in_folder):
    more = ("--trainer.precision=bf16-mixed", "--trainer.gradient_clip_val=1", "--trainer.accumulate_grad_batches=2")
    done = lightning("bench", DIGITS, *SMALL, *more, "--data.batch_size=8", "--rounds=4", "--out=speed")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in Path("speed").iterdir()] == ["bench.json"], "the run's own files are gone"
    results = json.loads(Path("speed/bench.json").read_text())
    assert (results["batch"], results["image"], results["precision"]) == (8, [1, 8, 8], "bf16-mixed")
    assert results["product"] == "1024 x 1024, bfloat16"
    assert list(results["left_out"]) == ["torchvision"]
    assert "in_channels=1: torchvision cannot express it" in done.stdout.partition("torchvision is left out: ")[2]
    training, inference = results["training"], results["inference"]
    assert list(training["images_per_second"]) == ["training step", "whole Trainer", "timm"]  # torchvision needs RGB
    assert list(inference["images_per_second"]) == ["inference", "timm"]
    assert training["rounds"] == inference["rounds"] == 4
    for part, name in ((training, "over_training_step"), (inference, "over_inference")):
        assert all(low <= middle <= high for middle, low, high in part[name].values())
        assert 0.0 < part["share_of_ceiling"][0] < 1.0
    assert "whole Trainer" in done.stdout
    assert "timm" in done.stdout
