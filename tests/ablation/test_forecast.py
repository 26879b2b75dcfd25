"""The forecast before an ablation runs: the images of its test, the time of a run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import SMALL, Command
from vit_lightning.ablation.forecast import count_test_images, seconds_of_run
from vit_lightning.config.resolve import resolve

PLAN = """\
config: small.yaml
arms: {cls: {model.pool: cls}, mean: {model.pool: mean}}
baseline: cls
tune: {options: {optimizer.lr: [0.001, 0.002]}, seeds: [1000]}
compare: {metric: test/acc, smallest_effect: 0.005, max_seeds: 12}
"""

BROKEN = """\
from torch import nn


class Broken(nn.Linear):
    def __init__(self, emb_size):
        super().__init__(emb_size, emb_size)
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls > 2:
            raise RuntimeError("out of memory")
        return super().forward(tokens)
"""


def test_a_dry_run_says_what_the_plan_can_show_and_how_long_it_takes(lightning: Command, tmp_path: Path) -> None:
    options = ", ".join(word.removeprefix("--").replace("=", ": ") for word in SMALL)
    (tmp_path / "small.yaml").write_text("data: {class_path: vit_lightning.Digits}\n")
    (tmp_path / "plan.yaml").write_text(f"{PLAN}fixed: {{{options}}}\n")
    result = lightning("ablate", "plan.yaml", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "two runs disagree on 5 % of 360 test images (compare.disagreement)" in result.stdout
    assert "360 test images at 5 % disagreement can show" in result.stdout
    assert re.search(r"at most 24: [\d.]+ (s|min)", result.stdout), result.stdout
    assert re.search(r"tuning before that: 4 runs, [\d.]+ (s|min)", result.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml", "small.yaml"], "nothing is written"


def test_a_dry_run_names_an_arm_whose_steps_fail(lightning: Command, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("data: {class_path: vit_lightning.Digits}\n")
    (tmp_path / "heads.py").write_text(BROKEN)
    options = ", ".join(word.removeprefix("--").replace("=", ": ") for word in SMALL)
    arms = "{cls: {model.pool: cls}, broken: {model.feed_forward: heads.Broken}}"
    plan = PLAN.replace("{cls: {model.pool: cls}, mean: {model.pool: mean}}", arms)
    (tmp_path / "plan.yaml").write_text(f"{plan}fixed: {{{options}}}\n")
    result = lightning("ablate", "plan.yaml", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert re.search(r"at most 24: [\d.]+ (s|min)", result.stdout), "the other arm's time counts"
    assert "no time for broken: a few steps failed" in result.stdout


def test_the_time_of_a_run_is_that_of_its_steps_validations_and_test() -> None:
    experiment = resolve(["--data.class_path=Digits", *SMALL, "--data.batch_size=100"])
    data = experiment.data
    evaluated = data.image_count("val") * 3 + data.image_count("test")
    assert seconds_of_run(experiment, 2.0, 0.5, 30.0, 3.0) == pytest.approx(2.0 + 0.5 * (30 + evaluated / 300))
    assert seconds_of_run(experiment, 2.0, 0.5, math.inf, math.inf) is None, "training has no end"
    assert count_test_images(experiment) == 360
    limited = {**experiment.config, "trainer": {**experiment.trainer, "limit_test_batches": 2}}
    assert count_test_images(replace(experiment, config=limited)) == 200
