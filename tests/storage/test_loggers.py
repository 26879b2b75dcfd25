"""Lightning's own loggers in a config, beside the run's own files and its run in W&B."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from runs import SMALL
from wandb_command import start, steps
from wandb_stub import read_wandb_file

from vit_lightning.cli import main
from vit_lightning.storage.metrics import read_metrics

LOGGERS = {
    "CSVLogger": {"save_dir": "theirs"},
    "WandbLogger": {"save_dir": "theirs", "project": "theirs", "offline": True},
}


def test_lightning_s_loggers_stand_beside_ours(tmp_path):
    """Each has the config and all metrics; W&B's has a run of its own, and does not take ours."""
    (tmp_path / "theirs").mkdir()
    loggers = [{"class_path": f"lightning.pytorch.loggers.{name}", "init_args": LOGGERS[name]} for name in LOGGERS]
    flags = [f"--trainer.logger={json.dumps(loggers)}", "--trainer.log_every_n_steps=10"]
    result = start(tmp_path, "fit", *SMALL, "--out=run", *flags).finish()
    assert result.returncode == 0, result.stdout + result.stderr
    metrics = steps(tmp_path / "run")
    names = {name for row in metrics.values() for name in row} - {"epoch"}
    accuracy = next(row["val/acc"] for row in metrics.values() if "val/acc" in row)
    runs = {}
    for path in tmp_path.rglob("*.wandb"):
        told = read_wandb_file(path)
        runs[path.relative_to(tmp_path).parts[0]] = told
        assert names <= {name for row in told["rows"] for name in row}
        assert [row["val/acc"] for row in told["rows"] if "val/acc" in row] == pytest.approx([accuracy])
        assert told["config"]["model"]["init_args"]["emb_size"] == 16
    assert {*runs} == {"run", "theirs"}
    assert runs["run"]["place"] != runs["theirs"]["place"]
    assert runs["theirs"]["place"][0].split("/")[1] == "theirs"
    assert "validation/predictions" in {name for row in runs["run"]["rows"] for name in row}
    (file,) = (tmp_path / "theirs").rglob("metrics.csv")
    assert yaml.safe_load(file.with_name("hparams.yaml").read_text())["model"]["init_args"]["emb_size"] == 16
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["val/acc"]) for row in rows if row.get("val/acc")] == pytest.approx([accuracy])


def test_the_logger_of_a_module_s_code_is_the_first_of_the_config(in_folder, capsys):
    """PL#16238: ours come behind it, and have what Lightning logs."""
    shutil.copy(Path(__file__).with_name("talks.py"), "talks.py")
    loggers = [{"class_path": "talks.Own", "save_dir": "theirs"}, {"class_path": "CSVLogger", "save_dir": "second"}]
    flags = ["--module=talks.Talks", f"--trainer.logger={json.dumps(loggers)}"]
    flags.append("--trainer.profiler={class_path: SimpleProfiler, filename: times}")
    assert main(["fit", *SMALL, "--out=run", "--test=false", *flags]) == 0
    (file,) = Path("theirs").rglob("metrics.csv")
    assert f"log_dir {file.parent}\n" in capsys.readouterr().out
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["own"] for row in rows if row["own"]] == ["7.0"]
    of_second = next(Path("second").rglob("metrics.csv")).read_text()
    accuracy = next(row["val/acc"] for row in read_metrics(Path("run")) if "val/acc" in row)
    assert [float(row["val/acc"]) for row in rows if row["val/acc"]] == pytest.approx([accuracy])
    assert "own" not in of_second
    assert Path("run/fit-times.txt").is_file()


@pytest.mark.parametrize(("kind", "name"), [("Talks", "experiment"), ("Watches", "watch")])
def test_code_that_calls_a_logger_which_no_config_names_is_told_to_name_one(in_folder, capsys, kind, name):
    shutil.copy(Path(__file__).with_name("talks.py"), "talks.py")
    assert main(["fit", *SMALL, "--out=run", f"--module=talks.{kind}"]) == 2
    said = f"lightning fit: self.logger.{name}: the config has no logger of Lightning (give the one your code "
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    assert not Path("run").exists()


def test_a_run_that_wandb_is_disabled_for_does_not_need_it(in_folder, monkeypatch, capsys):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    flags = ["--wandb.mode=disabled", '--trainer.callbacks=[{"class_path": "ModelCheckpoint", "monitor": "val/loss"}]']
    assert main(["fit", *SMALL, "--out=run", *flags]) == 0
    assert list(Path("run/model_checkpoints").glob("*.ckpt"))
    assert not Path("run/wandb").exists()
    assert "W&B" not in capsys.readouterr().out
