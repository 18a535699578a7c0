"""A seekable file over ranged GETs."""

import io
from typing import Any, BinaryIO, cast

from pipeline.io.s3_errors import PartialBody

MIN_RANGE_BYTES = 8 * 2**20
BODY_BLOCK_BYTES = 2**20
RangeReader = Any  # Callable[[int, int], bytes]; kept loose for RawIOBase


class RangeFile(io.RawIOBase):
    """Raw reader: each read is one request. Wrap it with buffered()."""

    def __init__(self, read_range: RangeReader, size_bytes: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"negative seek position {origin + offset}")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = min(len(view), self._size_bytes - self._position)
        if length <= 0:
            return 0
        data = self._read_range(self._position, length)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def buffered(read_range: RangeReader, size_bytes: int) -> BinaryIO:
    """A buffered reader that asks for at least 8 MiB at a time (or all that is left)."""
    buffer_bytes = max(1, min(MIN_RANGE_BYTES, size_bytes))
    return cast(BinaryIO, io.BufferedReader(RangeFile(read_range, size_bytes), buffer_bytes))


def range_header(start: int, length: int) -> str:
    """HTTP ranges are inclusive."""
    return f"bytes={start}-{start + length - 1}"


def checked_length(data: bytes, expected: int) -> bytes:
    """The data; PartialBody, which is retried, when it is not `expected` bytes."""
    if len(data) != expected:
        raise PartialBody(f"{len(data)} of {expected} bytes")
    return data
