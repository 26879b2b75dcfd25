"""``lightning export``: the same logits from the files, for every number of images, and a folder that is whole."""

import json
from pathlib import Path

import onnxruntime
import pytest
import timm
import torch
from references import CONFIGS, fresh
from safetensors.torch import load_file
from torch import nn

from vit_lightning import UserError, ViT, load
from vit_lightning.cli import main
from vit_lightning.commands import export
from vit_lightning.config.networks import network_in_file
from vit_lightning.models.attention import RotaryAttention
from vit_lightning.models.heads import AttentionPool
from vit_lightning.weights import convert
from vit_lightning.weights.sources import Source, open_source

VIEW = {"image_size": (8, 8), "in_channels": 3, "centre_share": 1.0, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}


def source(network, **more):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return Source(**{"place": "memory", "network": network.eval(), "view": VIEW, **more})


def tiny(**options):
    return ViT(image_size=8, patch_size=4, emb_size=16, depth=1, num_heads=2, num_classes=5, **options)


def images(count, channels=3):
    return torch.randn(count, channels, 8, 8, generator=torch.Generator().manual_seed(9))


def run_onnx(folder, batch):
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    return torch.from_numpy(session.run(["logits"], {"images": batch.numpy()})[0])


def run_torch(folder, batch):
    return torch.export.load(folder / "model.pt2").module()(batch)


def run_transformers(folder, batch):
    from transformers import AutoModelForImageClassification

    return AutoModelForImageClassification.from_pretrained(folder)(batch).logits


def run_ours(folder, batch):
    return load(folder).network(batch)


GRAPHS = {"onnx": ("model.onnx", run_onnx), "torch-export": ("model.pt2", run_torch)}
LOAD = {"onnx": run_onnx, "torch-export": run_torch, "hf": run_transformers, "safetensors": run_ours}


def check_graph(made, folder, to):
    """Writes a graph, and runs it here on numbers of images with which it was not traced."""
    file, run = GRAPHS[to]
    assert export.write_model(made, folder, to) <= 1e-4
    for count in (1, 2, 4, 5):
        with torch.no_grad():
            expected = made.network(images(count))
        assert expected.std() > 0.01
        torch.testing.assert_close(run(folder, images(count)), expected, rtol=0, atol=1e-4)
    assert b".py" not in (folder / file).read_bytes()  # places in the sources of this machine


@pytest.mark.parametrize("to", ["onnx", pytest.param("torch-export", marks=pytest.mark.full)])
def test_graphs_of_rotary_positions_and_an_attention_pool(to, tmp_path):
    """The graph of torch-export, too, is made on the way to ONNX."""
    check_graph(source(tiny(attention=RotaryAttention, pool=AttentionPool, register_tokens=1)), tmp_path, to)


@pytest.mark.full
@pytest.mark.parametrize("to", GRAPHS)
@pytest.mark.parametrize("family", CONFIGS)
def test_graphs_of_all_families(family, to, tmp_path):
    vit, _, _ = fresh(family)
    check_graph(Source(place="memory", network=vit, view=VIEW), tmp_path, to)


@pytest.mark.full
@pytest.mark.parametrize("to", GRAPHS)
def test_graphs_of_networks_of_others(to, tmp_path):
    network = timm.create_model("resnet10t", num_classes=5)
    check_graph(source(network), tmp_path, to)


@pytest.mark.parametrize("to", [pytest.param("onnx", marks=pytest.mark.full), "torch-export", "safetensors", "hf"])
def test_a_run_is_exported_with_its_results(to, results, in_folder, capsys):
    assert main(["export", "--ckpt=out", f"--to={to}", "--out=model"]) == 0
    assert "same logits" in capsys.readouterr().out
    config = json.loads(Path("model/config.json").read_text())
    if to == "hf":
        card = Path("model/README.md").read_text()
        assert "library_name: transformers" in card
        assert f"accuracy {100 * results['test/acc']:.2f} %" in card
        assert config["id2label"]["3"] == "3"
        assert main(["export", "--ckpt=out", "--to=hf", "--image_size=[8, 16]", "--out=wide"]) == 0
        assert "transformers squashes them to 8 x 16" in capsys.readouterr().out
    else:
        assert config["class_names"] == list("0123456789")
        assert config["preprocessing"]["mean"] == [pytest.approx(0.3053, abs=1e-3)]
        assert config["preprocessing"]["interpolation"] == "bicubic"
        assert "channels gray: (pixels / 255 - mean) / std" in config["input"]
    network, batch = open_source("out", make_network=network_in_file).network, images(5, channels=1)
    with torch.no_grad():
        torch.testing.assert_close(LOAD[to](Path("model"), batch), network(batch), rtol=0, atol=1e-4)


def test_the_arguments_beside_the_weights_make_the_other_library_s_model(in_folder):
    """Trained with dropouts that torchvision has not, which matter in training alone."""
    from torchvision.models.vision_transformer import VisionTransformer

    vit, state, config = fresh("timm", drop_path_rate=0.1, drop_rate=0.2)
    torch.save(state, "model.pth")
    Path("model.json").write_text(json.dumps({"family": "timm", "config": config}))
    assert main(["export", "--ckpt=model.pth", "--out=other", "--to=torchvision"]) == 0
    network = VisionTransformer(**json.loads(Path("other/config.json").read_text())["config"]).eval()
    network.load_state_dict(load_file("other/model.safetensors"), strict=True)
    torch.testing.assert_close(network(images(3)), vit(images(3)), rtol=0, atol=1e-5)


def test_other_logits_leave_nothing_behind(results, capsys, monkeypatch):
    monkeypatch.setattr(convert, "TOLERANCE", -1.0)
    assert main(["export", "--ckpt=out", "--to=safetensors", "--out=new"]) == 2
    assert "the logits differ by up to" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["out"]


def test_what_a_form_cannot_express_is_named(tmp_path):
    way_out = "lightning export --to=onnx or torch-export takes any network"
    with pytest.raises(UserError) as error:
        export.write_model(source(tiny(pool="mean")), tmp_path, "hf")
    problem = "pool=mean: hf cannot express it (there it is cls)"
    assert (error.value.problems[0], error.value.problems[-1]) == (problem, way_out)
    with pytest.raises(UserError) as error:
        export.write_model(source(tiny(register_tokens=2)), tmp_path, "torchvision")
    assert error.value.problems[0] == "register_tokens=2: torchvision cannot express it (there it is 0)"
    with pytest.raises(UserError, match="Sequential is no model of a config"):
        export.write_model(source(nn.Sequential(nn.Flatten(), nn.Linear(192, 5))), tmp_path, "safetensors")

    class Branches(nn.Module):
        def forward(self, batch):
            return batch.mean((2, 3)) if float(batch.sum()) > 0 else batch.amax((2, 3))

    with pytest.raises(UserError, match="Branches cannot be exported"):
        export.write_model(source(Branches()), tmp_path, "torch-export")
