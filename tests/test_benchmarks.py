"""The counters of ``experiments/benchmarks``, on a package of four files."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

from runs import REPOSITORY

FILES = {
    "__init__": "",
    "low": "def note(text: str) -> None:\n    print(text)\n",
    "middle": "from package.low import note\n\nclass Base:\n    def describe(self) -> str:\n        note('a')\n"
    "        return self.name\n\n    @property\n    def name(self) -> str:\n        return 'b'\n",
    "high": "from package.middle import Base\nfrom package.low import note\n\nclass Part(Base):\n"
    "    def __init__(self, size: int) -> None:\n        self.size = size\n\n"
    "    def forward(self, x):\n        note(x)\n\n"
    "# a comment\ndef make() -> Part:\n    '''A docstring.'''\n    return Part(3)\n",
    "top": "from package.high import make\nfrom package.low import note\n\ndef main():\n    part = make()\n"
    "    part(part.describe())\n    map(note, [make() for _ in range(3)])\n",
}


def run(monkeypatch, capsys, script: str, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(REPOSITORY / "experiments" / "benchmarks" / script), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_calls_are_followed_through_methods_bases_and_properties(in_folder, monkeypatch, capsys):
    (in_folder / "package").mkdir()
    for name, text in FILES.items():
        (in_folder / "package" / f"{name}.py").write_text(text)
    said = run(monkeypatch, capsys, "climbs.py", "package.top:main", "package.high:Part.forward", "--way")
    assert said[2] == "| `package.top:main` | 6 | 4 | 2 |"
    way = [line.strip().removeprefix("package.") for line in said[3:9]]
    assert way == ["top", "high", "middle", "low", "middle", "high"]
    assert said[9:] == ["| `package.high:Part.forward` | 2 | 2 | 0 |", "    package.high", "package.low"]
    (in_folder / "package" / "script.js").write_text("/* a\nb */\n// c\nlet x = 1;\n\nx += 1;\n")
    counted = run(monkeypatch, capsys, "code_lines.py", "package")
    assert counted[-1] == "all          6 files     27 lines of code"


MOST_LAUNCHES = {
    "AutoAugment": (134,),
    "RandAugment": (140,),
    "ThreeAugment": (156,),
    "cifar10_vit_tiny": (63, 101, 85, 12),
    "cifar10_resnet18": (63, 128, 96, 2),
    "crate_tiny": (34, 92, 81, 14),
    "deit3": (212, 109, 103, 37),
    "vit_augreg": (197, 69, 78, 12),
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
