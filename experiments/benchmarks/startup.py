"""Time from ``lightning fit --config digits`` to the first trained batch, and to a config error, beside bare imports.

Fresh processes, interleaved, with a warm file cache and compiled modules; seconds of the clock and of the processor.

- ``imports``: ``python -c "import torch, torchvision, lightning.pytorch"``, to the end of Python; ``imports alone``
  ends by ``os._exit`` when they are done.
- ``first step``: the command with a callback of the user's own that ends the process by ``os._exit`` when the first
  batch has been trained. W&B is offline, as it is for whoever has no key.
- ``config error``: the command with an option that is not there, to the end of Python.

    python experiments/benchmarks/startup.py [ROUNDS]

Its rounds are added to those of ``startup.json`` beside this file, if they are of this commit, versions and processor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import Rounds, paired_rounds

from vit_lightning.storage.environment import describe_environment

FIRST_STEP = """import os
from lightning.pytorch import Callback
class FirstStep(Callback):
    def on_train_batch_end(self, *args):
        os._exit(0)
"""
IMPORTS = "import torch, torchvision, lightning.pytorch"
FIT = ("-m", "vit_lightning", "fit", "--config", "digits")
COMMANDS = {
    "imports": ("-c", IMPORTS),
    "imports alone": ("-c", f"{IMPORTS}, os; os._exit(0)"),
    "first step": (*FIT, "--trainer.callbacks+=first_step.FirstStep"),
    "config error": (*FIT, "--model.emb_sizee=3"),
}
PAIRS = (("imports", "first step"), ("imports alone", "first step"), ("imports", "config error"))
RESULT = Path(__file__).with_suffix(".json")


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns seconds of the clock and of the processor of each command, round by round."""
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONDONTWRITEBYTECODE": ""}
    processor: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "first_step.py").write_text(FIRST_STEP, encoding="utf-8")

        def timed(name: str) -> Callable[[], None]:
            def run() -> None:
                with open(os.devnull, "w", encoding="utf-8") as nowhere:
                    given = [sys.executable, *COMMANDS[name]]
                    process = subprocess.Popen(given, cwd=folder, env=environment, stdout=nowhere, stderr=nowhere)
                    _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                assert process.returncode == (2 if name == "config error" else 0), name
                processor[name].append(used.ru_utime + used.ru_stime)

            return run

        clock = paired_rounds({name: timed(name) for name in COMMANDS}, rounds, warmup=0, seed=time.time_ns())
    return {"seconds": clock.seconds, "processor_seconds": processor}


def main(rounds: int = 12) -> None:
    facts = describe_environment()
    same = {name: facts[name] for name in ("processor", "cores", "python", "packages")}
    same["commit"] = (facts["git"]["package"] or facts["git"]["working folder"] or {}).get("commit")
    known: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    measured = measure(rounds)
    if all(known.get(name) == fact for name, fact in same.items()):
        measured = {
            kind: {name: known[kind][name] + seconds for name, seconds in of_kind.items()}
            for kind, of_kind in measured.items()
        }
    ratios: dict[str, dict[str, list[float]]] = {}
    for kind, of_kind in measured.items():
        for baseline, name in PAIRS:
            ratio = Rounds(of_kind).ratio(baseline, name)
            ratios.setdefault(f"{name} / {baseline}", {})[kind] = [round(value, 3) for value in ratio]
            print(f"{kind:<18} {name:<13} {Rounds(of_kind).median(name):6.2f} s, {ratio} x {baseline}")
    rounded = {
        kind: {name: [round(value, 2) for value in seconds] for name, seconds in of_kind.items()}
        for kind, of_kind in measured.items()
    }
    text = json.dumps({**same, "median_ratios_and_intervals": ratios, **rounded}, indent=1) + "\n"
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
