"""Mistakes of a first day, given to the command in this process: the right cause comes first."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from runs import REPOSITORY

from vit_lightning.cli import main

PLAN = REPOSITORY / "experiments" / "ablations" / "pooling.yaml"
MISTAKES = {
    "fit": "give a config: lightning fit --config digits (lightning configs lists",
    "fit --trainer.max_epochs=1": "give a config",
    "check-data": "give a config: lightning check-data --config digits",
    "fit digits.yaml --model.dept=3": "did you mean model.depth?",
    "train": "there is no command train, did you mean fit?",
    "evaluate --ckpt=x": "did you mean test?",
    "sweep": "did you mean ablate?",
    "FIT": "did you mean fit?",
    "lr_find": "did you mean lr-find?",
    "--config=digits.yaml fit": "the command comes first: lightning fit --config=digits.yaml",
    "digits.yaml": "the command comes first: lightning fit digits.yaml",
    "fit -config digits.yaml": "-config: an option has two dashes and its full name: --config",
    "fit digits.yaml --model.depth= 3": "there must be no space after the equals sign: --model.depth=3",
    "fit digits.yaml model.depth=3": "did you mean --model.depth=3?",
    "fit digits.yaml folder": "folder: unexpected argument, a folder",
    "fit --config": "--config needs a value: --config=CONFIG.yaml",
    "fit digits.yaml --experiment": "--experiment needs a value",
    "fit digits.yaml --out": "--out needs a value",
    "fit --config=digit.yaml": "No such file or directory (did you mean digits.yaml?)",
    "fit --config=families/tim": "(did you mean families/timm? lightning configs lists those of the package)",
    "fit --config=pooling": "config=pooling is the plan of an ablation, not a config: lightning ablate pooling",
    "ablate": "give a plan: lightning ablate pooling",
    "ablate cifar10_cpu": "is a config, not a plan",
    "configs digit": "digit: there is no such config (did you mean digits?",
    "configs digits digits_short": "digits_short: unexpected argument",
    "fit --config=folder": "Is a directory (did you mean folder/one.yaml?)",
    "fit --config=empty.yaml": "config=empty.yaml is empty",
    "fit --config=text.yaml": "config=text.yaml is no mapping",
    "fit --config=tabs.yaml": "line 2, column 1: found character '\\t' that cannot start any token (indent with spaces",
    "fit --config=typo.yaml": "optimzier: there is no such option (did you mean optimizer?)",
    "fit --config=plan.yaml": "config=plan.yaml is the plan of an ablation, not a config: lightning ablate plan.yaml",
    "ablate digits.yaml": "digits.yaml is a config, not a plan",
    "ablate nowhere.yaml": "No such file",
    "test": "ckpt is missing",
    "test --ckpt": "--ckpt needs a value: --ckpt=RUN_FOLDER",
    "test --ckpt=nowhere": "ckpt=nowhere is neither a run folder nor a file",
    "test --ckpt=folder": "holds neither checkpoints/best.ckpt nor",
    "test --ckpt=digits.yaml": "no zip file of torch.save",
    "report folder": "folder is no ablation: it holds no ledger.json",
    "report nowhere": "nowhere is no folder",
    "sync": "give one folder",
    "fit --resume=folder": "is not a run folder with a config.yaml",
    "fit digits.yaml --trust_config=yes": "trust-config=yes must be true or false",
    "fit digits.yaml --help.lost": "help.lost: there is no such group",
    "fit digits.yaml --epochs=3 --lr=1 --model-depth=3": "did you mean trainer.max_epochs?",
    "fit digits.yaml --optimizer=adam": "did you mean optimizer.name=adam?",
    "fit digits.yaml --model=resnet18": "did you mean torchvision.models.resnet18?",
    "fit digits.yaml --model=ViTT": "model.class_path=ViTT is not there (did you mean ViT?)",
    "fit digits.yaml --data=cifar10": "did you mean CIFAR10?",
    "fit digits.yaml --data.augment=[HorizonalFlip]": "did you mean HorizontalFlip?",
    "fit digits.yaml --data.augment='[HorizontalFlip, {class_path: RandomCrop, paddin: 3}]'": "augment.1.padding?",
    "fit digits.yaml --trainer.callbacks=[EarlyStoping]": "EarlyStoping is not there (did you mean EarlyStopping?)",
    "fit digits.yaml --trainer.logger=CSVLoger": "CSVLoger is not there (did you mean CSVLogger?)",
    "fit digits.yaml --trainer.callbacks=[{class_path:EarlyStopping}]": "with a space",
    "fit digits.yaml --metrics=[F1]": "metrics.class_path=F1 is no metric (did you mean F1Score?)",
    "predict --ckpt=nowhere digits.yaml": "digits.yaml is no image and no checkpoint (a config is given as",
    "shard digits.yaml out": "data.class_path=Digits holds decoded images, and so nothing to shard (choose ImageFolder",
    "fit digits.yaml --data.batch_size=abc": "data.batch_size=abc must be an int",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the files that the mistakes name."""
    folder = tmp_path_factory.mktemp("first day")
    digits = (REPOSITORY / "experiments" / "digits.yaml").read_text()
    texts = {"empty": "# nothing\n", "text": "just text\n", "tabs": "model:\n\tdepth: 3\n", "digits": digits}
    texts["typo"] = digits.replace("optimizer:", "optimzier:", 1)
    for name, text in {**texts, "plan": PLAN.read_text(), "folder/one": digits, "experiments/digits": digits}.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("words", MISTAKES)
def test_the_cause_of_a_mistake_comes_first(words, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    assert main(shlex.split(words)) == 2
    output = capsys.readouterr()
    said = output.err.splitlines()
    assert MISTAKES[words] in said[0]
    assert len(said) == (3 if "--epochs" in words else 1), output.err
    assert max(map(len, said)) < 500
    assert output.out == ""
    assert sorted(place.rglob("*")) == before
