"""Which partitions an incremental run takes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """A prepared partition: `dt=YYYY-MM-DD` with its date as watermark, or `flat` with none."""

    name: str
    watermark: str
    fingerprint: str


@dataclass(frozen=True)
class Selection:
    """What a run takes.

    new: trained on in full. old: for replay. late: changed after a parent trained on them; replayed, never new again.
    """

    new: tuple[Partition, ...]
    old: tuple[Partition, ...]
    late: tuple[Partition, ...]

    @property
    def watermark(self) -> str:
        """Newest date of all of them; empty for flat data."""
        return max((p.watermark for p in (*self.new, *self.old)), default="")


def select_partitions(
    prepared: Sequence[Partition], *, parent_watermark: str | None, parent_partitions: Mapping[str, str]
) -> Selection:
    """Split by the parent's watermark (None: no parent, everything is new).

    A dated partition is new when its date lies after the watermark; an undated one when the parent did not train on
    this very content.
    """
    if parent_watermark is None:
        return Selection(tuple(prepared), (), ())

    def is_new(partition: Partition) -> bool:
        if partition.watermark:
            return partition.watermark > parent_watermark
        return partition.fingerprint not in parent_partitions.values()

    new = tuple(p for p in prepared if is_new(p))
    old = tuple(p for p in prepared if not is_new(p))
    late = tuple(p for p in old if parent_partitions.get(p.name) != p.fingerprint)
    return Selection(new, old, late)
