"""The network and the LightningModule of a config: read with the facts of the data among their arguments, and made."""

import inspect
import re
import shlex
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

from vit_lightning.classes import match_classes
from vit_lightning.config.adapters import ADAPTERS, given_alone
from vit_lightning.config.files import Config, flatten, word
from vit_lightning.config.lightning_cli import lacks_optimizer
from vit_lightning.config.own_files import empty_caches, files_of
from vit_lightning.config.signatures import Part, signature_of
from vit_lightning.config.typed import Place, Reader, of_option
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError, near, refuse
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import pair, side
from vit_lightning.training.classifier import ConfiguredOptimizer, ViTClassifier
from vit_lightning.training.fine_tuning import LoraConfig, add_lora
from vit_lightning.training.losses import Teacher
from vit_lightning.weights import sources
from vit_lightning.weights.files import read_weights
from vit_lightning.weights.hubs import LIBRARIES
from vit_lightning.weights.sources import meta_logits

FACTS = ("image_size", "in_channels", "num_classes")
"""Arguments of a network that follow from the data."""
TIMM_NAMES = {"img_size": "image_size", "in_chans": "in_channels"}


def data_facts(data: ImageData) -> dict[str, Any]:
    """Arguments of a network that follow from the data, as plain values."""
    return {"image_size": side(data.image_size), "in_channels": data.in_channels, "num_classes": len(data.label_names)}


def part_of_network(reader: Reader, given: Any, facts: Mapping[str, Any] | None) -> Any:
    """Returns the network of a config, with the facts that it has arguments for; None if it cannot be made.

    Args:
        reader: the reader.
        given: ``model`` of a flat config, with its class.
        facts: facts of the data; None where they are not known.
    """
    if (found := reader.find(nn.Module, given, "model", ViT)) is None:
        return None
    name, target, arguments = found
    if inspect.isclass(target) and not issubclass(target, nn.Module):
        return reader.refused(f"model.class_path={name} must be a network, a torch.nn.Module")
    signature = signature_of(target)
    known = {*signature.options, *names_of_timm(target, arguments)}
    names = {fact: fact for fact in FACTS} | (TIMM_NAMES if name.startswith("timm.") else {})
    if facts is not None:
        for option, fact in names.items():
            if option in known:
                reader.problems += unlike_data("model", option, arguments.get(option, facts[fact]), facts[fact])
                arguments[option] = facts[fact]
    if name.startswith("timm."):  # whose classes have classes as defaults, which they alone know to read
        signature = signature._replace(options=given_alone(signature.options))
    provided = FACTS if facts is None else ()
    part = reader.made_of(found, signature, "model", provided=provided)
    found_problems = problems_of_library(part) if part is not None else []
    reader.problems += found_problems
    return None if found_problems else part


def problems_of_library(part: Part) -> list[str]:
    """Returns what is wrong with the name of a network of timm or torchvision, and weights that it would fetch."""
    library = part.name.partition(".")[0]
    if library not in LIBRARIES:
        return []
    given, name = part.arguments, timm_name(part.target, part.arguments)
    if given.get("checkpoint_path"):
        return [f"model.checkpoint_path={given['checkpoint_path']}: give it as init_from"]
    problems = [
        f"model.{option}={word(getattr(given[option], 'name', given[option]))}: give init_from={library}:{name} instead"
        for option in ("pretrained", "weights")
        if given.get(option)
    ]
    backbone = "weights_backbone"  # which torchvision fetches unless told not to
    if backbone in signature_of(part.target).options and given.get(backbone, "the default") is not None:
        problems.append(f"model.{backbone} would be fetched: give model.{backbone}=null")
    if library == "timm" and not inspect.isclass(part.target):
        from timm import is_model, list_models

        if not is_model(name) and ":" not in name:  # hf-hub:owner/name
            likely = list_models(f"{name.partition('.')[0]}*")[:3] or near(name.partition(".")[0], list_models())
            hint = f" (did you mean {', '.join(likely)}?)" * bool(likely)
            problems.append(f"model.model_name={name}: timm has no such model{hint}")
    return problems


def timm_name(target: Any, arguments: Mapping[str, Any]) -> str:
    """Returns the name of the network that a function of timm makes."""
    return str(arguments.get("model_name") or target.__name__)


def unlike_data(group: str, name: str, given: Any, fact: Any) -> list[str]:
    """Returns the problem of an argument whose value is not that of the data; a wrong type is refused by itself."""
    reader = Reader()
    value = reader.value(int | tuple[int, int] if name in ("image_size", "img_size") else int, given, name)
    agree = reader.problems or pair(value) == pair(tuple(fact) if isinstance(fact, list) else fact)
    return [] if agree else [f"{group}.{name}={given} does not fit the data, which has {fact} (leave it out)"]


def names_of_timm(target: Any, arguments: Mapping[str, Any]) -> set[str]:
    """Returns the arguments of the network that a function of timm makes, as far as it names the class."""
    if inspect.isclass(target) or not target.__module__.startswith("timm."):
        return set()
    from timm import is_model, model_entrypoint

    name = timm_name(target, arguments)
    made = get_type_hints(model_entrypoint(name)).get("return") if is_model(name) else None
    return {"num_classes", "in_chans", *(signature_of(made).options if inspect.isclass(made) else ())}


def empty_network(make: Callable[[], nn.Module], key: str = "model") -> nn.Module:
    """Returns a network on the meta device; one that cannot be built there is built and then moved.

    Args:
        make: makes it.
        key: option that errors name.

    Raises:
        UserError: its arguments do not fit, or a layer of it is lazy.
    """
    try:
        with of_option(key), torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    made = make()
            except (NotImplementedError, RuntimeError, UserError) as fault:  # it looks at its own numbers
                if not isinstance(fault, NotImplementedError) and not needs_numbers(fault):
                    raise
                made = make().to("meta")
            way_out = "give the layer its sizes, or pass images through it in __init__"
            lazy = [name for name, weight in made.named_parameters() if is_lazy(weight)]
            refuse([f"{name} has no size before a first batch ({way_out})" for name in lazy[:1]])
            return made
    finally:
        empty_caches()


def needs_numbers(fault: Exception) -> bool:
    """Whether an error comes from looking at numbers, which tensors on the meta device do not have."""
    return re.search(r"\bmeta\b", str(fault)) is not None


def network_from(part: Part, lora: LoraConfig) -> nn.Module:
    network: nn.Module = part.make()
    add_lora(network, lora)
    return network


def network_in_file(config: Mapping[str, Any], folder: Path | None = None) -> nn.Module:
    """Returns the network of a config in plain data, such as one that a file of weights carries.

    Args:
        config: the config, of which ``model`` and ``lora`` are read.
        folder: folder with files of the user's own, where the file of weights is trusted.

    Raises:
        UserError: its class is not there, or does not take its arguments.
    """
    with files_of(folder):
        reader = Reader(ADAPTERS)
        part = part_of_network(reader, flatten(config["model"]), None)
        lora = reader.part(Place(LoraConfig), config.get("lora") or {}, "lora")
        refuse(reader.problems)
        return network_from(part, lora.make())


open_source = partial(sources.open_source, make_network=network_in_file)
"""Returns a trained network with what is known about it, one of ours as its config says, see ``weights.sources``."""


def make_teacher(place: str, data: ImageData, *, trust: bool = False) -> Teacher:
    """Returns the teacher of a distillation for the student's data, and warns of what was assumed about it.

    It has an output for each class of the data. The positions of a ViT of ours are resized, as those of ``init_from``.

    Raises:
        UserError: it is not there, takes other images, or has other classes.
    """
    key, size = "distillation.teacher", data.image_size
    told = f"lightning export --ckpt={shlex.quote(place)} --config=... --out=FOLDER makes a teacher that tells it"
    file = read_weights(place, key)
    try:
        source = open_source(file, trust=trust, key=key)
    except UserError as error:  # a teacher has no config in which it could be given
        raise UserError(f"{text} ({told})" if "config={" in text else text for text in error.problems) from error
    notes = []
    if source.vit is not None and source.vit.image_size != size:
        trained = "x".join(map(str, source.vit.image_size))
        source = open_source(file, image_size=size, trust=trust, key=key)
        notes.append(f"trained on {trained} pixels, its positions are resized to {size[0]}x{size[1]}")
    if not {"mean", "std"} <= source.view.keys():
        raise UserError(f"{key}={place}: mean and std of its images are not known ({told})")
    shape = (data.in_channels, *size)
    problem = f"{key}={place} does not take the images of the data, {'x'.join(map(str, shape))}"
    outputs = meta_logits(source.network, shape, problem).shape[-1]
    try:
        whose = f"{key}={place}"
        match = match_classes(source.class_names, data.class_names, whose=whose, ours=data.place, classes=outputs)
    except UserError as error:
        raise UserError(f"{error} (fine-tune it on this data first, with init_from)") from error
    for note in (*source.notes, *notes, *filter(None, [match.note])):
        warnings.warn(f"{key}={place}: {note}", stacklevel=2)
    columns = None if match.labels == [*range(outputs)] else match.labels
    normalised = source.view["mean"], source.view["std"]
    return Teacher(source.network, normalised=normalised, images=(data.mean, data.std), columns=columns)


FILLED_IN = ("network", *FACTS)
"""Arguments that any LightningModule may have: the configured model, and facts of the data."""
CONFIGURED = tuple(name for name in inspect.signature(ViTClassifier).parameters if name not in FILLED_IN)
"""Arguments of ViTClassifier that options of the same name configure."""


def filled_in(kind: type[LightningModule]) -> list[str]:
    """Returns the arguments of a class that are filled in, and so are no options under ``module``."""
    names = (*FILLED_IN, *CONFIGURED) if issubclass(kind, ViTClassifier) else FILLED_IN
    return [name for name in names if name in signature_of(kind).options]


def part_of_module(reader: Reader, config: Config, facts: Mapping[str, Any] | None) -> Part | None:
    """Returns the module of a merged config, which may confirm facts of the data; None if it cannot be made."""
    if config.get("module") is None:
        return Part(ViTClassifier, {})
    if (found := reader.find(LightningModule, config["module"], "module")) is None:
        return None
    name, kind, arguments = found
    if not (inspect.isclass(kind) and issubclass(kind, LightningModule)):
        text = "must be a LightningModule, such as a subclass of ViTClassifier"
        return reader.refused(f"module.class_path={name} {text}")
    signature, filled = signature_of(kind), filled_in(kind)
    for fact in [fact for fact in FACTS if fact in filled and fact in arguments]:
        value = arguments.pop(fact)
        reader.problems += unlike_data("module", fact, value, facts[fact]) if facts is not None else []
    if "network" in filled and config.get("model") is None:
        hint = "give model, such as {preset: Ti/4}"
        reader.problems.append(f"model is missing: module.class_path={name} takes a network ({hint})")
    options = {key: option for key, option in signature.options.items() if key not in filled}
    return reader.made_of(found, signature._replace(options=options), "module")


def takes(part: Part, key: str) -> bool:
    """Whether the module takes what a group of options configures."""
    if key == "optimizer" and lacks_optimizer(part.target):
        return True
    return ("network" if key == "model" else key) in filled_in(part.target)


def module_from(part: Part, available: Mapping[str, Any]) -> LightningModule:
    """Returns the module of a config.

    Args:
        part: the module.
        available: values of all arguments that are filled in.
    """
    given, kind = {name: available[name] for name in filled_in(part.target)}, part.target
    if not lacks_optimizer(kind):
        made: LightningModule = part.make(**given)
        return made
    more: dict[str, Any] = {"__module__": kind.__module__}
    if getattr(available["optimizer"], "make", None) is not None and not hasattr(kind, "no_decay"):
        more["no_decay"] = lambda self: set()  # as Lightning's command line, which gives its class all weights alike
    module: Any = replace(part, target=type(kind.__name__, (ConfiguredOptimizer, kind), more)).make(**given)
    module.optimizer_config = available["optimizer"]
    return module  # type: ignore[no-any-return]
