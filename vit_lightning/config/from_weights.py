"""Words of trained models in a config: that of a run, an architecture, and how the images were prepared.

Each file of weights that a command line names is read here, once.
"""

import functools
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule

from vit_lightning.config.files import Config, as_flag, as_map, flatten, value_at, word
from vit_lightning.config.lightning_cli import module_of, takes_no_network
from vit_lightning.config.merge import merge
from vit_lightning.config.names import class_of, is_same_class
from vit_lightning.config.networks import filled_in, network_in_file, open_source
from vit_lightning.config.options import DEFAULT_CLASSES, RunOptions
from vit_lightning.config.own_files import also_search
from vit_lightning.config.signatures import plain, signature_of
from vit_lightning.config.typed import scalar
from vit_lightning.data.image_files import data_of_files
from vit_lightning.data.image_set import ImageSet
from vit_lightning.data.wrapped import WrappedDataset
from vit_lightning.errors import UserError, refuse
from vit_lightning.models.presets import PRESETS
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import pair, side
from vit_lightning.storage.checkpoint_files import find_checkpoint, is_plain, read_checkpoint, run_folder_of
from vit_lightning.storage.parsing import parse_yaml
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.weights.files import is_ours, read_weights
from vit_lightning.weights.hubs import LIBRARIES, model_of_library
from vit_lightning.weights.identify import OURS
from vit_lightning.weights.init_from import FROM_DATA, InitialWeights, facts_of_images, open_initial_weights
from vit_lightning.weights.options import model_config
from vit_lightning.weights.sources import for_size
from vit_lightning.weights.trust import refuse_untrusted


class Trained(NamedTuple):
    """The checkpoint that ``--ckpt`` names."""

    path: Path
    checkpoint: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Sentences on what the weights do not tell, and what was taken in its place."""

    @property
    def view(self) -> dict[str, Any]:
        """Preprocessing of the images and names of the classes, as far as they are known."""
        return self.checkpoint.get("test_view") or {}

    @property
    def data(self) -> Config:
        """Options of the data that it learned from."""
        return value_at(flatten(self.checkpoint.get("config")), "data") or {}

    @property
    def images(self) -> str:
        """Fingerprint of these images."""
        return str(self.checkpoint.get("images"))

    @property
    def class_names(self) -> list[str] | None:
        return self.view.get("class_names")


def with_checkpoint(
    flags: Sequence[tuple[str, str]], sources: Sequence[Config], told: Config | None, *, trust: bool
) -> tuple[Trained, list[Config]]:
    """Returns the checkpoint that ``--ckpt`` names, and configs behind that of its run.

    Args:
        flags: options and values of the command line.
        sources: the configs, the last one of flags.
        told: where image files replace the data of its config: what is not known about the model.
        trust: whether it may name any class.
    """
    places = [value for key, value in flags if key in ("ckpt", "ckpt_path")]
    if not places:
        raise UserError("ckpt is missing: give --ckpt RUN_FOLDER or --ckpt FILE")
    place, of_library = places[-1], places[-1].partition(":")[0] in LIBRARIES
    trained = _trained_by_run(place, sources, trust=trust) if told is None else _trained(place, told, trust=trust)
    config = flatten(trained.checkpoint.get("config") or {})
    if not isinstance(config, dict):
        raise UserError(f"ckpt={place} holds no config")
    if told is not None:
        view, asked = data_of_files(place, trained.checkpoint), as_map(sources[-1].get("data"))
        facts = {**view, **facts_of_images({"image_size": scalar(asked.get("image_size"))})}
        config["data"] = view | for_size(view, pair(facts["image_size"]))
    # its teacher may be gone; where a call writes, and whom it trusts, is said by that call alone
    config = _without(config, "distillation", *RunOptions.__dataclass_fields__)
    if not trust and not of_library:  # which the user has named
        refuse_untrusted(config)
    if not trust and isinstance(config.get("trainer"), dict):  # a profiler writes where it says
        config["trainer"] = _without(config["trainer"], "profiler")
    if isinstance(config.get("model"), dict):  # these come from the data, which may give other sizes
        config["model"] = {name: value for name, value in config["model"].items() if name not in FROM_DATA[:2]}
    if "data" not in config and "test_view" in trained.checkpoint:  # weights of others, on the data of the config
        sources, trained = _weights_of_others(place, trained, sources)
    return trained, [{**config, "init_from": None}, *sources]  # the weights are the checkpoint's own


def _weights_of_others(place: str, trained: Trained, sources: Sequence[Config]) -> tuple[list[Config], Trained]:
    """Returns configs without a network, whose weights are those of others, with a sentence on what is not used.

    Args:
        place: the weights as the user names them.
        trained: the weights.
        sources: configs, the last one of flags.
    """
    of_training = ("model", "module", "init_from", "lora", "freeze", "ema")
    unused = [n for n in of_training if any({*as_map(one.get(n) or None)} - {"num_heads"} for one in sources)]
    if not any(config.get("data") for config in sources):
        way_out = f"lightning predict --ckpt {shlex.quote(place)} IMAGES takes it with image files or folders"
        raise UserError(f"ckpt={place} is no run, whose images are known: give --config with data ({way_out})")
    if trained.view.get("multi_label"):
        raise UserError(f"ckpt={place} gives several labels an image, the data has one (lightning predict shows them)")
    used = "of the config, data, metrics, trainer and model.num_heads are used"
    notes = [f"{used}, no other option of {', '.join(unused)}"] if unused else []
    return [_without(config, *of_training) for config in sources], trained._replace(notes=(*trained.notes, *notes))


def fill_from_trained(trained: Trained, first: Config, merged: Config) -> Trained:
    """Prepares images of another class of data as the model knows them, where the user says nothing else about them.

    Args:
        trained: the model; comes back with sentences on what was taken from either.
        first: the config of its run, without data for weights of others.
        merged: the config, which is changed.

    Raises:
        UserError: data of the same class is split so that the model is measured on images that it was trained on.
    """
    before, data = (as_map(config.get("data")) for config in (first, merged))
    learned_from, name = (str(one.get("class_path", DEFAULT_CLASSES["data"])) for one in (before, data))
    if before and is_same_class(learned_from, name):
        refuse(other_cuts(before, data))
        return trained
    known = options_of_data(name)
    view = trained.view
    other_channels = () if "in_channels" in known or view.get("in_channels", 3) == 3 else ("mean", "std")  # do not fit
    view = _without(view, "class_names", "multi_label", *other_channels, *{"in_channels"} - known)
    given = {name: scalar(data[name]) for name in view if name in data}
    facts = facts_of_images(given)
    if "image_size" in view:
        size = pair(view["image_size"])
        view = for_size(view, pair(facts.get("image_size", size))) | {"image_size": side(size)}
    if "centre_share" in data:  # which would have no effect
        view.pop("resize", None)
    taken = {name: value for name, value in view.items() if name in known and name not in data}
    merged["data"] = {**data, **taken}
    shown = ", ".join(f"data.{key}={word(value)}" for key, value in taken.items())
    notes = [f"{shown} as in the source"] if taken else []
    notes += [
        f"data.{key} is not that of the source, {word(value)}"
        for key, value in view.items()
        if key not in taken and (given | facts).get(key) != parse_yaml(word(value), key)
    ]
    return trained._replace(notes=(*trained.notes, *notes))


def other_cuts(before: Config, data: Config, name: str = "data") -> list[str]:
    """Returns what is wrong with measured images that are cut in another way from what a model learned from."""
    problems = []
    for key in ("split_seed", "val_share", "test_share"):
        cut, other = before.get(key), data.get(key, before.get(key))
        if scalar(cut) != scalar(other):
            images = "and so from images that this one has for its measurement (leave it out)"
            problems.append(f"{name}.{key}={other}: the model learned from the split of {key}={cut}, {images}")
    return problems


def options_of_data(name: Any) -> set[str]:
    """Returns the options of a class of data, with those beside a dataset of others."""
    kind = class_of(name)
    is_module = issubclass(kind, LightningDataModule | LightningModule)
    return {*signature_of(kind).options, *(() if is_module else signature_of(WrappedDataset).options)}


def fill_module(trained: Trained | None, merged: Config, *, trust: bool) -> None:
    """Gives a module of the user's the arguments that a checkpoint's was made with and the config does not give.

    As ``load_from_checkpoint`` does. Facts of the data are the data's own. A warning names what was taken, and what the
    config gives otherwise.

    Args:
        trained: the checkpoint; where there is none, that of ``init_from``.
        merged: the config, which is changed.
        trust: whether it may name any class.
    """
    if issubclass(kind := module_of([merged]), ViTClassifier) or not (trained or merged.get("init_from")):
        return
    path = trained.path if trained else find_checkpoint(merged["init_from"], "init_from")
    checkpoint = trained.checkpoint if trained else read_checkpoint(path)
    (options, others), given = signature_of(kind), as_map(merged["module"])
    known, whole = checkpoint.get("hyper_parameters"), checkpoint.get("hparams_name")
    known = {whole: known} if whole in options else as_map(known)
    theirs = {name: flatten(plain(value)) for name, value in known.items() if name not in filled_in(kind)}
    theirs = {n: value for n, value in theirs.items() if n in options or (others and not n.startswith("_"))}
    odd = [name for name, value in theirs.items() if name not in given and not is_plain(value)]
    alike = [name for name, value in theirs.items() if name in options and repr(options[name].default) == repr(value)]
    taken = {name: value for name, value in theirs.items() if name not in (*given, *odd, *alike)}
    refuse_untrusted({"module": {} if trust else taken})
    merged["module"] = {**given, **taken}
    notes = [", ".join(f"module.{name}={word(value)}" for name, value in taken.items()) + " as it was trained"]
    notes = notes * bool(taken) + [f"its module.{name} is no plain data, and not taken" for name in odd]
    both = {n: v for n, v in theirs.items() if n in given and is_plain(v) and v not in (given[n], scalar(given[n]))}
    notes += [f"module.{name}={word(given[name])} in place of its {word(value)}" for name, value in both.items()]
    for note in notes:
        warnings.warn(f"{path}: {note}", stacklevel=2)


def _model_of(sources: Sequence[Config]) -> Config:
    """Returns the network that configs name."""
    return functools.reduce(merge, (as_map(one["model"]) for one in sources if one.get("model")), {})


def _without(config: Config, *names: str) -> Config:
    return {key: value for key, value in config.items() if str(key).rstrip("+") not in names}


def _trained_by_run(place: str, sources: Sequence[Config], *, trust: bool) -> Trained:
    """Returns the checkpoint of a run, whose config says which images there are, or the weights of others.

    Any Lightning may have written what the configs' own LightningModule loads as it is.
    """
    way_out, as_it_is = "", takes_no_network(sources)
    try:
        if place.partition(":")[0] not in (*LIBRARIES, "hf-hub"):  # these would be fetched
            path = find_checkpoint(place)
            checkpoint = read_checkpoint(path)
            if as_it_is or is_ours(checkpoint) or checkpoint.get("test_view"):
                return Trained(path, checkpoint)
            way_out = " (--module=CLASS, the LightningModule that wrote it, loads it as it is)"
    except UserError as error:
        if not Path(place).exists():  # nothing is fetched twice
            raise
        try:
            read_weights(place, "ckpt")
        except UserError:  # it is no source at all
            raise error from error.__cause__
    try:
        return _trained(place, {}, heads={"num_heads": _model_of(sources).get("num_heads")}, trust=trust)
    except UserError as error:
        raise UserError(text + way_out for text in error.problems) from error


def _trained(place: str, told: Config, *, heads: Config | None = None, trust: bool) -> Trained:
    """Returns any trained model as the checkpoint that a run of it would have."""
    try:
        file = read_weights(place, "ckpt")
        if file.checkpoint is not None and file.path is not None and not told:
            return Trained(file.path, file.checkpoint)
        source = open_source(file, config=told, heads=heads, trust=trust, key="ckpt")
    except UserError as error:
        raise UserError(as_flag(problem) for problem in error.problems) from error
    names = source.class_names or [str(label) for label in range(getattr(source.network, "num_classes", 0))]
    if not names:
        raise UserError(f"ckpt={place} gives features and no classes (lightning embed writes them)")
    model = (file.config or {}).get("model") if source.family in ("run", OURS) else None
    if model is None:
        model = model_config(source.network) if source.vit is not None else model_of_library(place)
    state = {f"network.{name}": tensor for name, tensor in source.network.state_dict().items()}
    checkpoint = {"config": {"model": model}, "state_dict": state, "test_view": {**source.view, "class_names": names}}
    return Trained(Path(place.partition(":")[2] or place), checkpoint, tuple(map(as_flag, source.notes)))


def with_source(sources: Sequence[Config], *, trust: bool) -> tuple[InitialWeights | None, Sequence[Config]]:
    """Returns the source of the initial weights that configs name, and these behind its architecture."""
    given = [config["init_from"] for config in sources if "init_from" in config]
    if not given or given[-1] is None:
        return None, sources
    initial = open_initial_weights(str(given[-1]), network_in_file, trust=trust)
    if trust and initial.file.path is not None and (folder := run_folder_of(initial.file.path)) is not None:
        also_search(folder)
    model = _model_of(sources)
    preset = PRESETS.get(str(model.get("preset")).partition("/")[0])
    heads = preset[2] if preset and model.get("num_heads") is None else model.get("num_heads")
    named = model.get("class_path")
    for_vit = not takes_no_network(sources) and (named is None or class_of(named) is ViT)
    told = {"num_heads": heads, "dim_head": value_at(model, "attention.dim_head")}
    initial = initial.described(for_vit=for_vit, heads=told)
    return initial, [{"model": flatten(initial.model)}, *sources]


def fill_from_source(initial: InitialWeights, merged: Config) -> InitialWeights:
    """Fills in size, mean and std of the images as those of a source where the config gives none.

    Only for data that takes images of any size; ``predict`` takes the same for the source itself.

    Args:
        initial: the source; comes back with a sentence on what was taken from it.
        merged: the config, which is changed.
    """
    data = as_map(merged.get("data"))
    if not issubclass(class_of(data.get("class_path")), ImageSet):
        return initial
    taken = {name: value for name, value in initial.images.items() if data.get(name) is None}
    merged["data"] = {**data, **taken}
    shown = {name: f"data.{name}={word(value)}" for name, value in taken.items()}
    guessed = [shown.pop(name) for name in ("mean", "std") if initial.usual and name in shown]
    notes = [f"{' and '.join(shown.values())} as in the source"] if shown else []
    if guessed:
        notes.append(f"{' and '.join(guessed)} as for most weights of {initial.usual}; nothing beside the file tells")
    return replace(initial, notes=(*initial.notes, *notes))
