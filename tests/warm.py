"""Does once, in the server that processes are forked from, what each would do anew: lazy imports, parsers, fonts."""

import atexit
import tempfile

import PIL.Image
import torch.utils.serialization.config  # noqa: F401
import wandb.sdk.launch  # noqa: F401  # as each start of W&B does, for two seconds
from runs import SMALL
from wandb.sdk.data_types._private import MEDIA_TMP

from vit_lightning.commands.resume import read_experiment
from vit_lightning.figures.curves import curves

read_experiment("fit", SMALL)
PIL.Image.preinit()
curves([], "").savefig("/dev/null", format="png")

MEDIA_TMP._finalizer.detach()  # the first process that ends would delete it for all
atexit.unregister(MEDIA_TMP.cleanup)
tempfile.tempdir = None  # a process has its own
