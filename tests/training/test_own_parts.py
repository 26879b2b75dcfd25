"""Loss, optimizer and schedule of the user's own: the numbers of the class, with our groups and warm-up."""

import json

import pytest
import torch
from runs import SMALL
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from vit_lightning import UserError, ViT
from vit_lightning.cli import main
from vit_lightning.config.files import flatten
from vit_lightning.config.resolve import resolve
from vit_lightning.training.losses import make_loss
from vit_lightning.training.optim import optimizer_and_schedule, parameter_groups


def settings_of(*flags: str):
    return resolve([*SMALL, "--optimizer.lr=0.01", *flags]).settings


def train(network, optimizer, schedule, steps: int, values=lambda group: group["lr"]) -> list:
    rates = []
    for step in range(steps):
        images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        network(images).square().mean().backward()
        rates.append(values(optimizer.param_groups[0]))
        optimizer.step()
        schedule.step()
    return rates


def small() -> ViT:
    torch.manual_seed(0)
    return ViT(image_size=8, patch_size=4, in_channels=1, emb_size=16, depth=1, num_heads=2, num_classes=10)


def test_a_class_of_torch_gets_our_groups_and_its_own_arguments():
    flags = ("--optimizer.class_path=NAdam", "--optimizer.momentum_decay=0.02", "--optimizer.betas=[0.8, 0.95]")
    config = settings_of(*flags, "--optimizer.schedule=constant", "--optimizer.weight_decay=0.1").optimizer
    ours, theirs = small(), small()
    train(ours, *optimizer_and_schedule(ours, config, total_steps=10, steps_per_epoch=10), 10)
    groups = parameter_groups(theirs, 0.1)
    assert len(groups) == 2
    optimizer = torch.optim.NAdam(groups, lr=0.01, betas=(0.8, 0.95), momentum_decay=0.02)
    train(theirs, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), 10)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_an_optimizer_whose_step_takes_no_closure_is_refused_before_training(in_folder):
    (in_folder / "mine.py").write_text("import torch\n\nclass Slow(torch.optim.SGD):\n    def step(self): pass\n")
    with pytest.raises(UserError, match=r"mine.Slow: .*step\(\) got an unexpected keyword argument 'closure'"):
        resolve(["--optimizer.class_path=mine.Slow", *SMALL])


def test_a_scheduler_of_torch_follows_our_warmup():
    flags = ("--optimizer.schedule.class_path=CosineAnnealingWarmRestarts", "--optimizer.schedule.T_0=4")
    config = settings_of(*flags, "--optimizer.schedule.eta_min=0.001", "--optimizer.warmup_steps=3").optimizer
    network = small()
    used = train(network, *optimizer_and_schedule(network, config, total_steps=13, steps_per_epoch=13), 13)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    schedule = CosineAnnealingWarmRestarts(optimizer, 4, eta_min=0.001)
    expected = train(network, optimizer, schedule, 10)
    assert used == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, *expected], rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "scheduler", "given", "momenta"),
    [
        ("SGD", "OneCycleLR", {"max_lr": 0.2, "total_steps": 10}, {0.85, 0.95}),
        ("AdamW", "CyclicLR", {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 4}, {0.8, 0.9}),
        ("SGD", "OneCycleLR", {"max_lr": 0.2, "total_steps": 10, "cycle_momentum": False}, {0.7}),
    ],
)
def test_a_scheduler_of_torch_cycles_the_momentum(kind, scheduler, given, momenta):
    """Their default was refused: "optimizer must support momentum"."""

    def values(group):
        return group["lr"], group["momentum"] if "momentum" in group else group["betas"][0]

    more = {"momentum": 0.7} if kind == "SGD" else {}
    flags = (f"--optimizer={json.dumps({'class_path': kind, **more})}", "--optimizer.weight_decay=0")
    flags += (f"--optimizer.schedule={json.dumps({'class_path': scheduler, **given})}", "--optimizer.warmup_steps=2")
    network = small()
    both = optimizer_and_schedule(network, settings_of(*flags).optimizer, total_steps=12, steps_per_epoch=12)
    used = train(network, *both, 12, values)
    optimizer = getattr(torch.optim, kind)(network.parameters(), lr=0.01, **more)
    schedule = getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **given)
    for found, expected in zip(used[2:], train(network, optimizer, schedule, 10, values), strict=True):
        assert found == pytest.approx(expected, rel=1e-12)
    assert {round(momentum, 6) for _, momentum in used[2:]} >= momenta


def test_a_schedule_of_epochs_keeps_its_rate_for_the_steps_of_each(in_folder):
    (in_folder / "mine.py").write_text("def falling(done, total): return 1 - done / total\n")
    own = settings_of("--optimizer.schedule={class_path: mine.falling, interval: epoch}").optimizer
    torchs = settings_of("--optimizer.schedule={class_path: StepLR, step_size: 2, interval: epoch}").optimizer
    network = small()
    used = train(network, *optimizer_and_schedule(network, own, total_steps=10, steps_per_epoch=4), 10)
    assert used == pytest.approx([0.01] * 4 + [0.01 * 2 / 3] * 4 + [0.01 / 3] * 2, rel=1e-12)
    used = train(network, *optimizer_and_schedule(network, torchs, total_steps=10, steps_per_epoch=4), 10)
    assert used == pytest.approx([0.01] * 8 + [0.001] * 2, rel=1e-12)
    with pytest.raises(UserError, match=r"schedule.interval=batch must be one of step, epoch"):
        settings_of("--optimizer.schedule={class_path: StepLR, step_size: 2, interval: batch}")


@pytest.mark.parametrize(
    ("name", "lr", "decay"), [("AdamW", 0.001, 0.01), ("NAdam", 0.002, 0.0), ("Adagrad", 0.01, 0.0)]
)
def test_a_class_of_torch_has_its_own_defaults(name, lr, decay):
    experiment = resolve([*SMALL, f"--optimizer.class_path={name}"])
    assert (experiment.settings.optimizer.lr, experiment.settings.optimizer.weight_decay) == (lr, decay)
    written = flatten(experiment.config["optimizer"])
    assert (written["lr"], written["weight_decay"]) == (lr, decay)


def test_a_loss_of_torch_takes_its_arguments():
    settings = settings_of("--loss.class_path=CrossEntropyLoss", "--loss.label_smoothing=0.3")
    logits, labels = torch.randn(5, 10), torch.arange(5)
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.3)
    assert make_loss(settings.loss)(logits, labels) == expected


WEIGHTS = [1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]


def test_a_list_of_numbers_is_a_tensor_where_a_loss_takes_one(in_folder):
    text = "from torch.nn.functional import cross_entropy as ce\nfrom torch import Tensor\n\n"
    (in_folder / "mine.py").write_text(
        f"{text}def weighted(a, b, weight: Tensor | None = None): return ce(a, b, weight)\n"
    )
    logits, labels = torch.randn(5, 10), torch.arange(5, 10)
    expected = torch.nn.functional.cross_entropy(logits, labels, torch.tensor(WEIGHTS))
    for name in ("CrossEntropyLoss", "mine.weighted"):
        experiment = resolve([*SMALL, f"--loss={{class_path: {name}, weight: [1, 2, 1, 1, 1, 1, 1, 1, 1, 5.0]}}"])
        loss = make_loss(experiment.settings.loss)
        assert loss(logits, labels) == expected
        assert not loss.state_dict(), "the config's numbers are no state"
        assert loss.double()(logits.double(), labels) == pytest.approx(float(expected))
        assert experiment.config["loss"]["init_args"]["weight"] == WEIGHTS
        (in_folder / "again.yaml").write_text(experiment.to_yaml())
        assert resolve(["--config=again.yaml"]).config == {**experiment.config, "experiment": "run"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("[1, 2]", "loss.class_path=CrossEntropyLoss: with labels: "),
        ("[1, a]", "loss.weight=[1, 'a'] must be a list of finite numbers or null"),
        ("[1, [2, 3]]", "loss.weight=[1, [2, 3]] must be a list of finite numbers or null"),
    ],
)
def test_numbers_that_make_no_tensor_are_refused(given, problem):
    with pytest.raises(UserError) as caught:
        settings_of(f"--loss={{class_path: CrossEntropyLoss, weight: {given}}}")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


def test_weights_of_classes_train_in_half_precision(in_folder):
    flags = [*SMALL, "--trainer.fast_dev_run=true", "--trainer.precision=bf16-true"]
    assert main(["fit", *flags, f"--loss={{class_path: CrossEntropyLoss, weight: {WEIGHTS}}}"]) == 0
