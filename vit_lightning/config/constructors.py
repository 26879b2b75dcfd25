"""Networks made by functions of timm and torchvision: the arguments that they hand on, the weights that they name.

``timm.create_model`` and the functions of ``timm.models`` hand on arguments that their signatures do not name. Weights
that a config names (``pretrained: true``, ``weights: IMAGENET1K_V1``) are read once, when a run begins: a resumed or
trained one has its own in its checkpoint.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch
from jsonargparse import Namespace
from torch import Tensor, nn

from vit_lightning.config.check_network import empty_network
from vit_lightning.config.files import word
from vit_lightning.config.trust import find_class
from vit_lightning.errors import UserError, one_line


def hands_on(class_path: Any) -> bool:
    """Whether a class path names a function of timm, whose arguments are known only when it is called."""
    return str(class_path).startswith("timm.") and inspect.isfunction(find_class(class_path))


def as_dict_kwargs(model: Any) -> Any:
    """Returns ``model`` with its arguments where jsonargparse checks those that it knows and hands on the others."""
    if not isinstance(model, dict) or not hands_on(model.get("class_path")):
        return model
    return {"class_path": model["class_path"], "dict_kwargs": {**model.get("init_args", {})}}


def arguments_of(model: Namespace) -> dict[str, Any]:
    """Returns all arguments of a parsed model."""
    return {**vars(model.get("init_args") or Namespace()), **dict(model.get("dict_kwargs") or {})}


def facts_for(facts: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of the data that a network has arguments for, under its names for them.

    Args:
        facts: image_size, in_channels and num_classes.
        model: ``model`` of a flat config.
    """
    network = find_class(model["class_path"])
    if network is None:
        return {}
    names = set(inspect.signature(network).parameters)
    if str(model["class_path"]).startswith("timm."):
        facts = {**facts, "img_size": facts["image_size"], "in_chans": facts["in_channels"]}
    if hands_on(model["class_path"]):
        names |= {"num_classes", "in_chans", *_names_of_class(_timm_name(model))}
    return {name: fact for name, fact in facts.items() if name in names}


def constructor_problems(model: Namespace, make: Callable[[], nn.Module], init_from: str | None) -> list[str]:
    """Returns what is wrong with the arguments of a function of timm or torchvision.

    Args:
        model: the parsed model; unknown arguments are removed from it.
        make: makes the network without weights.
        init_from: the config's own choice of initial weights.
    """
    if not _is_of_others(model):
        return []
    given, problems = arguments_of(model), []
    name, named = _timm_name(given | {"class_path": model.class_path}), _named_weights(given)
    if given.get("checkpoint_path"):
        return [f"model.checkpoint_path={given['checkpoint_path']}: give it as init_from"]
    if named and init_from is not None:
        problems.append(f"init_from={init_from} beside model.{named}: give one of the two")
    if not hands_on(model.class_path):
        return problems
    from timm import is_model, is_model_pretrained, list_models

    if not is_model(name) and ":" not in name:  # hf-hub:owner/name
        base = name.partition(".")[0]
        near = list_models(f"{base}*")[:3] or difflib.get_close_matches(base, list_models(), n=3)
        hint = f" (did you mean {', '.join(near)}?)" * bool(near)
        return [*problems, f"model.model_name={name}: timm has no such model{hint}"]
    if named and not given.get("pretrained_cfg") and is_model(name) and not is_model_pretrained(name):
        problems.append(f"model.pretrained=true: timm has no weights of {name}")
    return [*problems, *_unknown_arguments(model, make, name)]


def _unknown_arguments(model: Namespace, make: Callable[[], nn.Module], name: str) -> list[str]:
    """Returns the arguments that the network's class refuses, and removes them."""
    problems: list[str] = []
    while True:
        try:
            empty_network(make)
            return problems
        except UserError as error:
            found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[2] not in (model.get("dict_kwargs") or {}):
                return problems
            known = sorted(_names_of_class(name))
            near = difflib.get_close_matches(found[2], known, n=1)
            hint = f"did you mean model.{near[0]}?" if near else f"choose {', '.join(known)}"
            value = model.dict_kwargs.pop(found[2])
            problems.append(f"model.{found[2]}={value}: {found[1]} takes no such argument ({hint})")


def without_weights(model: Namespace) -> Namespace:
    """Returns a parsed model that reads no weights, with the architecture of those that it names."""
    kept: Namespace = model.clone()
    if _is_of_others(model) and _named_weights(arguments_of(model)):
        for name, none in (("pretrained", False), ("weights", None)):
            if name in kept.init_args:
                kept.init_args[name] = none
        if str(model.class_path).endswith((".googlenet", ".inception_v3")):  # which weights change
            kept.init_args["transform_input"] = True
    return kept


def load_named_weights(network: nn.Module, model: Namespace, make: Callable[[], nn.Module]) -> str:
    """Loads the weights that a model names; leaves the global random numbers as they were.

    Args:
        network: the network, made without them.
        model: the parsed model.
        make: makes the network as the model says, with them.

    Returns:
        A sentence on what was loaded; empty where the model names none.

    Raises:
        UserError: they cannot be had, or do not fit.
    """
    given = arguments_of(model)
    named = _named_weights(given)
    if not _is_of_others(model) or not named:
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
    if classes != (ours := given.get("num_classes", classes)):
        parts.append(f"new head ({classes} -> {ours} classes)")
    return f"{model.class_path!s} with {', '.join(parts)}"


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


def _is_of_others(model: Namespace) -> bool:
    return str(model.class_path).startswith(("timm.", "torchvision."))


def _named_weights(given: Mapping[str, Any]) -> str:
    """Returns the argument that names weights, as a config has it; empty if none does."""
    named = next((name for name in ("pretrained", "weights") if given.get(name)), None)
    value = "" if named is None else getattr(given[named], "name", given[named])
    return "" if named is None else f"{named}={word(value)}"


def _timm_name(model: Mapping[str, Any]) -> str:
    """Returns the name of the network that a function of timm makes."""
    return str(model.get("model_name") or str(model["class_path"]).rpartition(".")[2])


def _names_of_class(name: str) -> set[str]:
    """Returns the arguments of the class of a network of timm, as far as its function tells the class."""
    from timm import is_model, model_entrypoint

    made = get_type_hints(model_entrypoint(name)).get("return") if is_model(name) else None
    bases = made.__mro__[:-2] if inspect.isclass(made) else ()  # without nn.Module and object
    return {key for base in bases for key in inspect.signature(base).parameters} - {"args", "kwargs"}
