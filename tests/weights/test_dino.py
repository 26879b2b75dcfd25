"""DINOv2, DINOv3 and DeiT: features equal to those of transformers' classes, from memory, folders, Meta's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from references import randomise
from safetensors.torch import save_file
from tensors import randn

from vit_lightning import UserError, ViT, from_reference, load, to_reference
from vit_lightning.cli import main
from vit_lightning.weights.files import read_weights
from vit_lightning.weights.identify import identify

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
CASES = {
    "dinov2": ("Dinov2", "Model", {}),
    "dinov2, swiglu": ("Dinov2", "Model", {"use_swiglu_ffn": True, "qkv_bias": False}),
    "dinov2, classes": ("Dinov2", "ForImageClassification", {"num_labels": 5}),
    "registers": ("Dinov2WithRegisters", "Model", {"num_register_tokens": 4}),
    "registers, swiglu": ("Dinov2WithRegisters", "Model", {"num_register_tokens": 2, "use_swiglu_ffn": True}),
    "registers, classes": ("Dinov2WithRegisters", "ForImageClassification", {"num_labels": 5}),
    "deit": ("DeiT", "Model", {}),
    "deit, classes": ("DeiT", "ForImageClassification", {"num_labels": 5, "intermediate_size": 40}),
    "deit, teacher": ("DeiT", "ForImageClassificationWithTeacher", {"num_labels": 5, "layer_norm_eps": 1e-6}),
    "dinov3": ("DINOv3ViT", "Model", {"num_register_tokens": 4, "intermediate_size": 40}),
    "dinov3, gated": ("DINOv3ViT", "Model", {"use_gated_mlp": True, "hidden_act": "silu", "intermediate_size": 40}),
    "dinov3, no biases": ("DINOv3ViT", "Model", {"mlp_bias": False, "proj_bias": False, "intermediate_size": 40}),
}


def peer(case):
    """A model of transformers with random weights; no token of pre-training, and frequencies in float64."""
    kind, form, more = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    network = randomise(getattr(transformers, kind + form)(config)).eval()
    for name, weight in network.named_parameters():
        if name.endswith("mask_token"):
            torch.nn.init.zeros_(weight)
    if hasattr(network, "rope_embeddings"):
        exponents = torch.arange(0, 1, 4 / 12, dtype=torch.float64)
        network.rope_embeddings.inv_freq = 1 / config.rope_theta**exponents
    return network


def features(network, batch):
    output = network(batch)
    return output.logits if "logits" in output else output.last_hidden_state[:, 0]


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_of_transformers_and_weights_go_back(case, tmp_path):
    network, family = peer(case), case.split(",")[0].replace("registers", "dinov2")
    network.save_pretrained(tmp_path)
    batch = randn(2, 3, 32, 32)
    expected = features(network, batch)
    found = load(tmp_path)
    atol = 1e-6 if family == "dinov3" else 1e-10  # its coordinates are in float32
    assert found.network.reference["family"] == family
    assert found.mean == [0.485, 0.456, 0.406]
    torch.testing.assert_close(found.network(batch), expected, rtol=0, atol=atol)
    if "logits" not in network(batch):
        tokens = network(batch).last_hidden_state
        torch.testing.assert_close(found.network.forward_features(batch), tokens, rtol=0, atol=atol)

    if case == "deit":  # whose names in a table are those of its classifier
        return
    state = network.state_dict()
    config = {**SIZES, **CASES[case][2]}
    config |= {"num_register_tokens": 4} if case == "registers, classes" else {}
    vit = from_reference(state, family=family, config=config)
    torch.testing.assert_close(vit.eval()(batch), expected, rtol=0, atol=atol)
    back, same = to_reference(vit, family=family)
    assert same == config
    assert set(back) == set(state)
    assert all(torch.equal(back[name].flatten(), state[name].flatten()) for name in state)


def test_a_new_size_of_images_makes_new_rotations():
    network, batch = peer("dinov3"), randn(2, 3, 16, 48)
    vit = from_reference(
        network.state_dict(), family="dinov3", config={**SIZES, "num_register_tokens": 4, "intermediate_size": 40}
    )
    vit.eval().set_image_size((16, 48))
    torch.testing.assert_close(vit(batch), features(network, batch), rtol=0, atol=1e-6)


def meta_file(case):
    """The tensors of a model under the names of Meta's repository, with those that it keeps beside them."""
    network = peer(case)
    state, width = network.state_dict(), 24
    v3 = case.startswith("dinov3")
    last = "norm" if v3 else "layernorm"
    renamed = {f"norm.{kind}": state.pop(f"{last}.{kind}") for kind in ("weight", "bias")}
    renamed["mask_token"] = torch.ones(1, width)
    blocks = "model.layer" if v3 else "encoder.layer"
    for n in range(2):
        block, theirs = f"{blocks}.{n}", f"blocks.{n}"
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{block}.attention.{part}_proj.{kind}", torch.zeros(width).double()) for part in "qkv"]
            renamed[f"{theirs}.attn.qkv.{kind}"] = torch.cat(parts)
            if v3 and kind == "bias":
                renamed[f"{theirs}.attn.qkv.bias"][width : 2 * width] = 7.0  # which the mask takes away
                renamed[f"{theirs}.attn.qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(width)
            if f"{block}.mlp.gate_proj.{kind}" in state and not v3:
                gated = [state.pop(f"{block}.mlp.{part}.{kind}") for part in ("gate_proj", "up_proj")]
                renamed[f"{theirs}.mlp.w12.{kind}"] = torch.cat(gated)
    gated = any("gate_proj" in name for name in state)
    names = {
        f"{blocks}.": "blocks.",
        "attention.o_proj": "attn.proj",
        "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma",
        "mlp.gate_proj": "mlp.w1",
        "mlp.up_proj": "mlp.w2" if gated else "mlp.fc1",
        "mlp.down_proj": "mlp.w3" if gated or not v3 else "mlp.fc2",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.register_tokens": "storage_tokens" if v3 else "register_tokens",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "embeddings.patch_embeddings": "patch_embed.proj",
        "embeddings.": "",
    }
    for name, weight in state.items():
        if "mask_token" not in name:
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            renamed[name] = weight
    return network, renamed | ({"rope_embed.periods": torch.ones(3)} if v3 else {})


@pytest.mark.parametrize("case", ["dinov2", "dinov2, swiglu", "registers", "registers, swiglu", "dinov3"])
def test_files_of_meta_load_without_being_named(case, tmp_path):
    network, state = meta_file(case)
    save_file({name: weight.contiguous() for name, weight in state.items()}, tmp_path / "weights.safetensors")
    heads = {"num_attention_heads": 2, **({"image_size": 32} if case == "dinov3" else {})}
    found = load(tmp_path / "weights.safetensors", config=heads)
    assert found.network.reference["family"] == case.split(",")[0].replace("registers", "dinov2")
    assert found.mean == [0.485, 0.456, 0.406]
    batch = randn(2, 3, 32, 32)
    atol = 1e-4 if case == "dinov3" else 1e-8  # here tensors of two types, so that all are float32
    torch.testing.assert_close(found.network.double()(batch), features(network, batch), rtol=0, atol=atol)


def test_published_sizes_have_their_heads(tmp_path):
    for width, depth, heads in ((384, 12, 6), (1024, 24, 16)):
        sizes = {"image_size": 28, "patch_size": 14, "emb_size": width, "depth": 1, "num_heads": heads}
        vit = ViT(**sizes, num_classes=0, layer_scale=1.0)
        state, _ = to_reference(vit, family="dinov2", layout={"names": "repository"})
        for number in range(1, depth):
            state |= {n.replace("blocks.0.", f"blocks.{number}."): w for n, w in state.items() if "blocks.0." in n}
        torch.save(state, tmp_path / "weights.pth")
        file = read_weights(tmp_path / "weights.pth")
        found = identify(replace(file, tensors={name: weight.to("meta") for name, weight in file.tensors.items()}))
        assert (found.family, found.config.get("num_attention_heads", 12)) == ("dinov2", heads)


def test_registers_that_learned_a_position_keep_it_in_their_token():
    network = peer("registers")
    config = {**SIZES, "num_register_tokens": 4}
    vit = from_reference(network.state_dict(), family="dinov2", config=config).eval()
    with torch.no_grad():
        vit.patch_embedding.positions.table.add_(1.0)
    network.load_state_dict(to_reference(vit, family="dinov2")[0])
    batch = randn(2, 3, 32, 32)
    torch.testing.assert_close(vit(batch), features(network, batch), rtol=0, atol=1e-10)


def test_a_bias_of_keys_cannot_go_to_dinov3():
    config = {**SIZES, "num_register_tokens": 4, "intermediate_size": 40}
    vit = from_reference(peer("dinov3").state_dict(), family="dinov3", config=config)
    with torch.no_grad():
        vit.encoder[0].attention.fn.attention.qkv.bias.add_(1.0)
    for names in ("memory", "repository"):
        with pytest.raises(UserError, match="keys have no bias in dinov3, and here they learned one"):
            to_reference(vit, family="dinov3", layout={"names": names})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blocks.0.attn.q_proj.weight", "EVA-02"),
        ("layers.0.blocks.0.attn.relative_position_bias_table", "Swin"),
        ("blocks.0.attn.relative_position_bias_table", "BEiT"),
        ("visual.transformer.resblocks.0.attn.in_proj_weight", "CLIP or SigLIP"),
        ("decoder_blocks.0.attn.qkv.weight", "MAE with its decoder"),
    ],
)
def test_other_vits_are_refused_in_one_line(name, kind, tmp_path):
    save_file({name: torch.zeros(4, 4), "cls_token": torch.zeros(1, 1, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "other.safetensors")
    assert len(caught.value.problems) == 1
    assert f"holds weights of {kind}, which is not read" in str(caught.value)


@pytest.mark.parametrize("case", ["registers, swiglu", "dinov3"])
def test_neighbours_and_a_linear_probe_run_on_them(case, in_folder):
    kind, form, more = CASES[case]
    sizes = {**SIZES, "image_size": 8, "patch_size": 4}
    network = getattr(transformers, kind + form)(getattr(transformers, f"{kind}Config")(**sizes, **more))
    network.save_pretrained("dino")
    probes = '[{"class_path": "KNNProbe"}, {"class_path": "LinearProbe", "epochs": 2}]'
    flags = ["--data=Digits", "--init_from=dino", "--reset_head=true", "--freeze=backbone", "--trainer.max_epochs=1"]
    flags += [f"--trainer.callbacks={probes}", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu"]
    assert main(["fit", *flags, "--test=false", "--wandb.mode=disabled", "--out=probed"]) == 0
    measured = json.loads(Path("probed/results.json").read_text())
    assert {"val/knn_acc", "val/linear_acc"} <= set(measured)
    assert load("probed").network.encoder[1].attention.fn.attention.num_heads == 2
