"""Weights of one network fitted to another: new heads, resized positions, other channels and patches, no adapters."""

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_lightning.errors import UserError, refuse
from vit_lightning.models.heads import find_head
from vit_lightning.models.positions import LearnedPatchPositions, LearnedPositions
from vit_lightning.models.resize import Interpolation, ResizePositions, resize
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import Size

POSITIONS, KERNEL = "patch_embedding.positions.table", "patch_embedding.projection.conv.weight"
BEFORE = ("head.pool.", "head.norm.", "head.representation.")
"""Parts of a head of ours before the layer that has a row for each class."""
TOKENS = ("class_token", "distillation_token", "register_tokens")
"""Tokens before the patches, in their order."""


@dataclass(frozen=True)
class Adapted:
    """Weights of a source for a network."""

    state: dict[str, Tensor]
    """Weights under the network's names; those of ``new`` are missing."""
    resized: dict[str, str] = field(default_factory=dict)
    """Names of weights that were changed to fit, and how."""
    new: dict[str, str] = field(default_factory=dict)
    """Names whose weights stay those of the network, and why."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Names of the source that the network does not take, and why."""

    @property
    def taken(self) -> list[str]:
        """Names of the network whose weights are those of the source, bit for bit."""
        return [name for name in self.state if name not in self.resized]

    def load(self, network: nn.Module) -> None:
        """Loads the weights; those that are new keep the values that the network has."""
        network.load_state_dict(self.state, strict=False)

    def sentence(self) -> str:
        """Returns the report in one line."""
        changes = dict.fromkeys([*self.resized.values(), *self.new.values(), *self.left_out.values()])
        return ", ".join([f"{len(self.taken)} tensors taken", *changes])


def adapt(
    network: nn.Module,
    source: nn.Module | Mapping[str, Tensor],
    *,
    interpolation: Interpolation | ResizePositions = "bicubic",
    new_head: bool = True,
    reset_head: str = "",
    rows: Sequence[int] | None = None,
    grid: Size | None = None,
) -> Adapted:
    """Fits the weights of a source to a network of the same architecture; the same sizes change nothing.

    - The head is new where its shapes differ (``head.*`` of our ViT, else the last linear layer).
    - Positions are interpolated on the grid of patches, those of tokens before the patches are kept.
    - Channels of images as in timm: their sum for gray images, else repeated and scaled by the ratio of the numbers.
    - Patches of another size by the pseudo-inverse of FlexiViT (Beyer et al. 2023), which keeps the projections of
      resized patches.
    - A last norm, class token, distillation token or registers that only one of the two has are new or left out.

    Args:
        network: the network, which may be on the meta device; its weights are not changed.
        source: a network, or weights under the network's own names.
        interpolation: of learned positions; with reset those of another grid are new.
        new_head: whether a head of other shapes may be replaced.
        reset_head: why a head of the same shapes is new too; empty to take it.
        rows: output of the source for each class of the network; by default the same in the same order.
        grid: rows and columns of the source's positions where it is no ViT; by default they are a square.

    Raises:
        UserError: names all weights that do not fit.
    """
    weights = dict(source.state_dict() if isinstance(source, nn.Module) else source)
    own = network.state_dict()
    rules = _Rules(network, source if isinstance(source, ViT) else None, grid, interpolation)
    adapted, problems = Adapted({}), list[str]()
    without_lora = {_plain(name): name for name in weights if name not in own}
    for name, weight in own.items():
        plain = _plain(name)
        in_head = plain.startswith(rules.heads)
        value, by_name = weights.pop(name if name in weights else without_lora.get(plain, ""), None), ""
        if rows is not None and value is not None and in_head and not plain.startswith(BEFORE):
            value, by_name = value[torch.tensor(rows)], f"head of {len(rows)} of {len(value)} classes by name"
        if value is not None and value.shape == weight.shape:
            if reset_head and in_head:
                adapted.new[name] = reset_head
            else:
                adapted.state[name] = value
                adapted.resized.update({name: by_name} if by_name else {})
        elif value is not None and interpolation == "reset" and rules.is_positions(plain):
            adapted.new[name] = "new positions"
        elif value is not None and (resized := rules.resized(plain, value, weight)) is not None:
            adapted.state[name], adapted.resized[name] = resized
        elif value is None and (part := _optional(plain, weight)):
            adapted.new[name] = f"new {part}"
        elif new_head and in_head:
            adapted.new[name] = f"new head{_classes(value, weight)}"
        elif "lora_" in name:
            adapted.new[name] = "new LoRA weights"
        else:
            mine = f", the model as {_shape(weight)}"
            problems.append(f"it lacks {name}" if value is None else f"it has {name} as {_shape(value)}{mine}")
    for name, value in weights.items():
        plain = _plain(name)
        part = _optional(plain, value) or ("head" if new_head and plain.startswith(rules.heads) else "")
        if part and "lora_" not in name:
            adapted.left_out[name] = f"{part} left out"
        else:
            problems.append(f"it has {name}, which the model lacks")
    refuse(sorted(problems, key=lambda text: ", the model as " in text))
    return adapted


def merged(network: nn.Module) -> nn.Module:
    """Returns a copy whose weights include the adapters: a plain network, with the same logits but for rounding.

    A network without adapters is returned itself.
    """
    if not any(hasattr(module, "get_base_layer") for module in network.modules()):
        return network
    plain = copy.deepcopy(network)
    for name, module in list(plain.named_modules()):
        if hasattr(module, "get_base_layer"):
            module.merge()
            plain.set_submodule(name, module.get_base_layer())
    return plain.requires_grad_(True)


def _optional(name: str, weight: Tensor) -> str:
    """Returns the part of a network that a weight belongs to, if only one of the two networks may have it."""
    if not weight.is_floating_point():
        return "counters"
    if name.startswith(("norm.", "fc_norm.", "head.norm.")):
        return "last norm"
    token = name.removeprefix("patch_embedding.").removesuffix(".token")
    return token.replace("_", " ") if token in TOKENS else ""


def heads_of(network: nn.Module) -> tuple[str, ...]:
    """Returns how the names of the weights of the head begin; nothing for a network without a head."""
    with contextlib.suppress(UserError):
        return tuple(f"{name}." for name in find_head(network))
    return ()


class _Rules:
    """Weights of a network that need not be the same in the source: those of a head, and those that can be resized."""

    def __init__(
        self, network: nn.Module, source: ViT | None, grid: Size | None, interpolation: Interpolation | ResizePositions
    ) -> None:
        self.network, self.source, self.grid, self.interpolation = network, source, grid, interpolation
        kernels = (name for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
        self.first = KERNEL if isinstance(network, ViT) else f"{next(kernels, '')}.weight"
        self.heads = heads_of(network)

    def resized(self, name: str, value: Tensor, weight: Tensor) -> tuple[Tensor, str] | None:
        """Returns a value with the shape of a weight and how it was made; None if there is no way."""
        if name == self.first:
            return _projection(value, weight)
        if value.ndim != 3 or value.shape[2] != weight.shape[2] or not self.is_positions(name):
            return None
        vit = self.network if isinstance(self.network, ViT) else None
        return self._positions(vit, value) if vit is not None else self._positions_of_others(value, weight)

    def is_positions(self, name: str) -> bool:
        if isinstance(self.network, ViT):
            return name == POSITIONS
        return name.rpartition(".")[2] in ("pos_embed", "pos_embedding", "position_embeddings")

    def _positions(self, vit: ViT, value: Tensor) -> tuple[Tensor, str] | None:
        """Resizes the rows of the grid, and keeps those of tokens that both networks have; others are zero."""
        here = _rows_before(vit)
        there = here if self.source is None else _rows_before(self.source)
        before = sum(there.values())
        positions = None if self.source is None else self.source.patch_embedding.positions
        known_grid = positions.grid if isinstance(positions, LearnedPositions) else self.grid
        old, own = known_grid or _square(value.shape[1] - before), vit.patch_embedding.positions
        if old is None or before + old[0] * old[1] != value.shape[1] or not isinstance(own, LearnedPositions):
            return None
        table, text = _resized_positions(value, old, own.grid, before, self.interpolation)
        known = dict(zip(there, torch.split(table[0, :before], list(there.values())), strict=True))
        rows = []
        for token, count in here.items():
            given = known.get(token, value.new_zeros(0, value.shape[2]))[:count]
            rows.append(F.pad(given, (0, 0, 0, count - len(given))))
        if here != there:
            changed = [token.replace("_", " ") for token in TOKENS if here.get(token) != there.get(token)]
            text += f" (those of {' and '.join(changed)} {'zero' if sum(here.values()) > before else 'left out'})"
        return torch.cat([*rows, table[0, before:]])[None], text

    def _positions_of_others(self, value: Tensor, weight: Tensor) -> tuple[Tensor, str] | None:
        """Resizes positions of a network whose numbers of tokens and grid are known from its names alone."""
        size = getattr(getattr(self.network, "patch_embed", None), "grid_size", None)
        own = getattr(self.network, "num_prefix_tokens", 1)
        for prefix in dict.fromkeys([own, 0, 1, 2]):
            old = self.grid or _square(value.shape[1] - prefix)
            new = tuple(size) if size else _square(weight.shape[1] - prefix)
            if old and new and [prefix + a * b for a, b in (old, new)] == [value.shape[1], weight.shape[1]]:
                return _resized_positions(value, old, new, prefix, self.interpolation)
        return None


def _rows_before(vit: ViT) -> dict[str, int]:
    """Returns the rows of a table of positions before those of the grid, by token."""
    embedding = vit.patch_embedding
    if isinstance(embedding.positions, LearnedPatchPositions):
        return {}
    return {name: getattr(embedding, name).token.shape[1] for name in TOKENS if hasattr(embedding, name)}


def _resized_positions(
    value: Tensor, old: Size, new: Size, prefix: int, interpolation: Interpolation | ResizePositions
) -> tuple[Tensor, str]:
    assert interpolation != "reset"
    table = resize(value, old, new, prefix, interpolation)
    return table, "positions" if old == new else f"positions {_shape(old)} -> {_shape(new)} {interpolation}"


def _projection(value: Tensor, weight: Tensor) -> tuple[Tensor, str] | None:
    """Returns a kernel (e, c, p1, p2) for other channels and patch sizes; None for another width."""
    if value.ndim != 4 or weight.ndim != 4 or len(value) != len(weight):
        return None
    kernel, texts = value.double(), []
    before, channels = value.shape[1], weight.shape[1]
    if channels != before:
        if channels == 1:
            kernel = kernel.sum(dim=1, keepdim=True)
        else:
            kernel = kernel.repeat(1, math.ceil(channels / before), 1, 1)[:, :channels] * (before / channels)
        texts.append(f"channels {before} -> {channels} {'summed' if channels == 1 else 'repeated and scaled'}")
    old, new = value.shape[2:], weight.shape[2:]
    if old != new:
        unit = torch.eye(old.numel(), dtype=torch.float64, device=value.device).view(-1, 1, *old)
        matrix = F.interpolate(unit, size=tuple(new), mode="bicubic", antialias=True).flatten(1)
        kernel = (kernel.flatten(2) @ torch.linalg.pinv(matrix).T).unflatten(2, new)
        texts.append(f"patches {_shape(old)} -> {_shape(new)} by pseudo-inverse")
    return kernel.to(value.dtype), ", ".join(texts)


def _plain(name: str) -> str:
    """Returns the name that a weight has without LoRA."""
    return name.replace(".base_layer.", ".")


def _classes(value: Tensor | None, weight: Tensor) -> str:
    return f" ({len(value)} -> {len(weight)} classes)" if value is not None and len(value) != len(weight) else ""


def _square(count: int) -> Size | None:
    side = math.isqrt(max(0, count))
    return (side, side) if side > 0 and side * side == count else None


def _shape(tensor: Tensor | Sequence[int]) -> str:
    return "x".join(map(str, tensor.shape if isinstance(tensor, Tensor) else tensor)) or "one number"
