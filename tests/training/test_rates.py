"""Rate and decay of every parameter of every family, held against a table written by hand in the family's own names."""

from __future__ import annotations

import pytest
import torch
from references import fresh
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay

from vit_lightning import OptimizerConfig, from_reference, to_reference
from vit_lightning.training.optim import optimizer_and_schedule
from vit_lightning.weights.convert import WRITTEN

TIMM_BLOCK = "attn.qkv.weight attn.proj.weight mlp.fc1.weight mlp.fc2.weight"
TIMM_VECTORS = "norm1.weight norm1.bias attn.qkv.bias attn.proj.bias norm2.weight norm2.bias mlp.fc1.bias mlp.fc2.bias"
EINOPS_PATCHES = "to_patch_embedding.1.weight to_patch_embedding.1.bias to_patch_embedding.2.bias"
EINOPS_PATCHES += " to_patch_embedding.3.weight to_patch_embedding.3.bias"

# arguments of a family; then its matrices, which take decay, and all others: of the embedding, a block ({}) and the end
TABLES = {
    "timm": (
        {"reg_tokens": 2, "init_values": 0.1},
        ["patch_embed.proj.weight", "patch_embed.proj.bias cls_token reg_token pos_embed"],
        ["blocks.{}.", TIMM_BLOCK, f"{TIMM_VECTORS} ls1.gamma ls2.gamma"],
        ["head.weight", "norm.weight norm.bias head.bias"],
    ),
    "timm_legacy": (
        {"distilled": True},
        ["patch_embed.proj.weight", "patch_embed.proj.bias cls_token dist_token pos_embed"],
        ["blocks.{}.", TIMM_BLOCK, TIMM_VECTORS],
        ["head.weight head_dist.weight", "norm.weight norm.bias head.bias head_dist.bias"],
    ),
    "torchvision": (
        {},
        ["conv_proj.weight", "conv_proj.bias class_token encoder.pos_embedding"],
        [
            "encoder.layers.encoder_layer_{}.",
            "self_attention.in_proj_weight self_attention.out_proj.weight mlp.0.weight mlp.3.weight",
            "ln_1.weight ln_1.bias self_attention.in_proj_bias self_attention.out_proj.bias ln_2.weight ln_2.bias "
            "mlp.0.bias mlp.3.bias",
        ],
        ["heads.head.weight", "encoder.ln.weight encoder.ln.bias heads.head.bias"],
    ),
    "hf": (
        {},
        [
            "vit.embeddings.patch_embeddings.projection.weight",
            "vit.embeddings.patch_embeddings.projection.bias vit.embeddings.cls_token "
            "vit.embeddings.position_embeddings",
        ],
        [
            "vit.layers.{}.",
            "attention.q_proj.weight attention.k_proj.weight attention.v_proj.weight attention.o_proj.weight "
            "mlp.fc1.weight mlp.fc2.weight",
            "attention.q_proj.bias attention.k_proj.bias attention.v_proj.bias attention.o_proj.bias "
            "layernorm_before.weight layernorm_before.bias layernorm_after.weight layernorm_after.bias "
            "mlp.fc1.bias mlp.fc2.bias",
        ],
        ["classifier.weight", "vit.layernorm.weight vit.layernorm.bias classifier.bias"],
    ),
    "vit_pytorch": (
        {},
        ["to_patch_embedding.2.weight", f"{EINOPS_PATCHES} cls_token pos_embedding"],
        [
            "transformer.layers.{}.",
            "0.to_qkv.weight 0.to_out.0.weight 1.net.1.weight 1.net.4.weight",
            "0.norm.weight 0.norm.bias 0.to_out.0.bias 1.net.0.weight 1.net.0.bias 1.net.1.bias 1.net.4.bias",
        ],
        ["mlp_head.weight", "transformer.norm.weight transformer.norm.bias mlp_head.bias"],
    ),
    "simple_vit": (
        {},
        ["to_patch_embedding.2.weight", EINOPS_PATCHES],
        [
            "transformer.layers.{}.",
            "0.to_qkv.weight 0.to_out.weight 1.net.1.weight 1.net.3.weight",
            "0.norm.weight 0.norm.bias 1.net.0.weight 1.net.0.bias 1.net.1.bias 1.net.3.bias",
        ],
        ["linear_head.weight", "transformer.norm.weight transformer.norm.bias linear_head.bias"],
    ),
    "crate": (
        {},
        ["to_patch_embedding.2.weight", f"{EINOPS_PATCHES} cls_token pos_embedding"],
        [
            "transformer.layers.{}.",
            "0.fn.qkv.weight 0.fn.to_out.0.weight 1.fn.weight",
            "0.norm.weight 0.norm.bias 0.fn.to_out.0.bias 1.norm.weight 1.norm.bias",
        ],
        ["mlp_head.1.weight", "mlp_head.0.weight mlp_head.0.bias mlp_head.1.bias"],
    ),
    "torch_encoder": (
        {},
        ["patch_embed.proj.weight", "patch_embed.proj.bias cls_token pos_embed"],
        [
            "blocks.layers.{}.",
            "self_attn.in_proj_weight self_attn.out_proj.weight linear1.weight linear2.weight",
            "self_attn.in_proj_bias self_attn.out_proj.bias norm1.weight norm1.bias norm2.weight norm2.bias "
            "linear1.bias linear2.bias",
        ],
        ["head.weight", "norm.weight norm.bias head.bias"],
    ),
    "einops_tutorial": (
        {},
        ["0.projection.0.weight", "0.projection.0.bias 0.cls_token 0.positions"],
        [
            "1.{}.",
            "0.fn.1.qkv.weight 0.fn.1.projection.weight 1.fn.1.0.weight 1.fn.1.3.weight",
            "0.fn.1.qkv.bias 0.fn.1.projection.bias 0.fn.0.weight 0.fn.0.bias 1.fn.0.weight 1.fn.0.bias "
            "1.fn.1.0.bias 1.fn.1.3.bias",
        ],
        ["2.2.weight", "2.1.weight 2.1.bias 2.2.bias"],
    ),
}


def by_hand(family: str) -> dict[str, tuple[float, float]]:
    """Rate over lr = 1 and decay of each of the family's tensors: two blocks, layer_decay 0.5, weight_decay 0.3."""
    _, embedding, (prefix, *block), end = TABLES[family]
    layers = [("", 0.125, embedding), (prefix.format(0), 0.25, block), (prefix.format(1), 0.5, block), ("", 1.0, end)]
    return {
        start + name: (rate, decay)
        for start, rate, kinds in layers
        for names, decay in zip(kinds, (0.3, 0.0), strict=True)
        for name in names.split()
    }


def of_the_optimizer(vit, family):
    """The same as the optimizer has it; which tensor is which of ours is told by a number written into each."""
    config = OptimizerConfig(lr=1.0, weight_decay=0.3, layer_decay=0.5, schedule="constant")
    optimizer, _ = optimizer_and_schedule(vit, config, total_steps=1, steps_per_epoch=1)
    facts = {}
    with torch.no_grad():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.fill_(len(facts) + 1)
                facts[len(facts) + 1] = (group["lr"], group["weight_decay"])
    tensors, _ = to_reference(vit, family=family)
    numbers = {name: int(torch.as_tensor(tensor).flatten()[0]) for name, tensor in tensors.items()}
    assert all((torch.as_tensor(tensor) == numbers[name]).all() for name, tensor in tensors.items())
    return {name: facts[number] for name, number in numbers.items()}


# those of families that are read alone are told by their names as timm's or ours; deit's are hf's
@pytest.mark.parametrize("family", [family for family in WRITTEN if family != "deit"])
def test_rate_and_decay_of_every_parameter(family):
    vit, _, _ = fresh(family, **TABLES[family][0])
    assert of_the_optimizer(vit, family) == by_hand(family)
    assert sum(1 for _ in vit.parameters()) <= len(by_hand(family))  # some are several of theirs


def test_timm_says_the_same_but_for_its_last_norm():
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5)
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = param_groups_layer_decay(
        model, weight_decay=0.3, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    )
    theirs = {names[id(w)]: (group["lr_scale"], group["weight_decay"]) for group in groups for w in group["params"]}
    config = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    ours = of_the_optimizer(from_reference(model.state_dict(), family="timm", config=config), "timm")
    different = {name: (theirs[name], ours[name]) for name in theirs if theirs[name] != ours[name]}
    # timm gives the last norm the rate of the last block, BEiT and MAE that of the head
    assert different == {f"norm.{kind}": ((0.5, 0.0), (1.0, 0.0)) for kind in ("weight", "bias")}
    assert theirs.keys() == ours.keys()
