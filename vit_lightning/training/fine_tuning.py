"""Parts of a network that are trained: its head on a frozen backbone, or low-rank adapters by the package peft."""

import contextlib
import math
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError, at_least, probabilities, problems_of, refuse
from vit_lightning.models.heads import find_head


def freeze_backbone(network: nn.Module) -> None:
    """Freezes all but the head for good: no gradients, and evaluation mode, so neither dropout nor new statistics.

    No graph is kept of what comes before the head, since nothing there needs a gradient.

    Raises:
        UserError: the network has no head.
    """
    heads = find_head(network)
    network.requires_grad_(False)
    for head in heads.values():
        head.requires_grad_(True)
    for name, module in network.named_modules():
        if not any(_contains(name, head) or _contains(head, name) for head in heads):
            module.eval()
            module.train = partial(_stay, module)
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # Lightning's, at each start


def with_own_head(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Returns weights for a network with those of its own head in place of what they have there."""
    heads = tuple(f"{name}." for name in find_head(network))
    own = {name: value for name, value in network.state_dict().items() if name.startswith(heads)}
    return {name: value for name, value in state.items() if not name.startswith(heads)} | own


def _contains(outer: str, inner: str) -> bool:
    return not outer or f"{inner}.".startswith(f"{outer}.")


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces ``train`` of a frozen module, which stays in evaluation mode."""
    return module


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA): only they and the head are trained, all other weights are frozen.

    Args:
        rank: rank of the adapters; 0 for none.
        alpha: factor of the adapters, divided by rank.
        dropout: dropout probability on the input of an adapter.
        targets: names of the linear layers that get one, in each block and wherever else but in the head; of a ViT
            qkv, projection, expand, contract.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: ["qkv", "projection"])

    def __post_init__(self) -> None:
        refuse(
            at_least(0, rank=self.rank),
            problems_of(("alpha", self.alpha, 0.0 < self.alpha < math.inf, "a finite number above 0")),
            probabilities(dropout=self.dropout),
            [] if self.targets else ["targets=[] names no layer (rank=0 for no adapters)"],
            [] if self.rank else self._unused_problems(),
        )

    def _unused_problems(self) -> list[str]:
        plain = {"alpha": 16.0, "dropout": 0.0, "targets": ["qkv", "projection"]}
        changed = [name for name, value in plain.items() if getattr(self, name) != value]
        return [f"{name}={getattr(self, name)} does nothing for rank=0 (give a rank, such as 8)" for name in changed]


def add_lora(network: nn.Module, config: LoraConfig) -> None:
    """Gives a network its adapters, which change nothing before they are trained, and freezes all else but the head.

    A layer X becomes X.base_layer beside X.lora_A and X.lora_B. The global random numbers stay as they were.

    Raises:
        UserError: peft is not installed, or a target is not there.
    """
    if config.rank == 0:
        return
    try:
        import peft
    except ImportError as fault:
        raise UserError(f"lora.rank={config.rank} needs peft: pip install 'vit-lightning[lora]'") from fault
    heads = find_head(network)
    within = tuple(f"{head}." for head in heads)
    # the type itself: torch's attention reads the weights of its own kind of linear layer without calling it
    layers = {name: name.rpartition(".")[2] for name, module in network.named_modules() if type(module) is nn.Linear}
    layers = {name: last for name, last in layers.items() if not f"{name}.".startswith(within)}
    refuse(
        f"lora.targets: {type(network).__name__} has no linear layer {target} before its head "
        f"(choose {', '.join(dict.fromkeys(layers.values()))})"
        for target in config.targets
        if target not in layers.values()
    )
    chosen, alpha = [name for name, last in layers.items() if last in config.targets], config.alpha
    settings = peft.LoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=chosen)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(settings, network)
    del network.peft_config
    for head in heads.values():
        head.requires_grad_(True)


def idle_adapters(network: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """Returns the layers with adapters whose weights a network reads without calling them, as timm's BEiT does.

    Args:
        network: the network, on the meta device.
        shape: shape of an image, (c, H, W).
    """
    copied, called = deepcopy(network), set[nn.Module]()
    layers = {module: name for name, module in copied.named_modules() if hasattr(module, "get_base_layer")}
    for module in layers:
        module.register_forward_pre_hook(lambda module, _: called.add(module))
    with torch.device("meta"), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        copied(torch.empty(2, *shape))
        return [name for module, name in layers.items() if module not in called]
    return []  # it looks at numbers: only training shows
