"""Sorting more hashes than memory should hold: records go to files by their leading bits, each is sorted alone."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline.io.errors import os_errors

RECORDS_PER_FILE = 1_000_000
"""What is sorted at a time on average: some tens of MB."""
MAX_FILES = 256
Records = npt.NDArray[Any]


class HashSpill:
    """Structured records with a uint64 field `hash`, added in any order and given back sorted by it.

    Args:
        folder: emptied first, and removed on leaving the context.
        expected: about how many records will come.
    Records of one hash come back in the order of the field `place`.
    """

    def __init__(self, folder: Path, dtype: npt.DTypeLike, expected: int) -> None:
        self._folder, self._dtype = folder, np.dtype(dtype)
        files = min(MAX_FILES, max(1, expected // RECORDS_PER_FILE))
        self._bits = (files - 1).bit_length()
        self._files: list[BinaryIO] = []

    def __enter__(self) -> "HashSpill":
        shutil.rmtree(self._folder, ignore_errors=True)
        with os_errors("writing", f"file://{self._folder}"):
            self._folder.mkdir(parents=True)
            self._files = [(self._folder / f"{number:04d}").open("wb+") for number in range(1 << self._bits)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, records: Records) -> None:
        """Write records out."""
        with os_errors("writing", f"file://{self._folder}"):
            if not self._bits:
                self._files[0].write(records.tobytes())
                return
            target = (records["hash"] >> np.uint64(64 - self._bits)).astype(np.int64)
            order = np.argsort(target, kind="stable")
            ends = np.searchsorted(target[order], np.arange(len(self._files)), side="right")
            start = 0
            for number, end in enumerate(ends.tolist()):
                if end > start:
                    self._files[number].write(records[order[start:end]].tobytes())
                start = end

    def sorted(self) -> Iterator[Records]:
        """All records, a file at a time, in one rising order."""
        for file in self._files:
            with os_errors("reading", f"file://{self._folder}"):
                file.seek(0)
                records = np.frombuffer(file.read(), dtype=self._dtype)
            yield records[np.lexsort((records["place"], records["hash"]))]
