"""What others can send is data: nothing in a config or a checkpoint runs, and nothing of the environment gets out."""

import contextlib
import copy
import json
import pickle
import shutil
from pathlib import Path

import harness
import pytest
import torch
from runs import SMALL
from tensors import Payload

from vit_lightning.storage.checkpoint_files import read_checkpoint

RUN = (*SMALL, "--out=run")


@pytest.fixture(scope="module")
def trained(trained) -> Path:
    """A run to take checkpoints from."""
    return trained[0]


@pytest.fixture
def marker(tmp_path) -> Path:
    """There as soon as something hostile has run."""
    return tmp_path / "marker"


def refused(folder: Path, *arguments: str, **environment: str) -> str:
    """What the command says that does not run what it was given."""
    code = harness.command(folder, *arguments, **{"WANDB_MODE": "disabled", **environment})
    text = harness.log(folder)
    assert not (folder / "marker").exists(), "it ran"
    assert code in (2, 3), text
    assert "Traceback" not in text
    assert "weights_only" not in text
    assert "can still be loaded" not in text
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 4, text
    return text


def resume_from(folder: Path, file: Path, trained: Path) -> tuple[str, ...]:
    """A run that is not over, all of whose checkpoints are this file."""
    shutil.copytree(trained, folder / "run", ignore=shutil.ignore_patterns("results.json", "wandb"))
    for name in ("last", "previous", "best"):
        shutil.copy(file, folder / f"run/checkpoints/{name}.ckpt")
    return "fit", "--resume=run"


def zip_file(contents: object, path: Path) -> Path:
    torch.save(contents, path)
    return path


def legacy(contents: dict, path: Path) -> None:
    torch.save(contents, path, _use_new_zipfile_serialization=False)


def raw_pickle(contents: dict, path: Path) -> None:
    path.write_bytes(pickle.dumps(contents))


@pytest.fixture(params=[zip_file, legacy, raw_pickle])
def evil(request, tmp_path, marker, trained) -> Path:
    """A checkpoint that would load, and runs something then."""
    path = tmp_path / "evil.ckpt"
    request.param({**read_checkpoint(trained / "checkpoints/last.ckpt"), "extra": Payload(marker)}, path)
    return path


def test_row_23_the_payloads_are_live(evil, marker):
    with contextlib.suppress(RuntimeError):  # a raw pickle is none of torch's files, which it finds out too late
        torch.load(evil, weights_only=False)
    assert marker.exists()


COMMANDS = ("test", "predict", "init_from", "resume")


@pytest.mark.parametrize(
    ("evil", "command"),
    [*((zip_file, command) for command in COMMANDS), *((kind, "test") for kind in (legacy, raw_pickle))],
    indirect=["evil"],
)
def test_row_23_a_pickle_does_not_run(evil, tmp_path, trained, command):
    words = {
        "test": ("test", "--ckpt=evil.ckpt"),
        "predict": ("predict", "--ckpt=evil.ckpt"),
        "init_from": ("fit", *RUN, "--init_from=evil.ckpt"),
    }
    refused(tmp_path, *(words[command] if command in words else resume_from(tmp_path, evil, trained)))


@pytest.mark.parametrize("evil", [zip_file, raw_pickle], indirect=True)
def test_row_23_a_variable_of_torch_does_not_open_the_door(evil, tmp_path, trained):
    refused(tmp_path, "test", "--ckpt=evil.ckpt", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")


def test_row_23_a_damaged_last_checkpoint_that_runs_things_is_passed_over(tmp_path, trained, marker):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("results.json"))
    contents = read_checkpoint(trained / "checkpoints/last.ckpt")
    zip_file({**contents, "extra": Payload(marker)}, folder / "checkpoints/last.ckpt")
    words = "fit", "--resume=run", "--trainer.max_epochs=2", "--allow-config-change=trainer.max_epochs", "--test=false"
    words = *words, "--allow-config-change=test"
    assert harness.command(tmp_path, *words, WANDB_MODE="disabled") == 0, harness.log(tmp_path)
    assert "falling back to previous.ckpt" in harness.log(tmp_path)
    assert not marker.exists()


def with_config(changes: dict, trained: Path, path: Path) -> Path:
    """A sound checkpoint, but for what its config names, by dotted keys."""
    contents = read_checkpoint(trained / "checkpoints/best.ckpt")
    config = copy.deepcopy(contents["config"])
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return zip_file({**contents, "config": config}, path)


INTO_HOME = {"dirpath": "HOME", "filename": "bashrc"}
ELSEWHERE: dict[str, object] = {
    "out": "HOME/new",
    "trainer.profiler": {"class_path": "SimpleProfiler", "init_args": INTO_HOME},
    "trainer.callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": INTO_HOME}],
    "trainer.logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "HOME/new"}},
    "distillation.teacher": "HOME/teacher",
    "init_from": "HOME/first",
}
"""What a config may name that writes to a place, or reads from one, and a test does without; HOME is elsewhere."""


def test_row_25_the_config_of_a_checkpoint_writes_nothing_elsewhere(tmp_path, trained):
    home, folder = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    folder.mkdir()
    (home / "test-bashrc.txt").write_text("mine")
    with_config(json.loads(json.dumps(ELSEWHERE).replace("HOME", str(home))), trained, folder / "evil.ckpt")
    assert harness.command(folder, "test", "--ckpt=evil.ckpt", WANDB_MODE="disabled") == 0, harness.log(folder)
    assert {path.name: path.read_text() for path in home.iterdir()} == {"test-bashrc.txt": "mine"}


KEEPS = """
from pathlib import Path
from lightning.pytorch import Callback
class Keeps(Callback):
    def state_dict(self):
        return {"kept": Path("here")}
"""


def test_row_24_what_cannot_be_loaded_again_is_found_before_the_first_step(tmp_path):
    (tmp_path / "own.py").write_text(KEEPS)
    code = harness.fit(tmp_path, '--trainer.callbacks+=[{"class_path": "own.Keeps"}]', WANDB_MODE="disabled")
    said = [line for line in harness.log(tmp_path).splitlines() if line.startswith("lightning fit:")]
    assert code == 2, harness.log(tmp_path)
    assert len(said) == 1
    assert "a checkpoint of this run" in said[0]
    assert "Traceback" not in harness.log(tmp_path)
    assert not (tmp_path / "witness0.jsonl").exists()
    assert list(tmp_path.glob("run/checkpoints/*")) == []
