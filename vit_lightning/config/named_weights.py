"""Weights that a network of timm or torchvision names: ``pretrained: true``, ``weights: IMAGENET1K_V1``.

They are read once, when a run begins: a resumed or trained one has its own in its checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vit_lightning.config.files import word
from vit_lightning.config.names import near
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import Part
from vit_lightning.errors import UserError, one_line


def weights_problems(part: Part, init_from: str | None) -> list[str]:
    """Returns what is wrong with the weights, or the name, of a network of timm or torchvision.

    Args:
        part: the network.
        init_from: the config's own choice of initial weights.
    """
    if not _is_of_others(part):
        return []
    given, problems = part.arguments, []
    named = _named_weights(given)
    if given.get("checkpoint_path"):
        return [f"model.checkpoint_path={given['checkpoint_path']}: give it as init_from"]
    if named and init_from is not None:
        problems.append(f"init_from={init_from} beside model.{named}: give one of the two")
    if inspect.isclass(part.target) or not part.name.startswith("timm."):
        return problems
    from timm import is_model, is_model_pretrained, list_models

    name = timm_name(part.target, given)
    if not is_model(name) and ":" not in name:  # hf-hub:owner/name
        base = name.partition(".")[0]
        likely = list_models(f"{base}*")[:3] or near(base, list_models())
        hint = f" (did you mean {', '.join(likely)}?)" * bool(likely)
        return [*problems, f"model.model_name={name}: timm has no such model{hint}"]
    if named and not given.get("pretrained_cfg") and is_model(name) and not is_model_pretrained(name):
        problems.append(f"model.pretrained=true: timm has no weights of {name}")
    return problems


def without_weights(part: Part) -> Part:
    """Returns a network that reads no weights, with the architecture of those that it names."""
    if not _is_of_others(part):
        return part
    sources = {"pretrained": False, "weights": None, "checkpoint_path": ""}
    none = {name: value for name, value in sources.items() if name in part.arguments}
    if "weights_backbone" in signature_of(part.target).options:  # which torchvision fetches unless told not to
        none["weights_backbone"] = None
    if _named_weights(part.arguments) and part.name.endswith((".googlenet", ".inception_v3")):  # which weights change
        none["transform_input"] = True
    return replace(part, arguments={**part.arguments, **none})


def load_named_weights(network: nn.Module, part: Part, make: Callable[[], nn.Module]) -> str:
    """Loads the weights that a network names; leaves the global random numbers as they were.

    Args:
        network: the network, made without them.
        part: the network of the config.
        make: makes the network as the config says, with them.

    Returns:
        A sentence on what was loaded; empty where none are named.

    Raises:
        UserError: they cannot be had, or do not fit.
    """
    given = part.arguments
    named = _named_weights(given)
    if not _is_of_others(part) or not named:
        return ""
    weights = given.get("weights")
    try:
        with torch.random.fork_rng(devices=[]):
            if weights is None:
                state = make().state_dict()
                facts: Any = network.pretrained_cfg
                classes = int(facts["num_classes"])
            else:
                state = weights.get_state_dict(progress=given.get("progress", True), check_hash=True, weights_only=True)
                classes = len(weights.meta["categories"])
    except Exception as fault:  # of urllib, of sockets, of the hub
        url = "" if weights is None else f" as {torch.hub.get_dir()}/checkpoints/{weights.url.rpartition('/')[2]}"
        reason = str(fault) if isinstance(fault, UserError) else one_line(fault)
        raise UserError(
            f"model.{named}: the weights cannot be had: {reason:.300} (without a network, put the file that it would "
            f"fetch in its cache{url}, or give a file of weights as init_from)"
        ) from fault
    parts = [named, *(_fit(network, state, classes, named) if weights is not None else [])]
    network.load_state_dict(state)
    ours = given.get("num_classes", classes)
    kept = "head kept, though nothing tells the order of its classes"
    parts.append(kept if classes == ours else f"new head ({classes} -> {ours} classes)")
    return f"{part.name} with {', '.join(parts)}"


def _fit(network: nn.Module, state: dict[str, Tensor], classes: int, named: str) -> list[str]:
    """Changes weights of torchvision so that they fit a network of other classes or of another image size.

    Returns:
        What was changed.

    Raises:
        UserError: others do not fit.
    """
    own, changed = network.state_dict(), []
    table = "encoder.pos_embedding"
    if table in state and table in own and state[table].shape != own[table].shape:
        from torchvision.models.vision_transformer import interpolate_embeddings

        before = state[table].shape[1] - 1
        state.update(interpolate_embeddings(network.image_size, network.patch_size, state))
        sides = [round(tokens**0.5) for tokens in (before, own[table].shape[1] - 1)]
        changed.append(f"positions {sides[0]}x{sides[0]} -> {sides[1]}x{sides[1]} bicubic")
    for name in [name for name in state if name not in own and name.lower().startswith("aux")]:
        del state[name]
    for name in own:
        if name in state and state[name].shape != own[name].shape and len(state[name]) == classes:
            state[name] = own[name]
    refused = [name for name in own if name not in state or state[name].shape != own[name].shape]
    if refused or set(state) - set(own):
        raise UserError(f"model.{named}: the weights do not fit the other arguments of model: {', '.join(refused[:8])}")
    return changed


def timm_name(target: Any, arguments: Mapping[str, Any]) -> str:
    """Returns the name of the network that a function of timm makes."""
    return str(arguments.get("model_name") or target.__name__)


def _is_of_others(part: Part) -> bool:
    return part.name.startswith(("timm.", "torchvision."))


def _named_weights(given: Mapping[str, Any]) -> str:
    """Returns the argument that names weights, as a config has it; empty if none does."""
    named = next((name for name in ("pretrained", "weights") if given.get(name)), None)
    value = "" if named is None else getattr(given[named], "name", given[named])
    return "" if named is None else f"{named}={word(value)}"
