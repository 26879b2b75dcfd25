"""Differences between other libraries' ViTs and ours with the same weights, in float64 and float32.

python experiments/benchmarks/parity.py                (needs the extra ``test``; half a minute on one core)

Each peer is built by its own library at the sizes of Ti/16 (224 pixels, 12 blocks, width 192, 3 heads, 1,000 classes),
with random weights, of standard deviation 0.1 in norms, biases and positions too. Two random images go through it and
through the ViT that ``from_reference`` makes of its tensors. Differences are the largest over the logits, divided by
their standard deviation, and over the gradients of all weights, divided by their largest entry.
"""

from __future__ import annotations

import copy

import timm
import torch
import torchvision
import transformers
import vit_pytorch
from torch import Tensor, nn

from vit_lightning import from_reference, to_reference

SIZES = {"depth": 12, "num_heads": 3, "num_classes": 1000, "img_size": 224, "patch_size": 16, "embed_dim": 192}
TORCHVISION = {"image_size": 224, "patch_size": 16, "num_layers": 12, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
HF = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
HF |= {"image_size": 224, "patch_size": 16, "num_labels": 1000}
LUCID = {"image_size": 224, "patch_size": 16, "num_classes": 1000, "dim": 192, "depth": 12, "heads": 3, "mlp_dim": 768}

PEERS = [
    ("timm", timm.models.VisionTransformer, SIZES),
    ("timm", timm.models.deit.VisionTransformerDistilled, SIZES),
    ("torchvision", torchvision.models.VisionTransformer, TORCHVISION | {"num_classes": 1000}),
    ("hf", lambda **config: transformers.ViTForImageClassification(transformers.ViTConfig(**config)), HF),
    ("vit_pytorch", vit_pytorch.ViT, LUCID),
    ("simple_vit", vit_pytorch.SimpleViT, LUCID),
]


def logits_of(output: object) -> Tensor:
    logits = getattr(output, "logits", output)
    assert isinstance(logits, Tensor)
    return logits


def gradients(model: nn.Module, images: Tensor, direction: Tensor) -> Tensor:
    """Leaves the gradients in the weights' place, and returns the logits."""
    logits = logits_of(model(images))
    logits.backward(direction)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros(()) if weight.grad is None else weight.grad)
    return logits.detach()


def compare(family: str, peer: nn.Module, config: dict[str, object], dtype: torch.dtype) -> tuple[float, float]:
    """Returns the largest difference of the logits and of the gradients, as the module says."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 224, 224, generator=generator, dtype=torch.float64).to(dtype)
    direction = torch.randn(2, 1000, generator=generator, dtype=torch.float64).to(dtype)
    peer = copy.deepcopy(peer).to(dtype).eval()
    vit = from_reference(peer.state_dict(), family=family, config=config).to(dtype).eval()
    theirs, ours = gradients(peer, images, direction), gradients(vit, images, direction)
    named, _ = to_reference(vit, family=family)
    pairs = [(torch.as_tensor(named[name]), weight.detach()) for name, weight in peer.named_parameters()]
    largest = max(float(weight.abs().max()) for _, weight in pairs)
    error = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    return float((ours - theirs).abs().max() / theirs.std()), error / largest


def main() -> None:
    versions = {module.__name__: module.__version__ for module in (torch, torchvision, timm, transformers)}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{'family':12} {'class':32} {'logits, float64':>16} {'gradients':>10} {'float32':>10}")
    for family, make, config in PEERS:
        torch.manual_seed(0)
        peer = make(**config)
        with torch.no_grad():
            for weight in peer.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        logits, gradient = compare(family, peer, config, torch.float64)
        single, _ = compare(family, peer, config, torch.float32)
        print(f"{family:12} {type(peer).__name__:32} {logits:16.1e} {gradient:10.1e} {single:10.1e}", flush=True)


if __name__ == "__main__":
    main()
