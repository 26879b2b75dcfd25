"""Datasets and data modules of others in the place of ours."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import DataHooks
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from vit_lightning.classes import are_named, listed, match_classes
from vit_lightning.data.base import ImageData
from vit_lightning.data.batches import PAIR, Batch, as_batch, in_words, keys_of, tensors_in
from vit_lightning.data.image_set import IMAGENET_MEAN, IMAGENET_STD, SPLIT_NAMES, SplitData, unseen
from vit_lightning.data.items import Items, labels_of, read_item, to_pixels
from vit_lightning.data.per_image import Own, name_of, seeded
from vit_lightning.data.splits import SPLITS, Split
from vit_lightning.errors import UserError, named, refuse
from vit_lightning.sizes import pair


@dataclass(kw_only=True, eq=False, repr=False)
class WrappedDataset(SplitData):
    """Any map-style ``Dataset`` of (image, label) items: order, resume, augmentation and normalisation are ours.

    In a config ``data.class_path`` names the dataset itself, with its arguments beside those of this class. If it takes
    ``train`` or ``split``, it is made once for each split; a split that it lacks is cut from the training images,
    stratified, by ``split_seed``. See ``Items`` for the kinds of images.

    Args:
        dataset_class: the class, or a function that returns a dataset.
        arguments: its arguments.
        num_workers: processes that load images.
        image_size: height and width in pixels of the model's input, by default those of the images; others are cropped
            at the centre and resized.
        in_channels: 1 or 3 channels of PIL images; by default those of the first.
        num_classes: number of classes; by default that of the dataset's ``classes``, else of its labels.
        class_names: name of each class; by default the dataset's ``classes``, else numbers.
        mean: mean of each channel, of pixels between 0 and 1; by default ImageNet's, 0.5 for other than 3 channels.
        std: standard deviation of each channel; by default ImageNet's, 0.25 for other than 3 channels.
    """

    dataset_class: Own
    arguments: dict[str, Any] | None = None
    num_workers: int = 2
    image_size: int | tuple[int, int] | None = None  # type: ignore[assignment]  # a pair once __post_init__ is done
    in_channels: int | None = None  # type: ignore[assignment]
    num_classes: int | None = None  # type: ignore[assignment]
    class_names: list[str] | None = None  # type: ignore[assignment]
    mean: tuple[float, ...] | None = None  # type: ignore[assignment]
    std: tuple[float, ...] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._notes: list[str] = []
        self._made = self._make_splits()
        train = self._made["train"]
        with seeded():
            first, *others = [read_item(train, index, self.title)[0] for index in (0, len(train) // 2, len(train) - 1)]
        self._take_images(first, others)
        self._take_classes()
        self._datasets |= self._splits

    def problems(self) -> list[str]:
        problems = super().problems()
        for key in ("mean", "std"):
            values = getattr(self, key)
            if values is not None and self.in_channels is not None and len(values) != self.in_channels:
                problems.append(f"{key}={list(values)} must have {self.in_channels} values, one for each channel")
        return problems

    @property
    def title(self) -> str:
        """Name of the dataset, as in errors."""
        return f"class_path={name_of(self.dataset_class)}"

    def _make(self, **which: Any) -> Any:
        with seeded() as seed, named(f"{self.title}: ", others=True):
            seed(self.split_seed)  # it may draw a split, or the images: the same for each split, rank and resumed run
            return self.dataset_class(**{**(self.arguments or {}), **which})

    def _make_splits(self) -> dict[Split, Any]:
        """Makes the dataset of each split that it has."""
        given, takes = self.arguments or {}, _takes(self.dataset_class)
        if "train" in given:
            raise UserError(f"train={given['train']}: it is set for each split (leave it out)")
        key = next((key for key in ("train", "split") if key in takes and key not in given), None)
        if key is None:
            made: dict[Split, Any] = {"train": self._make()}
        elif key == "train":
            made = {"train": self._make(train=True), "test": self._make(train=False)}
        else:
            names: dict[Split, tuple[str, ...]] = {**SPLIT_NAMES, "train": (*SPLIT_NAMES["train"], "trainval")}
            found = {split: self._first_that_works(names[split]) for split in SPLITS}
            made = {split: dataset for split, dataset in found.items() if dataset is not None}
        for split, dataset in made.items():
            there = all(hasattr(dataset, name) for name in ("__getitem__", "__len__"))
            if not there or isinstance(dataset, IterableDataset):
                text = f"gives a {type(dataset).__name__} without __getitem__ and __len__"
                raise UserError(f"{self.title} {text} (a LightningDataModule takes any loader)")
            if not len(dataset):
                raise UserError(f"{self.title}: its {split} images are none")
        return made

    def _first_that_works(self, names: Sequence[str]) -> Any:
        """Returns the dataset of the first name of a split that it accepts; None if validation or test has none."""
        faults = []
        for name in names:
            try:
                dataset = self._make(split=name)
            except UserError as error:
                cause = error.__cause__
                if not isinstance(cause, ValueError | KeyError | FileNotFoundError | AssertionError):
                    raise
                faults.append(error)
                continue
            if not hasattr(dataset, "__len__") or len(dataset):
                return dataset
        if "train" in names:
            raise faults[0] if faults else UserError(f"{self.title}: split=train has no images")
        return None

    def _take_images(self, first: Any, others: Sequence[Any]) -> None:
        """Takes size and channels from the first image, and default statistics from its channels."""
        with named(f"{self.title}: "):
            pixels = to_pixels(first, self.in_channels)
            self.in_channels = pixels.shape[2]
            shapes = [pixels.shape[:2], *(to_pixels(other, self.in_channels).shape[:2] for other in others)]
        if self.image_size is None and len({*shapes}) > 1:
            sizes = ", ".join(dict.fromkeys(f"{height}x{width}" for height, width in shapes))
            raise UserError(f"image_size is missing: the images have several sizes ({sizes})")
        self.image_size = pair(self.image_size or shapes[0])
        colour = self.in_channels == 3
        self.mean = self.mean or (IMAGENET_MEAN if colour else (0.5,) * self.in_channels)
        self.std = self.std or (IMAGENET_STD if colour else (0.25,) * self.in_channels)
        refuse(self.problems())

    def _take_classes(self) -> None:
        """Takes the names of the classes from the dataset, else their number from the labels."""
        own = {split: _class_names(dataset) for split, dataset in self._made.items()}
        self._places = {split: self._match(own["train"], names, split) for split, names in own.items()}
        names = self.class_names or own["train"]
        if names != own["train"] and sorted(names or ()) == sorted(own["train"] or ()):
            raise UserError(
                f"class_names={listed(names or ())}: names follow labels, and those of {self.title} have the order "
                f"{listed(own['train'] or ())} (leave it out)"
            )
        if names is None:
            labels = [] if self.num_classes else labels_of(self._made["train"], self.title)
            names = [str(label) for label in range(self.num_classes or 1 + max(labels))]
            note = unseen(labels, names) if labels else ""
            self._notes += [f"{self.title}: {note} (data.num_classes)"] if note else []
        self.class_names = [str(name) for name in names]
        if self.num_classes not in (None, len(self.class_names)):
            raise UserError(f"num_classes={self.num_classes}: {self.title} names {len(self.class_names)} classes")
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"num_classes={self.num_classes} must be at least 2 to classify")

    def _match(self, train: list[str] | None, names: list[str] | None, split: Split) -> list[int] | None:
        """Returns the label in training of each class of a split; None where they are the same, or not known."""
        if train is None or names is None or names == train:
            return None
        whose, ours = f"{self.title} for train", f"{self.title} for {split}"
        labels, note = match_classes(train, names, whose=whose, ours=ours, classes=len(train))
        self._notes += [note] if note else []
        return labels

    def take_classes(self, names: Sequence[str] | None, whose: str) -> str:
        """Also says where classes have no names, and training images or their labels are others than before."""
        note = super().take_classes(names, whose)
        if note or are_named(self.class_names) or self.learned in (None, self.fingerprint()):
            return note
        others = f"and its training images or their labels are not those of {whose}"
        return f"{self.place} names no classes, {others}: nothing tells if labels mean the same (data.class_names)"

    def source_splits(self) -> dict[Split, Items]:
        return {
            split: self.batches_of(dataset, range(len(dataset)), self._places[split])
            for split, dataset in self._made.items()
        }

    @property
    def notice(self) -> str:
        notes = [*self._notes]
        if self.cut_splits and (note := unseen(self._source["train"].labels.tolist(), self.class_names or ())):
            notes.append(f"{self.title}: {note} (data.class_names)")
        return "; ".join(notes)

    def make_dataset(self, split: Split) -> Items:
        made: Items = self._splits[split]
        return made


def _class_names(dataset: Any) -> list[str] | None:
    """Returns the names that a dataset has for its classes, if any: of ``class_to_idx`` first, which labels follow.

    Those of a ``Subset`` are those of the dataset that it is of, and those of a ``ConcatDataset`` must be the same.
    Where a ``target_transform`` changes labels, names follow it; there are none where it makes one of several.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        parts = [names for part in dataset.datasets if (names := _class_names(part))]
        longest = max(parts, key=len, default=None)
        if other := next((names for names in parts if names != (longest or [])[: len(names)]), None):
            both = f"have the classes {listed(longest or [])} and {listed(other)}"
            raise UserError(
                f"class_path=ConcatDataset: its datasets {both}, so that labels differ (give all one class_to_idx)"
            )
        return longest
    index = getattr(dataset, "class_to_idx", None) or {}
    names = getattr(dataset, "classes", None) or getattr(dataset, "class_names", None)
    if not names or sorted(index.values()) == [*range(len(names))]:  # ImageNet's has several names for a class
        names = sorted(index, key=index.__getitem__) or names or None
    if names and (change := getattr(dataset, "target_transform", None)):
        with named(f"target_transform of {type(dataset).__name__}: ", others=True):
            labels = [int(change(label)) for label in range(len(names))]
        order = sorted(range(len(names)), key=labels.__getitem__)
        names = [names[place] for place in order] if {*labels} == {*range(len(names))} else None
    return None if names is None else [str(name) for name in names]


def _takes(function: Own) -> set[str]:
    """Returns the arguments of a function, or of a class and of the bases that it hands ``**kwargs`` on to."""
    bases = function.__mro__ if isinstance(function, type) else ()
    names = set[str]()
    for call in [vars(base)["__init__"] for base in bases if "__init__" in vars(base)] or [function]:
        parameters = inspect.signature(call).parameters
        names |= {*parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


OURS = ("setup", "on_after_batch_transfer", *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")))
"""Hooks of ours that a wrapped LightningDataModule gets in place of its own, which they call."""


class WrappedDataModule(ImageData):
    """Any ``LightningDataModule``, used as it is: its loaders, its augmentation, its batches.

    Or a ``LightningModule`` with loaders: in a training they are those of the module that is trained.

    In a config ``data.class_path`` names the module itself, with its arguments beside those of this class. A
    ViTClassifier takes batches with float images (b, c, H, W) and labels (b,), see ``as_batch``. A fact that is not
    given is an attribute of the module, or is read from its first training batch and the names of classes that its
    training dataset has; the number of classes must be one of these.

    Args:
        module: the module.
        num_classes: number of classes; by default the module's attribute, or the number of its ``class_names``.
        class_names: name of each class; by default the module's attribute, else those of its dataset, else numbers.
        image_size: height and width of the images in pixels.
        in_channels: channels of the images.
    """

    own_loaders = False
    train_batches_per_epoch: Any = None  # Lightning counts them
    step_weight: Any = None  # the sizes of the batches are not known
    class_names: list[str] = []  # noqa: RUF012  # of each

    def __init__(
        self,
        *,
        module: LightningDataModule | LightningModule,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        image_size: int | tuple[int, int] | None = None,
        in_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._own = {name: getattr(module, name) for name in OURS} if isinstance(module, LightningDataModule) else {}
        if not self.has("train"):
            raise UserError(f"{self.title} has no train_dataloader")
        size: Any = image_size or getattr(module, "image_size", None)
        channels = in_channels or getattr(module, "in_channels", None)
        self._trained: list[str] | None = None
        """Names of the classes of the training dataset, in the order of its labels."""
        if size is None or channels is None:
            way_out = "needless with data.image_size and data.in_channels"
            with named(f"{self.title}: its first batch ({way_out}): ", others=True), seeded():
                tried = copy.deepcopy(module)  # one may give other loaders, or count, at each call
                tried.prepare_data()
                tried.setup(stage="fit")
                loader = tried.train_dataloader()
                batch = next(iter(loader))
            self._trained = _class_names(getattr(loader, "dataset", None))
            shape = next((part.shape for part in tensors_in(batch) if part.ndim == 4), None)
            if shape is None:
                lacking = "its first batch has no images (b, c, H, W)"
                raise UserError(f"{self.title}: {lacking} (give data.image_size and data.in_channels)")
            size, channels = size or shape[2:], channels or shape[1]
        self.image_size, self.in_channels = pair(size), channels
        names = class_names or getattr(module, "class_names", None)
        count = num_classes or getattr(module, "num_classes", None) or len(names or self._trained or ()) or None
        if not isinstance(count, int) or count < 2:
            raise UserError(
                f"num_classes={count}: give data.num_classes, {name_of(self.module)} an attribute num_classes, "
                "or num_classes to a LightningModule that takes it"
            )
        if names and len(names) != count:
            raise UserError(f"class_names has {len(names)} names for {count} classes")
        names = names or (self._trained if len(self._trained or ()) == count else None)
        self.class_names = [str(name) for name in names or range(count)]
        if isinstance(module, LightningDataModule):  # whose attributes the user's code reads on the Trainer
            vars(module).update({name: getattr(self, name) for name in OURS}, wrapped_by=self)
            self.for_trainer = module

    @property
    def title(self) -> str:
        return f"class_path={name_of(self.module)}"

    def has(self, split: Split | Literal["predict"]) -> bool:
        """Whether the module has images of a split."""
        return self._is_theirs(f"{split}_dataloader")

    def _theirs(self, hook: str) -> Any:
        """Returns a hook of the module's own."""
        return self._own.get(hook) or getattr(self.module, hook)

    def _is_theirs(self, hook: str) -> bool:
        return getattr(self._theirs(hook), "__func__", None) is not getattr(DataHooks, hook)

    @property
    def notice(self) -> str:
        ranks = getattr(self.for_trainer.trainer, "world_size", 1)
        twice = f"; {ranks} ranks may validate an image twice (validate --ckpt RUN --trainer.devices=1 does not)"
        said = (
            f"{name_of(self.module)} is used as it is: no augmentation, mixing or normalisation of ours, no check that "
            "a resumed run has the same images, and a run that is resumed inside an epoch is not bit-identical"
        )
        return said + twice * (ranks > 1)

    def make_dataset(self, split: Split) -> Dataset[Batch]:
        raise UserError(f"data.{self.title}: single images of a LightningDataModule cannot be read")

    def test_view(self) -> dict[str, Any]:
        """Returns the class names: the preprocessing of test images is the module's own."""
        return {"class_names": list(self.class_names)}

    def fingerprint(self) -> str:
        """Returns an empty text: the images are not known."""
        return ""

    def setup(self, stage: str = "fit") -> None:
        if isinstance(self.module, LightningModule):
            assert self.trainer is not None
            self.module = self.trainer.lightning_module  # which Lightning sets up
        else:
            self._theirs("setup")(stage="test" if stage == "predict" and not self.has("predict") else stage)

    def train_dataloader(self) -> Any:
        return _made_again_by_attributes(self._theirs("train_dataloader")())

    def val_dataloader(self) -> Any:
        return self._of_trained("val")

    def _of_trained(self, split: Split | Literal["predict"]) -> Any:
        """Returns a loader, or refuses one whose labels stand for other classes than those of training."""
        if not self.has(split):
            raise UserError(f"data.{self.title} has no {split}_dataloader")
        loader = self._theirs(f"{split}_dataloader")()
        names = _class_names(getattr(loader, "dataset", None)) or []
        if self._trained and names != self._trained[: len(names)]:
            both = f"has the classes {listed(names)}, that for train {listed(self._trained)}"
            way_out = "give all one class_to_idx, or their folder as data.class_path=ImageFolder"
            raise UserError(f"{self.title}: its dataset for {split} {both}, so that labels differ ({way_out})")
        return _made_again_by_attributes(loader)

    def test_dataloader(self) -> Any:
        return self._of_trained("test")

    def predict_dataloader(self) -> Any:
        return self._of_trained("predict" if self.has("predict") else "test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns the batch as the module makes it, in the form of ours for a ViTClassifier.

        Raises:
            UserError: it holds no images and labels where a ViTClassifier, or other labels of the model, need them.
        """
        trainer: Any = self.for_trainer.trainer
        kind, hook = trainer.lightning_module, "on_after_batch_transfer"
        theirs = self._theirs(hook) if self._is_theirs(hook) else getattr(kind, hook)  # of either, as Lightning has it
        batch = theirs(batch, dataloader_idx)
        is_ours = getattr(kind, "takes_pairs", False)
        is_unlabelled = trainer.predicting and len([*tensors_in(batch)]) == 1
        if is_unlabelled or not (is_ours or self.changes_labels):
            return batch
        found = as_batch(batch[:2] if is_ours and isinstance(batch, tuple | list) else batch)
        if found is None or (self.changes_labels and found.targets is not None):
            needs = type(kind).__name__ if is_ours else "a model with its classes in another order"
            raise UserError(f"data.{self.title}: a batch holds {in_words(batch)}, and {needs} takes {PAIR}")
        if is_ours:
            count = len(self.class_names)
            of_all = f"labels of {count} classes are 0 to {count - 1}: change them, or give data.num_classes"
            is_read = "acc" in getattr(kind, "measures", ())  # as it is not by MAE
            # on a GPU it waits for the step before
            if is_read and (found.labels.is_cpu or not trainer.global_step):
                wrong = found.labels[(found.labels < 0) | (found.labels >= count)].tolist()
                refuse(f"data.{self.title}: a batch has the label {label} ({of_all})" for label in wrong[:1])
            return found.replace(images=found.images.to(kind.dtype), labels=self.of_model(found.labels))
        labels = batch[keys_of(batch)[1]]  # type: ignore[index]
        return apply_to_collection(batch, Tensor, lambda part: self.of_model(part) if part is labels else part)


def _made_again_by_attributes(loader: Any) -> Any:
    """Returns a loader that Lightning can make again, with a sampler of its own for several ranks or predictions.

    It takes the arguments that it has recorded, and cannot replace one that was given by position.
    """
    if type(loader) is DataLoader:
        for name in [name for name in vars(loader) if name.startswith("__pl_saved")]:
            vars(loader).pop(name)
    return loader
