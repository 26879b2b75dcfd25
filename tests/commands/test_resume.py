import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from runs import SMALL

from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint, seal
from vit_lightning.storage.metrics import read_metrics


def start(*flags: str, allowed: tuple[str, ...] = ()):
    return fit(resolve([*SMALL, *flags, *(f"--allow-config-change={name}" for name in allowed)]))


def runs() -> list[str]:
    return sorted(path.parent.name for path in Path("runs/run").glob("*/config.yaml"))


def test_auto_continues_the_trial_of_an_agent_and_no_other_with_the_same_options(in_folder, trained, monkeypatch):
    shutil.copytree(trained[0], "runs/run/0")
    Path("runs/run/0/results.json").unlink()
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "other")
    start("--resume=auto")
    assert len(runs()) == 2
    monkeypatch.setenv("WANDB_RUN_ID", json.loads(Path("runs/run/0/environment.json").read_text())["run_id"])
    start("--resume=auto")
    assert len(runs()) == 2
    assert Path("runs/run/0/results.json").exists()


def test_auto_continues_with_the_newest_run_of_the_same_config_that_is_not_over(in_folder, trained):
    shutil.copytree(trained[0], "runs/run/0")
    results = Path("runs/run/0/results.json")
    results.unlink()
    assert start("--resume=auto")["test/loss"] == trained[1]["test/loss"]
    assert runs() == ["0"]
    assert [row["step"] for row in read_metrics(results.parent) if "test/acc" in row] == [21]
    start("--resume=auto")
    assert len(runs()) == 2, "what is over does not go on"
    results.unlink()
    start("--resume=auto", "--optimizer.lr=0.01")
    assert len(runs()) == 3, "another page is another run"
    again = Path("runs/run", runs()[-1], "results.json")
    again.unlink()
    start("--resume=auto", "--data.num_workers=1", "--optimizer.lr=0.01")
    assert len(runs()) == 3
    assert again.exists()


def test_must_ends_where_nothing_can_continue(in_folder, trained, capsys):
    assert main(["fit", *SMALL, "--resume=must"]) == 3
    assert "resume=must: runs/run holds no unfinished run of this config" in capsys.readouterr().err
    assert main(["fit", *SMALL, "--resume=must", "--out=out"]) == 3
    assert not Path("out").exists()
    shutil.copytree(trained[0], "out")
    Path("out/results.json").unlink()
    assert main(["fit", *SMALL, "--resume=must", "--out=out"]) == 0
    assert main(["fit", *SMALL, "--resume=must", "--out=out"]) == 0, "it is over: there is nothing left to do"


def test_a_run_that_is_over_takes_no_changes(results):
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert main(["fit", "--resume=out", "--optimizer.lr=1", "--allow-config-change=optimizer.lr"]) == 2
    assert before == {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["callbacks"]["Stopwatch"].update(seconds="long"),
        lambda held: held["callbacks"].pop("Stopwatch"),
    ],
)
def test_a_run_is_named_whose_checkpoints_hold_something_else(results, change, capsys):
    Path("out/results.json").unlink()
    for path in Path("out/checkpoints").iterdir():
        held = read_checkpoint(path, mmap=False)
        change(held)
        with path.open("w+b") as file:
            torch.save(held, file)
            seal(file)
    assert main(["fit", "--resume=out"]) == 2
    assert "its contents do not fit together" in capsys.readouterr().err


def test_a_run_can_be_trained_in_a_thread_and_its_checkpoint_holds_the_config(in_folder):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(start, "--out=out", "--resume=auto").result()["steps"] == 21
    page = read_checkpoint(Path("out/checkpoints/last.ckpt"))["config"]
    assert "resume" not in page
    assert json.dumps(page), "plain data"


def test_what_writes_checkpoints_is_not_for_the_config(in_folder, capsys):
    plugin = '--trainer.plugins=[{"class_path": "lightning.pytorch.plugins.AsyncCheckpointIO"}]'
    assert main(["fit", *SMALL, plugin]) == 2
    assert "trainer.plugins: a CheckpointIO cannot be given" in capsys.readouterr().err
