"""Pre-training as a masked autoencoder: equal to transformers', the same masks again, and what starts from its runs."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange, repeat
from PIL import Image
from runs import SMALL, logged_rows, whole_and_resumed
from torch import Tensor

from vit_lightning import MAE, RotaryAttention, SinCos2dPositions, UserError, ViT, load
from vit_lightning.cli import main
from vit_lightning.commands.fit import fit
from vit_lightning.config.resolve import resolve
from vit_lightning.data.batches import Batch
from vit_lightning.models.mae import draw_kept
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.training.compiled import compile_module

NAMES = (
    (r"vit\.embeddings\.cls_token", "network.patch_embedding.class_token.token"),
    (r"vit\.embeddings\.patch_embeddings\.projection", "network.patch_embedding.projection.conv"),
    (r"vit\.layernorm", "network.norm"),
    (r"(vit|decoder)\.(?:decoder_)?layers\.", r"\1.encoder."),
    (r"decoder\.mask_token", "decoder.mask.token"),
    (r"decoder\.decoder_embed", "decoder.embedding"),
    (r"decoder\.decoder_norm", "decoder.norm"),
    (r"decoder\.decoder_pred", "decoder.pixels"),
    (r"attention\.qkv", "attention.fn.attention.qkv"),
    (r"attention\.o_proj", "attention.fn.attention.projection"),
    (r"layernorm_before", "attention.fn.norm"),
    (r"layernorm_after", "feed_forward.fn.norm"),
    (r"mlp\.fc1", "feed_forward.fn.feed_forward.expand"),
    (r"mlp\.fc2", "feed_forward.fn.feed_forward.contract"),
    (r"^vit\.", "network."),
)


def to_ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' ViTMAEForPreTraining under our names."""
    joined = {}
    for name, value in theirs.items():
        if ".q_proj." in name:
            parts = [theirs[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            joined[name.replace("q_proj", "qkv")] = torch.cat(parts)
        elif not re.search(r"[kv]_proj|pos(ition)?_embed", name):
            joined[name] = value
    found = {}
    for name, value in joined.items():
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        found[name] = value
    return found


@pytest.mark.parametrize("normalise", [True, False])
def test_pixels_loss_and_gradients_are_those_of_transformers(normalise):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = {f"decoder_{name}": value for name, value in {**sizes, "hidden_size": 8, "intermediate_size": 32}.items()}
    images = {"image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-6, "norm_pix_loss": normalise}
    torch.manual_seed(0)
    peer = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes, **decoder, **images))
    peer.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False  # else its positions stay zeros
    peer.vit.embeddings.initialize_weights()
    peer.decoder.initialize_weights(36)
    peer = peer.double()
    sizes = {"image_size": 24, "patch_size": 4, "num_classes": 3, "emb_size": 16, "depth": 2, "num_heads": 2}
    vit = ViT(**sizes, positions=partial(SinCos2dPositions, form="mae"))
    decoder = {"decoder_emb_size": 8, "decoder_depth": 2, "decoder_num_heads": 2, "mask_ratio": 0.7}
    ours = MAE(vit, normalise_pixels=normalise, **decoder).double()
    peer.config.mask_ratio = peer.vit.embeddings.config.mask_ratio = 0.7
    for weight in peer.parameters():
        weight.data += 0.1 * torch.randn_like(weight) * weight.requires_grad
    missing = ours.load_state_dict(to_ours(peer.state_dict()), strict=False)
    assert not missing.unexpected_keys
    assert all(name.startswith(("network.head.", "train_metrics.")) for name in missing.missing_keys)

    pixels, keys = torch.randn(5, 3, 24, 24, dtype=torch.float64), torch.arange(5)
    kept = ours.draw_kept(keys)
    noise = torch.ones(5, 36).scatter(1, kept, torch.linspace(0, 0.5, kept.shape[1]).expand(5, -1))
    expected = peer(pixels, noise=noise)
    found = ours.step(Batch(pixels, keys, keys, keys), "train")
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=1e-6)
    expected.loss.backward()
    found.loss.backward()
    gradients = to_ours({name: weight.grad for name, weight in peer.named_parameters() if weight.requires_grad})
    trained = {name: weight.grad for name, weight in ours.named_parameters() if weight.requires_grad}
    assert trained.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(trained[name], gradient, rtol=0, atol=1e-6)


def test_masks_are_functions_of_the_key_and_of_all_patches_alike():
    keys = torch.arange(4000)
    kept = draw_kept(keys, 16, 0.75)
    assert kept.shape == (4000, 4)
    assert torch.equal(draw_kept(keys[7:9], 16, 0.75), kept[7:9])
    assert all(len(set(row)) == 4 for row in kept.tolist())
    assert kept.flatten().bincount().numpy() == pytest.approx(np.full(16, 1000), rel=0.1)


@pytest.mark.full
def test_a_compiled_step_is_the_same_as_one_graph():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "num_classes": 3, "emb_size": 8, "depth": 1, "num_heads": 2}
    module = MAE(ViT(**sizes), decoder_emb_size=8, decoder_depth=1, decoder_num_heads=2)
    keys, graphs = torch.arange(4), []
    batch = Batch(torch.randn(4, 3, 8, 8), keys, keys, keys)
    expected = module.step(batch, "train").loss
    compile_module(module, 4, torch.device("cuda"), backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert torch.equal(module.step(batch, "train").loss, expected)
    assert len(graphs) == 1


@pytest.mark.parametrize(("normalise", "dtype"), [(True, torch.float32), (False, torch.float64)])
def test_a_reconstruction_keeps_what_is_kept_and_tells_the_rest(normalise, dtype):
    """A decoder that tells zeros has the mean of each patch where pixels are normalised; 64-true has other weights."""
    sizes = {"in_channels": 2, "num_classes": 3, "emb_size": 8, "depth": 1, "num_heads": 2}
    decoder = {"decoder_emb_size": 8, "decoder_depth": 1, "decoder_num_heads": 2, "mask_ratio": 0.5}
    module = MAE(ViT(image_size=(8, 12), patch_size=(2, 4), **sizes), normalise_pixels=normalise, **decoder).to(dtype)
    torch.nn.init.zeros_(module.decoder.pixels.weight)
    images, keys = torch.rand(3, 2, 8, 12) + 1, torch.arange(3)
    masked, whole = module.reconstruct(images, keys)
    is_kept = masked != 0
    assert is_kept.float().mean() == 0.5
    assert torch.equal(whole[is_kept], images[is_kept])
    means = rearrange(images, "b c (h p) (w q) -> b h w (c p q)", p=2, q=4).mean(dim=3) * normalise
    told = repeat(means, "b h w -> b c (h p) (w q)", c=2, p=2, q=4)
    torch.testing.assert_close(whole[~is_kept], told[~is_kept])
    kept = {(image, row // 2 * 3 + column // 4) for image, _, row, column in is_kept.nonzero().tolist()}
    assert kept == {(image, patch) for image, row in enumerate(module.draw_kept(keys).tolist()) for patch in row}


DECODER = ("--module.decoder_emb_size=16", "--module.decoder_depth=1", "--module.decoder_num_heads=2")
RUN = ("fit", *SMALL, "--model.patch_size=2", "--module=MAE", *DECODER, "--data.fraction=0.2", "--data.batch_size=40")
RUN += ("--checkpoint.monitor=val/loss", "--checkpoint.mode=min", "--wandb.mode=disabled", "--trainer.max_epochs=2")


def losses(run: str, name: str) -> list[float]:
    return [row[name] for row in logged_rows(Path(run)) if name in row]


def test_a_run_that_is_killed_inside_an_epoch_comes_out_the_same_to_the_bit(in_folder):
    flags = ("--checkpoint.every_n_steps=1", "--trainer.log_every_n_steps=1", "--trainer.callbacks=[KNNProbe]")
    augment = "--data.augment=[{class_path: RandomCrop, padding: 1}]"
    whole_and_resumed(*RUN, *flags, augment, kill=9)
    assert logged_rows(Path("run")) == logged_rows(Path("whole"))
    assert len(losses("whole", "val/knn_acc")) == 2
    assert Image.open("whole/validation/reconstructions-0002.png").size == (8 * 122, 3 * 152 + 26)


def test_masks_are_others_in_each_epoch_and_the_same_in_each_validation(in_folder, monkeypatch):
    monkeypatch.setattr("vit_lightning.figures.validation_pictures.SAMPLE", 20)
    fit(resolve([*RUN[1:], "--optimizer.lr=0", "--out=run"]))
    assert len(set(losses("run", "train/loss"))) == 2
    validated = losses("run", "val/loss")
    assert len(validated) == 2
    assert validated[0] == validated[1]
    reconstructions = Image.open("run/validation/reconstructions-0002.png")
    assert reconstructions.getpixel((7 * 122 + 61, 26 + 2 * 152 + 40)) != (255, 255, 255)  # eight whole columns


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mae")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit(resolve([*RUN[1:], "--out=run"]))
    return folder / "run"


def test_a_classifier_starts_from_its_encoder_with_a_head_of_its_own(pretrained, in_folder, capsys):
    start = (f"--init_from={pretrained}", "--optimizer.layer_decay=0.75", "--optimizer.lr=0")
    fit(resolve([*start, *SMALL[-2:], "--data.fraction=0.2", "--wandb.mode=disabled", "--out=tuned"]))
    assert "18 tensors taken, new head\n" in capsys.readouterr().out
    first, tuned = (read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"] for run in (pretrained, Path("tuned")))
    kept = [name for name in tuned if name.startswith("network.") and ".head." not in name]
    assert len(kept) == 18
    assert all(torch.equal(first[name], tuned[name]) for name in kept)


@pytest.mark.full
def test_commands_take_its_run_or_refuse_it(pretrained, in_folder, capsys):
    for command in ("embed", "inspect", "test"):
        assert main([command, f"--ckpt={pretrained}"]) == 0
    assert "without names" not in "".join(capsys.readouterr())
    assert main(["predict", f"--ckpt={pretrained}"]) != 0
    assert "MAE learns without labels and predicts no classes" in capsys.readouterr().err


def test_pre_training_starts_from_an_encoder_with_a_decoder_of_its_own(pretrained, in_folder, capsys, monkeypatch):
    monkeypatch.setattr("vit_lightning.figures.validation_pictures.SAMPLE", 4)
    given: list[dict[str, Path]] = []
    log = "vit_lightning.storage.wandb_logger.RunLogger.log_images"
    monkeypatch.setattr(log, lambda self, images, step=None: given.append(images))
    fit(resolve([*RUN[1:], "--trainer.max_epochs=1", "--test=false", f"--init_from={pretrained}", "--out=more"]))
    printed = capsys.readouterr().out
    assert "18 tensors taken, new head, new decoder\n" in printed
    assert "no report" not in printed
    *_, picture = [images["images/reconstructions"] for images in given if "images/reconstructions" in images]
    assert picture.samefile("more/validation/reconstructions-0001.png")
    assert Image.open(picture).size == (4 * 122, 3 * 152 + 26)


def test_a_loaded_run_gives_features_and_no_classes(pretrained):
    model = load(pretrained)
    assert model.embed(torch.zeros(2, 1, 8, 8)).shape == (2, 16)
    with pytest.raises(UserError, match="gives no logits"):
        model.predict(torch.zeros(2, 1, 8, 8))


def test_a_network_that_cannot_be_given_some_of_its_patches_is_refused():
    sizes = {"image_size": 8, "patch_size": 4, "num_classes": 3, "emb_size": 16, "depth": 1, "num_heads": 2}
    with pytest.raises(UserError, match="not one with RotaryAttention"):
        MAE(ViT(**sizes, attention=RotaryAttention))
    with pytest.raises(UserError, match=r"mask_ratio=1.0 must be above 0 .*\nnetwork.patch_dropout: masks"):
        MAE(ViT(**sizes, patch_dropout=0.5), mask_ratio=1.0)
    with pytest.raises(UserError, match="decoder_emb_size=10 must be a multiple of 4"):
        MAE(ViT(**sizes), decoder_emb_size=10, decoder_num_heads=2)
