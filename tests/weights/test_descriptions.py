"""Weights with what their writers keep beside them give the writers' own probabilities, on images of any shape."""

import importlib
import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image
from torchvision import models
from torchvision.transforms import v2

from vit_lightning import Digits, UserError, ViT, load
from vit_lightning.cli import main
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.weights.files import read_weights
from vit_lightning.weights.identify import identify

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZE = {"height": 32, "width": 32}
SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}


def blurred(height, width):
    """Noise of a few pixels' size, so that a shift or another kernel is seen."""
    noise = np.random.default_rng(height).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height))


IMAGES = [blurred(height, width) for height, width in ((40, 64), (64, 40), (20, 17), (37, 101), (32, 32))]


def sharpened(network):
    """Larger weights, so that images differ in their classes."""
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(6)
    return network.eval()


def hf_network(**config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    made = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, **{"num_labels": 4, **config})
    return sharpened(transformers.ViTForImageClassification(made))


def timm_network(**arguments):
    torch.manual_seed(0)
    return sharpened(timm.create_model("vit_tiny_patch16_224", **{**SMALL, "num_classes": 4, **arguments}))


def probabilities(place, **facts):
    found = load(place, **facts).predict(IMAGES, top_k=4)
    order = [sorted(zip(one.classes, one.probabilities, strict=True)) for one in found]
    return torch.tensor([[value for _, value in row] for row in order])


def check(place, logits, *, sigmoid=False):
    expected = logits.sigmoid() if sigmoid else logits.softmax(dim=1)
    assert (probabilities(place) - expected).abs().max() < 1e-4


def by_transformers(network, processor, folder, **options):
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    with torch.no_grad():
        return network(torch.cat([processor(i, return_tensors="pt")["pixel_values"] for i in IMAGES]), **options).logits


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ViT", {"size": SIZE}),
        ("ViT", {"size": SIZE, "resample": 3, "rescale_factor": 1 / 127.5}),
        ("ViT", {"size": SIZE, "resample": 0, "do_rescale": False, "do_normalize": False}),
        ("ViT", {"size": SIZE, "resample": 1, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1]}),
        ("Bit", {"size": {"shortest_edge": 37}, "crop_size": SIZE}),
        ("Bit", {"size": {"shortest_edge": 32}, "crop_size": SIZE, "rescale_factor": 1 / 127.5}),
        ("Bit", {"size": {"shortest_edge": 35}, "crop_size": SIZE, "resample": 0}),
        ("DeiT", {"size": {"height": 36, "width": 40}, "crop_size": SIZE}),
    ],
    ids=str,
)
def test_an_image_processor_of_transformers_prepares_the_images(kind, fields, tmp_path):
    processor = getattr(transformers, f"{kind}ImageProcessor")(**fields)
    check(tmp_path, by_transformers(hf_network(), processor, tmp_path))


@pytest.mark.parametrize("size", [(40, 40), (24, 16)], ids=str)
@pytest.mark.parametrize("kind", ["ViT", "Dinov2", "Dinov2WithRegisters"])
def test_images_have_the_size_of_the_processor_whatever_the_config_says(kind, size, tmp_path):
    """Transformers-Tutorials#107, and DINOv2's folders (518 pixels in config.json): that of the config was taken."""
    processor = transformers.ViTImageProcessor(size=dict(zip(("height", "width"), size, strict=True)))
    if kind == "ViT":
        check(tmp_path, by_transformers(hf_network(), processor, tmp_path, interpolate_pos_encoding=True))
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
        made = getattr(transformers, f"{kind}Config")(**sizes, num_labels=4)
        network = sharpened(getattr(transformers, f"{kind}ForImageClassification")(made))
        check(tmp_path, by_transformers(network, processor, tmp_path))


def test_a_folder_of_transformers_is_predicted_at_another_size(tmp_path):
    by_transformers(hf_network(), transformers.ViTImageProcessor(size=SIZE), tmp_path / "hf")
    IMAGES[0].save(image := tmp_path / "a.png")
    command = ["predict", f"--ckpt={tmp_path / 'hf'}", str(image), "--data.image_size=48", f"--out={tmp_path / 'out'}"]
    assert main(command) == 0
    top = load(tmp_path / "hf", image_size=48).predict([image])[0]
    row = (tmp_path / "out/predictions.csv").read_text().splitlines()[1].split(",")
    assert row[1] == top.classes[0]
    assert float(row[2]) == pytest.approx(top.probabilities[0], abs=1e-5)


@pytest.mark.parametrize(
    "config", [{"problem_type": "multi_label_classification"}, {"num_labels": 1}, {"problem_type": None}], ids=str
)
def test_several_labels_and_one_logit_have_a_sigmoid(config, tmp_path):
    processor = transformers.ViTImageProcessor(size=SIZE)
    logits = by_transformers(hf_network(**config), processor, tmp_path)
    check(tmp_path, logits, sigmoid=config != {"problem_type": None})


@pytest.mark.parametrize(
    "fields",
    [
        {"crop_pct": 0.9},
        {"crop_mode": "squash", "crop_pct": 0.8, "interpolation": "bilinear"},
        {"interpolation": "lanczos", "crop_pct": 1.0, "mean": (0.5, 0.4, 0.3)},
        {"interpolation": "nearest"},
    ],
    ids=str,
)
def test_a_config_of_timm_prepares_the_images(fields, tmp_path):
    network = timm_network()
    network.pretrained_cfg.update(input_size=(3, 32, 32), num_classes=4, **fields)
    timm.models.save_for_hf(network, tmp_path, model_args=SMALL)
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    with torch.no_grad():
        check(tmp_path, network(torch.stack([prepare(image) for image in IMAGES])))


def train_py(folder, model=None, **args):
    """A checkpoint of timm's train.py, and the logits of what wrote it."""
    network = timm_network(**(model or {}))
    given = {"model": "vit_tiny_patch16_224", "gp": None, "in_chans": None, "img_size": None, "crop_mode": None}
    given |= {"input_size": (3, 32, 32), "crop_pct": None, "mean": None, "std": None, "interpolation": "", "lr": 0.1}
    given |= {"model_kwargs": SMALL, **args}
    contents = {"epoch": 3, "state_dict": network.state_dict(), "args": Namespace(**given), "optimizer": {"state": {}}}
    torch.save(contents, folder / "model_best.pth.tar")
    prepare = timm.data.create_transform(**timm.data.resolve_data_config(given, model=network))
    with torch.no_grad():
        return network(torch.stack([prepare(image) for image in IMAGES]))


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ({}, {"crop_pct": 0.7, "mean": (0.3, 0.4, 0.5), "std": (0.2, 0.2, 0.3)}),
        ({}, {"crop_mode": "squash", "mean": (0.4,), "interpolation": "bilinear"}),
        ({"global_pool": "avg"}, {"gp": "avg"}),
        ({"class_token": False, "global_pool": "avg"}, {"model_kwargs": {**SMALL, "class_token": False}, "gp": "avg"}),
        ({"num_classes": 1}, {"num_classes": 1}),
    ],
    ids=str,
)
def test_the_args_of_a_checkpoint_of_timm_prepare_the_images(model, args, tmp_path):
    logits = train_py(tmp_path, model, **args)
    check(tmp_path / "model_best.pth.tar", logits, sigmoid="num_classes" in args)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("preprocessor_config", {"do_resize": False}, r"do_resize=False of .* \(only True\): config=\{'resize'"),
        ("preprocessor_config", {"sharpen": 2}, "sharpen=2 of .* is not read: take it out"),
        ("preprocessor_config", {"size": {"shortest_edge": 32}}, "only one size for all images"),
        ("preprocessor_config", {"image_processor_type": "SamImageProcessor"}, "only ViTImageProcessor, DeiT"),
        ("config", {"problem_type": "regression"}, "problem_type=regression of config.json is not read"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused(file, fields, message, tmp_path):
    by_transformers(hf_network(), transformers.ViTImageProcessor(size=SIZE), tmp_path)
    path = tmp_path / f"{file}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(UserError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("lacks", ["timm", "the architecture"])
def test_what_timm_alone_knows_is_not_guessed(lacks, tmp_path, monkeypatch):
    train_py(tmp_path, mean=(0.3, 0.4, 0.5))
    place = tmp_path / "model_best.pth.tar"
    if lacks == "timm":
        monkeypatch.setitem(sys.modules, "timm.models", None)
    else:
        contents = torch.load(place, weights_only=False)
        contents["args"].model = "vit_of_my_own"
        torch.save(contents, place)
    file = read_weights(place)
    assert file.view == {"image_size": (32, 32), "in_channels": 3, "mean": [0.3, 0.4, 0.5]}
    assert file.unread.keys() == {"std", "centre_share", "interpolation"}
    with pytest.raises(UserError, match=r"std of its images .*pip install timm\): config=\{'std'") as error:
        load(place)
    assert len(error.value.problems) == 3
    given = load(place, config={"std": [0.2] * 3, "centre_share": 0.9, "interpolation": "bicubic"})
    assert given.predict(IMAGES)


NAMED = {
    "class_to_idx": {"d": 0, "b": 1, "a": 2, "c": 3},
    "idx_to_class": {0: "d", 1: "b", 2: "a", 3: "c"},
    "classes": ["d", "b", "a", "c"],
    "hyper_parameters": {"class_names": ["d", "b", "a", "c"]},
}


@pytest.mark.parametrize("key", NAMED)
def test_classes_of_a_file_that_names_them_go_by_name(key, tmp_path, monkeypatch, capsys):
    """rf-detr#115, PlantNet-300K#16."""
    monkeypatch.chdir(tmp_path)
    network = timm_network(num_heads=1)
    torch.save({"model": network.state_dict(), key: NAMED[key]}, "weights.pth")
    with torch.no_grad():
        logits = network(torch.tensor(np.asarray(IMAGES[4])).permute(2, 0, 1)[None] / 127.5 - 1)
    predicted = "dbac"[logits.argmax()]
    for split in ("train", "val", "test"):
        for name in "abcd":
            (tmp_path / f"data/{split}/{name}").mkdir(parents=True)
            for number in range(5 if (split, name) == ("test", predicted) else 1):
                IMAGES[4].save(tmp_path / f"data/{split}/{name}/{number}.png")
    data = {"class_path": "ImageFolder", "root": "data", "num_workers": 0, "image_size": 32}
    (tmp_path / "data.yaml").write_text(json.dumps({"data": data, "model": {"num_heads": 1}}))
    assert main(["test", "--ckpt=weights.pth", "--config=data.yaml", "--out=result"]) == 0
    assert json.loads((tmp_path / "result/results.json").read_text())["test/acc"] == pytest.approx(5 / 8)
    output = capsys.readouterr().out
    assert "equated" not in output
    assert "of the config" not in output  # its num_heads is used


@pytest.mark.parametrize("before", [(16, 32), (32, 32)])
@pytest.mark.parametrize("size", [(16, 32), (40, 24), (24, 24)])
def test_rectangles_are_prepared_as_by_timm(before, size, tmp_path):
    arguments = {**SMALL, "img_size": before}
    network = timm_network(img_size=before)
    config = {"input_size": (3, *before), "crop_pct": 0.9, "crop_mode": "center"}
    timm.models.save_for_hf(network, tmp_path, model_config=config, model_args=arguments)
    network.set_input_size(size)
    facts = timm.data.resolve_data_config({**config, "input_size": (3, *size)}, model=network)
    prepare = timm.data.create_transform(**facts)
    with torch.no_grad():
        expected = network(torch.stack([prepare(image) for image in IMAGES])).softmax(dim=1)
    assert (probabilities(tmp_path, image_size=size) - expected).abs().max() < 1e-4


def test_what_timm_prepares_otherwise_is_refused_or_given(tmp_path):
    train_py(tmp_path, model_kwargs={**SMALL, "new": 1})
    with pytest.raises(UserError, match=r"config.new=1: timm has no such option"):
        load(tmp_path / "model_best.pth.tar")
    train_py(tmp_path, crop_mode="border")
    with pytest.raises(UserError, match=r"crop_mode=border .*: config=\{'resize'"):
        load(tmp_path / "model_best.pth.tar")
    by_squash = load(tmp_path / "model_best.pth.tar", config={"resize": [32, 32]}).predict(IMAGES)
    train_py(tmp_path, crop_mode="squash", crop_pct=1.0)
    assert load(tmp_path / "model_best.pth.tar").predict(IMAGES) == by_squash


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_an_export_prepares_images_as_its_source(form, tmp_path):
    processor = transformers.ViTImageProcessor(size=SIZE, resample=3, rescale_factor=1 / 127.5)
    source = hf_network(problem_type="multi_label_classification")
    logits = by_transformers(source, processor, tmp_path / "source")
    assert main(["export", f"--ckpt={tmp_path}/source", f"--out={tmp_path}/out", f"--to={form}"]) == 0
    check(tmp_path / "out", logits, sigmoid=True)
    if form == "hf":
        again = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
        network = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
        logits_again = by_transformers(network, again, tmp_path / "again")
        assert (logits_again - logits).abs().max() < 1e-3
        assert network.config.problem_type == "multi_label_classification"


@pytest.mark.parametrize(
    ("name", "arguments", "fields"),
    [
        ("vit_tiny_patch16_224", {}, {"crop_pct": 0.9, "interpolation": "bilinear", "mean": (0.5, 0.4, 0.3)}),
        ("vit_base_patch16_clip_224", {"pre_norm": False}, {"crop_pct": 32 / 46}),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "fc_norm": False}, {"crop_mode": "squash", "crop_pct": 1.0}),
        ("deit_tiny_distilled_patch16_224", {}, {}),
    ],
)
def test_timm_reads_an_export_in_its_names_and_prepares_images_as_the_source(name, arguments, fields, tmp_path):
    torch.manual_seed(0)
    network = sharpened(timm.create_model(name, **SMALL, num_classes=4, **arguments))
    network.pretrained_cfg.update(input_size=(3, 32, 32), num_classes=4, label_names=["a", "b", "c", "d"], **fields)
    timm.models.save_for_hf(network, tmp_path / "source", model_args={**SMALL, **arguments})
    assert main(["export", f"--ckpt={tmp_path}/source", f"--out={tmp_path}/out", "--to=timm"]) == 0
    again = timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True).eval()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(again))
    with torch.no_grad():
        check(tmp_path / "source", again(torch.stack([prepare(image) for image in IMAGES])))
        assert (again.double()(images) - network.double()(images)).abs().max() < 1e-9
    assert again.pretrained_cfg["label_names"] == load(tmp_path / "out").class_names == ["a", "b", "c", "d"]
    assert timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True, num_classes=7).num_classes == 7


@pytest.mark.parametrize("prefix", ["net.", "encoder.", "student.", "_forward_module.", "module._orig_mod.", "x.net."])
def test_a_prefix_is_any_whose_rest_is_a_family(prefix, tmp_path):
    weights = timm_network().state_dict()
    beside = {"criterion.weight": torch.ones(4), "val_acc.correct": torch.tensor(3), "queue": torch.ones(2)}
    torch.save({"state_dict": {**{prefix + n: v for n, v in weights.items()}, **beside}}, tmp_path / "a.ckpt")
    found = read_weights(tmp_path / "a.ckpt")
    assert found.tensors.keys() == weights.keys()
    assert all(torch.equal(found.tensors[name], weights[name]) for name in weights)
    assert len(found.notes) == 1
    assert all(name in found.notes[0] for name in beside)


@pytest.mark.parametrize(
    "keys",
    [("model_state_dict",), ("net",), ("weights",), ("checkpoint", "model", "state_dict"), ("ema_model",)],
    ids=str,
)
def test_each_mapping_of_tensors_is_tried(keys, tmp_path):
    weights = timm_network().state_dict()
    contents = weights
    for key in reversed(keys):
        contents = {key: contents, "epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}
    torch.save(contents, tmp_path / "a.pth")
    assert read_weights(tmp_path / "a.pth").tensors.keys() == weights.keys()
    other = {name: value + 1 for name, value in weights.items()}
    torch.save({**contents, "student": other}, tmp_path / "b.pth")
    found = read_weights(tmp_path / "b.pth")
    assert torch.equal(found.tensors["cls_token"], weights["cls_token"])
    assert found.notes == (f"the weights are those under {'.'.join(keys)}, not those under student",)


def timm_weights(prefix, **arguments):
    return {prefix + name: value for name, value in timm_network(**arguments).state_dict().items()}


@pytest.mark.parametrize(
    ("others", "depth", "place"),
    [
        (["model.", "teacher."], 4, "model."),
        (["student.", "teacher."], 6, "student."),
        (["model.", "teacher_model."], 2, "model."),
        (["student.module.", "teacher."], 2, "teacher."),
        (["student_backbone.", "teacher_backbone."], 2, "teacher_backbone."),
        (["model.", "kd_loss.net."], 4, "model."),
        (["backbone_acc."], 2, "backbone_acc."),
        (["accelerated."], 2, "accelerated."),
    ],
    ids=str,
)
def test_a_teacher_counts_only_as_the_average_of_a_student_like_it(others, depth, place, tmp_path):
    weights = [timm_weights(prefix, depth=depth if prefix == others[-1] else 2) for prefix in others]
    for number, each in enumerate(weights):
        each[f"{others[number]}cls_token"].fill_(number)
    torch.save({"state_dict": {name: value for each in weights for name, value in each.items()}}, tmp_path / "a.ckpt")
    token = read_weights(tmp_path / "a.ckpt").tensors["cls_token"]
    assert (token == others.index(place)).all()


@pytest.mark.parametrize(
    ("beside", "is_student"),
    [
        ("distillation_token", 1),
        ("model.distill_mlp.0.weight", 1),
        ("self_distillation_loss.center", 0),
        ("distillation_loss.center", 0),
        ("distiller.center", 0),
        ("student.distillation_token", 0),
    ],
)
def test_of_a_distillation_the_student_is_taken_and_not_a_teacher_like_it(beside, is_student, tmp_path):
    """vit-pytorch's DistillWrapper (vit-pytorch#62); the teacher of DINO is an average."""
    wrapper = next((f"{place}." for place in ("model", "distiller") if beside.startswith(place)), "")
    student, teacher = (timm_weights(f"{wrapper}{prefix}") for prefix in ("student.", "teacher."))
    student[f"{wrapper}student.cls_token"].fill_(1)
    torch.save({beside: torch.zeros(1, 32), **teacher, **student}, tmp_path / "a.pt")
    assert (read_weights(tmp_path / "a.pt").tensors["cls_token"] == 1).all() == is_student


def test_foreign_weights_are_measured_on_the_data_of_a_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = dict(enumerate("abcd"))
    network = hf_network(id2label=names)
    logits = by_transformers(network, transformers.ViTImageProcessor(size=SIZE), tmp_path / "source")
    labels = [0, 1, 2, 3, int(logits[4].argmax())]
    for split in ("train", "val", "test"):
        for name in names.values():
            (tmp_path / f"data/{split}/{name}").mkdir(parents=True)
        for number, label in enumerate(labels):
            IMAGES[number].save(tmp_path / f"data/{split}/{names[label]}/{number}.png")
    config = "model: {preset: Ti/4}\ndata: {class_path: ImageFolder, root: data, num_workers: 0, in_memory: false}\n"
    (tmp_path / "exp.yaml").write_text(config)
    assert main(["test", "--ckpt=source", "--config=exp.yaml", "--out=result"]) == 0
    assert "data.resize=[32, 32]" in capsys.readouterr().out
    accuracy = (logits.argmax(dim=1) == torch.tensor(labels)).float().mean()
    assert json.loads((tmp_path / "result/results.json").read_text())["test/acc"] == pytest.approx(float(accuracy))
    assert main(["test", "--ckpt=source", "--config=exp.yaml", "--out=larger", "--data.image_size=48"]) == 0
    output = capsys.readouterr().out
    assert "data.resize=[48, 48]" in output
    assert "of the config, data, metrics, trainer and model.num_heads are used, no other option of model" in output
    same = resolve(["--ckpt=source", "--config=exp.yaml", "--data.image_size=32"], "test")
    assert not [note for note in same.trained.notes if "is not that of" in note]
    main(["test", "--ckpt=source", "--config=exp.yaml", "--out=whole", "--data.centre_share=0.5"])
    assert "data.resize" not in capsys.readouterr().out
    assert main(["test", "--ckpt=source"]) == 2
    assert "give --config with data (lightning predict" in capsys.readouterr().err
    torch.save(network.state_dict(), "bare.pth")
    bare = ["test", "--ckpt=bare.pth", "--config=exp.yaml", "--out=bare"]
    assert main(bare) == 2
    assert "give --model.num_heads=..." in capsys.readouterr().err
    assert main([*bare, f"--model.num_heads={network.config.num_attention_heads}"]) == 0


@pytest.fixture
def own(in_folder, monkeypatch):
    shutil.copy(Path(__file__).with_name("own_mlp.py"), in_folder)
    monkeypatch.syspath_prepend(in_folder)
    return importlib.import_module("own_mlp")


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_any_lightning_is_a_modules_own_or_weights_of_others(own, tmp_path, capsys):
    (tmp_path / "exp.yaml").write_text("module: {class_path: own_mlp.Own}\ndata: {class_path: Digits}\n")
    own = own.Own(width=12, sign=-1)
    rest = {"pytorch-lightning_version": "2.6.0", "epoch": 1, "global_step": 3}
    hyper = {"num_classes": 10, "width": 12, "sign": -1.0, "kept": tmp_path, "_instantiator": "evil.run"}
    torch.save({"state_dict": own.state_dict(), **rest, "hyper_parameters": hyper}, "own.ckpt")
    expected = Trainer(logger=False, accelerator="cpu").test(own, datamodule=Digits(), verbose=False)[0]["test/acc"]
    words = ["test", "--ckpt=own.ckpt", "--config=exp.yaml"]
    with pytest.warns(match=r"own.ckpt: module.width=12, module.sign=-1.0 as it was trained") as told:
        assert main([*words, "--out=result"]) == 0
    assert json.loads((tmp_path / "result/results.json").read_text())["test/acc"] == pytest.approx(expected)
    assert "own.ckpt: its module.kept is no plain data, and not taken" in {str(one.message) for one in told}
    with pytest.warns(match=r"own.ckpt: module.sign=1 in place of its -1.0"):
        assert main([*words, "--model.sign=1", "--out=other"]) == 0
    assert json.loads((tmp_path / "other/results.json").read_text())["test/acc"] != pytest.approx(expected)
    torch.save({"state_dict": own.state_dict(), "hyper_parameters": {"kept": {"class_path": "evil.Run"}}}, "evil.ckpt")
    assert main(["test", "--ckpt=evil.ckpt", "--config=exp.yaml"]) == 2
    assert "module.kept.class_path=evil.Run: a file of weights may name" in capsys.readouterr().err
    assert main(["test", "--ckpt=own.ckpt", "--data=Digits"]) == 2
    error = capsys.readouterr().err
    assert "own.ckpt holds weights of none of the families" in error
    assert "--module=CLASS, the LightningModule that wrote it, loads it as it is" in error
    network = ViT(image_size=8, patch_size=4, emb_size=64, depth=1, num_heads=1, in_channels=1)
    torch.save({"state_dict": {f"model._orig_mod.{n}": v for n, v in network.state_dict().items()}, **rest}, "vit.ckpt")
    torch.save(network.state_dict(), "vit.pth")
    for name in "vit.ckpt", "vit.pth":
        assert main(["test", f"--ckpt={name}", "--data=Digits", f"--out={name}.d"]) == 0
    found, same = (json.loads((tmp_path / f"vit.{end}.d/results.json").read_text()) for end in ("ckpt", "pth"))
    assert found["test/loss"] == same["test/loss"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "classes", "prefix"), [("Own", 10, ""), ("Own", 12, ""), ("NoBias", 12, ""), ("Renames", 10, "old.")]
)
def test_a_training_starts_from_a_checkpoint_of_any_lightning(own, tmp_path, kind, classes, prefix):
    """PL#15705: that of a module of the user's was "of none of the families"; a head of other classes is new."""
    theirs = own.Own(num_classes=classes).state_dict()
    given = {f"{prefix}{name}": value for name, value in theirs.items()}
    hyper = {"hyper_parameters": {"num_classes": classes, "sign": -1.0}}
    torch.save({"state_dict": given, "pytorch-lightning_version": "2.6.0", **hyper}, "theirs.ckpt")
    new = set() if (kind, classes) == ("Own", 10) else {"head.weight", "head.bias"}
    flags = [f"--module=own_mlp.{kind}", "--data=Digits", "--test=false"]
    flags += ["--optimizer.class_path=torch.optim.SGD"]
    flags += ["--trainer.max_steps=1", "--wandb.mode=disabled", "--init_from=theirs.ckpt", f"--reset_head={bool(new)}"]
    assert main(["fit", *flags, "--out=run"]) == 0
    assert ("sign: -1.0" in (tmp_path / "run/config.yaml").read_text()) == (kind != "NoBias")
    begun = read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["state_dict"]
    assert {name for name in theirs if not torch.equal(theirs[name], begun.get(name, torch.zeros(())))} == new


def test_an_arch_of_timm_prepares_the_images_and_without_it_a_note_names_the_crop(tmp_path):
    network = timm_network()
    torch.save({"state_dict": network.state_dict(), "arch": "vit_tiny_patch16_224"}, tmp_path / "a.pth.tar")
    model = load(tmp_path / "a.pth.tar", config={"num_heads": 2})
    cfg = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    assert (model.centre_share, model.image_size) == (cfg.crop_pct, (32, 32))
    assert model.mean == list(cfg.mean)
    torch.save({"state_dict": network.state_dict(), "arch": "mine"}, tmp_path / "b.pth.tar")
    assert any("centre_share 1.0" in note for note in load(tmp_path / "b.pth.tar", config={"num_heads": 2}).notes)
    given = {"num_heads": 2, "centre_share": 0.9, "std": [0.1, 0.2, 0.3]}
    model = load(tmp_path / "b.pth.tar", config=given)
    assert (model.std, model.centre_share) == (given["std"], 0.9)
    told = [note for note in model.notes if "of most weights" in note]
    assert told[0].startswith("mean [0.5, 0.5, 0.5], interpolation bicubic of its images are those")
    assert "centre_share" not in told[0]


def by_torchvision(folder, **args):
    """A checkpoint of torchvision's references/classification/train.py, and the logits of its evaluation."""
    network = models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=1, hidden_dim=64, mlp_dim=64, num_classes=4
    )
    average = torch.optim.swa_utils.AveragedModel(network, use_buffers=True)
    torch.nn.init.normal_(average.module.heads.head.weight)
    state = {"model": network.state_dict(), "model_ema": average.state_dict(), "optimizer": {"state": {}}, "epoch": 3}
    given = {"model": "vit_b_16", "data_path": "d", "backend": "PIL", "train_crop_size": 28, "model_ema": True, **args}
    torch.save({**state, "args": Namespace(**given)}, folder / "model_3.pth")
    kernel = v2.InterpolationMode(given["interpolation"])
    prepare = v2.Compose(
        [
            *[v2.PILToTensor()] * (given["backend"] == "tensor"),
            v2.Resize(given["val_resize_size"], interpolation=kernel, antialias=True),
            v2.CenterCrop(given["val_crop_size"]),
            *[v2.PILToTensor()] * (given["backend"] == "PIL"),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )
    with torch.no_grad():
        return average.eval()(torch.stack([prepare(image) for image in IMAGES]))


@pytest.mark.parametrize(
    "args",
    [
        {"val_resize_size": 37, "val_crop_size": 32, "interpolation": "bilinear"},
        {"val_resize_size": 32, "val_crop_size": 32, "interpolation": "bicubic"},
        {"val_resize_size": 40, "val_crop_size": 32, "interpolation": "bilinear", "backend": "tensor"},
    ],
    ids=str,
)
def test_the_args_of_a_checkpoint_of_torchvision_prepare_the_images_of_its_average(args, tmp_path):
    logits = by_torchvision(tmp_path, **args)
    check(tmp_path / "model_3.pth", logits)
    assert (
        "the weights are those under model_ema.module, not those under model"
        in read_weights(tmp_path / "model_3.pth").notes
    )


def dino_part(prefix, seed):
    """A backbone of DINO's names with its projection head, and the backbone."""
    torch.manual_seed(seed)
    network = sharpened(timm.create_model("vit_tiny_patch16_224", **SMALL, num_classes=0))
    head = {"mlp.0.weight": (64, 32), "mlp.0.bias": (64,), "last_layer.weight_g": (9, 1), "last_layer.weight_v": (9, 8)}
    state = {f"{prefix}backbone.{name}": value for name, value in network.state_dict().items()}
    return network, state | {f"{prefix}head.{name}": torch.ones(shape) for name, shape in head.items()}


@pytest.mark.parametrize("alone", [False, True])
def test_of_a_checkpoint_of_dino_the_teacher_counts_without_its_projection_head(alone, tmp_path):
    (_, student), (network, teacher) = dino_part("module.", 1), dino_part("", 2)
    args = Namespace(arch="vit_small", patch_size=8, teacher_temp=0.04)
    whole = {"student": student, "teacher": teacher, "args": args, "dino_loss": {"center": torch.ones(1, 9)}}
    torch.save({"teacher": teacher} if alone else whole, tmp_path / "checkpoint.pth")
    found = load(tmp_path / "checkpoint.pth", config={"num_heads": 2})
    batch = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(found.network(batch), network(batch), rtol=0, atol=1e-5)
    notes = read_weights(tmp_path / "checkpoint.pth").notes
    assert "beside the network: teacher.head.mlp.0.weight, teacher.head.mlp.0.bias, teacher.head.last" in notes[-1]
    if not alone:
        assert notes[0] == "the weights are those under teacher.backbone, not those under student.module.backbone"
        assert (found.mean, found.resize) == ([0.485, 0.456, 0.406], 36)


@pytest.mark.parametrize(
    ("prefix", "beside"),
    [
        ("module.base_encoder.", [f"module.{n}.weight" for n in ("base_encoder.head.0", "base_encoder.head.3", "p.0")]),
        ("backbone.", ["classifier.weight", "classifier.bias", "projector.0.weight"]),
    ],
    ids=["MoCo v3", "solo-learn"],
)
def test_what_only_a_pre_training_needs_is_left_out(prefix, beside, tmp_path):
    weights = {n: value for n, value in timm_network().state_dict().items() if not n.startswith("head.")}
    state = {f"{prefix}{name}": value for name, value in weights.items()} | dict.fromkeys(beside, torch.ones(4, 4))
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    found = read_weights(tmp_path / "a.ckpt")
    assert found.tensors.keys() == weights.keys()
    assert [*found.notes] == [
        f"left out, since they are beside the network: {', '.join(f'state_dict.{name}' for name in beside)}"
    ]
    assert identify(found, {"num_heads": 2}).family == "timm"


MEAN, STD = torch.tensor([0.49, 0.48, 0.44]).view(1, 3, 1, 1), torch.tensor([0.24, 0.25, 0.26]).view(1, 3, 1, 1)


@pytest.mark.parametrize(
    ("prefix", "names"), [("1.", ("0.mean", "0.std")), ("", ("mean", "std")), ("net.", ("norm.new_mean", "sigma"))]
)
def test_a_normaliser_of_images_beside_the_network_is_told_with_its_numbers(prefix, names, tmp_path):
    weights = timm_network().state_dict()
    beside = dict(zip(names, (MEAN, STD), strict=True))
    torch.save({**beside, **{f"{prefix}{name}": value for name, value in weights.items()}}, tmp_path / "a.pth")
    found = read_weights(tmp_path / "a.pth")
    assert found.tensors.keys() == weights.keys()
    numbers = f"{names[0]} [0.49, 0.48, 0.44], {names[1]} [0.24, 0.25, 0.26]"
    assert [*found.notes] == [f"left out, since they are beside the network: {numbers}"]


def test_a_network_of_no_family_keeps_its_mean_and_a_head_of_two_layers(tmp_path):
    state = {"mean": MEAN, "body.weight": torch.ones(4, 4), "head.0.weight": MEAN, "head.2.weight": STD}
    torch.save({**state, "loss_fn.weight": STD}, tmp_path / "a.pth")
    assert read_weights(tmp_path / "a.pth").tensors.keys() == state.keys()


@pytest.mark.parametrize(
    ("make", "head", "other"),
    [
        (timm_network, "head", "head.1"),
        (lambda: models.VisionTransformer(16, 8, 1, 2, 32, 64, num_classes=5), "heads.head", "heads"),
        (lambda: models.VisionTransformer(16, 8, 1, 2, 32, 64, num_classes=5), "heads.head", "heads.1"),
    ],
    ids=["timm", "torchvision, a layer", "torchvision, after dropout"],
)
def test_a_head_of_one_layer_may_have_another_place(make, head, other, tmp_path):
    weights = make().state_dict()
    state = {f"_orig_mod.{name.replace(f'{head}.', f'{other}.')}": value for name, value in weights.items()}
    assert f"_orig_mod.{other}.weight" in state
    torch.save(state, tmp_path / "a.pth")
    found = read_weights(tmp_path / "a.pth").tensors
    assert found.keys() == weights.keys()
    assert torch.equal(found[f"{head}.weight"], weights[f"{head}.weight"])


@pytest.mark.parametrize("prefix", ["backbone.", "model.backbone.", "module.backbone."])
def test_a_head_beside_a_backbone_is_its_head(prefix, tmp_path):
    weights, parent = timm_network().state_dict(), prefix.removesuffix("backbone.")
    named = {f"{parent if n.startswith('head.') else prefix}{n}": value for n, value in weights.items()}
    other = {n: torch.zeros_like(value) for n, value in weights.items() if parent and n.startswith("head.")}
    for state in {**named, **other}, {**other, **named}:  # the outer head is another
        torch.save({"state_dict": state}, tmp_path / "a.ckpt")
        found = read_weights(tmp_path / "a.ckpt")
        assert found.tensors.keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in found.tensors.items())
        beside = [f"state_dict.{name}" for name in other]
        assert [*found.notes] == [f"left out, since they are beside the network: {', '.join(beside)}"] * bool(other)
