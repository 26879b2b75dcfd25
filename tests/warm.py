"""Does once, in the server that processes are forked from, what each would do anew: lazy imports, parsers, fonts."""

import PIL.Image
import torch.utils.serialization.config  # noqa: F401
from runs import SMALL

from vit_lightning.commands.resume import read_experiment
from vit_lightning.figures.curves import curves

read_experiment("fit", SMALL)
PIL.Image.preinit()
curves([], "").savefig("/dev/null", format="png")
