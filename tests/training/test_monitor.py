import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from vit_lightning import Digits, ViT, ViTClassifier
from vit_lightning.storage.metrics import MetricsFile, read_metrics
from vit_lightning.training.callbacks import Stopwatch
from vit_lightning.training.monitor import Monitor
from vit_lightning.training.resources import peak_flops


class Norms(Callback):
    """Gradient of each step, before clipping."""

    def __init__(self) -> None:
        self.gradients: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [weight.grad.flatten() for weight in pl_module.parameters() if weight.requires_grad]
        self.gradients.append(float(torch.cat(gradients).norm()))


def test_norms_and_times_of_logged_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("vit_lightning.training.monitor._peak_flops", lambda trainer: 1e9)  # no CPU is known
    seed_everything(0, verbose=False)
    network = ViT(image_size=8, patch_size=4, in_channels=1, num_classes=10, emb_size=16, depth=1, num_heads=2)
    norms, stopwatch = Norms(), Stopwatch()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    steps = {"max_epochs": 2, "limit_train_batches": 6, "accumulate_grad_batches": 2, "log_every_n_steps": 2}
    own = {"callbacks": [norms, stopwatch, Monitor(stopwatch, 1000, (1, 8, 8))], "logger": MetricsFile(tmp_path)}
    run = Trainer(accelerator="cpu", gradient_clip_val=0.01, **quiet, **steps, **own)
    run.fit(ViTClassifier(network), Digits(batch_size=20))
    rows = [row for row in read_metrics(tmp_path) if "optim/grad_norm" in row]
    assert [(row["step"], row["epoch"]) for row in rows] == [(1, 0), (3, 1), (5, 1)]
    for row in rows:
        assert row["optim/grad_norm"] == pytest.approx(norms.gradients[row["step"]], rel=1e-5)
        assert row["speed/images_per_second"] == pytest.approx(40 / row["speed/step_seconds"], rel=1e-3)
        assert row["speed/mfu"] == pytest.approx(3 * 1000 * row["speed/images_per_second"] / 1e9, rel=1e-3)
    spent = sum(2 * row["speed/step_seconds"] for row in rows)
    assert 0.5 * stopwatch.seconds < spent <= stopwatch.seconds * 1.01


@pytest.mark.parametrize(
    ("device", "precision", "matmul_precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", "highest", 989.4),
        ("NVIDIA H100 80GB HBM3", "32-true", "highest", 66.9),
        ("NVIDIA H100 NVL", "16-mixed", "high", 835.5),
        ("NVIDIA GH200 480GB", "bf16-mixed", "high", 989.4),
        ("NVIDIA GB200", "bf16-mixed", "high", 2500.0),
        ("NVIDIA L40S", "32-true", "medium", 183.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", "high", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16-mixed", "high", None),
        ("NVIDIA H100 80GB HBM3", "64-true", "high", None),
    ],
)
def test_peaks_are_those_of_dense_products(device, precision, matmul_precision, tflops):
    assert peak_flops(device, precision, matmul_precision) == (tflops and 1e12 * tflops)
