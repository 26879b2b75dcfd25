import pytest
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy
from timm.loss import SoftTargetCrossEntropy

from vit_lightning import CutMix, Digits, LossConfig, MixUp, UserError, ViT, ViTClassifier
from vit_lightning.data.batches import Batch
from vit_lightning.training.losses import make_loss


def logits_and_labels(classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (6,), generator=generator)


def timm_targets(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """Mixed targets as timm makes them, which smooths them there; ours are smoothed by the loss."""
    mixup = Mixup(mixup_alpha=1.0, mode="batch", label_smoothing=smoothing, num_classes=classes)
    mixup._params_per_batch = lambda: (0.3, False)
    return mixup(torch.zeros(len(labels), 1, 2, 2), labels)[1].double()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_is_timm_s(smoothing):
    logits, labels = logits_and_labels()
    ours, theirs = make_loss(LossConfig("bce", smoothing)), TimmBinaryCrossEntropy(smoothing)
    torch.testing.assert_close(ours(logits, labels), theirs(logits, labels), rtol=1e-14, atol=0)
    mixed = timm_targets(labels, 7, smoothing)
    torch.testing.assert_close(ours(logits, timm_targets(labels, 7, 0.0)), theirs(logits, mixed), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("threshold", "present"), [(0.0, 2), (0.5, 1)])
def test_a_threshold_makes_whole_targets_of_mixed_ones_as_timm_s(threshold, present):
    """With 0 both classes of a mixed image are there, as DeiT III and ViT-5 have it."""
    logits, labels = logits_and_labels()
    mixed = timm_targets(labels, 7, 0.0)
    loss = make_loss(LossConfig("bce", target_threshold=threshold))
    expected = TimmBinaryCrossEntropy(smoothing=0.0, target_threshold=threshold)(logits, mixed)
    torch.testing.assert_close(loss(logits, mixed), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(loss(logits, labels), make_loss(LossConfig("bce"))(logits, labels))
    assert (mixed > threshold).sum(1).max() == present
    with pytest.raises(UserError, match=r"target_threshold=0\.5 does nothing without name=bce"):
        LossConfig("ce", target_threshold=0.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_mixed_targets_is_timm_s(smoothing):
    logits, labels = logits_and_labels()
    ours = make_loss(LossConfig("ce", smoothing))(logits, timm_targets(labels, 7, 0.0))
    theirs = SoftTargetCrossEntropy()(logits, timm_targets(labels, 7, smoothing))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["ce", "bce"])
@pytest.mark.parametrize("distilled", [False, True], ids=["one head", "two heads"])
@pytest.mark.parametrize("mixing", [[], [MixUp()], [CutMix()]], ids=["plain", "MixUp", "CutMix"])
def test_a_training_step_takes_mixed_images_whatever_the_loss_and_the_heads(name, distilled, mixing):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "in_channels": 1, "num_classes": 10, "emb_size": 16, "depth": 1}
    network = ViT(**sizes, num_heads=2, distillation_token=distilled)
    torch.nn.init.normal_(network.head.linear.weight)
    module = ViTClassifier(network, loss=LossConfig(name, 0.1))
    images, labels = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8), torch.arange(6)
    batch = Batch(images, labels, indices=torch.arange(6), keys=torch.arange(6))
    batch = Digits(mixing=mixing).model_input(batch, completed=3)
    loss, found, _ = module.step(batch, "train")
    heads = network(batch.images)
    torch.testing.assert_close(found, torch.stack(heads).mean(dim=0) if distilled else heads)
    shares = F.one_hot(labels, 10).float() if not mixing else batch.targets
    smooth = 0.9 * shares + 0.01
    expected = []
    for logits in heads if distilled else [heads]:
        if name == "ce":
            expected.append(-(smooth * logits.log_softmax(1)).sum(1).mean())
        else:
            terms = smooth * F.logsigmoid(logits) + (1 - smooth) * F.logsigmoid(-logits)
            expected.append(-terms.mean())
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    if mixing:
        assert not torch.equal(shares, F.one_hot(batch.labels, 10).float())


@pytest.mark.parametrize("name", ["ce", "bce"])
def test_shares_of_mixed_images_are_not_rounded_with_the_logits(name):
    module = ViTClassifier(torch.nn.Flatten().bfloat16(), num_classes=3, loss=LossConfig(name))
    logits, targets = torch.tensor([[10.0, 0.0, -10.0]]), torch.tensor([[0.3, 0.7, 0.0]])
    batch = Batch(logits.bfloat16(), torch.tensor([1]), torch.arange(1), torch.arange(1), targets)
    loss = module.step(batch, "train").loss
    torch.testing.assert_close(loss, make_loss(LossConfig(name))(logits, targets), rtol=1e-6, atol=0)
