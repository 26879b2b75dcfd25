import pytest
import timm
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from sklearn.metrics import top_k_accuracy_score
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_calibration_error

from vit_lightning import Digits, LossConfig, OptimizerConfig, UserError, ViT, ViTClassifier

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def small(num_classes: int = 10) -> ViT:
    return ViT(image_size=8, patch_size=4, in_channels=1, num_classes=num_classes, emb_size=16, depth=1, num_heads=2)


def trainer(**arguments: object) -> Trainer:
    return Trainer(accelerator="cpu", **{**QUIET, "max_epochs": 1, **arguments})


def test_accumulated_gradients_train_as_whole_batches_do_at_the_end_of_an_epoch_too():
    weights = []
    for size, batches in ((128, 1), (64, 2), (32, 4)):  # the last step of an epoch has 14 images, one batch each time
        seed_everything(0, verbose=False)
        module = ViTClassifier(small(), optimizer=OptimizerConfig(name="sgd", lr=0.1, warmup_fraction=0.0))
        trainer(max_epochs=2, accumulate_grad_batches=batches).fit(module, Digits(batch_size=size))
        weights.append(torch.cat([weight.detach().flatten() for weight in module.network.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-5)


def test_figures_of_an_epoch_are_those_of_all_its_images():
    seed_everything(0, verbose=False)
    module, data = ViTClassifier(small()), Digits(batch_size=100)
    images, labels = data.transform.normalise(data.dataset("test").images), data.dataset("test").labels
    for scale in (0.01, 3.0):  # logits that all lie in [0, 1] are no probabilities either
        torch.nn.init.uniform_(module.network.head.linear.weight, 0.0, scale)
        (results,) = trainer().test(module, data, verbose=False)
        with torch.no_grad():
            logits = module.eval()(images)
        assert results["test/loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        assert results["test/acc"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()), abs=1e-7)
        assert results["test/acc5"] == pytest.approx(top_k_accuracy_score(labels, logits, k=5), abs=1e-7)
        expected = multiclass_calibration_error(logits.softmax(1), labels, num_classes=10, n_bins=15)
        assert results["test/ece"] == pytest.approx(float(expected), abs=1e-5)


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": 2}, 14),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 6),
        ({"max_epochs": -1, "max_steps": 5}, 5),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 6),
        ({"max_epochs": 3, "overfit_batches": 2}, 6),
    ],
)
def test_the_schedule_ends_with_training(arguments, steps):
    rates = Rates()
    run = trainer(callbacks=[rates], **arguments)
    run.fit(ViTClassifier(small(), optimizer=OptimizerConfig(lr=1.0, min_lr=0.25)), Digits(batch_size=200))
    assert run.global_step == steps
    assert rates.rates[-1] == pytest.approx(0.25)


def test_warm_up_counts_epochs_of_optimizer_steps():
    rates = Rates()
    config = OptimizerConfig(lr=1.0, warmup_epochs=0.5, schedule="constant")
    run = trainer(callbacks=[rates], accumulate_grad_batches=2)
    run.fit(ViTClassifier(small(), optimizer=config), Digits(batch_size=100))
    assert rates.rates[:10] == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0, 1.0, 1.0])


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(UserError, match="max_epochs"):
        trainer(max_epochs=-1, max_steps=-1).fit(ViTClassifier(small()), Digits())


@pytest.mark.parametrize(("epochs", "steps"), [(-1, 20), (None, 20), (2, -1)])
def test_a_warm_up_of_epochs_that_differ_in_steps_is_refused(epochs, steps):
    run = trainer(callbacks=[GradientAccumulationScheduler({0: 2, 1: 1})], max_epochs=epochs, max_steps=steps)
    with pytest.raises(UserError, match="epochs differ in steps"):
        run.fit(ViTClassifier(small(), optimizer=OptimizerConfig(warmup_epochs=1)), Digits(batch_size=200))


def test_a_network_without_classes_is_refused():
    with pytest.raises(UserError, match="num_classes=0"):
        ViTClassifier(small(0))
    with pytest.raises(UserError, match="num_classes=None"):
        ViTClassifier(torch.nn.Linear(2, 2))


def test_a_network_that_learns_from_a_teacher_by_a_head_of_its_own_has_two():
    network = timm.create_model("deit_tiny_distilled_patch16_224", img_size=16, embed_dim=24, depth=1, num_classes=3)
    network.set_distilled_training(True)
    batch = torch.randn(2, 3, 16, 16), torch.tensor([0, 2])
    output = ViTClassifier(network).step(batch, "train")
    assert len(output.heads) == 2
    torch.testing.assert_close(output.logits, sum(output.heads) / 2)


@pytest.mark.parametrize("kind", ["images and labels", "images in tuples", "images"])
def test_predictions_of_loaders_of_the_user_s_own(kind):
    images, labels = torch.randn(5, 1, 8, 8), torch.arange(5)
    known = {"images and labels": [images, labels], "images in tuples": [images]}
    dataset = TensorDataset(*known[kind]) if kind in known else list(images)
    module = ViTClassifier(small())
    batches = trainer().predict(module, DataLoader(dataset, batch_size=3))
    found = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    torch.testing.assert_close(found.pop("probabilities"), module.eval()(images).softmax(dim=-1))
    assert [values.tolist() for values in found.values()] == ([[0, 1, 2, 3, 4]] if "labels" in kind else [])


def test_losses_are_means_over_images_whatever_the_batches():
    seed_everything(0, verbose=False)
    module, data = ViTClassifier(small(), loss=LossConfig(label_smoothing=0.1)), Digits(batch_size=1000)
    torch.nn.init.normal_(module.network.head.linear.weight)
    run = trainer(limit_train_batches=2)
    module.optimizer_config = OptimizerConfig(lr=0.0)
    run.fit(module, data)
    images, labels = data.transform.normalise(data.dataset("train").images), data.dataset("train").labels
    with torch.no_grad():
        smoothed = torch.nn.functional.cross_entropy(module(images), labels, label_smoothing=0.1)
    assert float(run.callback_metrics["train/loss"]) == pytest.approx(float(smoothed), rel=1e-5)


def test_one_module_can_be_validated_trained_and_trained_again():
    module, data = ViTClassifier(small()), Digits(batch_size=400)
    trainer().validate(module, data, verbose=False)
    trainer().fit(module, data)
    trainer().test(module, data, verbose=False)
    run = trainer()
    run.fit(module, data)
    assert torch.isfinite(run.callback_metrics["train/loss"])
