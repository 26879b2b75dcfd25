"""What ``experiments/benchmarks/gpu_counts.py`` counts."""

import os
import subprocess
import sys

from runs import REPOSITORY

MOST_LAUNCHES = {
    "AutoAugment": (134,),
    "RandAugment": (140,),
    "ThreeAugment": (156,),
    "cifar10_vit_tiny": (62, 81, 85, 12),
    "cifar10_resnet18": (62, 121, 96, 2),
    "crate_tiny": (34, 72, 81, 14),
    "deit3": (212, 91, 103, 37),
    "vit_augreg": (197, 62, 78, 12),
}
"""Launches of an augmentation; of a step with two blocks those of data, forward, backward and optimizer."""


def test_no_step_waits_for_a_gpu_and_launches_do_not_grow():
    """In a process of its own, where torch takes tensors for those of a GPU."""
    script = REPOSITORY / "experiments" / "benchmarks" / "gpu_counts.py"
    command = [sys.executable, script, "--small", "--images=4", "--only", *MOST_LAUNCHES]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).stdout
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    counted = {name: [*map(int, numbers)] for name, *numbers in rows if name in MOST_LAUNCHES}
    assert counted.keys() == MOST_LAUNCHES.keys()
    assert not {name: crossings for name, (crossings, *_) in counted.items() if crossings}
    for name, (_, *launches) in counted.items():
        assert all(map(int.__le__, launches, MOST_LAUNCHES[name])), name
