"""Trained models by name: a run, a checkpoint or a file of weights becomes a network with its preprocessing."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit_lightning.classes import are_named, listed
from vit_lightning.errors import UserError, problems_of, refuse
from vit_lightning.models.heads import find_head
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import covers, pair, side
from vit_lightning.storage.checkpoint_files import load_network, run_folder_of
from vit_lightning.weights.adapt import adapt, merged
from vit_lightning.weights.convert import from_reference
from vit_lightning.weights.descriptions import INTERPOLATIONS, PREPROCESSING
from vit_lightning.weights.files import WeightsFile, naming, read_weights
from vit_lightning.weights.identify import OURS, identify, with_arguments
from vit_lightning.weights.options import model_config
from vit_lightning.weights.trust import refuse_untrusted

MakeNetwork = Callable[[Mapping[str, Any], Path | None], nn.Module]
"""Makes the network of a config in plain data, with random weights; where it is trusted, from files in a folder too."""
_HALF, _IMAGENET = ([0.5] * 3, [0.5] * 3), ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_USUAL = {"timm": _HALF, "hf": _HALF, "google": _HALF, "big_vision": _HALF}
_USUAL |= dict.fromkeys(("torchvision", "crate", "deit", "dinov2", "dinov3"), _IMAGENET)
"""Mean and standard deviation by which most published weights of a family had their images normalised."""
_BY_PROCESSOR = ("hf", "deit", "dinov2", "dinov3")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained network and what is known about it."""

    place: str
    """The name by which it was asked for."""
    network: nn.Module
    """In evaluation mode; a ViT wherever the weights are those of one."""
    view: dict[str, Any]
    """Preprocessing of images and logits, the arguments of ``ImageFiles``; each only where it is known."""
    family: str = ""
    """Family of the weights, ``run`` for a checkpoint of ours; empty for a network of another kind."""
    class_names: list[str] | None = None
    notes: tuple[str, ...] = ()
    """Sentences on what the weights do not tell, and what was taken in its place."""
    config: Mapping[str, Any] | None = None
    """Config of the run that trained it."""
    path: Path | None = None
    """File of the weights."""

    @property
    def vit(self) -> ViT | None:
        """The network if it is a ViT of ours."""
        return self.network if isinstance(self.network, ViT) else None

    @property
    def run(self) -> Path | None:
        """Folder of the run that trained it."""
        return None if self.path is None else run_folder_of(self.path)


class _Known(NamedTuple):
    """Facts about a model that its place need not tell: arguments of ``open_source``."""

    make_network: MakeNetwork
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    heads: Mapping[str, Any] | None
    usual: bool
    trust: bool

    def network(self, config: Mapping[str, Any], path: Path | None) -> nn.Module:
        """Returns the network of a config from a file of weights."""
        if config["model"] is None:
            raise UserError("its module takes no network, so that there is no network to load")
        if not self.trust:
            refuse_untrusted({"model": config["model"]})
        folder = None if path is None else run_folder_of(path)
        return self.make_network(config, (folder or Path.cwd()) if self.trust else None)


def open_source(
    place: str | Path | WeightsFile,
    *,
    make_network: MakeNetwork,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    config: Mapping[str, Any] | None = None,
    heads: Mapping[str, Any] | None = None,
    usual: bool = True,
    trust: bool = False,
    key: str = "source",
) -> Source:
    """Returns a trained network with what is known about it; leaves the global random numbers as they were.

    Args:
        place: run folder (its best checkpoint), checkpoint, .safetensors, .pth, .pt, .bin, .pth.tar, .npz, folder of
            ``save_pretrained`` or of an export, hf-hub:owner/name, timm:NAME, torchvision:NAME, or
            wandb:ENTITY/PROJECT/ARTIFACT:ALIAS; or weights that were read from there.
        make_network: makes the network of the config in a file.
        image_size: height and width in pixels of its images, if not those of its training: positions are resized.
        num_classes: classes of a new head; 0 for features.
        config: what is not known or is to be replaced: ``PREPROCESSING`` and, for weights of others, arguments in the
            words of their family.
        heads: ``num_heads`` of the network of a config, which holds where the weights do not tell it.
        usual: whether it is used as it is: with images of the size of its processor, and the mean and std of most
            weights of the family where they are not known.
        trust: whether the config in the file may name any class, and so run it.
        key: option that errors name.

    Raises:
        UserError: it is not there, damaged, or its architecture cannot be told.
    """
    given = dict(config or {})
    facts = {name: given.pop(name) for name in PREPROCESSING if name in given}
    known = _Known(make_network, given, facts, heads, usual, trust)
    with torch.random.fork_rng(devices=[]), naming(key, place):
        file = place if isinstance(place, WeightsFile) else read_weights(place, key)
        found = _opened(file, known)
        if num_classes is None and _learned_no_classes(found.config or {}):
            num_classes = 0
        if image_size is None and usual and found.family in _BY_PROCESSOR:
            found = _of_processor_size(found, known, file.view or {})
        if image_size is not None or num_classes is not None:
            found = _changed(found, known, image_size, num_classes)
        refuse(_wrong_facts(found, facts), prefix="config.")
        view = {name: value for name, value in found.view.items() if name in PREPROCESSING}
        refuse(_wrong_facts(found, view), prefix="its preprocessing, or config={...} in its place: ")
    found.network.eval()
    return found


def _opened(file: WeightsFile, known: _Known) -> Source:
    family, network, notes = _network(file, known)
    view = {"centre_share": 1.0, **({} if file.network is None else {"in_channels": 3}), **(file.view or {})}
    names, odd = class_names_of(file, getattr(network, "num_classes", None))
    notes += (odd,) if odd and "class_names" not in known.facts else ()
    gives = {fact: f"config={{'{fact}': ...}} gives it" for fact in PREPROCESSING}
    unread = ((fact, text) for fact, text in file.unread.items() if fact not in known.facts)
    refuse(f"{text}: {gives.get(fact, 'take it out if it changes nothing')}" for fact, text in unread)
    if isinstance(network, ViT):
        view = for_size(view, network.image_size) | {"in_channels": network.in_channels}
    view |= {"class_names": names, **known.facts}
    usual = usual_normalisation(network, family) if known.usual and view.get("in_channels") == 3 else {}
    bilinear = family in ("hf", "dinov3") or (family == "torchvision" and network.image_size == (224, 224))
    usual |= {"interpolation": "bilinear" if bilinear else "bicubic"} if usual else {}
    told = {**(file.view or {}), **known.facts}
    if assumed := {name: value for name, value in usual.items() if name not in told}:
        view |= assumed
        more = [] if {"centre_share", "resize"} & told.keys() else ["centre_share"]
        text = ", ".join(f"{name} {value}" for name, value in assumed.items())
        text += f" of its images are those of most weights of {family}"
        text += ", centre_share 1.0 shows all of them" * len(more)
        others = ", ".join(f"'{name}': ..." for name in (*assumed, *more))
        notes += (f"{text}; nothing beside the file tells (config={{{others}}} gives others)",)
    return Source(
        place=file.place,
        network=network,
        family=family,
        class_names=view.pop("class_names"),
        view=view,
        notes=notes,
        config=None if file.checkpoint is None else file.checkpoint["config"],
        path=file.path,
    )


def _network(file: WeightsFile, known: _Known) -> tuple[str, nn.Module, tuple[str, ...]]:
    """Returns the family of weights, their network, and what was assumed; of a library its own if it is no ViT."""
    if file.checkpoint is not None:
        assert file.path is not None
        refuse(f"config.{name}={value}: the config of its run tells this" for name, value in known.config.items())
        network = known.network(file.checkpoint["config"], file.path)
        load_network(network, file.checkpoint, file.path)
        return "run", merged(network), file.notes  # adapters belong to a training
    try:
        found = identify(file, known.config, known.heads)
        if found.family == OURS:
            network = known.network({"model": found.config}, file.path)
            whole = {name: value for name, value in network.state_dict().items() if not value.is_floating_point()}
            load_network(network, {"state_dict": {**whole, **file.tensors}}, Path(file.place), prefix="")
        else:
            network = from_reference(file.tensors, family=found.family, config=found.config)
    except UserError:
        if file.network is None or known.config:  # what was given is to hold
            raise
        return "", file.network, ()
    if next(network.parameters()).dtype in (torch.float16, torch.bfloat16):
        network.float()
    return found.family, network, (*file.notes, *found.notes)


def class_names_of(file: WeightsFile, classes: int | None = None) -> tuple[list[str] | None, str]:
    """Returns the names of the classes beside weights, None unless there is one for each, and why they are left out.

    Args:
        file: the weights.
        classes: number of the network's outputs, where it is known.
    """
    config = {**(file.config or {}), **(file.view or {})}
    stated, by_name = config.get("pretrained_cfg"), config.get("class_to_idx")
    inverse = {label: name for name, label in by_name.items()} if isinstance(by_name, Mapping) else None
    of_labels = config.get("id2label") or inverse or config.get("idx_to_class")
    given = [config.get("class_names"), config.get("label_names"), config.get("classes")]
    given += [stated.get("label_names")] if isinstance(stated, Mapping) else []
    if isinstance(of_labels, Mapping):
        labels = {str(label): str(name) for label, name in of_labels.items()}
        names = [labels.get(str(label)) for label in range(len(labels))]
        if None in names:
            return None, f"id2label names {listed([*labels])}, which are not 0 to {len(labels) - 1}: left out"
        given.append(names)
    found = next((names for names in given if isinstance(names, list | tuple)), ())
    if not found or not all(isinstance(name, str) for name in found):
        return None, ""
    if classes not in (None, len(found)):
        return None, f"the {len(found)} names of classes beside it are not those of its {classes} outputs: left out"
    return (list(found) if are_named(found) or not isinstance(of_labels, Mapping) else None), ""


def usual_normalisation(network: nn.Module, family: str) -> dict[str, Any]:
    """Returns mean and std of the images of most published weights of a family; nothing where they are not known."""
    if family not in _USUAL:
        return {}
    mean, std = _IMAGENET if "patch_embedding.distillation_token.token" in network.state_dict() else _USUAL[family]
    return {"mean": mean, "std": std}


def for_size(view: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """Returns the preprocessing for images of another size, of which as much is shown."""
    resize, before, share = view.get("resize"), pair(view.get("image_size", size)), view.get("centre_share", 1.0)
    if resize is not None:
        usual = [math.floor(old / share) for old in before]  # of timm, which rounds down at each size
        known = usual if resize == "cover" else pair(resize)
        edges = [
            math.floor(new / share) if edge == by_share else edge * new // old
            for edge, by_share, new, old in zip(known, usual, size, before, strict=True)
        ]
        shorter = "cover" if [*known] == usual and edges[0] != edges[1] else max(edges)
        view = {**view, "resize": edges if isinstance(resize, list | tuple) else shorter}
    return {**view, "image_size": size}


def _learned_no_classes(config: Mapping[str, Any]) -> bool:
    """Whether a run pre-trained without labels, so that its head is not trained."""
    module = config.get("module")
    name = module.get("class_path") if isinstance(module, Mapping) else module
    return str(name).rpartition(".")[2] == "MAE"


def _changed(source: Source, known: _Known, size: int | tuple[int, int] | None, classes: int | None) -> Source:
    """Returns a source with a new head, or for images of another size."""
    view = source.view if size is None else for_size(source.view, pair(size))
    source = replace(source, view=view, class_names=source.class_names if classes is None else None)
    if isinstance(source.network, ViT):
        model: Any = model_config(source.network) if source.config is None else source.config["model"]
        arguments: dict[str, Any] = {} if size is None else {"image_size": list(pair(size))}
        arguments |= {} if classes is None else {"num_classes": classes}
        changed = known.network({"model": with_arguments(model, arguments)}, source.path)
        changed.to(next(source.network.parameters()).dtype)
        of_transformers = source.family in _BY_PROCESSOR and not source.network.register_tokens
        adapt(changed, source.network, interpolation="aliased bicubic" if of_transformers else "bicubic").load(changed)
        return replace(source, network=changed)
    network = source.network
    for name, head in find_head(network).items() if classes is not None else ():
        if not isinstance(head, nn.Linear):
            raise UserError(f"num_classes={classes}: {name} of {type(network).__name__} is no linear layer")
        network.set_submodule(name, nn.Linear(head.in_features, classes) if classes else nn.Identity())
        network.num_classes = classes  # type: ignore[assignment]
    if "image_size" in view:
        shape = (view.get("in_channels", 3), *pair(view["image_size"]))
        meta_logits(network, shape, f"image_size={view['image_size']}: {type(network).__name__} does not take it")
    return source


def _of_processor_size(source: Source, known: _Known, view: Mapping[str, Any]) -> Source:
    """Returns a source for images as its processor makes them, of which transformers resizes positions."""
    trained, size = (one.get("image_size", source.view["image_size"]) for one in (source.view, view))
    if tuple(size) == tuple(trained):
        return source
    changed, (shown, before) = _changed(source, known, size, None), ("x".join(map(str, one)) for one in (size, trained))
    note = f"images have {shown} pixels, as by its processor: positions are resized from {before}, as by its config"
    view = {**changed.view, "resize": view.get("resize"), **known.facts}
    return replace(changed, view=view, notes=(*source.notes, note))


def meta_logits(network: nn.Module, shape: tuple[int, ...], problem: str) -> Tensor:
    """Returns the logits of two images (c, H, W) of a shape, without numbers; raises UserError if there are none."""
    try:
        with torch.no_grad():
            logits: Tensor = copy.deepcopy(network).to("meta").eval()(torch.empty(2, *shape, device="meta"))
        return logits
    except Exception as fault:  # whatever the layers of others raise
        raise UserError(f"{problem}: {' '.join(str(fault).split())[:200]}") from fault


def _wrong_facts(source: Source, facts: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with given facts of preprocessing."""
    channels, size = source.view.get("in_channels", 3), source.view.get("image_size", (1, 1))
    classes = getattr(source.network, "num_classes", None)
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "mean": (lambda mean: len(_numbers(mean)) == channels, f"{channels} numbers"),
        "std": (lambda std: len(_numbers(std)) == channels and min(std) > 0.0, f"{channels} numbers above 0"),
        "centre_share": (lambda share: type(share) in (int, float) and 0.0 < share <= 1.0, "above 0 and at most 1"),
        "class_names": (lambda names: _are_names(names, classes), f"a list of {classes or 'the'} names"),
        "interpolation": (lambda name: name in INTERPOLATIONS, f"one of {', '.join(INTERPOLATIONS)}"),
        "resize": (
            lambda given: (
                given == "cover" or ([*map(type, _numbers(given) or [given] * 2)] == [int, int] and covers(given, size))
            ),
            f"a number of pixels, or height and width, at least {side(pair(size))}, or cover",
        ),
        "multi_label": (lambda value: type(value) is bool, "true or false"),
    }
    return problems_of(*((name, value, rules[name][0](value), rules[name][1]) for name, value in facts.items()))


def _numbers(value: Any) -> list[float]:
    """Returns the finite numbers of a list; none where it holds anything else."""
    items = value if isinstance(value, list | tuple) else []
    return [*items] if all(type(item) in (int, float) and math.isfinite(item) for item in items) else []


def _are_names(value: Any, count: int | None) -> bool:
    names = value if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value) else []
    return bool(names) and len(names) == (count or len(names))
