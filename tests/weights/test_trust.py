"""What comes inside a file of weights is data, whatever command or function reads it."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from runs import SMALL

from vit_lightning import Digits, UserError, ViTClassifier, load
from vit_lightning.cli import main
from vit_lightning.config.networks import make_teacher, network_in_file
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO, read_checkpoint
from vit_lightning.weights.init_from import open_initial_weights
from vit_lightning.weights.trust import refuse_untrusted

FOREIGN = """
from pathlib import Path
from torch import nn
Path("harmed").write_text("ran")
class Thing(nn.Identity): ...
"""

DOORS = {
    "load": lambda place: load(place),
    "load_from_checkpoint": lambda place: ViTClassifier.load_from_checkpoint(place),
    "teacher": lambda place: make_teacher(place, Digits()),
    "export": ["export", "--ckpt={}", "--out=out", "--to=timm"],
    "embed": ["embed", "--ckpt={}", "images"],
    "summary": ["summary", "--ckpt={}"],
    "test": ["test", "--ckpt={}"],
    "predict": ["predict", "--ckpt={}"],
    "init_from": ["fit", *SMALL, "--init_from={}"],
}


@pytest.fixture
def foreign(in_folder, monkeypatch):
    """A module that could be imported, and leaves its mark if it is."""
    (in_folder / "foreign_part.py").write_text(FOREIGN)
    (in_folder / "images").mkdir()
    (in_folder / "images/a.png").write_bytes(b"")
    monkeypatch.syspath_prepend(in_folder)
    yield "foreign_part.Thing"
    sys.modules.pop("foreign_part", None)


def checkpoint_naming(model, trained):
    contents = read_checkpoint(trained[0] / "checkpoints/best.ckpt", mmap=False)
    AtomicCheckpointIO().save_checkpoint({**contents, "config": {**contents["config"], "model": model}}, "evil.ckpt")
    return "evil.ckpt"


@pytest.mark.parametrize("door", DOORS)
def test_no_door_imports_what_a_file_names(door, foreign, trained, capsys):
    attention = {"class_path": "vit_lightning.ViT", "init_args": {"attention": {"class_path": foreign}}}
    for model in ({"class_path": foreign}, attention):
        place, read = checkpoint_naming(model, trained), DOORS[door]
        if callable(read):
            with pytest.raises(UserError, match=r"class_path=foreign_part.Thing: .*trust=True"):
                read(place)
        else:
            assert main([word.format(place) for word in read]) == 2
            said = capsys.readouterr().err
            assert "class_path=foreign_part.Thing: a file of weights may name" in said
            assert "trust" in said
    assert not Path("harmed").exists()


def test_hyper_parameters_of_a_checkpoint_build_nothing(foreign, trained):
    """They are not read: its weights and its config are all that is needed."""
    nested = {"_instantiator": "foreign_part.Thing", "_class_path": foreign, "network": {"class_path": foreign}}
    hyper = {"hyper_parameters": nested, "datamodule_hyper_parameters": nested, "hparams_name": "kwargs"}
    AtomicCheckpointIO().save_checkpoint({**read_checkpoint(trained[0] / "checkpoints/best.ckpt"), **hyper}, "a.ckpt")
    assert main(["test", "--ckpt=a.ckpt"]) == 0
    assert main(["fit", *SMALL, "--init_from=a.ckpt", "--print_config"]) == 0
    assert not Path("harmed").exists()


@pytest.mark.parametrize("form", ["beside", "inside a checkpoint of a plain Trainer"])
def test_descriptions_of_weights_import_nothing(form, foreign):
    config, weights = {"model": {"class_path": foreign}}, {"x": torch.zeros(1)}
    place = "a.pth"
    torch.save({"state_dict": weights, "config": config} if "inside" in form else weights, place)
    Path("a.json").write_text(json.dumps(config if form == "beside" else {}))
    for read in (load, lambda place: open_initial_weights(place, network_in_file).described()):
        with pytest.raises(UserError, match=r"model.class_path=foreign_part.Thing: a file of weights may name"):
            read(place)
    assert main(["export", f"--ckpt={place}", "--out=out", "--to=timm"]) == 2
    assert not Path("harmed").exists()


@pytest.mark.parametrize(
    ("config", "option"),
    [
        ({"trainer": {"callbacks": ["os.Thing"]}}, "trainer.callbacks.0=os.Thing"),
        ({"trainer": {"callbacks+": [{"class_path": "a.b.C"}]}}, "trainer.callbacks+.0.class_path=a.b.C"),
        ({"model": "foreign.Net"}, "model=foreign.Net"),
        ({"model": '{"class_path": "foreign.Net"}'}, "model.class_path=foreign.Net"),
        ({"model": {"init_args": {"activation": "os.system"}}}, "model.init_args.activation=os.system"),
        ({"model": {"init_args": {"a": ["torch.hub.load"]}}}, "model.init_args.a.0=torch.hub.load"),
        ({"model": {"class_path": "torch.load"}}, "model.class_path=torch.load"),
        ({"model": {"class_path": "lightning.pytorch.cli.LightningCLI"}}, "LightningCLI: a file of weights may name"),
        ({"model": {"class_path": "lightning.pytorch.LightningModule.load_from_checkpoint"}}, "may name modules"),
        ({"model": {"class_path": "torchvision.models.vgg.torch.hub.load"}}, "hub.load: a file of weights may name"),
        ({"data": {"dataset_class": "torchvision.datasets.folder.default_loader"}}, "data.dataset_class="),
        ({"data": {"class_path": "torchvision.datasets.LSUN"}}, "data.class_path=torchvision.datasets.LSUN"),
        ({"data": {"init_args": {"loader": "torchvision.io.read_file"}}}, "data.init_args.loader=torchvision.io"),
        ({"model": {"class_path": "vit_lightning.commands.fit.fit"}}, "may name modules, datasets and functions"),
    ],
)
def test_what_a_file_of_weights_must_not_name(config, option):
    with pytest.raises(UserError) as caught:
        refuse_untrusted(config)
    assert option in str(caught.value)
    assert "--trust on the command line" in str(caught.value)


def test_what_a_file_of_weights_may_name(trained):
    refuse_untrusted(read_checkpoint(trained[0] / "checkpoints/best.ckpt")["config"])
    refuse_untrusted(
        {
            "experiment": "os.path.first",
            "weights": {"file": "json.pth"},
            "model": {"class_path": "timm.create_model", "init_args": {"model_name": "vit_tiny_patch16_224.augreg"}},
            "module": {"class_path": "ViTClassifier", "init_args": {"loss": {"class_path": "torch.nn.MSELoss"}}},
            "data": {
                "class_path": "vit_lightning.ImageFolder",
                "init_args": {"root": "photos.v2", "labels": "test.csv"},
            },
            "metrics": ["torchmetrics.F1Score", {"name": "acc", "function": "torchmetrics.functional.accuracy"}],
            "optimizer": {"class_path": "torch.optim.AdamW"},
            "trainer": {"callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStopping"}], "strategy": "ddp"},
        }
    )


OWN = """
from torch import nn
class Mix(nn.Module):
    def __init__(self, emb_size, num_heads):
        super().__init__()
        self.mix = nn.Linear(emb_size, emb_size)
    def forward(self, tokens):
        return self.mix(tokens)
"""


def test_a_trusted_run_brings_the_files_of_its_classes(in_folder, capsys):
    Path("own_mix.py").write_text(OWN)
    assert main(["fit", *SMALL, "--model.attention.class_path=own_mix.Mix", "--out=run"]) == 0
    Path("own_mix.py").write_text("raise RuntimeError('the copy of the run counts')")
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")  # where no file has the name
    images = torch.randn(2, 1, 8, 8)
    with pytest.raises(UserError, match=r"own_mix.Mix: .* if you wrote or read that code: trust=True$"):
        load("../run")
    logits = load("../run", trust=True).network(images)
    assert torch.equal(load("../run", trust=True, num_classes=10).network(images), logits)
    assert torch.equal(
        ViTClassifier.load_from_checkpoint("../run/checkpoints/best.ckpt", trust=True).eval()(images), logits
    )
    assert torch.equal(make_teacher("../run", Digits(), trust=True).network(images), logits)
    for command in (["export", "--out=out"], ["embed", "--out=features.npz"], ["predict"]):
        assert main([*command, "--ckpt=../run", "--trust"]) == 0
    capsys.readouterr()
    assert main(["fit", *SMALL, "--init_from=../run", "--trust", "--out=second"]) == 0
    assert "tensors taken" in capsys.readouterr().out
    assert Path("second/own_mix.py").read_text() == OWN
    assert main(["export", "--ckpt=../run", "--out=other", "--to=timm", "--trust"]) == 2
    assert "attention: Mix is no block of ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"class_path": "torchvision.models.segmentation.fcn_resnet50"}, "model.weights_backbone=null"),
        ({"class_path": "torchvision.models.vit_b_16", "init_args": {"weights": "DEFAULT"}}, "give init_from="),
    ],
    ids=["backbone", "weights"],
)
def test_a_model_in_a_file_fetches_and_reads_nothing_else(model, words, trained, in_folder, monkeypatch):
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *given: pytest.fail(f"fetches {given}"))
    with pytest.raises(UserError, match=words):
        load(checkpoint_naming(model, trained))
