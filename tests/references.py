"""Small models of every family in ``vit_lightning.weights``, with random weights from a seed."""

import torch

from vit_lightning.weights import FAMILIES
from vit_lightning.weights.options import OPTIONS, build, canonical_state, describe
from vit_lightning.weights.tables import find_names, to_theirs


def sized(words, **more):
    """Arguments of a small model: size of images and patches, classes, width, depth and heads by these words."""
    return {**dict(zip(words.split(), (8, 4, 5, 16, 2, 2), strict=True)), **more}


SQUARES = {"image_size": [8, 8]}
LUCID = "image_size patch_size num_classes dim depth heads"
HUGGING_FACE = "image_size patch_size num_labels hidden_size num_hidden_layers num_attention_heads"
CONFIGS = {
    "timm": sized("img_size patch_size num_classes embed_dim depth num_heads"),
    "timm_legacy": sized("img_size patch_size num_classes embed_dim depth num_heads"),
    "torchvision": sized("image_size patch_size num_classes hidden_dim num_layers num_heads", mlp_dim=24),
    "hf": sized(HUGGING_FACE, intermediate_size=24),
    "deit": sized(HUGGING_FACE, intermediate_size=24),
    "dinov2": sized(HUGGING_FACE),
    "vit_pytorch": sized(LUCID, mlp_dim=24),
    "simple_vit": sized(LUCID, mlp_dim=24),
    "crate": sized(LUCID),
    "big_vision": {**sized("image_size patch_size num_classes width depth num_heads", patch_size=[4, 4]), **SQUARES},
    "google": {
        **sized("image_size patches num_classes hidden_size num_layers num_heads", patches=[4, 4], mlp_dim=24),
        **SQUARES,
    },
    "torch_encoder": sized("img_size patch_size num_classes embed_dim depth num_heads"),
    "einops_tutorial": sized("img_size patch_size num_classes emb_size depth num_heads"),
}

MORE = [
    ("timm_legacy", {"distilled": True, "representation_size": 7}),
    ("timm_legacy", {"qk_scale": 0.3, "qkv_bias": False}),
    ("vit_pytorch", {"pool": "mean"}),
    ("crate", {"pool": "mean", "ista": 0.2, "dim_head": 8, "mlp_dim": 99}),
    ("big_vision", {"pool_type": "tok", "rep_size": True}),
    ("big_vision", {"pool_type": "map", "posemb": "sincos2d", "mlp_dim": 20, "rep_size": 12}),
    ("big_vision", {"pool_type": "tok", "posemb": "sincos2d", "num_classes": None}),
    ("google", {"classifier": "gap"}),
    ("google", {"representation_size": 7}),
    ("einops_tutorial", {"attention_variant": "separate_literal"}),
    ("einops_tutorial", {"attention_variant": "fused_correct", "forward_expansion": 3}),
    ("hf", {"id2label": {"0": "cat"}, "architectures": ["ViTForImageClassification"]}),
]
"""Models of these families with other options."""

TIMM = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}

TIMM_CONFIGS = {
    "token": {},
    "rectangles": {"img_size": [8, 24], "patch_size": [4, 6], "in_chans": 1},
    "avg": {"global_pool": "avg"},
    "avg, norm before pool": {"global_pool": "avg", "fc_norm": False},
    "avg without class token": {"global_pool": "avg", "class_token": False},
    "avg with prefix": {"global_pool": "avg", "reg_tokens": 2, "pool_include_prefix": True},
    "max": {"global_pool": "max", "reg_tokens": 1},
    "max with prefix": {"global_pool": "max", "pool_include_prefix": True},
    "avgmax": {"global_pool": "avgmax"},
    "avgmax with prefix": {"global_pool": "avgmax", "pool_include_prefix": True},
    "map": {"global_pool": "map", "act_layer": "gelu_tanh"},
    "map with prefix": {"global_pool": "map", "pool_include_prefix": True, "mlp_ratio": 3.0},
    "map without class token": {"global_pool": "map", "class_token": False, "norm_layer": "rmsnorm_1e-6"},
    "norm after token": {"fc_norm": True},
    "registers": {"reg_tokens": 3},
    "registers, positions on patches": {"reg_tokens": 3, "no_embed_class": True},
    "positions on patches": {"no_embed_class": True},
    "no positions": {"pos_embed": "none"},
    "layer scale": {"init_values": 0.1},
    "pre norm": {"pre_norm": True, "act_layer": "quick_gelu"},
    "no final norm": {"final_norm": False},
    "qk norm": {"qk_norm": True},
    "qk norm, rms": {"qk_norm": True, "norm_layer": "rmsnorm_1e-6"},
    "attention and mlp norm": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "patch norm": {"embed_norm_layer": "layernorm_1e-5"},
    "layernorm 1e-5": {"norm_layer": "layernorm_1e-5"},
    "swiglu": {"mlp_layer": "SwiGLU", "act_layer": "SiLU"},
    "swiglu with norm": {"mlp_layer": "SwiGLU", "act_layer": "SiLU", "scale_mlp_norm": True},
    "swiglu packed": {"mlp_layer": "SwiGLUPacked", "act_layer": "SiLU", "mlp_ratio": 5.5},
    "geglu": {"mlp_layer": "SwiGLUPacked"},
    "odd mlp": {"mlp_ratio": 2.7},
    "features": {"num_classes": 0},
}
"""Arguments of timm's VisionTransformer beside those of ``TIMM``."""


UNTOLD = ("num_heads", "num_attention_heads", "global_pool", "fc_norm", "act_layer", "norm_layer", "init_values")
UNTOLD += ("pool_include_prefix", "pool", "ista", "dim_head", "qk_scale", "attention_variant")
UNTOLD += ("hidden_act", "embed_norm_layer", "heads", "layer_norm_eps")
"""Arguments that no tensor tells."""


def told(family, config, state):
    """What the words of a family have to add to the tensors of a model."""
    size = next(field.theirs for field in FAMILIES[family].fields if "image_size" in field.options)
    positions = any("pos" in name for name in state)
    more = [name for name in config if isinstance(config[name], list) or (name == size and not positions)]
    given = {name: value for name, value in config.items() if name in (*UNTOLD, *more)}
    given |= {"global_pool": "token"} if config.get("fc_norm") else {}
    return given | ({"act_layer": config.get("act_layer", "gelu")} if config.get("mlp_layer") == "SwiGLUPacked" else {})


def fresh(family, layout=None, **more):
    """Returns a ViT with random weights, and its tensors and config in the family's form."""
    table = FAMILIES[family]
    config = {**CONFIGS[family], **more}
    vit = build(table.read(config, {**table.layout_for(OPTIONS), **(layout or {})}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in vit.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    options, ours = describe(vit), canonical_state(vit)
    names = table.names(options, {**table.layout_for(options), **(layout or {})})
    state = to_theirs(ours, find_names(ours, names))
    extra = table.extra(options, table.layout_for(options))
    return vit.eval(), state | {name: torch.empty(shape) for name, shape in extra.items()}, config


def randomise(network, seed=0):
    """Weights large enough that attention is far from uniform, and nothing is zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            fan_in = weight[0].numel() if weight.ndim > 1 and len(weight) else 1
            scale = 1.3 * fan_in**-0.5 if "weight" in name and weight.ndim > 1 else 0.4
            weight.copy_(scale * drawn + (1.0 if weight.ndim == 1 and name.endswith("weight") else 0.0))
    return network.double()
