"""Options of a config and of the command line, each declared once: a field with its type, default and help.

From these classes come the parser, the help and the checks. ``model``, ``data`` and ``trainer`` are not here: their
options are the arguments of the classes that they name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vit_lightning.errors import at_least, is_plain_name, refuse
from vit_lightning.models.resize import ResizePositions
from vit_lightning.storage.wandb_logger import WandbConfig
from vit_lightning.training.checkpoints import CheckpointConfig
from vit_lightning.training.ema import EMAConfig
from vit_lightning.training.fine_tuning import LoraConfig
from vit_lightning.training.losses import DistillationConfig, LossConfig, OwnLoss
from vit_lightning.training.optim import OptimizerConfig

TRAINED = ("validate", "test", "predict")
"""Commands that use a trained model, whose config lies in its checkpoint."""

COMPILES = ("fit", "validate", "test")
"""Commands that compile the network of a config with ``compile``."""

Resume = Literal["never", "auto"]

OWN_OF_OPTIMIZER = ("name", "betas", "eps", "momentum", "nesterov")
"""Our options of an optimizer in whose place those of another class stand."""


class Settings(NamedTuple):
    """Groups of a config that are plain settings."""

    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig | OwnLoss = LossConfig()
    ema: EMAConfig = EMAConfig()
    distillation: DistillationConfig = DistillationConfig()
    lora: LoraConfig = LoraConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    wandb: WandbConfig = WandbConfig()


GROUPS = ("module", "model", "data", "trainer", *Settings._fields)
"""Options that hold options; ``model:`` with nothing under it changes nothing."""

DEFAULT_CLASSES = {"model": "vit_lightning.ViT", "data": "vit_lightning.Digits"}
"""Classes of groups that need not be named."""

BESIDE_OTHER_CLASS: dict[str, tuple[str, ...]] = {
    "optimizer": tuple(name for name in OptimizerConfig.__dataclass_fields__ if name not in OWN_OF_OPTIMIZER),
    "loss": (),
}
"""Our options of a group that stay beside a class of others in its place."""


@dataclass(frozen=True)
class ConfigOptions:
    """General options.

    Args:
        experiment: name of the experiment; by default that of the last config file.
        seed_everything: seed of the initial weights, the order of images, augmentation and dropout.
        init_from: trained model with the initial weights: run folder (its best checkpoint), checkpoint, .safetensors,
            .pth, .npz, folder of save_pretrained, hf-hub:owner/name, timm:NAME, torchvision:NAME,
            or wandb:ENTITY/PROJECT/ARTIFACT:ALIAS. Options of a ViT, and size, mean and std of the images, that the
            config does not give are those of the source.
        resize_positions: interpolation of learned positions for images of another size than those of the source; reset
            re-initialises them, after init_from alone.
        reset_head: whether the head is re-initialised after init_from.
        freeze: backbone trains the head alone; all else stays as it is, without dropout or new statistics.
        test: whether fit tests the best checkpoint after training.
        compile: whether training, validation and test run code of torch.compile, made in the first steps, which takes a
            minute, and seconds in a later run, by torch's cache; needs a C++ compiler. On a GPU network and loss are
            one graph for each shape of a batch, on a CPU all blocks of a ViT share one. reduce-overhead is true with
            CUDA graphs on one GPU, for small networks at small batches; gradients are then those of one batch, and are
            overwritten by the next. auto trains with that where options and machine allow it, however short the
            training is, else with plain code, as on a CPU.
        matmul_precision: precision of products of float32 matrices: high allows TF32, medium bfloat16; by default that
            of torch.
        pictures_every_n_epochs: epochs between two pictures of the validation in the run folder and W&B, 0 for none; by
            default epochs 1, 2, 4, 8, ..., and the last.
        watchdog_minutes: minutes without a finished batch after which fit ends a run that hangs, with exit code 1 and
            the stacks of all threads in hang-rank0.txt of the run folder; a first batch has three times as long, and
            ranks wait four times as long for one another; 0 for no watchdog.
        metrics: classes of torchmetrics with their arguments, also by short names such as F1Score, that validation and
            test log under name.
        fast_paths: a fast path is another way to compute a layer's matrix products, equal but for rounding. auto takes
            those that were measured to be fastest for the device, type and shape; plain takes torch's own operators.
    """

    experiment: str | None = None
    seed_everything: int = 0
    init_from: str | None = None
    resize_positions: ResizePositions = "bicubic"
    reset_head: bool = False
    freeze: Literal["backbone"] | None = None
    test: bool = True
    compile: bool | Literal["auto", "reduce-overhead"] = False
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    pictures_every_n_epochs: int | None = None
    watchdog_minutes: float = 30.0
    metrics: list[Any] | None = None
    fast_paths: Literal["auto", "plain"] = "auto"

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.seed_everything < 2**32:
            problems.append(f"seed_everything={self.seed_everything} must be at least 0 and below 2**32")
        if self.experiment is not None and not is_plain_name(self.experiment):
            problems.append(f"experiment={self.experiment} must be a plain name, without slashes")
        every, minutes = self.pictures_every_n_epochs, self.watchdog_minutes
        refuse(problems, at_least(0, pictures_every_n_epochs=every, watchdog_minutes=minutes))


@dataclass(frozen=True)
class RunOptions:
    """Options of one call, given as flags alone.

    Args:
        print_config: print the complete config and exit.
        out: new folder for the results.
        trust: whether a file of weights may name classes of any package in its config, and so run them.
        resume: a run folder to resume (on the command line); auto resumes the newest run of this config that is neither
            finished nor in use, or starts a new one; with never, each start is a new run.
    """

    print_config: bool = False
    out: Path | None = None
    trust: bool = False
    resume: Resume = "never"
