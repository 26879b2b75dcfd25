"""``lightning convert``: a ViT as a file of another implementation, with proof that its logits are the same."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_lightning.commands.console import quiet, row, say
from vit_lightning.commands.export import image_shape, without_home, write_hf
from vit_lightning.commands.open_model import open_model
from vit_lightning.config.experiment import network_in_file
from vit_lightning.errors import UserError
from vit_lightning.storage.folder import whole_folder, write_whole
from vit_lightning.weights.convert import FAMILIES, to_reference
from vit_lightning.weights.identify import OURS
from vit_lightning.weights.logits import TOLERANCE, largest_difference
from vit_lightning.weights.sources import Source, open_source
from vit_lightning.weights.write import WRITERS


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of ``lightning convert``.

    Args:
        source: the model: run folder, checkpoint, file or folder of weights, or hf-hub:OWNER/NAME, timm:NAME,
            torchvision:NAME.
        dst: new file that ends with .safetensors, .pth or .npz; or a new folder with --to=hf.
        to: implementation: timm, torchvision, hf, vit_pytorch, simple_vit, crate, big_vision, google, torch_encoder,
            einops_tutorial or timm_legacy.
        image_size: height and width in pixels of the images that it will get, if they are not those of its training.
        config: what the weights do not tell or is to be replaced: --config='{num_heads: 3, mean: [...], std: [...]}'
            (also centre_share, class_names, and arguments of their family).
    """

    source: str
    dst: Path
    to: str
    image_size: int | tuple[int, int] | None = None
    config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        problems = []
        object.__setattr__(self, "to", self.to.replace("-", "_"))
        if self.to == OURS:
            problems.append(f"to={OURS}: lightning export --ckpt={self.source} --to=safetensors writes our own names")
        elif self.to not in FAMILIES:
            problems.append(f"to={self.to} must be one of {', '.join(FAMILIES)}")
        if self.dst.suffix not in WRITERS and (self.to != "hf" or self.dst.suffix):
            folder = ", or be a folder" if self.to == "hf" else ""
            problems.append(f"DST {self.dst} must end with {', '.join(WRITERS)}{folder}")
        problems += [f"DST {path} is there already (choose a new one)" for path in self.files if path.exists()]
        if problems:
            raise UserError(problems)

    @property
    def files(self) -> tuple[Path, ...]:
        """Weights, and the arguments of the constructor beside them; or the one folder."""
        return (self.dst, self.dst.with_suffix(".json")) if self.dst.suffix else (self.dst,)


def convert(options: ConvertOptions) -> None:
    """Writes a ViT under the names of another implementation, and as JSON the arguments of its constructor.

    Raises:
        UserError: names the options that the implementation does not have; or the logits differ.
    """
    quiet()
    source = open_model(options.source, image_size=options.image_size, config=options.config, key="source")
    if source.vit is None:
        raise UserError(f"source={options.source}: {type(source.network).__name__} is no ViT of ours")
    try:
        difference = _write(source, options)
    except UserError as error:
        raise UserError([f"source={options.source}: {problem}" for problem in error.problems]) from error
    say(row("same logits", f"within {difference:.2g} (allowed {TOLERANCE:g}) for batches of 1, 2 and 5 images"))
    say(row("written", ", ".join(map(str, options.files))))


def _write(source: Source, options: ConvertOptions) -> float:
    """Writes the files, reads them again, and returns the largest difference of the logits."""
    vit, shape = source.vit, image_shape(source)
    assert vit is not None
    vit.float()
    if not options.dst.suffix:
        with whole_folder(options.dst, "DST") as folder:
            write_hf(source, folder)
            return largest_difference(vit, open_source(folder, make_network=network_in_file, key="DST").network, shape)
    tensors, config = to_reference(vit, family=options.to, dropouts=False)
    try:
        options.dst.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"DST {options.dst} cannot be made: {fault.strerror}") from fault
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=options.dst.parent) as folder:
        parts = [Path(folder) / path.name for path in options.files]
        WRITERS[options.dst.suffix](tensors, parts[0])
        known = {"preprocessing": source.view, "class_names": source.class_names}
        description = {"family": options.to, "config": config, **known}
        write_whole(parts[1], without_home(json.dumps(description, indent=2, ensure_ascii=False) + "\n"))
        again = open_source(parts[0], make_network=network_in_file, key="DST").network
        difference = largest_difference(vit, again, shape)
        for part, path in zip(reversed(parts), reversed(options.files), strict=True):  # the weights come last
            os.replace(part, path)
    return difference
