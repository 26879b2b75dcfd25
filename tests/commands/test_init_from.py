"""Runs that start from other models, and trained models on images of other sizes."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from tensors import write_images

from vit_lightning import load, to_reference
from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.commands.resume import read_run
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.resolve import resolve
from vit_lightning.models.vit import ViT
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.weights.init_from import open_initial_weights
from vit_lightning.weights.options import model_config


def first_weights(place, network, interpolation, **facts):
    return open_initial_weights(place, network_in_file).fitted(network, interpolation, **facts)


DATA = ("--data=ImageFolder", "--data.num_workers=0", "--data.batch_size=8", "--trainer.accelerator=cpu")
MODEL = ("--model.patch_size=4", "--model.emb_size=16", "--model.depth=1", "--model.num_heads=2", "--model.pool=mean")
TABLE = "patch_embedding.positions.table"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images of two and of three classes, and a run on the first at 16 pixels."""
    folder = tmp_path_factory.mktemp("place")
    for number, name in enumerate("abc"):
        for root in ("two", "three"):
            if root == "three" or name != "c":
                write_images(folder / root / "train" / name, 16, seed=number)
                write_images(folder / root / "test" / name, 4, seed=number + 5)
    flags = [*DATA, *MODEL, f"--data.root={folder / 'two'}", "--data.image_size=16", "--trainer.max_epochs=1"]
    flags += ["--model.drop_path=0.1", "--model.layer_scale=0.1", "--model.feed_forward.dropout=0.1"]
    fit(resolve([*flags, f"--out={folder / 'run'}"]))
    return folder


def start(place, *flags, root="three"):
    return [*DATA, f"--data.root={place / root}", "--trainer.max_epochs=1", *flags]


def test_a_run_starts_from_another_at_another_size_with_other_classes(place, in_folder, capsys):
    shutil.copytree(place / "run", "first")
    flags = start(place, "--init_from=first", "--data.image_size=[24,8]", "--optimizer.lr=0")
    results = fit(resolve([*flags, "--out=second"]))
    said = capsys.readouterr().out
    line = "weights     from first (run): 19 tensors taken, positions 4x4 -> 6x2 bicubic, new head (2 -> 3 classes)\n"
    assert line in said
    report = json.loads(Path("second/init_from.json").read_text())
    assert set(report["new"]) == {"head.linear.weight", "head.linear.bias"}
    assert report["resized"] == {TABLE: "positions 4x4 -> 6x2 bicubic"}
    model = yaml.safe_load(Path("second/config.yaml").read_text())["model"]["init_args"]
    assert (model["emb_size"], model["pool"], model["layer_scale"]) == (16, "mean", 0.1)
    assert model["image_size"] == [24, 8]
    repeated = resolve(["--config=second/config.yaml"])
    assert repeated.config["model"]["init_args"] == model, "its config.yaml repeats it"
    assert model["drop_path"] == model["feed_forward"]["init_args"]["dropout"] == 0.0, "no regularisation comes along"
    before, after = (read_checkpoint(Path(name, "checkpoints/last.ckpt"))["state_dict"] for name in ("first", "second"))
    assert all(torch.equal(before[f"network.{name}"], after[f"network.{name}"]) for name in report["taken"])
    anew = resolve([*flags, "--resize_positions=reset", "--out=third"])
    weights = first_weights("first", anew.make_network(), anew.config["resize_positions"])
    assert set(weights.adapted.new) == {TABLE, "head.linear.weight", "head.linear.bias"}
    assert "new positions" in weights.sentence()
    assert not weights.adapted.resized
    shutil.rmtree("first")
    Path("second/results.json").unlink()
    again = fit(read_run(Path("second")))
    assert again["test/loss"] == results["test/loss"], "the source is not needed again"


def test_a_source_that_learned_from_images_cut_in_another_way_is_said(place, in_folder, capsys):
    """OpenTau#502: images that came to a folder change what is cut from it, and so does another split_seed."""
    shutil.copytree(place / "two/train", "images")
    flags = ["--data.root=images", "--data.image_size=16", "--trainer.max_epochs=1", "--test=false"]
    fit(resolve([*DATA, *MODEL, *flags, "--out=run"]))
    seen = "data.root=images: val and test are cut in another way than for run, which may have learned from them"
    whole = f"--data.root={Path('images').absolute()}"
    for number, more in enumerate(["", "--data.split_seed=1", whole, ""]):
        if number == 2:
            write_images(Path("images/b"), 20, seed=9)
        fit(resolve([*DATA, *flags, "--init_from=run", *filter(None, [more])]))
        place = f"data.root={Path('images').absolute() if more == whole else 'images'}"
        assert (seen.replace("data.root=images", place) in capsys.readouterr().out) == bool(number)


def test_options_of_the_config_go_before_those_of_the_source(place, in_folder, capsys):
    flags = start(place, f"--init_from={place / 'run'}", "--data.image_size=16", root="two")
    own = resolve([*flags, "--model.drop_path=0.2", "--model.num_heads=1", "--resize_positions=bilinear"])
    model = own.config["model"]["init_args"]
    assert (model["drop_path"], model["num_heads"], model["depth"]) == (0.2, 1, 1)
    notes = first_weights(str(place / "run"), own.make_network(), "bicubic").notes
    assert "something else than in the source: num_heads is 1 and not 2, dim_head is 16 and not 8, scale" in notes[0]
    assert main(["fit", *flags, "--model.emb_size=32", "--model.depth=2"]) == 2
    said = capsys.readouterr().err
    assert f"init_from={place / 'run'} is of another architecture than the model" in said
    assert "than the model: emb_size 16, not 32; depth 1, not 2; " in said
    assert "it lacks encoder.1.attention.fn.norm.weight" in said
    assert main(["fit", *flags, "--model.preset=Ti/4", "--optimizer.lr=fast"]) == 2
    assert "optimizer.lr=fast" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(("named", "text"), [("ab", ""), ("xy", ", new head: other classes"), ("", "")])
def test_a_head_is_new_for_other_classes_and_facts_that_differ_are_told(named, text, place, in_folder):
    network = resolve(start(place, f"--init_from={place / 'run'}", "--data.image_size=16", root="two")).make_network()
    torch.save(network.state_dict(), "pytorch_model.bin")
    config = {"model": {"class_path": "vit_lightning.ViT", "init_args": model_config(network)["init_args"]}}
    facts = {"class_names": list(named)} if named else {}
    preprocessing = {"mean": [0.5] * 3, "std": [0.25] * 3}
    Path("config.json").write_text(json.dumps({**config, **facts, "preprocessing": preprocessing}))
    data = resolve(start(place, "--data.image_size=16", *MODEL, root="two")).data
    first = first_weights(".", network, "bicubic", mean=data.mean, std=data.std, class_names=data.class_names)
    assert first.sentence().endswith(f"tensors taken{text}")
    theirs = "those of the source mean 0.5, 0.5, 0.5 and std 0.25, 0.25, 0.25"
    assert any(note.endswith(f"and std 0.229, 0.224, 0.225, {theirs}") for note in first.notes)
    assert any(
        note.startswith("head kept: ") and "init_from=. has 2 without names" in note for note in first.notes
    ) == (not named)


def test_the_config_gives_the_heads_that_weights_do_not_tell(place, in_folder, capsys):
    theirs = timm.models.VisionTransformer(
        img_size=16, num_classes=2, patch_size=4, embed_dim=24, depth=1, num_heads=3
    ).eval()
    torch.save(theirs.state_dict(), "theirs.pth")
    flags = start(place, "--init_from=theirs.pth", "--data.image_size=16", root="two")
    assert main(["fit", *flags]) == 2
    assert "do not tell the number of heads: give --model.num_heads=..." in capsys.readouterr().err
    for given in ("--model.num_heads=3", "--model.attention.dim_head=8"):
        network = resolve([*flags, given]).make_network()
        first = first_weights("theirs.pth", network, "bicubic")
        assert not any("heads" in note or "mean" in note for note in first.notes)
        first.adapted.load(network)
        images = torch.rand(2, 3, 16, 16)
        torch.testing.assert_close(network.eval()(images), theirs(images))


def saved_by_timm(place, *, beside=None):
    """Saves a ViT for images of 16 pixels under timm's names, and what is known about its images beside it."""
    vit = ViT(image_size=16, patch_size=4, emb_size=64, depth=1, num_heads=1, num_classes=7)
    torch.save(to_reference(vit, family="timm")[0], place)
    if beside is not None:
        known = {"architecture": "vit", "pretrained_cfg": {"input_size": [3, 16, 16], **beside}}
        Path(place).with_suffix(".json").write_text(json.dumps(known))


def images_of(experiment):
    data = experiment.config["data"]["init_args"]
    return data["image_size"], data["mean"], data["std"]


def test_size_and_normalisation_of_the_images_are_those_of_the_source(place, in_folder, capsys):
    saved_by_timm("bare.pth")
    saved_by_timm("told.pth", beside={"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]})
    told, bare = (resolve([*start(place, f"--init_from={name}.pth")]) for name in ("told", "bare"))
    assert images_of(told) == (16, [0.4, 0.5, 0.6], [0.1, 0.2, 0.3])
    assert images_of(bare) == (16, [0.5] * 3, [0.5] * 3), "as load and predict assume"
    with pytest.warns(UserWarning, match="those of most weights of timm"):
        known, assumed = load("told.pth"), load("bare.pth")
    assert (known.image_size, known.mean, assumed.std) == ((16, 16), [0.4, 0.5, 0.6], [0.5] * 3)
    run = resolve(start(place, f"--init_from={place / 'run'}"))
    assert images_of(run)[0] == 16
    given = ["--data.image_size=[24,8]", "--data.mean=[0.1,0.2,0.3]"]
    experiment = resolve([*start(place, "--init_from=bare.pth"), *given])
    assert images_of(experiment) == ([24, 8], [0.1, 0.2, 0.3], [0.5] * 3)
    assert main(["fit", *start(place, "--init_from=bare.pth"), "--trainer.fast_dev_run=true"]) == 0
    said = capsys.readouterr().out
    assert "weights     data.image_size=16 as in the source\n" in said
    assert "weights     data.mean=[0.5, 0.5, 0.5] and data.std=[0.5, 0.5, 0.5] as for most weights of timm" in said
    other = next(text for text in experiment.initial.notes if text.startswith("images are normalised"))
    assert other.endswith("those of most weights of timm mean 0.5, 0.5, 0.5 and std 0.5, 0.5, 0.5")


@pytest.mark.parametrize("name", ["finetune", "linear_probe", "lora"])
def test_the_configs_that_start_from_a_model_take_a_folder_of_images_and_their_sizes_from_it(name, place, in_folder):
    saved_by_timm("told.pth", beside={"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]})
    experiment = resolve([f"--config={name}", f"--data.root={place / 'three'}", "--init_from=told.pth"])
    data = experiment.config["data"]["init_args"]
    assert images_of(experiment) == (16, [0.4, 0.5, 0.6], [0.1, 0.2, 0.3])
    assert [change["class_path"] for change in data["augment"]] == ["vit_lightning.HorizontalFlip"]
    assert data["min_area"] >= 0.5
    assert experiment.config["model"]["init_args"]["emb_size"] == 64


@pytest.mark.parametrize(("command", "how"), [("test", "bicubic"), ("predict", "bilinear")])
def test_a_trained_model_is_measured_at_another_size(command, how, place, in_folder, capsys):
    files = [str(place / "three/test/c")] if command == "predict" else []
    flags = [f"--ckpt={place / 'run'}", "--data.image_size=24", f"--resize_positions={how}"]
    assert main([command, *flags, *files]) == 0
    line = f"image size  24x24 pixels, trained at 16x16 (positions 4x4 -> 6x6 {how})\n"
    assert line in capsys.readouterr().out
    assert main([command, *flags, *files, "--resize_positions=reset"]) == 2
    assert "resize_positions=reset is for a training with init_from" in capsys.readouterr().err
