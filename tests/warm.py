"""Does once, in the server that processes are forked from, what each would do anew: lazy imports, parsers, fonts."""

import atexit
import contextlib
import tempfile

import PIL.Image
import torch.utils.serialization.config  # noqa: F401
from runs import SMALL

from vit_lightning.commands.resume import read_experiment
from vit_lightning.figures.curves import curves

read_experiment("fit", SMALL)
PIL.Image.preinit()
curves([], "").savefig("/dev/null", format="png")

with contextlib.suppress(ModuleNotFoundError):  # a lent GPU's machine has no wandb
    import wandb.sdk.launch  # noqa: F401  # as each start of W&B does, for two seconds
    from wandb.sdk.data_types._private import MEDIA_TMP

    MEDIA_TMP._finalizer.detach()  # the first process that ends would delete it for all
    atexit.unregister(MEDIA_TMP.cleanup)
tempfile.tempdir = None  # a process has its own
