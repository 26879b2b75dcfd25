"""Mistakes in keys, types and values, found all at once; the installed command is asked in test_errors.py."""

from __future__ import annotations

import pytest
from runs import REPOSITORY

from vit_lightning.cli import main

DIGITS = f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}"

CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key of the data": ([DIGITS, "--data.batchsize=3"], ["data.batchsize=3", "data.batch_size"]),
    "unknown key of the optimizer": (
        [DIGITS, "--optimizer.learning_rate=1"],
        ["optimizer.learning_rate=1", "did you mean optimizer.lr?"],
    ),
    "fraction for a whole number": ([DIGITS, "--data.batch_size=8.5"], ["data.batch_size=8.5", "an int"]),
    "word for a rate": ([DIGITS, "--optimizer.lr=fast"], ["optimizer.lr=fast", "a finite float"]),
    "unknown schedule": (
        [DIGITS, "--optimizer.schedule=step"],
        ["optimizer.schedule=step", "cosine, linear, wsd, constant"],
    ),
    "unknown way to clip": (
        [DIGITS, "--trainer.gradient_clip_algorithm=nrom", "--trainer.gradient_clip_val=-1"],
        ["trainer.gradient_clip_algorithm=nrom", "norm, value", "trainer.gradient_clip_val=-1"],
    ),
    "two averages": (
        [DIGITS, "--ema.decay=0.9", '--trainer.callbacks=[{"class_path": "EMAWeightAveraging"}]'],
        ["ema.decay=0.9 beside trainer.callbacks.EMAWeightAveraging"],
    ),
    "the rest of what is trained": (
        [DIGITS, "--ema.decay=1", "--loss.name=mse", "--optimizer.name=adagrad", "--distillation.teacher=nowhere"],
        [
            "ema.decay=1",
            "loss.name=mse",
            "ce, bce",
            "optimizer.name=adagrad",
            "adamw, adam, sgd, lamb, lion, muon",
            "nowhere",
        ],
    ),
    "unknown positions": ([DIGITS, "--model.positions=rotary"], ["model.positions=rotary", "learned, sincos2d, none"]),
    "one number for two": ([DIGITS, "--optimizer.betas=0.9"], ["optimizer.betas=0.9", "a list of 2"]),
    "wrong precision": ([DIGITS, "--trainer.precision=8-bit"], ["trainer.precision=8-bit", "bf16-mixed"]),
    "empty page": (["--config=empty.yaml"], ["config=empty.yaml", "no keys"]),
    "page that is no text": (["--config=binary.yaml"], ["config=binary.yaml", "no text"]),
    "page that is a folder": (["--config=."], ["config=.", "directory"]),
    "network that is not there": ([DIGITS, "--model.class_path=no.Net"], ["model.class_path=no.Net", "--trust-config"]),
    "negative width": ([DIGITS, "--model.emb_size=-8"], ["model.emb_size=-8", "at least 1"]),
    "negative epochs": ([DIGITS, "--trainer.max_epochs=-5"], ["trainer.max_epochs=-5", "at least 1"]),
    "dropout of one": ([DIGITS, "--model.emb_dropout=1.0"], ["model.emb_dropout=1.0", "below 1"]),
    "negative drop path": ([DIGITS, "--model.drop_path=-0.1"], ["model.drop_path=-0.1", "at least 0"]),
    "infinite decay": ([DIGITS, "--optimizer.weight_decay=inf"], ["optimizer.weight_decay=inf", "finite"]),
    "test of a missing run": (["COMMAND test", "--ckpt=nowhere"], ["ckpt=nowhere", "neither"]),
    "several values of one class": (
        [DIGITS, "--model.depth=0", "--model.emb_dropout=1", "--model.attention.dropout=2", "--model.num_heads=5"],
        ["model.depth=0", "model.emb_dropout=1.0", "model.attention.dropout=2.0", "model.num_heads=5"],
    ),
    "data and model at once": (
        [DIGITS, "--data.split_seed=-1", "--data.batch_size=0", "--model.patch_size=3"],
        ["data.split_seed=-1", "data.batch_size=0", "model.patch_size=3"],
    ),
    "a missing page and a wrong flag": (
        ["--config=nowhere.yaml", "--config=binary.yaml", "--trainer.max_epoch=2", "--data=ImageFolder"],
        ["config=nowhere.yaml", "config=binary.yaml", "trainer.max_epoch=2"],
    ),
    "no device": ([DIGITS, "--trainer.devices=0", "--data.batch_size=0"], ["trainer.devices=0", "data.batch_size=0"]),
    "a callback's argument": (["--config=callback.yaml"], ["trainer.callbacks.0.patience=long", "an int"]),
    "a callback's choice": (["--config=mode.yaml"], ["trainer", "mode"]),
    "a class with a wrong argument": (
        ["--config=augment.yaml"],
        ["data.augment.1.paddding=3", "data.augment.1.padding"],
    ),
}

PAGES = {
    "empty.yaml": b"# nothing\n",
    "binary.yaml": bytes(range(128, 256)),
    "callback.yaml": b"model: {patch_size: 4}\ntrainer:\n  callbacks:\n"
    b"  - {class_path: EarlyStopping, init_args: {monitor: val/loss, patience: long}}\n",
    "mode.yaml": b"model: {patch_size: 4}\ntrainer:\n  callbacks:\n"
    b"  - {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/loss, mode: up}}\n",
    "augment.yaml": b"model: {patch_size: 4}\ndata:\n  augment:\n"
    b"  - class_path: HorizontalFlip\n  - {class_path: RandomCrop, init_args: {paddding: 3}}\n",
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_key_and_value(in_folder, capsys, name):
    for page, content in PAGES.items():
        (in_folder / page).write_bytes(content)
    arguments, parts = CASES[name]
    command, rest = ("test", arguments[1:]) if arguments[0] == "COMMAND test" else ("fit", arguments)
    assert main([command, *rest]) == 2
    said = capsys.readouterr().err
    assert 1 <= len(said.splitlines()) <= 15
    for part in parts:
        assert part in said
    assert {path.name for path in in_folder.iterdir()} == {*PAGES}


def test_more_problems_than_fit_on_a_screen_are_counted(in_folder, capsys):
    assert main(["fit", DIGITS, *(f"--model.unknown{number}=1" for number in range(30))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 15
    assert "and 18 more" in lines[-1]


def test_a_secret_of_the_environment_does_not_get_into_a_page(in_folder, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    assert main(["fit", DIGITS, "--wandb.notes=my key is 0123456789abcdef0123", "--out=run"]) == 2
    said = capsys.readouterr().err
    assert "wandb.notes holds the value of WANDB_API_KEY" in said
    assert "0123456789abcdef0123" not in said
    assert not (in_folder / "run").exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            ["--optimizer.class_path=NAdam", "--optimizer.nesterov=true"],
            "optimizer.nesterov=true: torch.optim.NAdam takes no nesterov (choose ",
        ),
        (["--optimizer.class_path=torch.optim.Nadam"], "is not there (did you mean torch.optim.NAdam?)"),
        (["--optimizer.class_path=LBFGS"], "LBFGS doesn't support per-parameter options"),
        (["--optimizer.class_path=SparseAdam"], "SparseAdam does not support dense gradients"),
        (["--optimizer.class_path=Rprop"], "Rprop has no weight decay (give optimizer.weight_decay=0)"),
        (["--optimizer.class_path=NAdam", "--optimizer.name=sgd"], "optimizer.name=sgd beside optimizer.class_path"),
        (["--optimizer.schedule.class_path=ReduceLROnPlateau"], "required positional argument: 'metrics'"),
        (
            ["--loss.class_path=CrossEntropyLoss", "--loss.reduction=none"],
            "shape (4,), torch.float32 where a tensor of one",
        ),
        (
            ["--loss.class_path=MultiMarginLoss", "--data.mixing=[MixUp]"],
            "MultiMarginLoss: with class probabilities, which data.mixing makes: ",
        ),
        (["--metrics=[ConfusionMatrix]", "--model.depth=0"], "MulticlassConfusionMatrix: it gives (10, 10)"),
        (["--metrics=[ConfusionMatrix]", "--model.depth=0"], "model.depth=0"),
        (['--metrics=[{"class_path": "F1Score", "averge": "micro"}]'], "did you mean metrics.average?"),
        (['--metrics=[{"class_path": "Accuracy", "name": "acc"}]'], "metrics.name=acc"),
        (["--metrics=[F1Score]", "--checkpoint.monitor=val/f1"], "val/acc5, val/f1_score, "),
        (
            ["--ema.class_path=NAdam"],
            "ema.class_path=NAdam: ema takes no class",
        ),
        (
            ["--model.class_path=timm.create_model", "--model.model_name=vit_tiny", "--model.num_classes=10"],
            "model.model_name=vit_tiny: timm has no such model (did you mean vit_tiny_patch16_224, ",
        ),
        (["--model.attention.class_path=torch.nn.Nothing"], "model.attention.class_path=torch.nn.Nothing is not there"),
        (["--loss=3"], "loss=3: give its options (name, label_smoothing)"),
        (['--data.augment=[{"padding": 3}]'], "data.augment: a class_path is missing"),
    ],
)
def test_an_answer_says_what_to_do(in_folder, capsys, flags, part):
    if "timm" in flags[0]:
        pytest.importorskip("timm")
    assert main(["fit", "--model.patch_size=4", *flags] if "timm" not in flags[0] else ["fit", *flags]) == 2
    assert part in capsys.readouterr().err
