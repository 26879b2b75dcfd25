"""Parquet files as a table that is read in place: a row costs reading its row group, and there is no second copy."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from os import getpid
from pathlib import Path
from threading import local
from typing import Any

from vit_lightning.errors import UserError

PLAN, UNFINISHED = "plan.txt", "unfinished.txt"
"""Files that ``lightning shard`` keeps beside its Parquet files: hash of their images; there until all are written."""
MAX_GROUP_BYTES = 2**24
"""Largest row group that is worth reading for one image."""
OPEN_FILES = 128
"""Files that each thread keeps open."""


def need_datasets(purpose: str) -> Any:
    """Returns the library ``datasets``, or raises a UserError that says how to install it."""
    try:
        import datasets
    except ImportError as fault:
        raise UserError(f"{purpose} needs datasets (pip install 'vit-lightning[datasets]')") from fault
    return datasets


def parquet_files(folder: Path) -> list[Path]:
    """Returns the Parquet files in a folder and its subfolders, in order.

    Raises:
        UserError: there are none, or ``lightning shard`` wrote others that are missing.
    """
    if (folder / UNFINISHED).is_file():
        raise UserError(f"path={folder} is not finished (give the same lightning shard again, and it continues)")
    files = sorted(folder.glob("**/*.parquet"))
    if not files:
        raise UserError(f"path={folder} holds no Parquet files")
    if (folder / PLAN).is_file():
        numbered = {file: re.fullmatch(r"(\w+)-\d+-of-(\d+)", file.stem) for file in files}
        if others := [str(file) for file, found in numbered.items() if found is None]:
            raise UserError(f"path={folder}: {others[0]} is none of the files of lightning shard (move it elsewhere)")
        counts = {found[1]: int(found[2]) for found in numbered.values() if found is not None}
        expected = [folder / file_name(split, i, count) for split, count in counts.items() for i in range(count)]
        if missing := [str(file) for file in expected if file not in files]:
            raise UserError(f"path={folder}: {missing[0]} is missing (give the same lightning shard again)")
    return files


def file_name(split: str, number: int, count: int) -> str:
    return f"{split}-{number:05}-of-{count:05}.parquet"


class ParquetTable:
    """Rows of Parquet files of one schema, with the part of ``datasets.Dataset`` that is needed.

    ``table[column]`` is a list, ``table[row]`` a dict with the image alone. Each thread of each process opens the files
    for itself, memory-mapped, and keeps the row group that it read last.

    Args:
        files: in the order of the rows.
        image_column: the column that ``table[row]`` holds.
    """

    def __init__(self, files: Sequence[Path], image_column: str) -> None:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_metadata

        self.files, self.image_column = files, image_column
        try:
            self._metadata = [read_metadata(file) for file in files]
        except (ArrowException, OSError) as fault:
            raise UserError(f"{files[0].parent} holds a damaged Parquet file: {fault}") from fault
        sizes = [
            (number, group, data.row_group(group).num_rows)
            for number, data in enumerate(self._metadata)
            for group in range(data.num_row_groups)
        ]
        self._groups = [(number, group) for number, group, _ in sizes]
        self._starts = [0, *accumulate(rows for *_, rows in sizes)]
        self._own = local()

    def __reduce__(self) -> tuple[type["ParquetTable"], tuple[Sequence[Path], str]]:
        return ParquetTable, (self.files, self.image_column)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def features(self) -> Any:
        features = need_datasets("path").Features
        return features.from_arrow_schema(self._metadata[0].schema.to_arrow_schema())

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    @property
    def holds_encoded_images(self) -> bool:
        """Whether the image column holds files as bytes, or bytes and path; ``datasets`` reads other forms."""
        import pyarrow

        schema = self._metadata[0].schema.to_arrow_schema()
        if self.image_column not in schema.names:
            return True  # which is reported as a missing column
        kind = schema.field(self.image_column).type
        if pyarrow.types.is_struct(kind):
            return {"bytes", "path"} <= {field.name for field in kind}
        return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

    @property
    def largest_group(self) -> int:
        """Bytes of the largest row group."""
        return max((self._metadata[n].row_group(g).total_byte_size for n, g in self._groups), default=0)

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            parts = (self._open(number).read(columns=[key], use_threads=False) for number in range(len(self.files)))
            return [value for part in parts for value in part[key].to_pylist()]
        position = bisect_right(self._starts, key) - 1
        return {self.image_column: self._group(position)[key - self._starts[position]].as_py()}

    def _group(self, position: int) -> Any:
        """Returns the images of a row group."""
        own = self._own
        if getattr(own, "process", None) != getpid():
            own.process, own.position, own.open = getpid(), None, lru_cache(OPEN_FILES)(self._open)
        if own.position != position:
            number, group = self._groups[position]
            table = own.open(number).read_row_group(group, columns=[self.image_column], use_threads=False)
            own.position, own.group = position, table[self.image_column]
        return own.group

    def _open(self, number: int) -> Any:
        from pyarrow.parquet import ParquetFile

        return ParquetFile(self.files[number], metadata=self._metadata[number], memory_map=True)
