"""Image sets in the layout of Hugging Face ``datasets``: from the hub, or Parquet files on disk."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from glob import escape
from pathlib import Path
from typing import Any

from vit_lightning.classes import SHOWN, in_order, one_form
from vit_lightning.data.image_set import ImageSet, by_split, files_in, split_of, taken_by_a_part, unseen
from vit_lightning.data.images import Encoded
from vit_lightning.data.splits import Split
from vit_lightning.errors import UserError, named, reading, refuse

FILES = ("state.json", "*.parquet", "metadata.csv", "metadata.jsonl")
"""Files that hold tables, each kind read where those before it are not there."""
NO_LABEL = {-1, "-1", "", None}
"""Values in the place of a label that is secret or missing."""


def _content(table: Any, column: str, row: int) -> Path | bytes:
    """Returns the content of an image, or its file."""
    # of the Arrow table, since datasets takes longer for a row; null is as damaged as an empty file
    image = table.data.column(column)[row].as_py() or {"bytes": b"", "path": None}
    return Path(image["path"]) if image["bytes"] is None and image["path"] else bytes(image["bytes"] or b"")


def _column(table: Any, column: str) -> list[Any]:
    """Returns a column of labels, with the names of the classes in place of their numbers."""
    names = dict(enumerate(getattr(table.features[column], "names", None) or ()))
    return [one_form(names.get(value, value)) for value in table.data.column(column).to_pylist()]


def _shown(value: Any) -> str:
    return f"{value!r}, no label" if value in NO_LABEL else str(value)


@dataclass(kw_only=True, eq=False, repr=False)
class HuggingFaceSet(ImageSet):
    """A set with an image column and a label column, through the library ``datasets`` (an extra of this package).

    Parquet files and sets of the hub are unpacked once into ``cache``, whose files are memory-mapped. Labels are whole
    numbers or texts. Classes are those of the training images, and go by name. A split that the source lacks, or whose
    labels are all -1, is cut from the training images, stratified, by ``split_seed``.

    Args:
        path: folder of ``save_to_disk``, with Parquet files, tars of WebDataset, or with images that a metadata.csv or
            metadata.jsonl lists, whose names or folders say train, val or test; or the name of a set on the hub.
        name: configuration of a set on the hub that has several.
        revision: commit, branch or tag of a set on the hub; a run's config.yaml has the commit that was loaded.
        image_column: column with the images; without one of the usual name, the only one of images.
        label_column: column with the labels.
        cache: folder for what is downloaded and unpacked.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    cache: Path = Path("data/huggingface")
    _said = ""

    @cached_property
    def class_names(self) -> list[str]:
        return [str(value) for value in self._classes]

    @property
    def _telling(self) -> Split:
        """The split whose classes count: training where the source has it, also if a test needs no training images."""
        return "train" if "train" in self._tables else next(iter(self._values))

    @property
    def _named(self) -> list[str]:
        """Names of the classes of all tables of the split that tells them, if any."""
        features = [table.features[self.label_column] for table in self._tables[self._telling]]
        return list(dict.fromkeys(one_form(name) for one in features for name in getattr(one, "names", None) or ()))

    @cached_property
    def _classes(self) -> list[Any]:
        """Names of the classes, else all training labels in order."""
        values = {*self._labelled[self._telling]} - NO_LABEL
        if self._named or not all(isinstance(value, str) for value in values):
            return self._named or sorted(value for value in values if isinstance(value, int) and value >= 0)
        return in_order(values)

    def pinned(self) -> dict[str, Any]:
        return {} if self.revision is None else {"revision": self.revision}

    @property
    def notice(self) -> str:
        numbered = [split for split, values in self._values.items() if any(isinstance(value, int) for value in values)]
        empty = unseen(self._labels["train"], self.class_names) if "train" in self._labels else ""
        notes = [*filter(None, (self._said, empty))]
        if self._named and numbered:
            notes.append(f"labels of {' and '.join(numbered)} are numbers, in the order of the class names")
        return f"data.path={self.path}: {'; '.join(notes)}" if notes else ""

    def check(self) -> None:
        """Checks that the source is there and has both columns."""
        if Path(self.path).is_dir():
            given = {"name": None if self._is_described else self.name, "revision": self.revision}.items()
            why = f"is for sets of the hub, and path={self.path} is a folder"
            refuse(f"{key}={value} {why}" for key, value in given if value is not None)
        problems, place = [], f"path={self.path}: "
        for split, features in ((split, table.features) for split, some in self._tables.items() for table in some):
            asked = {"image_column": self.image_column, "label_column": self.label_column}
            missing = [f"data.{key}={name}" for key, name in asked.items() if name not in features]
            label, choices = features.get(self.label_column), ", ".join(features)
            if missing:
                problems.append(f"{place}{split} has no column {', '.join(missing)} (choose {choices})")
            elif not re.match("u?int|(large_)?string|bool|null", str(getattr(label, "dtype", ""))):
                one = f"an image has one label, a number or a text (choose {choices}, or give a Dataset of your own)"
                problems.append(f"{place}label_column={self.label_column} of {split} holds {label}: {one}")
        refuse(dict.fromkeys(problems))
        self.needed(self._tables)

    @cached_property
    def _tables(self) -> dict[Split, list[Any]]:
        """Tables of each split that the source has."""
        try:
            import datasets
        except ImportError as fault:
            raise UserError("HuggingFaceSet needs datasets (pip install 'vit-lightning[datasets]')") from fault
        try:
            found = self._of_folder(datasets) if Path(self.path).is_dir() else self._of_hub(datasets)
            new = self._renamed([table for tables in found.values() for table in tables], datasets)
            return {split: [table.rename_columns(new) for table in tables] for split, tables in found.items()}
        except UserError:
            raise
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as fault:
            text = " ".join(str(fault.__cause__ or fault).split())[:300]
            way_out = " (datasets takes [ for a pattern: rename the folder)" * ("[" in self.path)
            raise UserError(f"path={self.path} cannot be loaded: {text}{way_out}") from fault

    def _renamed(self, tables: Sequence[Any], datasets: Any) -> dict[str, str]:
        """Returns the new name of the only column of images, as ``img`` in CIFAR-10 of the hub, if none is usual."""
        found = {name for table in tables for name, one in table.features.items() if isinstance(one, datasets.Image)}
        usual = any(self.image_column in table.features for table in tables)
        is_clear = len(found) == 1 and all(found <= {*table.features} for table in tables)
        return {found.pop(): "image"} if self.image_column == "image" and is_clear and not usual else {}

    def _of_hub(self, datasets: Any) -> dict[Split, list[Any]]:
        """Loads the tables of a set of the hub, of which ``datasets`` keeps a copy in ``cache``."""
        builder = datasets.load_dataset_builder(self.path, self.name, cache_dir=str(self.cache), revision=self.revision)
        # offline it is whatever commit the cache holds
        if re.fullmatch("[0-9a-f]{40}", self.revision or "") and self.revision != builder.hash:
            raise ValueError(f"revision={self.revision} is not in {self.cache}, but {builder.hash}")
        self.revision = builder.hash
        builder.download_and_prepare()
        return self._of_splits(builder.as_dataset())

    def _of_splits(self, tables: Mapping[str, Any]) -> dict[Split, list[Any]]:
        """Returns the tables of each split by the names that a set gives its splits."""
        named, problems = by_split(tables)
        if not named:
            problems.append(f"no split is named train or test (there are {', '.join(tables)})")
        refuse(problems, prefix=f"path={self.path}: ")
        unused = [name for name in tables if name not in named.values()]
        self._said = "; ".join([*taken_by_a_part(named), *[f"without use: {', '.join(unused)}"] * bool(unused)])
        return {split: [tables[name]] for split, name in named.items()}

    @property
    def _is_described(self) -> bool:
        """Whether the README.md of a folder says which files are of which split, as that of a set of the hub."""
        card = Path(self.path, "README.md")
        return card.is_file() and re.search(r"(?m)\A---$(?s:.*?)^configs:", card.read_text("utf-8")) is not None

    def _of_folder(self, datasets: Any) -> dict[Split, list[Any]]:
        """Loads the tables of a folder."""
        from pyarrow.parquet import read_schema

        root, there = Path(self.path), sorted(files_in(Path(self.path)))
        cache = {"cache_dir": str(self.cache)}
        if self._is_described:
            return self._of_splits(datasets.load_dataset(self.path, self.name, **cache))
        # datasets takes a path with [ for a pattern
        if any(file.suffix == ".tar" for file in there):  # shards of WebDataset
            return self._of_splits(datasets.load_dataset("webdataset", data_dir=escape(self.path), **cache))
        files = next((found for kind in FILES if (found := [file for file in there if file.match(kind)])), [])
        if not files:
            known = "Parquet files, no dataset of save_to_disk and no metadata.csv, with columns file_name and label"
            way_out = "class folders: data.class_path=ImageFolder; arrays: a Dataset of your own"
            raise UserError(f"path={self.path} holds no {known} ({way_out})")
        if files[0].stem == "metadata":
            return self._of_metadata(datasets, files)
        tables: dict[Split, list[Any]] = {}
        for split, paths in self._by_split({file: file.relative_to(root) for file in files}).items():
            if files[0].name == "state.json":
                tables[split] = [datasets.load_from_disk(str(path.parent)) for path in paths]
                continue
            alike: dict[str, list[str]] = {}  # datasets would read all with the class names of the first
            for path in paths:
                with reading(path):
                    schema = datasets.Features.from_arrow_schema(read_schema(path))
                alike.setdefault(str(schema), []).append(escape(str(path)))
            tables[split] = [datasets.Dataset.from_parquet(names, **cache) for names in alike.values()]
        return tables

    def _of_metadata(self, datasets: Any, files: Sequence[Path]) -> dict[Split, list[Any]]:
        """Returns tables of the paths that files list, a row for each image, with its label."""
        rows, cache = list[dict[str, Any]](), {"cache_dir": str(self.cache)}
        for file in files:
            if file.suffix == ".csv":  # in which NA may be a class
                as_text = {self.label_column: str, "file_name": str}  # 1 and x of one file are classes as 1 of another
                with named(f"path={file} must be UTF-8: ", others=True):
                    head = file.read_text("utf-8").partition("\n")[0]
                more = {"sep": ";" if ";" in head and "," not in head else ",", "converters": as_text, **cache}
                table = datasets.Dataset.from_csv(escape(str(file)), keep_default_na=False, **more)
            else:
                table = datasets.Dataset.from_json(escape(str(file)), **cache)
            if "file_name" not in table.features:
                raise UserError(f"path={file} has no column file_name (it has {', '.join(table.features)})")
            for row in table.to_list():
                usual, of_windows = (file.parent / row["file_name"].replace("\\", slash) for slash in "\\/")
                rows.append({**row, self.image_column: str(usual if usual.is_file() else of_windows)})
        missing = [row[self.image_column] for row in rows if not Path(row[self.image_column]).is_file()]
        text = f"path={self.path}: {len(missing)} of {len(rows)} files of {files[0].name} are not there: "
        refuse(text + name for name in missing[:1])
        at = {n: Path(row[self.image_column]).relative_to(self.path).with_name("_") for n, row in enumerate(rows)}
        return {split: [datasets.Dataset.from_list([rows[n] for n in ns])] for split, ns in self._by_split(at).items()}

    def _by_split(self, paths: Mapping[Any, Path]) -> dict[Split, list[Any]]:
        """Returns what belongs to each split, by the name of its file or nearest folder; all to train if none says it.

        Args:
            paths: path below the folder of the set, of each.
        """
        found: dict[Split | None, dict[Any, tuple[str, ...]]] = {}
        for key, path in paths.items():
            means = [*map(split_of, path.parts[:-1]), split_of(path.stem, whole=False)]
            last = max((number for number, split in enumerate(means) if split), default=-1)
            found.setdefault(means[last], {})[key] = path.parts[: min(last + 1, len(path.parts) - 1)]
        odd = [paths[key] for key in found.pop(None, {})]
        folders = {split: sorted({str(Path(self.path, *one)) for one in of.values()}) for split, of in found.items()}
        problems = [
            f"{' and '.join(f)} hold images of {split} (give data.path one)" for split, f in folders.items() if f[1:]
        ]
        if found and odd:
            beside = f"{odd[0]} says none of train, val and test"
            problems.append(f"{beside}, beside {', '.join(map(str, found))}, in its name or its folder's")
        refuse(problems, prefix=f"path={self.path}: ")
        return {split: [*of] for split, of in found.items() if split} or {"train": [*paths]}

    @cached_property
    def _labelled(self) -> dict[Split, list[Any]]:
        """Name of the class of each image, or its number, of each split with labels."""
        self.check()
        values = {
            split: [value for table in tables for value in _column(table, self.label_column)]
            for split, tables in self._tables.items()
        }
        # on the hub, -1 stands for the secret labels of a test: as if the split were not there
        return {split: some for split, some in values.items() if split == "train" or {*some} - NO_LABEL}

    @cached_property
    def _values(self) -> dict[Split, list[Any]]:
        """Names or numbers of ``_labelled``, of the splits that are needed."""
        return self.needed(self._labelled)

    @cached_property
    def _labels(self) -> dict[Split, list[int]]:
        places = {value: label for label, value in enumerate(self._classes)}
        if self._named:
            places |= {label: label for label in range(len(places))}
        odd = {split: {*values} - {*places} for split, values in self._values.items()}
        refuse(
            f"path={self.path}: label_column={self.label_column} of {split} holds "
            f"{', '.join(sorted(map(_shown, some))[:SHOWN])} (labels are whole numbers from 0 on or texts, and those "
            f"of training: {', '.join(self.class_names[:SHOWN])})"
            for split, some in odd.items()
            if some
        )
        return {split: [places[value] for value in values] for split, values in self._values.items()}

    def source_splits(self) -> dict[Split, Encoded]:
        import datasets

        encoded = {}
        for split, labels in self._labels.items():
            names = [f"{self.path}, {split}, row {row}" for row in range(len(labels))]
            parts = [table.select_columns([self.image_column]) for table in self._tables[split]]
            files = [part.cast_column(self.image_column, datasets.Image(decode=False)) for part in parts]
            read = partial(_content, datasets.concatenate_datasets(files), self.image_column)
            encoded[split] = Encoded(read, range(len(labels)), labels, names)
        return encoded
