"""Classes go by name: where two sources of them meet, they are mapped by name, or refused with both lists."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image
from safetensors.torch import load_file, save_file

from vit_lightning import ImageFolder, UserError, ViTClassifier, load
from vit_lightning.ablation.plan import read_plan
from vit_lightning.cli import main
from vit_lightning.commands.embed import embed
from vit_lightning.commands.export import export
from vit_lightning.commands.fit import fit
from vit_lightning.commands.resume import read_experiment
from vit_lightning.commands.trained import evaluate, predict
from vit_lightning.config.networks import make_teacher
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_metrics

COLOURS = {"cat": (200, 60, 60), "dog": (60, 200, 60), "owl": (60, 60, 200), "ant": (200, 200, 60)}
FLAGS = [
    *("--data=ImageFolder", "--data.root=images", "--data.image_size=12", "--data.min_area=1", "--data.num_workers=0"),
    *("--data.batch_size=8", "--data.centre_share=1", "--model.patch_size=4", "--model.emb_size=32", "--model.depth=1"),
    *("--model.num_heads=2", "--optimizer.lr=0.01", "--optimizer.warmup_epochs=0", "--trainer.accelerator=cpu"),
    *("--trainer.max_epochs=1", "--wandb.mode=disabled"),
]


def draw(folder: str, names: dict[str, str]) -> None:
    """Images of colours in class folders, by the colour that a folder shows."""
    for split, count in ("train", 16), ("val", 4), ("test", 6):
        for name, colour in names.items():
            place = Path(folder, split, name)
            place.mkdir(parents=True)
            draw = np.random.default_rng(len(split))
            for number in range(count):
                pixels = np.array(COLOURS[colour]) + draw.integers(-40, 40, (12, 12, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")


@pytest.fixture(scope="module")
def trained_on_colours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colours")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        draw("images", {name: name for name in ("cat", "dog", "owl")})
        shutil.copy(Path(__file__).with_name("own_data.py"), "own.py")
        results = fit(resolve([*FLAGS, "--out=run"]))
    assert results["test/acc"] == 1.0, "three colours are learned"
    return folder, results


@pytest.fixture
def control(trained_on_colours, tmp_path, monkeypatch):
    """Results of a run on cat, dog and owl, in the working folder with its images."""
    shutil.copytree(trained_on_colours[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return trained_on_colours[1]


def measure(*flags):
    return evaluate(resolve(["--ckpt=run", *flags, "--out=tested"], "test"), "test")


def rows_of(file):
    return list(csv.reader(Path(file).read_text().splitlines()))[1:]


@pytest.mark.parametrize("data", ["Reversed", "Module", "Numbered"])
def test_images_with_their_classes_in_another_order_are_tested_by_name(data, control, capsys):
    found = measure(f"--data=own.{data}")
    assert found["test/acc"] == control["test/acc"]
    assert found["test/loss"] == pytest.approx(control["test/loss"], abs=1e-5)
    assert ("they are equated by their numbers" in capsys.readouterr().out) == (data == "Numbered")
    names = ["0", "1", "2"] if data == "Numbered" else ["cat", "dog", "owl"]
    assert [row[:3] for row in rows_of("tested/classes.csv")] == [[name, "6", "6"] for name in names]


def test_images_that_lack_a_class_are_tested_by_name(control, capsys):
    draw("few", {name: name for name in ("owl", "dog")})
    assert measure("--data.root=few")["test/acc"] == 1.0
    rows = rows_of("tested/classes.csv")
    assert [row[:3] for row in rows] == [["cat", "0", "0"], ["dog", "6", "6"], ["owl", "6", "6"]]
    predict(resolve(["--ckpt=run", "--data.root=few", "--out=predicted"], "predict"))
    rows = rows_of("predicted/predictions.csv")
    assert [row[1] for row in rows] == [row[2] for row in rows] == ["dog"] * 6 + ["owl"] * 6


def test_further_test_sets_are_measured_by_name(control, capsys):
    """Of fewer classes, of a dataset with another order, of a folder without splits, and of half wrong images."""
    draw("few", {name: name for name in ("owl", "dog")})
    draw("half", {"cat": "cat", "owl": "dog"})
    also = {"few": "few", "plain": "half/test", "own": {"class_path": "own.Reversed"}}
    results = fit(resolve([*FLAGS, f"--data.also_test={json.dumps(also)}", "--out=fitted"]))
    own = {name: results[f"test/{name}"] for name in ("acc", "loss", "ece")}
    assert own == {name: control[f"test/{name}"] for name in own}, "the same as without"
    found = {name: results[f"test/{name}/acc"] for name in also}
    assert found == {"few": 1.0, "plain": 0.5, "own": 1.0}
    assert results["test/own/loss"] == pytest.approx(results["test/loss"], abs=1e-5)
    assert results["test/own/ece"] == pytest.approx(results["test/ece"], abs=1e-5)
    assert [results[f"test/{name}/images"] for name in also] == [12, 12, 18]
    assert "test/plain  accuracy 50.00 % (95 % interval 25.4 to 74.6 %)" in capsys.readouterr().out
    rows = [row for row in read_metrics(Path("fitted")) if any(name.startswith("test/") for name in row)]
    logged = [{name: row[name] for name in row if name.endswith("/acc")} for row in rows]
    assert logged == [{"test/acc": 1.0}, *({f"test/{name}/acc": found[name]} for name in also)]
    again = evaluate(resolve(["--ckpt=fitted", "--trust", "--out=again"], "test"), "test")
    assert {name: again[name] for name in again} == {name: results[name] for name in again}
    also = "--data.also_test={half: half, few: few/test, images: images}"
    other = evaluate(resolve(["--ckpt=run", "--data.root=few/test", also, "--out=later"], "test"), "test")
    assert other["test/half/acc"] == 0.5
    images = [other["test_images"], *(other[f"test/{name}/images"] for name in ("few", "images"))]
    assert images == [12, 12, 18], "whatever folder data.root is: all of one, of the training's the test images"
    assert Path("fitted/test_predictions-plain.npz").is_file()


def test_further_test_sets_of_other_classes_or_places_are_refused_before_any_work(control, capsys):
    draw("other", {"canine": "dog", "feline": "cat"})
    also = {
        "a": "other",
        "b": "nowhere",
        "c": {"root": "images", "rot": 3},
        "d": {"image_size": 8},
        "e": {"split_seed": 1},
        "f": {"class_path": "ImageFolder", "split_seed": 1},
    }
    assert main(["fit", *FLAGS, f"--data.also_test={json.dumps(also)}", "--out=new"]) == 2
    said = capsys.readouterr().err
    for part in (
        "data.root=other has the classes canine, feline",
        "data.also_test.b.root=nowhere is not a folder",
        "data.also_test.c.rot=3: there is no such option (did you mean data.also_test.c.root?)",
        "data.also_test.e.split_seed=1: the model learned from the split of split_seed=None",
        "data.also_test.f.split_seed=1: the model learned from the split of split_seed=None",
        "data.also_test.d: its images are 3 x 8 x 8, and those of data are 3 x 12 x 12",
    ):
        assert part in said
    assert main(["fit", *FLAGS, "--data.also_test=few", "--out=new"]) == 2
    assert "data.also_test=few must hold {NAME: FOLDER}" in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("test", {"canine": "dog", "feline": "cat", "strix": "owl"}),
        ("validate", {"Cat": "cat", "Dog": "dog", "Owl": "owl"}),
        ("predict", {"ant": "ant", "cat": "cat", "dog": "dog", "owl": "owl"}),
    ],
    ids=["other names", "other case", "one more"],
)
def test_images_of_other_classes_are_refused_before_any_work(command, names, control, capsys):
    draw("other", names)
    assert main([command, "--ckpt=run", "--data.root=other"]) == 2
    said = capsys.readouterr().err
    assert f"data.root=other has the classes {', '.join(names)}; the model of ckpt=" in said
    assert "has cat, dog, owl: the model has no " in said
    assert not Path("run", command).exists()


def test_embed_writes_the_labels_of_the_model(control, capsys):
    for folder in Path("images").iterdir():
        shutil.rmtree(folder / "cat")
    assert np.load(embed(ckpt="run", out=Path("e.npz")))["label"].tolist() == [1] * 6 + [2] * 6
    assert "warning" not in capsys.readouterr().out
    for folder in Path("images").iterdir():
        (folder / "dog").rename(folder / "ant")
    with pytest.raises(UserError, match=r"has the classes ant, owl; the model of ckpt=run has cat, dog, owl"):
        embed(ckpt="run", out=Path("f.npz"))


def test_a_run_is_not_resumed_with_other_classes(control):
    checkpoint = read_checkpoint(Path("run/checkpoints/last.ckpt"))
    assert checkpoint["test_view"]["class_names"] == ["cat", "dog", "owl"]
    Path("run/results.json").unlink()
    for folder in Path("images").iterdir():
        (folder / "dog").rename(folder / "hen")
    with pytest.raises(UserError, match=r"data.root=images has the classes cat, hen, owl, run has cat, dog, owl"):
        fit(read_experiment("fit", ["--resume=run"]))


def other_order(names: dict[int, str], rows: list[int], folder: str = "hub") -> None:
    """The run as a folder of Hugging Face, some rows of whose head have these names; -1 is a row of zeros."""
    export(ckpt="run", out=Path(folder), to="hf")
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps({**config, "id2label": names}))
    tensors = load_file(Path(folder, "model.safetensors"))
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = torch.stack([tensors[name][row] * (row >= 0) for row in rows])
    save_file(tensors, Path(folder, "model.safetensors"))


ORDERS = [
    ({0: "owl", 1: "cat", 2: "dog"}, [2, 0, 1]),
    ({0: "bee", 1: "owl", 2: "ant", 3: "dog", 4: "cat"}, [-1, 2, -1, 1, 0]),
    ({2: "cat", 1: "dog", 0: "owl"}, [2, 1, 0]),
]


@pytest.mark.parametrize(("names", "rows"), ORDERS, ids=["another order", "more classes", "keys not in order"])
def test_teacher_and_head_of_a_source_are_put_in_the_order_of_the_data(names, rows, control):
    other_order(names, rows)
    experiment = resolve([*FLAGS, "--init_from=hub", "--distillation.teacher=hub"])
    images = torch.randn(4, 3, 12, 12)
    own = load("run").network
    assert torch.allclose(experiment.teacher(images), own(images), atol=1e-4)
    network = experiment.make_network()
    experiment.initial.adapted.load(network)
    assert torch.allclose(network.eval()(images), own(images), atol=1e-4)
    assert f"head of 3 of {len(rows)} classes by name" in experiment.initial.sentence()


def test_a_source_without_names_is_said_and_one_of_other_classes_refused(control):
    data = resolve(FLAGS).data
    other_order({number: f"LABEL_{number}" for number in range(3)}, [0, 1, 2])
    with pytest.warns(UserWarning, match=r"distillation.teacher=hub has 3 without names: they are equated"):
        make_teacher("hub", data)
    draw("numbers", {"0": "cat", "1": "dog", "2": "owl"})
    resolved = resolve(["--ckpt=hub", *(flag for flag in FLAGS if "root" not in flag), "--data.root=numbers"], "test")
    assert "has 3 without names: they are equated by their numbers" in resolved.trained.notes[-1]
    note = "head kept: the data has the classes cat, dog, owl; init_from=hub has 3 without names: they are equated"
    assert any(text.startswith(note) for text in resolve([*FLAGS, "--init_from=hub"]).initial.notes)
    other_order({0: "ant", 1: "bee", 2: "cat"}, [0, 1, 2], "insects")
    with pytest.raises(
        UserError, match=r"cat, dog, owl; distillation.teacher=insects has ant, bee, cat: .* .fine-tune"
    ):
        make_teacher("insects", data)
    assert "new head: other classes" in resolve([*FLAGS, "--init_from=insects"]).initial.sentence()


def test_names_of_a_hugging_face_config(control):
    for names in (["cat", "dog", "owl"], ["crane", "crane", "owl"]):
        other_order(dict(enumerate(names)), [0, 1, 2], names[0])
        assert load(names[0]).class_names == names
    other_order({0: "cat", 1: "dog", 5: "owl"}, [0, 1, 2])
    with pytest.warns(UserWarning, match="id2label names 0, 1, 5, which are not 0 to 2"):
        assert load("hub").class_names is None


def test_a_trainer_without_our_command_maps_by_name_too(control):
    draw("few", {name: name for name in ("owl", "dog")})
    module = ViTClassifier.load_from_checkpoint("run/checkpoints/best.ckpt")
    given = {"image_size": 12, "num_workers": 0, "centre_share": 1.0}
    trainer = Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    (found,) = trainer.test(module, datamodule=ImageFolder(root=Path("few"), **given), verbose=False)
    assert found["test/acc"] == 1.0
    draw("numbers", {"0": "cat", "1": "dog", "2": "owl"})
    data = ImageFolder(root=Path("numbers"), **given)
    with pytest.warns(UserWarning, match="has cat, dog, owl: they are equated by their numbers"):
        trainer.test(module, datamodule=data, verbose=False)
    draw("other", {"canine": "dog", "feline": "cat", "strix": "owl"})
    with pytest.raises(UserError, match=r"the model has cat, dog, owl: .* \(give the classes of the data the names"):
        trainer.test(module, datamodule=ImageFolder(root=Path("other"), **given), verbose=False)


def test_images_are_for_the_model_that_took_them_last(control):
    data = ImageFolder(root=Path("images"), image_size=12)
    own = ["cat", "dog", "owl"]
    for names, labels in (["owl", "ant", "dog", "cat"], [3, 2, 0]), (["0", "1", "2"], [0, 1, 2]), (own, [0, 1, 2]):
        note = data.take_classes(names, "a model")
        assert data.label_names == (own if note else names)
        assert data.of_model(torch.arange(3)).tolist() == labels
    data.take_classes(["owl", "ant", "dog", "cat"], "a model")
    module = ViTClassifier.load_from_checkpoint("run/checkpoints/best.ckpt")
    module.trainer = SimpleNamespace(datamodule=data)
    module.setup("fit")
    assert data.label_names == own


def test_weights_of_a_loss_go_by_name(control):
    flags = [*FLAGS, "--loss.class_path=CrossEntropyLoss"]
    found = resolve([*flags, "--loss.weight={owl: 3, cat: 1, dog: 2}"])
    assert found.config["loss"]["init_args"]["weight"] == [1.0, 2.0, 3.0]
    with pytest.raises(UserError, match=r"there is no class hen; owl has no weight \(the classes are cat, dog, owl\)"):
        resolve([*flags, "--loss.weight={hen: 3, cat: 1, dog: 2}"])
    draw("few", {name: name for name in ("owl", "dog")})
    given = ["--ckpt=run", "--data.root=few", "--loss.class_path=CrossEntropyLoss"]
    tested = resolve([*given, "--loss.weight={owl: 3, cat: 1, dog: 2}"], "test")
    assert tested.config["loss"]["init_args"]["weight"] == [1.0, 2.0, 3.0]


def test_arms_with_other_classes_are_refused(control):
    draw("other", {"canine": "dog", "feline": "cat", "strix": "owl"})
    Path("exp.yaml").write_text(resolve(FLAGS).to_yaml())
    compare = {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 8}
    arms = {"here": {"data.root": "images"}, "there": {"data.root": "other"}}
    plan = {"config": "exp.yaml", "arms": arms, "baseline": "here", "compare": compare}
    Path("plan.yaml").write_text(json.dumps(plan))
    with pytest.raises(UserError, match="here has the classes cat, dog, owl, there has canine, feline, strix"):
        read_plan(Path("plan.yaml"))
