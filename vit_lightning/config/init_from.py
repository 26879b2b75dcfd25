"""``init_from``: the weights that a run starts from, and the architecture that its model takes from them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit_lightning.config.files import Config, flatten
from vit_lightning.config.old_configs import with_block
from vit_lightning.config.sources import open_source
from vit_lightning.config.trust import Imports, find_class, refuse_unknown
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError
from vit_lightning.models.resize import Interpolation
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import Size, pair
from vit_lightning.training.freeze import head_state
from vit_lightning.weights.adapt import TOKENS, Adapted, adapt
from vit_lightning.weights.as_config import model_config
from vit_lightning.weights.convert import from_reference
from vit_lightning.weights.describe import describe
from vit_lightning.weights.files import WeightsFile, read_weights
from vit_lightning.weights.identify import OURS, identify

KEY = "init_from"
FROM_DATA = ("image_size", "img_size", "in_channels", "in_chans", "num_classes")
NOT_TAKEN = (*FROM_DATA, "drop_path_schedule", "activation_checkpointing")
"""Options of a model that never come from a source: those of the data, and those of training alone."""

WITHOUT_FUNCTION = (*FROM_DATA, "patch_size", "layer_scale", "final_norm", *TOKENS)
"""Options that change no function, or of whose change ``adapt`` tells."""


class FirstWeights(NamedTuple):
    """Weights of a source, fitted to the network of a run."""

    place: str
    family: str
    adapted: Adapted
    notes: tuple[str, ...]
    head_kept: bool = False
    """Whether the head is the source's, though it is not known whether its classes are those of the data."""

    def sentence(self) -> str:
        return f"from {self.place} ({self.family}): {self.adapted.sentence()}{', head kept' * self.head_kept}"

    def with_new_head(self, network: nn.Module, why: str) -> FirstWeights:
        """Returns the same with the head that the network has."""
        return self._replace(adapted=self.adapted.with_new_head(list(head_state(network)), why), head_kept=False)

    def to_json(self, interpolation: Interpolation) -> str:
        facts = {"source": self.place, "family": self.family, "resize_positions": interpolation}
        return json.dumps({**facts, "notes": self.notes, **self.adapted.facts()}, indent=2) + "\n"


def inherited_model(place: str, class_path: str | None, heads: Mapping[str, Any] | None = None) -> Config:
    """Returns the architecture of a source as a flat ``model``, under which lie the options of the user's own.

    Empty where the user's config names a class of other networks, which takes weights by name. Dropouts, stochastic
    depth and sizes that follow from the data are left out.

    Args:
        place: the source.
        class_path: class that the config names, if it names one.
        heads: the config's ``num_heads`` and ``dim_head``, which hold where the weights do not tell them.

    Raises:
        UserError: the source cannot be read, or its architecture is unknown.
    """
    file = read_weights(place, KEY)
    if file.checkpoint is not None:
        config = with_block(flatten({"model": file.checkpoint["config"]["model"]}))
        return _architecture(config["model"] or {})
    if class_path is not None and find_class(class_path) is not ViT:
        return {}
    try:
        found = identify(file, model=heads or {})
        model = found.config
        refuse_unknown({"model": model} if found.family == OURS else {})
        if found.family != OURS:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                tensors = {name: tensor.to("meta") for name, tensor in file.tensors.items()}
                model = model_config(from_reference(tensors, family=found.family, config=found.config))
    except UserError as error:
        if _has_our_names(file):  # a part of a ViT, or one without its config
            return {}
        raise UserError(f"{KEY}={place}: {problem}" for problem in error.problems) from error
    return _architecture(flatten(model))


def _has_our_names(file: WeightsFile) -> bool:
    return any(name.startswith(("patch_embedding.projection.", "head.linear.")) for name in file.tensors)


def _architecture(model: Config) -> Config:
    """Returns a flat model without regularisation and sizes of the data."""
    return {name: _without_dropouts(value) for name, value in model.items() if name not in NOT_TAKEN and _stays(name)}


def _without_dropouts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_dropouts(item) for name, item in value.items() if _stays(name)}
    return value


def _stays(name: str) -> bool:
    return "dropout" not in name and not name.startswith("drop_path")


def first_weights(
    place: str,
    network: nn.Module,
    interpolation: Interpolation,
    imports: Imports | None = None,
    data: ImageData | None = None,
) -> FirstWeights:
    """Returns the weights of a source, fitted to a network; leaves the global random numbers as they were.

    Args:
        place: the source.
        network: the network that is to start with them; a ViT takes those of any family, others their own names.
        interpolation: of learned positions.
        imports: packages from which the config of a run may name classes; None for those that are allowed now.
        data: data of the run, with whose classes and normalisation those of the source are compared.

    Raises:
        UserError: the source cannot be read, or names all weights that do not fit.
    """
    given, family, notes, view = _weights_for(network, place, imports)
    differences = list(_differences(network, given))
    if differences:
        told = ", ".join(f"{name} is {ours} and not {theirs}" for name, ours, theirs in differences)
        notes += (f"the weights compute something else than in the source: {told}",)
    try:
        first = FirstWeights(place, family, adapt(network, given, interpolation=interpolation), notes)
    except UserError as error:
        options = [f"{name} {theirs}, not {ours}" for name, ours, theirs in differences if name != "scale"]
        problems = [*options, *error.problems]
        more = f" (and {len(problems) - 8} more differences)" if len(problems) > 8 else ""
        text = f"{KEY}={place} is of another architecture than the model: {'; '.join(problems[:8])}{more}"
        raise UserError(text) from error
    return first if data is None else _compared(first, network, view, data)


def _compared(first: FirstWeights, network: nn.Module, view: Mapping[str, Any], data: ImageData) -> FirstWeights:
    """Returns weights with a new head where the classes are known to be others, and with a note on normalisation."""
    ours = _normalisation(getattr(data, "mean", None), getattr(data, "std", None))
    theirs = _normalisation(view.get("mean"), view.get("std"))
    if ours and theirs and ours != theirs:
        first = first._replace(notes=(*first.notes, f"images are normalised with {ours}, those of the source {theirs}"))
    names, classes = view.get("class_names"), list(data.class_names)
    with contextlib.suppress(UserError):  # a network without a head
        if names == classes or set(head_state(network)).isdisjoint(first.adapted.taken):
            return first
        if _are_names(names) and _are_names(classes):
            return first.with_new_head(network, "new head: other classes")
        return first._replace(head_kept=True)
    return first


def _normalisation(mean: Sequence[float] | None, std: Sequence[float] | None) -> str:
    """Returns mean and std in words; empty where they are not known."""
    if not mean or not std:
        return ""
    mean_text, std_text = (", ".join(f"{value:.3g}" for value in values) for values in (mean, std))
    return f"mean {mean_text} and std {std_text}"


def _are_names(classes: Sequence[str] | None) -> bool:
    """Whether classes have names, and not only their numbers."""
    return bool(classes) and classes != [str(number) for number in range(len(classes or ()))]


def _differences(network: nn.Module, source: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Any, Any]]:
    """Yields options that are others in the network than in the source, with both values."""
    if not isinstance(network, ViT) or not isinstance(source, ViT):
        return
    with contextlib.suppress(UserError):  # blocks of the user's own
        ours, theirs = describe(network), describe(source)
        for name, value in ours.items():
            if name not in WITHOUT_FUNCTION and _stays(name) and value != theirs[name]:
                yield name, value, theirs[name]


def _weights_for(
    network: nn.Module, place: str, imports: Imports | None
) -> tuple[nn.Module | Mapping[str, Tensor], str, tuple[str, ...], Mapping[str, Any]]:
    """Returns weights for a ViT, or under their own names for others, their family, notes, and facts of the images."""
    if isinstance(network, ViT):
        try:
            heads = {"num_heads": network.num_heads}
            source = open_source(place, heads=heads, usual=False, imports=imports, key=KEY)
            reference = getattr(source.network, "reference", None) or {"family": "ViT"}
            family = "run" if source.config is not None else str(reference["family"])
            return source.network, family, source.notes, {**source.view, "class_names": source.class_names}
        except UserError:
            file = read_weights(place, KEY)
            if file.checkpoint is not None or not _has_our_names(file):
                raise
    file = read_weights(place, KEY)
    state = {} if file.checkpoint is None else file.checkpoint["state_dict"]
    named = {name.removeprefix("network."): state[name] for name in state if name.startswith("network.")}
    return named or file.tensors, "run" if named else "by name", file.notes, file.view or {}


def with_resized_positions(
    checkpoint: Mapping[str, Any], network: nn.Module, data: ImageData, interpolation: Interpolation
) -> tuple[dict[str, Any], str]:
    """Returns a checkpoint of a network for images of another size than it was trained on, and what was changed.

    Only positions are resized: where anything else differs, the checkpoint stays as it is.
    """
    size, trained = pair(data.image_size), _trained_size(checkpoint)
    unchanged = dict(checkpoint)
    if trained is None or trained == size:
        return unchanged, ""
    state = checkpoint["state_dict"]
    weights = {name.removeprefix("network."): state[name] for name in state if name.startswith("network.")}
    patch = getattr(network, "patch_size", None) or getattr(getattr(network, "patch_embed", None), "patch_size", None)
    grid = None if patch is None else (trained[0] // pair(patch)[0], trained[1] // pair(patch)[1])
    try:
        adapted = adapt(network, weights, interpolation=interpolation, new_head=False, grid=grid)
    except UserError:
        return unchanged, ""
    changed = [*adapted.resized.values(), *adapted.new.values(), *adapted.left_out.values()]
    if any(not text.startswith("positions") for text in changed):
        return unchanged, ""
    resized = {f"network.{name}": adapted.state[name] for name in adapted.resized}
    text = f"{size[0]}x{size[1]} pixels, trained at {trained[0]}x{trained[1]}"
    return {**unchanged, "state_dict": {**state, **resized}}, f"{text} ({', '.join(changed) or 'no weight changes'})"


def _trained_size(checkpoint: Mapping[str, Any]) -> Size | None:
    view = checkpoint.get("test_view") or ((checkpoint.get("config") or {}).get("data") or {}).get("init_args") or {}
    size = view.get("image_size")
    return None if size is None else pair(tuple(size) if isinstance(size, list) else size)
