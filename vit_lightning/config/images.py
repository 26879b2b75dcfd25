"""The data of a config: read and made, and held against the images that a trained model learned from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vit_lightning.classes import are_named
from vit_lightning.config.files import Config, as_map, flatten
from vit_lightning.config.from_weights import Trained, options_of_data, other_cuts
from vit_lightning.config.merge import merge
from vit_lightning.config.names import class_of, is_same_class
from vit_lightning.config.options import DEFAULT_CLASSES
from vit_lightning.config.signatures import Part, signature_of
from vit_lightning.config.typed import Place, Reader
from vit_lightning.data.base import ImageData
from vit_lightning.data.image_files import ImageFiles
from vit_lightning.errors import UserError, gathered, is_plain_name


def read_data(
    reader: Reader, config: Config, trained: Trained | None, command: str
) -> tuple[Part | None, ImageData | None, list[str]]:
    """Reads and makes the data.

    Args:
        reader: the reader.
        config: the config.
        trained: the model that a command uses, which must not be measured on the images that it learned from.
        command: the command.

    Returns:
        its class; it, if it can be used; why its images cannot be read.
    """
    given = config.get("data") or {}
    also = given.get("also_test") if isinstance(given, dict) else None
    given = {key: item for key, item in given.items() if key != "also_test"} if also else given
    part = reader.part(Place(ImageData), given, "data", class_of(DEFAULT_CLASSES["data"]))
    if part is None or (data := _made_data(reader, part)) is None:
        return part, None, []
    images, given = replace(reader, problems=[]), {**as_map(given), "class_path": part.name}
    if trained is not None:
        data.wanted = "val" if command == "validate" else "test"
        data.learned = None if _is_in(trained.data.get("root"), data) else trained.images
    with images.trying("data"):
        data.check()
    if trained is not None and not images.problems:
        with images.trying():
            _refuse_other_images(data, given, trained)
    if also and command in ("fit", "test"):
        also = _read_further(images, data, also, given, trained)
    part = part.with_arguments({"also_test": also} if also else {})
    if images.problems:
        return part, None, images.problems
    if data.wanted is None:
        with reader.trying("data"):
            data.check_augment()
    return part.with_arguments(data.pinned()), data, []


def _refuse_other_images(data: ImageData, given: Config, trained: Trained) -> None:
    """Refuses measured images that are cut from other images than those that the model learned from."""
    if data.wanted not in data.cut_splits or not has_images_of(trained.data, flatten(given), data):
        return
    unkept: dict[str, Any] = {"in_memory": False} if "in_memory" in signature_of(type(data)).options else {}
    if replace(data, **unkept).fingerprint() != trained.images:
        some = "some would be of the training (give others, or these as they were)"
        raise UserError(
            f"{data.place}: its images are no longer those that the model learned from, and those of "
            f"{data.wanted} are cut from them: {some}"
        )


def _read_further(
    reader: Reader, data: ImageData, also: Any, given: Config, trained: Trained | None
) -> dict[str, Part]:
    """Reads and makes further test sets, whose images and labels become those that the model takes.

    Args:
        reader: the reader.
        data: the data of the config, which gets them.
        also: a folder, or options in place of those of the data, by name.
        given: what the config says of the data.
        trained: the model that a command uses.
    """
    if wrong := [str(name) for name in also if not is_plain_name(str(name))] if isinstance(also, dict) else [str(also)]:
        text = f"{', '.join(wrong)} must hold {{NAME: FOLDER}} or {{NAME: {{OPTION: VALUE}}}}"
        return reader.refused(f"data.also_test={text}") or {}
    parts = {name: _read_one_further(reader, data, name, entry, given, trained) for name, entry in also.items()}
    return {name: part for name, part in parts.items() if part is not None}


def _read_one_further(
    reader: Reader, data: ImageData, name: str, entry: Any, given: Config, trained: Trained | None
) -> Part | None:
    """Reads and makes one of the further test sets; None, with its problems, if its images are not there."""
    key, folder = f"data.also_test.{name}", {"class_path": "vit_lightning.ImageFolder", "root": entry}
    own = merge({"data": given}, {"data": entry if isinstance(entry, dict) else folder})["data"]
    if is_same_class(own["class_path"], given["class_path"]):
        reader.problems += other_cuts(given, own, key)
    view = {**data.test_view(), "batch_size": data.batch_size, "num_workers": getattr(data, "num_workers", 0)}
    known = options_of_data(own["class_path"]) - {"class_names", "mean", "std"}
    part: Part = reader.part(Place(ImageData), {**{k: view[k] for k in view if k in known}, **own}, key)
    if (other := reader.make(part, key)) is None:
        return None
    other.wanted, other.mean, other.std = "test", data.mean, data.std
    learned = getattr(data, "root", None) if trained is None else trained.data.get("root")
    other.learned = None if _is_in(learned, other) else "" if trained is None else trained.images
    before = len(reader.problems)
    with reader.trying(key):
        other.check()
    if len(reader.problems) > before:
        return None
    with reader.trying():
        other.take_classes(data.class_names if trained is None else trained.class_names, "the model")
    shapes = [f"{one.in_channels} x {' x '.join(map(str, one.image_size))}" for one in (other, data)]
    if shapes[0] != shapes[1]:
        reader.problems.append(f"{key}: its images are {shapes[0]}, and those of data are {shapes[1]}")
    data.further[name] = other
    return part.with_arguments(other.pinned())


def with_labels(
    reader: Reader, trained: Trained | None, data: ImageData | None
) -> tuple[Trained | None, ImageData | None]:
    """Returns the data with the labels of a trained model, in the order of its outputs."""
    if data is None or trained is None or isinstance(data, ImageFiles):  # which have no labels
        return trained, data
    names = trained.class_names
    is_known = are_named(names) or "data" in (trained.checkpoint.get("config") or {})
    if not is_known and len(names or ()) == data.num_classes:
        names = None  # only its outputs have numbers
    labelled = None
    with gathered(reader.problems):
        note = data.take_classes(names, f"the model of ckpt={trained.path}")
        trained, labelled = trained._replace(notes=(*trained.notes, *[note] * bool(note))), data
    return trained, labelled


def has_images_of(source: Config | None, given: Config, data: ImageData) -> bool:
    """Whether some data are taken from the same images as those of another config, as far as the options tell."""
    before, now = _source(source), _source(given)
    if not is_same_class(str(before.get("class_path")), now["class_path"]):
        return False
    return _is_in(before["root"], data) if before.get("root") else before == now


def _source(data: Config | None) -> Config:
    """Returns what a config says of the images themselves."""
    return {key: value for key, value in (data or {}).items() if key not in signature_of(ImageData).options}


def _is_in(root: Any, data: ImageData) -> bool:
    """Whether images of a folder are those of some data."""
    return root is not None and Path(root).resolve() == Path(getattr(data, "root", "")).resolve()


def _made_data(reader: Reader, part: Part) -> ImageData | None:
    """Returns the data; where values are refused, with those that it takes, so that all else can be checked."""
    data: ImageData | None = reader.make(part, "data")
    if data is None:
        tried, required = replace(reader, problems=[]), signature_of(part.target).required
        given, part = part.arguments, replace(part, arguments={name: part.arguments[name] for name in required})
        data = tried.make(part, "data")
        for name, value in given.items() if data is not None else ():
            more = part.with_arguments({name: value})
            if (made := tried.make(more, "data")) is not None:
                data, part = made, more
    return data
