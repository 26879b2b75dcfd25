"""Ten programs of a user, each a file beside a config, started from another folder and killed once."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
import yaml
from fake_runs import pretend
from runs import logged_rows

from vit_lightning.ablation.ledger import read_study
from vit_lightning.ablation.plan import slug
from vit_lightning.storage.checkpoint_files import read_checkpoint

pytestmark = pytest.mark.full

PROGRAM = """
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import Metric
from torchvision.transforms import v2

from vit_lightning import ResidualAdd
from vit_lightning.models.blocks import NamedSequential


class PostNorm(NamedSequential):
    def __init__(self, emb_size, attention, feed_forward, norm, layer_scale=None, drop_path=0.0):
        super().__init__(
            attention=ResidualAdd(attention), norm1=norm(emb_size),
            feed_forward=ResidualAdd(feed_forward), norm2=norm(emb_size),
        )


class Focal(nn.Module):
    def __init__(self, gamma: float = 2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, targets):
        loss = F.cross_entropy(logits, targets, reduction="none")
        return ((1 - torch.exp(-loss)) ** self.gamma * loss).mean()


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    mean.lerp_(weight.grad, 1 - group["beta"])
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean.sign(), alpha=group["lr"])
        return loss


class Speckle(v2.Transform):
    def transform(self, inpt, params):
        return torch.where(torch.rand(inpt.shape) < 0.1, 255 - inpt, inpt)


class Shapes(Dataset):
    classes = ["dark", "light", "half"]

    def __init__(self, train: bool = True, count: int = 300):
        generator = torch.Generator().manual_seed(int(train))
        self.labels = torch.arange(count) % 3
        self.images = torch.randint(0, 96, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
        self.images += (torch.tensor([0, 120, 60])[self.labels])[:, None, None, None].byte()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


class Loaders(LightningDataModule):
    num_classes = 10

    def setup(self, stage):
        pixels, labels = load_digits(return_X_y=True)
        self.images = TensorDataset(torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels))

    def train_dataloader(self):
        return DataLoader(self.images, batch_size=162)

    val_dataloader = test_dataloader = train_dataloader


class Mlp(nn.Sequential):
    def __init__(self, image_size=8, num_classes: int = 10, width: int = 32):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, num_classes))


class Plain(LightningModule):
    def __init__(self, num_classes: int, lr: float = 0.01):
        super().__init__()
        self.lr, self.net = lr, Mlp(num_classes=num_classes)

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, number):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, number):
        self.log("val/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def test_step(self, batch, number):
        self.log("test/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class WorstClass(Metric):
    def __init__(self, num_classes: int):
        super().__init__()
        self.add_state("right", torch.zeros(num_classes), dist_reduce_fx="sum")
        self.add_state("all", torch.zeros(num_classes), dist_reduce_fx="sum")

    def update(self, probabilities, labels):
        self.all += torch.bincount(labels, minlength=len(self.all))
        self.right += torch.bincount(labels[probabilities.argmax(1) == labels], minlength=len(self.all))

    def compute(self):
        return (self.right / self.all.clamp(min=1)).min()


class Shrink(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for weight in pl_module.parameters():
            weight.data.mul_(0.999)
"""

PARTS = {
    "block": {"model.block.class_path": "mine.PostNorm"},
    "loss": {"loss.class_path": "mine.Focal", "loss.gamma": 1.5, "data.mixing": None},
    "optimizer": {"optimizer.class_path": "mine.SignSGD", "optimizer.beta": 0.8},
    "transform": {"data.augment": [{"class_path": "mine.Speckle"}]},
    "dataset": {"data.class_path": "mine.Shapes", "data.batch_size": 36},
    "data module": {"data.class_path": "mine.Loaders"},
    "module": {"module.class_path": "mine.Plain", "module.lr": 0.02},
    "metric": {"metrics": [{"class_path": "mine.WorstClass"}]},
    "callback": {"trainer.callbacks": [{"class_path": "fault.Fault"}, {"class_path": "mine.Shrink"}]},
    "network": {"model.class_path": "mine.Mlp", "model.width": 24},
}


def nested(options: dict[str, object]) -> dict[str, object]:
    config: dict[str, object] = {}
    for key, value in options.items():
        *groups, name = key.split(".")
        node = config
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return config


def write_project(folder: Path, part: str) -> Path:
    """Writes a user's folder: a config and the file beside it; returns another folder, from which it is used."""
    options = {
        "trainer.callbacks": [{"class_path": "fault.Fault"}],
        "trainer.max_epochs": 4,
        "trainer.accelerator": "cpu",
        "trainer.log_every_n_steps": 1,
        "checkpoint.every_n_steps": 1,
        **({} if part in ("dataset", "data module") else {"data.batch_size": 162}),
        **(MODEL if part not in ("network", "module") else {}),
        **PARTS[part],
    }
    project, elsewhere = folder / "project", folder / "elsewhere"
    project.mkdir(parents=True)
    elsewhere.mkdir()
    (project / "mine.py").write_text(PROGRAM)
    (project / "exp.yaml").write_text(yaml.safe_dump(nested(options)))
    return elsewhere


MODEL = {"model.patch_size": 4, "model.emb_size": 16, "model.depth": 1, "model.num_heads": 2}
START = ("fit", "--config=../project/exp.yaml", "--out=run")


def outcome(folder: Path) -> dict[str, object]:
    """All that must not depend on whether a run was killed."""
    last = read_checkpoint(folder / "run/checkpoints/last.ckpt")
    return {
        "weights": last["state_dict"],
        "optimizer": last["optimizer_states"],
        "steps": last["global_step"],
        "best": read_checkpoint(folder / "run/checkpoints/best.ckpt")["state_dict"],
        "rows": logged_rows(folder / "run"),
        "results": harness.results(folder),
        "batches": harness.batches(folder),
    }


@pytest.mark.parametrize("part", PARTS)
def test_a_part_beside_the_config_is_killed_once_and_resumes_to_the_same_bits(tmp_path, part):
    whole, killed = (write_project(tmp_path / name, part) for name in ("whole", "killed"))
    assert harness.command(whole, *START) == 0, harness.log(whole)[-3000:]
    # within an epoch, but for loaders that are not ours, which begin an interrupted epoch again
    fault = f"0:{24 if part == 'data module' else 13}:batch_start:KILL"
    assert harness.command(killed, *START, fault=fault) == -9, harness.log(killed)[-3000:]
    (tmp_path / "killed" / "project").rename(tmp_path / "killed" / "moved")  # the run has its own copy
    assert harness.resume(killed) == 0, harness.log(killed)[-3000:]
    assert not harness.differences(outcome(whole), outcome(killed))
    assert harness.command(killed, "test", "--ckpt=run", "--trust") == 0, harness.log(killed)[-3000:]


@pytest.mark.parametrize("part", ["module", "data module", "dataset"])
def test_a_run_of_own_parts_is_ended_by_a_signal_and_resumes_to_the_same_bits(tmp_path, part):
    whole, stopped = (write_project(tmp_path / name, part) for name in ("whole", "stopped"))
    assert harness.command(whole, *START) == 0, harness.log(whole)[-3000:]
    assert harness.command(stopped, *START, fault="0:13:batch_start:TERM") == 143, harness.log(stopped)[-3000:]
    said = harness.log(stopped)
    assert "to resume: lightning fit --resume run" in said
    assert read_checkpoint(stopped / "run/checkpoints/last.ckpt")["global_step"] == 14
    assert harness.resume(stopped) == 0, harness.log(stopped)[-3000:]
    if part != "data module":  # whose loaders begin an interrupted epoch again
        assert not harness.differences(outcome(whole), outcome(stopped))


def test_each_part_is_an_arm_of_an_ablation(tmp_path):
    folder = write_project(tmp_path, "callback").parent / "project"
    arms = {"ours": MODEL}
    for part, options in PARTS.items():
        arms[part] = {**({} if part in ("network", "module") else MODEL), **options}
    config = {"trainer": {"max_epochs": 2, "accelerator": "cpu"}, "data": {"batch_size": 162}}
    (folder / "short.yaml").write_text(yaml.safe_dump(config))
    compare = {"metric": "test/acc", "smallest_effect": 0.01, "max_seeds": 6}
    plan = {"config": "short.yaml", "arms": arms, "baseline": "ours", "compare": compare}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    trained = [f"{slug(arm)}-seed{seed}" for arm in arms for seed in (0, 1)]
    process = harness.start(folder, "plan.yaml", "out", *trained, call=pretend)
    process.join(300)
    assert process.exitcode == 0, harness.log(folder)[-3000:]
    process = harness.start(folder, "ablate", "plan.yaml", "--out=out", "--workers=2")
    process.join(1200)
    assert process.exitcode == 0, harness.log(folder)[-3000:]
    runs = read_study(folder / "out").runs
    assert [run.state for run in runs] == ["done"] * 6 * len(arms)
    assert {run.arm for run in runs} == {"ours", *PARTS}
    page = (folder / "out" / "report.html").read_text()
    assert all(part in page for part in PARTS)
