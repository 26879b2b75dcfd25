"""Patch dropout, drop path by depth and activation checkpointing."""

import pytest
import torch
from timm.layers import PatchDropout as TimmPatchDropout
from timm.models.vision_transformer import VisionTransformer

from vit_lightning import ViT, from_reference
from vit_lightning.models.layers import DropPath
from vit_lightning.models.patches import PatchDropout, PatchEmbedding

SIZES = {"image_size": 16, "patch_size": 4, "emb_size": 16, "depth": 3, "num_heads": 2, "num_classes": 3}


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_patch_dropout_is_timm_s(prefix, p):
    tokens = torch.randn(4, prefix + 16, 5)
    ours, theirs = PatchDropout(p, prefix), TimmPatchDropout(p, num_prefix_tokens=prefix)
    torch.manual_seed(1)
    kept = ours(tokens)
    torch.manual_seed(1)
    assert torch.equal(kept, theirs(tokens))
    assert kept.shape[1] == prefix + max(1, int(16 * (1 - p)))
    assert torch.equal(kept[:, :prefix], tokens[:, :prefix])
    assert torch.equal(ours.eval()(tokens), tokens)


def test_patch_dropout_has_its_place_where_timm_has_it():
    config = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    config |= {"reg_tokens": 2, "pre_norm": True}
    theirs = VisionTransformer(**config, patch_drop_rate=0.5)
    ours = from_reference(theirs.state_dict(), family="timm", config=config)
    ours.patch_embedding = PatchEmbedding(
        **{name: part for name, part in ours.patch_embedding.named_children() if name != "norm"},
        patch_dropout=PatchDropout(0.5, 3),
        norm=ours.patch_embedding.norm,
    )
    images = torch.randn(2, 3, 16, 16)
    torch.manual_seed(2)
    expected = theirs(images)
    torch.manual_seed(2)
    torch.testing.assert_close(ours(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("schedule", "rates"), [("linear", [0.1, 0.2]), ("constant", [0.2, 0.2, 0.2])])
def test_drop_path_by_depth(schedule, rates):
    vit = ViT(**SIZES, drop_path=0.2, drop_path_schedule=schedule)
    found = [module.p for module in vit.encoder.modules() if isinstance(module, DropPath)]
    assert found == pytest.approx([rate for rate in rates for _ in range(2)])  # both branches of a block


DROPS = {"drop_path": 0.5, "emb_dropout": 0.1, "patch_dropout": 0.2, "head_dropout": 0.1}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_activation_checkpointing_gives_the_same_bits(precision):
    calls = {}

    def gradients(checkpointing: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        vit = ViT(**SIZES, **DROPS, activation_checkpointing=checkpointing)
        torch.nn.init.normal_(vit.head.linear.weight)
        calls[checkpointing] = 0

        def count(*_: object) -> None:
            calls[checkpointing] += 1

        for block in vit.encoder:
            block.register_forward_pre_hook(count)
            block.feed_forward.fn.feed_forward.dropout.p = 0.3
            block.attention.fn.attention.dropout = 0.2
        torch.manual_seed(3)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = vit(torch.randn(4, 3, 16, 16)).square().sum()
        loss.backward()
        return [weight.grad for weight in vit.parameters()], torch.rand(3)

    (plain, after), (recomputed, after_too) = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert torch.equal(after, after_too), "the random numbers that follow are others"
    assert any(gradient.abs().sum() > 0 for gradient in plain)
    assert calls == {False: 3, True: 6}
