"""Where things are, and the smallest run there is."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
GUIDE = REPOSITORY / "notebooks"
SHARED = REPOSITORY.parent / "shared"
"""Reference outputs and real images, in the workplace alone: tests that use them skip where they are missing."""

SMALL = (
    *("--model.patch_size=4", "--model.emb_size=16", "--model.depth=1", "--model.num_heads=2"),
    *("--trainer.max_epochs=1", "--trainer.accelerator=cpu"),
)
"""A run on digits that takes a second."""

Command = Callable[..., subprocess.CompletedProcess[str]]


def example(name: str) -> str:
    """Returns an example of the README, of the guide or of CONTRIBUTING.md."""
    pages = (REPOSITORY / "README.md", REPOSITORY / ".github" / "CONTRIBUTING.md", *GUIDE.glob("*.md"))
    page = "".join(path.read_text(encoding="utf-8") for path in pages)
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """Ends a training in this process behind an optimizer step, before its row is logged.

    Nothing that it would do at its end is done.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

    log = _LoggerConnector.update_train_step_metrics

    def stop(self: Any) -> None:
        if self.trainer.global_step == step:
            raise RuntimeError("killed")
        log(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LoggerConnector, "update_train_step_metrics", stop)
        with pytest.raises(RuntimeError, match="killed"):
            yield


def logged_rows(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged, without what is never the same twice."""
    from vit_lightning.storage.metrics import read_metrics

    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith("speed/")} for row in read_metrics(folder)
    ]


def same_weights(*runs: str) -> dict[str, Any]:
    """Compares steps and weights at the end of runs to the bit; returns the last checkpoint of the first."""
    import torch

    from vit_lightning.storage.checkpoint_files import read_checkpoint

    whole, *others = (read_checkpoint(Path(run, "checkpoints/last.ckpt")) for run in runs)
    for other in others:
        assert other["global_step"] == whole["global_step"]
        for name, value in whole["state_dict"].items():
            assert torch.equal(value, other["state_dict"][name]), name
    return whole


def whole_and_resumed(*arguments: str, kill: int) -> dict[str, Any]:
    """Trains a run ``whole``, and another, ``run``, that is killed and resumed; they end with the same weights."""
    from vit_lightning.cli import main

    assert main([*arguments, "--out=whole"]) == 0
    with killed_after(kill):
        main([*arguments, "--out=run"])
    assert main(["fit", "--resume=run"]) == 0
    return same_weights("whole", "run")
