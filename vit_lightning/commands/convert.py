"""``lightning convert``: a ViT as a file of another implementation, with proof that its logits are the same."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.export import image_shape, say_same_logits, without_home, write_hf
from vit_lightning.commands.load import Facts, Size, Trust, open_model
from vit_lightning.config.networks import network_in_file
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.storage.folder import whole_folder, write_whole
from vit_lightning.weights.convert import FAMILIES, to_reference
from vit_lightning.weights.identify import OURS
from vit_lightning.weights.logits import largest_difference
from vit_lightning.weights.sources import Source, open_source
from vit_lightning.weights.write import WRITERS


def convert(
    source: str,
    dst: Path,
    *,
    to: str,
    image_size: Size = None,
    config: Facts = None,
    trust: Trust = False,
) -> None:
    """Writes a ViT under the names of another implementation, and as JSON the arguments of its constructor.

    Args:
        source: the model: run folder, checkpoint, file or folder of weights, or hf-hub:OWNER/NAME, timm:NAME,
            torchvision:NAME.
        dst: new file that ends with .safetensors, .pth or .npz; or a new folder with --to=hf.
        to: implementation: timm, torchvision, hf, vit_pytorch, simple_vit, crate, big_vision, google, torch_encoder,
            einops_tutorial or timm_legacy.

    Raises:
        UserError: names the options that the implementation does not have; or the logits differ.
    """
    to = to.replace("-", "_")
    # weights, and the arguments of the constructor beside them; or the one folder
    files = (dst, dst.with_suffix(".json")) if dst.suffix else (dst,)
    problems = [f"DST {path} is there already (choose a new one)" for path in files if path.exists()]
    if to == OURS:
        problems.append(f"to={OURS}: lightning export --ckpt={source} --to=safetensors writes our own names")
    elif to not in FAMILIES:
        problems.append(f"to={to} must be one of {', '.join(FAMILIES)}")
    if dst.suffix not in WRITERS and (to != "hf" or dst.suffix):
        folder = ", or be a folder" if to == "hf" else ""
        problems.append(f"DST {dst} must end with {', '.join(WRITERS)}{folder}")
    refuse(problems)
    quiet()
    model = open_model(source, image_size=image_size, config=config, trust=trust, key="source")
    if model.vit is None:
        raise UserError(f"source={source}: {type(model.network).__name__} is no ViT of ours")
    try:
        difference = _write(model, to, files)
    except UserError as error:
        raise UserError([f"source={source}: {problem}" for problem in error.problems]) from error
    say_same_logits(difference)
    say(row("written", ", ".join(map(str, files))))


def _write(source: Source, to: str, files: Sequence[Path]) -> float:
    """Writes the files, reads them again, and returns the largest difference of the logits."""
    vit, shape = source.vit, image_shape(source)
    assert vit is not None
    vit.float()
    dst = files[0]
    if not dst.suffix:
        with whole_folder(dst, "DST") as folder:
            write_hf(source, folder)
            return largest_difference(vit, open_source(folder, make_network=network_in_file, key="DST").network, shape)
    tensors, config = to_reference(vit, family=to, dropouts=False)
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"DST {dst} cannot be made: {fault.strerror}") from fault
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=dst.parent) as folder:
        parts = [Path(folder) / path.name for path in files]
        WRITERS[dst.suffix](tensors, parts[0])
        known = {"preprocessing": source.view, "class_names": source.class_names}
        description = {"family": to, "config": config, **known}
        write_whole(parts[1], without_home(json.dumps(description, indent=2, ensure_ascii=False) + "\n"))
        again = open_source(parts[0], make_network=network_in_file, key="DST").network
        difference = largest_difference(vit, again, shape)
        for part, path in zip(reversed(parts), reversed(files), strict=True):  # the weights come last
            os.replace(part, path)
    return difference
