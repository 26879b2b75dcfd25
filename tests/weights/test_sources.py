"""Trained models by name: whatever the source, the same function, its preprocessing and what had to be assumed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tensors import randomise
from torchvision import models
from transformers import ViTConfig, ViTForImageClassification

from vit_lightning import Digits, UserError, ViT, load, to_reference
from vit_lightning.commands.export import export
from vit_lightning.config.networks import make_teacher, network_in_file
from vit_lightning.storage.checkpoint_files import AtomicCheckpointIO, find_checkpoint, read_checkpoint
from vit_lightning.training.probes import features
from vit_lightning.weights import sources

open_source = partial(sources.open_source, make_network=network_in_file)
TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 1, "num_classes": 3}


@pytest.fixture
def theirs():
    """A small ViT of timm with random weights."""
    return randomise(timm.models.VisionTransformer(**TINY), scale=0.1).eval()


def test_a_file_of_weights_gets_what_it_does_not_tell(theirs, in_folder):
    torch.save({"state_dict": theirs.state_dict()}, "a.pth")
    images = torch.randn(2, 3, 16, 16)
    with pytest.warns(
        UserWarning,
        match=r"a.pth: mean \[0.5, 0.5, 0.5\], std .*, interpolation bicubic of its images are those of most",
    ):
        model = load("a.pth")
    assert isinstance(model.network, ViT)
    assert torch.allclose(model.network(images), theirs(images), atol=1e-5)
    assert (model.class_names, model.image_size, model.mean) == (None, (16, 16), [0.5, 0.5, 0.5])
    assert model.predict(images, top_k=1)[1].classes == [str(int(theirs(images)[1].argmax()))]
    names = ["cat", "dog", "fox"]
    facts = {"mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 1.0], "class_names": names, "centre_share": 0.5}
    source = open_source("a.pth", config={**facts, "num_heads": 2})
    assert source.network.num_heads == 2
    assert source.class_names == names
    assert {name: source.view[name] for name in ("mean", "std", "centre_share")} == {
        name: facts[name] for name in ("mean", "std", "centre_share")
    }
    assert not any("mean" in note or "heads" in note for note in source.notes)


def test_images_of_bare_weights_are_resized_as_those_of_most_of_their_family(theirs, in_folder):
    """Of pytorch-deep-learning#1221: torchvision's transforms are bilinear, and no note named the interpolation."""
    of_torchvision = models.VisionTransformer(224, 32, 1, 1, 64, 64, num_classes=3)
    of_hf = ViTForImageClassification(ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=1))
    by_torchvision = models.ViT_B_16_Weights.IMAGENET1K_V1.transforms().interpolation.value
    by_timm = timm.get_pretrained_cfg("vit_base_patch16_224").interpolation
    for network, mode in (of_torchvision, by_torchvision), (of_hf, "bilinear"), (theirs, by_timm):
        torch.save(network.state_dict(), "bare.pth")
        source = open_source("bare.pth")
        assert source.view["interpolation"] == mode
        assert any(f"interpolation {mode}" in note and "'interpolation': ..." in note for note in source.notes)


def test_deit_has_the_statistics_of_imagenet(in_folder):
    theirs = randomise(timm.models.deit.VisionTransformerDistilled(**TINY), scale=0.1).eval()
    torch.save(theirs.state_dict(), "a.pth")
    source = open_source("a.pth")
    assert source.view["mean"] == [0.485, 0.456, 0.406]
    images = torch.randn(2, 3, 16, 16)
    assert torch.allclose(source.network(images), theirs(images), atol=1e-5)
    with torch.no_grad():
        (pooled,) = features(source.network, images)
    assert torch.equal(pooled, open_source("a.pth", num_classes=0).network(images))


def test_an_export_tells_of_a_teacher_what_its_bare_weights_do_not(in_folder):
    vit = ViT(image_size=8, patch_size=4, in_channels=1, emb_size=24, depth=1, num_heads=3, num_classes=10)
    torch.save(to_reference(vit, family="timm")[0], "bare.pth")
    how = r"\(lightning export --ckpt=bare.pth --config=\.\.\. --out=FOLDER makes a teacher that tells it\)"
    with pytest.raises(UserError, match=rf"bare.pth: .* number of heads: give config=.* {how}"):
        make_teacher("bare.pth", Digits())
    export(ckpt="bare.pth", out=Path("teacher"), config={"num_heads": 3, "mean": [0.5], "std": [0.5]})
    images = torch.rand(2, 1, 8, 8)
    teacher = make_teacher("teacher", Digits())
    assert torch.allclose(teacher.network(images), vit.eval()(images), atol=1e-5)


def test_other_sizes_and_classes(theirs, in_folder, trained):
    torch.save(theirs.state_dict(), "a.pth")
    state = torch.get_rng_state()
    larger = open_source("a.pth", image_size=24, num_classes=5)
    assert torch.equal(torch.get_rng_state(), state)
    wider = timm.create_model("vit_tiny_patch16_224", **{**TINY, "img_size": 24})
    wider.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(theirs.state_dict(), wider))
    images = torch.randn(2, 3, 24, 24)
    tokens = wider.eval().forward_features(images)
    assert torch.allclose(larger.network.forward_features(images), tokens, atol=1e-4)
    assert larger.network(images).shape == (2, 5)
    assert larger.view["image_size"] == (24, 24)
    features = open_source("a.pth", num_classes=0).network
    assert torch.allclose(
        features(images[..., :16, :16]), theirs.forward_features(images[..., :16, :16])[:, 0], atol=1e-4
    )
    run = open_source(trained[0], image_size=(16, 12), num_classes=2)
    assert run.network(torch.randn(2, 1, 16, 12)).shape == (2, 2)
    with pytest.raises(UserError, match=r"source=.*out: patch_size=4 does not .*image_size"):
        open_source(trained[0], image_size=9)
    with pytest.raises(UserError, match=r"num_classes=-1 must be at least 0"):
        open_source(trained[0], num_classes=-1)
    with pytest.raises(UserError, match=r"config.num_heads=2: the config of its run tells this"):
        open_source(trained[0], config={"num_heads": 2})


def test_models_of_libraries(monkeypatch, theirs):
    """Without their weights, which lie elsewhere: a ViT becomes ours, others stay what they are."""
    get, create = models.get_model, timm.create_model
    monkeypatch.setattr(models, "get_model", lambda name, weights: get(name, num_classes=1000))
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name))
    vit = open_source("timm:vit_tiny_patch16_224")
    assert isinstance(vit.network, ViT)
    assert (vit.network.num_heads, vit.view["centre_share"]) == (3, 0.9)
    other = open_source("torchvision:squeezenet1_1")
    assert type(other.network) is models.SqueezeNet
    assert (other.class_names[0], other.view["centre_share"]) == ("tench", 0.875)
    net = load("torchvision:mobilenet_v3_small", image_size=64, num_classes=0)
    assert net.embed(torch.zeros(2, 3, 64, 64)).shape == (2, 1024)
    with pytest.raises(UserError, match="gives no logits"):
        net.predict(torch.zeros(2, 3, 64, 64))
    with pytest.raises(UserError, match=r"source=torchvision:squeezenet1_1 holds weights of none of the families"):
        open_source("torchvision:squeezenet1_1", config={"num_heads": 3})


def test_wrong_facts_are_named_at_once(trained):
    wrong = {"mean": [1, 2], "std": [0.0], "centre_share": -1, "class_names": 3}
    with pytest.raises(UserError) as caught:
        load(trained[0], config=wrong)
    assert [text.split("config.")[1].split("=")[0] for text in caught.value.problems] == list(wrong)


def written(contents: dict[str, Any], path: Path) -> Path:
    """Writes a checkpoint with its checksum; the first files of a writer are read again."""
    writer = AtomicCheckpointIO()
    writer.save_checkpoint(contents, path)
    writer.finish()
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held["state_dict"].update({next(iter(held["state_dict"])): None}), "no tensor .NoneType."),
        (
            lambda held: held["state_dict"].update({"val_metrics.acc.tp": ["x"]}),
            "val_metrics.acc.tp as no tensor .list.",
        ),
        (lambda held: held["test_view"].update(centre_share="half"), "centre_share=half must be above 0"),
        (lambda held: held["config"].update(lora="all"), "lora"),
        (lambda held: held["config"]["model"]["init_args"].update(depth=10**6), "depth=1000000 must be at most"),
    ],
)
def test_a_sealed_checkpoint_with_other_contents_is_refused_in_words(trained, tmp_path, change, message):
    held = read_checkpoint(find_checkpoint(trained[0]), mmap=False)
    change(held)
    with pytest.raises(UserError, match=message):
        load(written(held, tmp_path / "other.ckpt"))


def test_a_fact_in_our_word_is_answered_with_the_word_of_the_family(tmp_path):
    vit = ViT(image_size=16, patch_size=4, emb_size=24, depth=1, num_heads=3, num_classes=7)
    torch.save(to_reference(vit, family="hf")[0], tmp_path / "bare.pth")
    with pytest.raises(UserError, match=r"hf has no such option that we know \(there it is num_attention_heads\)"):
        load(tmp_path / "bare.pth", config={"num_heads": 3})
