"""Image sets in the layout of Hugging Face ``datasets``: from the hub, or Parquet files on disk."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vit_lightning.data.image_set import SPLIT_NAMES, ImageSet
from vit_lightning.data.images import Encoded
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, first_line
from vit_lightning.limits import refuse


def _content(table: Any, column: str, row: int) -> Path | bytes:
    """Returns the content of an image, or its file."""
    # of the Arrow table, since datasets takes 8 times as long for a row; null is as damaged as an empty file
    image = table.data.column(column)[row].as_py() or {"bytes": b"", "path": None}
    return Path(image["path"]) if image["bytes"] is None and image["path"] else bytes(image["bytes"] or b"")


def _unreachable(settings: Any, path: str, revision: str | None) -> str:
    """Returns why the hub cannot be reached, by one request: ``datasets`` tries for half a minute; empty if it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi(endpoint=settings.HF_ENDPOINT).dataset_info(path, revision=revision, timeout=5)
    except (HfHubHTTPError, ValueError):  # an answer, or a name that is not asked for: ``datasets`` says which
        return ""
    except Exception as fault:  # of one of several libraries for HTTP
        return first_line(fault)
    return ""


@contextmanager
def _offline(settings: Any) -> Iterator[None]:
    """Lets ``datasets`` load from its cache alone."""
    before, settings.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before


@dataclass(kw_only=True, eq=False, repr=False)
class HuggingFaceSet(ImageSet):
    """A set with an image column and a label column, through the library ``datasets`` (an extra of this package).

    They are unpacked once into ``cache``, whose files are memory-mapped. A split that the source lacks, or whose labels
    are all -1, is cut from the training images, stratified, by ``split_seed``.

    Args:
        path: folder with Parquet files that have train, val or test in their names, or the name of a set on the hub.
        name: configuration of a set on the hub that has several.
        revision: commit, branch or tag of a set on the hub; a run's config.yaml has the commit that was loaded.
        image_column: column with the images.
        label_column: column with the labels.
        cache: folder for what is downloaded and unpacked.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    cache: Path = Path("data/huggingface")

    @cached_property
    def class_names(self) -> list[str]:
        self.check()
        return self._named_classes or [str(label) for label in range(1 + max(self._labels["train"]))]

    @property
    def _named_classes(self) -> list[str] | None:
        return getattr(self._tables["train"].features[self.label_column], "names", None)

    def pinned(self) -> dict[str, Any]:
        return {} if self.revision is None else {"revision": self.revision}

    def check(self) -> None:
        """Checks that the source is there and has both columns."""
        if Path(self.path).is_dir():
            given = {"name": self.name, "revision": self.revision}
            refuse(
                f"{key}={value} is for sets of the hub, and path={self.path} is a folder"
                for key, value in given.items()
                if value is not None
            )
        for split, table in self._tables.items():
            missing = [name for name in (self.image_column, self.label_column) if name not in table.column_names]
            if missing:
                there = ", ".join(table.column_names)
                raise UserError(f"path={self.path}: {split} has no column {' or '.join(missing)} (choose {there})")

    @cached_property
    def _tables(self) -> dict[Split, Any]:
        """Tables of the splits that the source has."""
        try:
            import datasets
        except ImportError as fault:
            raise UserError("HuggingFaceSet needs datasets (pip install 'vit-lightning[datasets]')") from fault
        tables = self._unpacked(datasets, self._files() if Path(self.path).is_dir() else {})
        found = {split: tables[name] for split, names in SPLIT_NAMES.items() for name in names if name in tables}
        if "train" not in found:
            raise UserError(f"path={self.path} has no split named train (it has {', '.join(tables)})")
        return found

    def _unpacked(self, datasets: Any, files: dict[str, list[Path]]) -> dict[str, Any]:
        """Loads the tables through ``datasets``, which keeps a copy in ``cache``."""
        source, data_files = self.path, None
        if files:
            source, data_files = "parquet", {split: [str(file) for file in paths] for split, paths in files.items()}
        why = "" if files else _unreachable(datasets.config, self.path, self.revision)
        try:
            with _offline(datasets.config) if why else nullcontext():
                builder = datasets.load_dataset_builder(
                    source, self.name, data_files=data_files, cache_dir=str(self.cache), revision=self.revision
                )
            if not files:  # offline it is whatever commit the cache holds
                if re.fullmatch("[0-9a-f]{40}", self.revision or "") and self.revision != builder.hash:
                    raise ValueError(f"revision={self.revision} is not in {self.cache}, but {builder.hash}")
                self.revision = builder.hash
            builder.download_and_prepare()
            loaded = builder.as_dataset()
        except (OSError, ValueError, RuntimeError) as fault:
            if why and isinstance(fault, ConnectionError):
                here = f"is no folder, {self.cache} has no such set of the hub"
                raise UserError(f"path={self.path} {here}, and the hub cannot be reached ({why})") from fault
            raise UserError(f"path={self.path} cannot be loaded: {' '.join(str(fault).split())[:300]}") from fault
        columns = [self.image_column, self.label_column]  # others would be decoded with each row
        return {
            name: table.select_columns(columns).cast_column(self.image_column, datasets.Image(decode=False))
            if {*columns} <= {*table.column_names}
            else table
            for name, table in loaded.items()
        }

    def _files(self) -> dict[str, list[Path]]:
        """Returns the Parquet files of each split."""
        found: dict[str, list[Path]] = {}
        for file in sorted(Path(self.path).glob("**/*.parquet")):
            names = [split for split, words in SPLIT_NAMES.items() if any(word in file.stem for word in words)]
            if len(names) != 1:
                raise UserError(f"path={self.path}: the name of {file.name} must hold one of train, val and test")
            found.setdefault(names[0], []).append(file)
        if not found:
            raise UserError(f"path={self.path} holds no Parquet files")
        return found

    @cached_property
    def _labels(self) -> dict[Split, list[int]]:
        self.check()
        labels = {split: table.data.column(self.label_column).to_pylist() for split, table in self._tables.items()}
        # on the hub, -1 stands for the secret labels of a test: as if the split were not there
        labels = {split: values for split, values in labels.items() if split == "train" or {*values} != {-1}}
        names = self._named_classes
        known = {*range(len(names))} if names else {label for label in labels["train"] if isinstance(label, int)}
        odd = {split: {*values} - {label for label in known if label >= 0} for split, values in labels.items()}
        problems = [
            f"path={self.path}: label_column={self.label_column} of {split} holds "
            f"{', '.join(sorted(map(str, some))[:5])} (labels are whole numbers from 0 on, and those of training)"
            for split, some in odd.items()
            if some
        ]
        refuse(problems)
        return labels

    def source_splits(self) -> dict[Split, Encoded]:
        encoded = {}
        for split, labels in self._labels.items():
            names = [f"{self.path}, {split}, row {row}" for row in range(len(labels))]
            read = partial(_content, self._tables[split], self.image_column)
            encoded[split] = Encoded(read, range(len(labels)), labels, names)
        return encoded
