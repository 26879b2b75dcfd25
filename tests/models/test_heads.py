import pytest
import torch
from tensors import randn, randomise
from torch import nn

from vit_lightning import ViT, ViTClassifier
from vit_lightning.errors import UserError
from vit_lightning.models.heads import (
    ClassificationHead,
    ClassTokenAndMeanPool,
    DistilledHead,
    MaxPool,
    MeanAllPool,
    MeanMaxPool,
    SequencePool,
)

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 1, "num_heads": 2, "num_classes": 5}


def test_pools_count_the_tokens_that_they_say():
    tokens = randn(2, 6, 4)
    patches = tokens[:, 2:]
    expected = {
        MeanAllPool(4, 1, 2): tokens.sum(1) / 6,
        MaxPool(4, 1, 2): patches.max(dim=1).values,
        MaxPool(4, 1, 2, prefix=True): tokens.max(dim=1).values,
        MeanMaxPool(4, 1, 2): (patches.max(dim=1).values + patches.sum(1) / 4) / 2,
        MeanMaxPool(4, 1, 2, prefix=True): (tokens.max(dim=1).values + tokens.sum(1) / 6) / 2,
        ClassTokenAndMeanPool(4, 1, 2): torch.cat([tokens[:, 0], patches.sum(1) / 4], dim=1),
    }
    for pool, wanted in expected.items():
        torch.testing.assert_close(pool(tokens), wanted, rtol=0, atol=1e-12)


def test_a_sequence_pool_weighs_each_token_by_its_score():
    pool, tokens = SequencePool(4, 1, 1).double(), randn(2, 3, 4)
    with torch.no_grad():
        pool.score.weight.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    one, other = tokens[:, 1], tokens[:, 2]
    share = torch.sigmoid(one[:, :1] - other[:, :1])  # of two tokens
    torch.testing.assert_close(pool(tokens), share * one + (1 - share) * other, rtol=0, atol=1e-12)


def test_a_pool_of_another_width_widens_what_is_behind_it():
    vit = ViT(**SMALL, pool=ClassTokenAndMeanPool, final_norm="after_pool")
    assert vit.head.linear.in_features == vit.head.norm.weight.shape[0] == 32
    assert vit(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    with pytest.raises(UserError, match="pool=ClassTokenAndMeanPool needs class_token=true"):
        ViT(**SMALL, pool=ClassTokenAndMeanPool, class_token=False)
    with pytest.raises(UserError, match="pool=ClassTokenAndMeanPool needs class_token=true"):
        ViT(**SMALL, pool=ClassTokenAndMeanPool, class_token=False, register_tokens=1)  # which would pass for one


def test_head_dropout_drops_pooled_channels_in_training():
    head = ClassificationHead(pool=MeanAllPool(400, 1, 0), emb_size=400, num_classes=0, dropout=0.25)
    torch.manual_seed(0)
    out = head(torch.ones(8, 3, 400))
    assert abs((out == 0).float().mean().item() - 0.25) < 0.05
    assert torch.equal(head.eval()(torch.ones(8, 3, 400)), torch.ones(8, 400))


def test_distilled_head_gives_a_pair_in_training_and_its_mean_in_evaluation():
    head = randomise(DistilledHead(emb_size=4, num_classes=3)).double()
    tokens = randn(2, 6, 4)
    pair = head(tokens)
    assert isinstance(pair, tuple)
    torch.testing.assert_close(pair[0], head.linear(tokens[:, 0]))
    torch.testing.assert_close(pair[1], head.distillation(tokens[:, 1]))
    torch.testing.assert_close(head.eval()(tokens), (pair[0] + pair[1]) / 2)


def test_a_classifier_learns_from_both_heads():
    torch.manual_seed(0)
    vit = randomise(ViT(**SMALL, distillation_token=True)).double()
    model = ViTClassifier(vit)
    batch = (randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
    loss, logits, _ = model.step(batch, "train")
    pair = vit(batch[0])
    losses = [nn.functional.cross_entropy(part, batch[1]) for part in pair]
    torch.testing.assert_close(loss, (losses[0] + losses[1]) / 2)
    torch.testing.assert_close(logits, (pair[0] + pair[1]) / 2)
    loss.backward()
    assert all(weight.grad.count_nonzero() for weight in vit.head.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "mean"}, "distillation_token=true needs pool=cls"),
        ({"representation_size": 8}, "distillation_token=true needs representation_size=null"),
        ({"final_norm": "after_pool"}, "distillation_token=true needs final_norm other than after_pool"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_distillation_token_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        ViT(**SMALL, distillation_token=True, **options)
