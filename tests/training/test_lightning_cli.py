"""A config of LightningCLI trains here what it trains there."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from runs import SMALL, killed_after, logged_rows, same_weights

from vit_lightning import UserError
from vit_lightning.cli import main
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_results

CONFIG = """
seed_everything: true
ckpt_path: null
trainer:
  accelerator: cpu
  default_root_dir: null
  enable_checkpointing: null
  use_distributed_sampler: true
  barebones: false
  logger: null
  max_epochs: 4
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val_loss, save_last: true}
model: {class_path: cli_parts.Lit, init_args: {num_classes: 3, hidden: 16}}
data: {class_path: cli_parts.DM, init_args: {batch_size: 8}}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {T_max: 4}}
"""
FIT = ("fit", "--config=cli.yaml", "--wandb.mode=disabled", "--test=false")


@pytest.fixture
def cli(in_folder, monkeypatch) -> Path:
    shutil.copy(Path(__file__).with_name("cli_parts.py"), in_folder)
    (in_folder / "cli.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(in_folder)
    monkeypatch.setattr(sys, "argv", ["main.py"])
    yield in_folder
    sys.modules.pop("cli_parts", None)


def rates() -> list[float]:
    """Returns the learning rates of the steps since the last call."""
    taken = sys.modules["cli_parts"].Lit.rates
    found = [*taken]
    taken.clear()
    return found


def theirs(folder: Path, *flags: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns learning rates and weights of a training by LightningCLI itself."""
    quiet = (
        "--trainer.logger=false",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={folder}/cli",
    )
    module = LightningCLI(args=["fit", "--config=cli.yaml", *quiet, *flags]).model
    return rates(), {name: weight.detach().clone() for name, weight in module.named_parameters()}


@pytest.mark.parametrize(
    "changed", [{}, {"lr_scheduler": None, "optimizer": "torch.optim.NAdam"}], ids=["cosine", "constant"]
)
def test_a_config_of_lightning_s_command_line_trains_the_same_weights(cli, changed):
    """Of LightningCLI itself: its learning rates epoch by epoch, and the class's own weight decay, of all weights."""
    config = {name: value for name, value in {**yaml.safe_load(CONFIG), **changed}.items() if value is not None}
    Path("cli.yaml").write_text(yaml.safe_dump(config))
    expected_rates, expected = theirs(cli)
    assert main([*FIT, "--out=run"]) == 0
    assert rates() == pytest.approx(expected_rates, rel=1e-12)
    state = read_checkpoint(Path("run/checkpoints/last.ckpt"))["state_dict"]
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-6)


def test_a_schedule_of_epochs_goes_on_in_a_resumed_run(in_folder):
    """Also from within an epoch; config.yaml says that it counts epochs."""
    flags = ["fit", *SMALL, "--trainer.max_epochs=3", "--wandb.mode=disabled", "--test=false", "--data.batch_size=200"]
    flags += ["--trainer.log_every_n_steps=1", "--checkpoint.every_n_steps=1"]
    Path("cli.yaml").write_text("lr_scheduler: {class_path: ExponentialLR, gamma: 0.5}\n")
    flags.append("--config=cli.yaml")
    with killed_after(10):
        main([*flags, "--out=run"])
    assert main(["fit", "--resume=run"]) == 0
    steps = {row["step"]: row["lr"] for row in logged_rows(Path("run")) if "lr" in row}
    assert [steps[step] for step in range(21)] == pytest.approx([1e-3] * 7 + [5e-4] * 7 + [2.5e-4] * 7, rel=1e-6)
    schedule = yaml.safe_load(Path("run/config.yaml").read_text())["optimizer"]["schedule"]
    assert schedule["init_args"] == {"gamma": 0.5, "last_epoch": -1, "interval": "epoch"}


def test_a_config_of_lightning_s_command_line_runs_with_its_classes_monitor_and_checkpoints(cli, capsys):
    """The module's num_classes is that of the data; ModelCheckpoint's monitor chooses best.ckpt, too."""
    assert main([*FIT, "--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=2", "--out=run"]) == 0
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert resolve(["--config=run/config.yaml"]).config == config
    assert (config["checkpoint"]["monitor"], config["checkpoint"]["mode"]) == ("val_loss", "min")
    assert config["data"]["init_args"]["num_classes"] == 3
    assert config["module"] == {"class_path": "cli_parts.Lit", "init_args": {"hidden": 16}}
    theirs = resolve(["--config=cli.yaml", "--test=false", '--trainer.callbacks=[{"class_path": "cli_parts.Best"}]'])
    assert [theirs.config["checkpoint"][key] for key in ("monitor", "mode")] == ["accuracy", "max"]
    names = {folder: {path.name for path in Path("run", folder).iterdir()} for folder in CHECKPOINTS}
    assert names == CHECKPOINTS
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    of_validation = r"accuracy \d\.\d{4}  val_loss \d\.\d{4}"
    assert [bool(re.search(of_validation, line)) for line in lines] == [False, True, False]
    assert not any("number" in line for line in lines), "logged only after the line, which would show the last epoch's"
    assert (
        resolve(["--config=cli.yaml", "--checkpoint.monitor=accuracy", "--test=false"]).settings.checkpoint.monitor
        == "accuracy"
    )


CHECKPOINTS = {
    "checkpoints": {"best.ckpt", "last.ckpt", "previous.ckpt"},
    "model_checkpoints": {"epoch=1-step=12.ckpt", "last.ckpt"},
}


def test_options_of_the_model_are_those_of_a_module_that_takes_no_network(cli):
    """As with LightningCLI: of flags, in either form, and of a further config."""
    Path("over.yaml").write_text("model: {init_args: {hidden: 8}}")
    for flag in ("--model.hidden=8", "--model.init_args.hidden=8", "--config=over.yaml"):
        config = resolve(["--config=cli.yaml", flag, "--test=false"]).config
        assert config["module"] == {"class_path": "cli_parts.Lit", "init_args": {"hidden": 8}}
    Path("text.yaml").write_text("{module: cli_parts.Lit, model: {hidden: 8}}")
    flags = ["--config=text.yaml", "--data=cli_parts.DM", "--data.num_classes=3", "--module.num_classes=3"]
    assert resolve([*flags, "--test=false"]).config["module"]["init_args"] == {"hidden": 8}
    other = ["--module=vit_lightning.ViTClassifier", "--model.patch_size=4", "--data.num_classes=3", "--test=false"]
    config = resolve(["--config=cli.yaml", *other, "--lr_scheduler=null"]).config
    assert (config["model"]["init_args"]["patch_size"], config["optimizer"]["init_args"]["schedule"]) == (4, "constant")
    with pytest.raises(UserError, match=r"^module.hiden=8: there is no such option \(did you mean module.hidden\?\)$"):
        resolve(["--config=cli.yaml", "--model.hiden=8", "--test=false"])


def test_what_only_the_training_shows_is_said_without_a_traceback(cli, capsys):
    """A metric that the module does not log, and a test without a test_step; the way of its loss is known before."""
    flags = ["--config=cli.yaml", "--test=false"]
    assert resolve([*flags, "--checkpoint.monitor=val_loss"]).config["checkpoint"]["mode"] == "min"
    with pytest.raises(UserError, match=r"^checkpoint.mode=max: lower values of val_loss .* \(give mode=min\)$"):
        resolve([*flags, "--checkpoint.monitor=val_loss", "--checkpoint.mode=max"])
    with pytest.raises(UserError, match=r"^checkpoint.mode is missing: whether higher \(max\) or lower \(min\) values"):
        resolve([*flags, "--checkpoint.monitor=val_nll"])
    theirs = '{"class_path": "cli_parts.Watch", "monitor": ["val_loss", "accuracy"], "mode": "max"}'
    assert resolve([*flags, f"--trainer.callbacks+={theirs}"]), "what a callback of others takes is its own"
    assert main([*FIT, "--trainer.limit_val_batches=0.01", "--out=none"]) == 2
    assert "limit_val_batches" in capsys.readouterr().err
    assert not Path("none").exists()
    stopping = '{"class_path": "EarlyStopping", "monitor": "val/loss"}'
    assert main([*FIT, f"--trainer.callbacks+={stopping}", "--out=run"]) == 2
    assert "Early stopping conditioned on metric `val/loss` which is not available" in capsys.readouterr().err
    assert main([*FIT, "--out=other"]) == 0
    assert "test again" not in capsys.readouterr().out
    assert main(["test", "--ckpt=other", "--trust"]) == 2
    assert "has no test_step (give it one, or fit with test=false)" in capsys.readouterr().err


def test_facts_of_the_data_that_a_module_is_given_must_be_true(cli):
    flags = ["--config=cli.yaml", "--test=false"]
    with pytest.raises(UserError, match=r"^module.num_classes=3 does not fit the data, which has 4 \(leave it out\)$"):
        resolve([*flags, "--data.num_classes=4"])
    with pytest.raises(UserError, match=r"^data.num_classes=None: give data.num_classes"):
        resolve(["--module=cli_parts.Lit", "--data=cli_parts.DM", "--test=false"])


def test_loaders_of_a_module_are_used_where_no_data_are_given(cli):
    """As by Lightning; other data come first, and what the loaders do not take is refused."""
    base = [*FIT[:1], "--module=cli_parts.Own", "--checkpoint.monitor=val_loss", *FIT[2:3]]
    base += ["--optimizer.lr=0.01", "--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
    assert main([*base, "--module.steps=3", "--out=own"]) == 0
    given = ["--data=cli_parts.Loaders", "--data.batch_size=16", "--data.num_classes=3"]
    assert main([*base, *given, "--out=given"]) == 0
    with killed_after(4):
        main([*base, "--module.steps=3", "--out=run"])
    assert main(["fit", "--resume=run"]) == 0
    same_weights("given", "own", "run")
    results = [read_results(Path(name))["test/acc"] for name in ("given", "own", "run")]
    assert results[0] == results[1] == results[2]
    config = yaml.safe_load(Path("own/config.yaml").read_text())
    assert config["data"]["class_path"] == "cli_parts.Own"
    for flag, problem in {"--data.batch_size=16": "batch_size=", "--module.hidden=x": "cli_parts.py, line "}.items():
        with pytest.raises(UserError, match=problem):
            resolve([*base[1:], flag])
    with pytest.raises(UserError, match=r"^data is missing: cli_parts.OwnHolder has loaders .*takes a network"):
        resolve(["--module=cli_parts.OwnHolder", "--model.patch_size=4"])


def test_a_network_inside_a_module_is_the_model_and_must_be_given(cli):
    network = "{class_path: cli_parts.Net, init_args: {num_classes: 3, width: 5}}"
    given = "cli_parts.Lit, init_args: {num_classes: 3, hidden: 16}"
    Path("cli.yaml").write_text(CONFIG.replace(given, f"cli_parts.Holder, init_args: {{network: {network}}}"))
    config = resolve(["--config=cli.yaml", "--data.num_classes=3", "--test=false"]).config
    assert config["module"] == {"class_path": "cli_parts.Holder"}
    assert config["model"] == {"class_path": "cli_parts.Net", "init_args": {"num_classes": 3, "width": 5}}
    Path("cli.yaml").write_text(CONFIG.replace(given, "cli_parts.Holder"))
    with pytest.raises(UserError) as caught:
        resolve(["--config=cli.yaml", "--data.num_classes=3", "--test=false"])
    assert caught.value.problems == [
        "model is missing: module.class_path=cli_parts.Holder takes a network (give model, such as {preset: Ti/4})"
    ]
