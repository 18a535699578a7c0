"""Which partitions an incremental run takes as new."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.token_sets import Partition, Selection, select_partitions


def day(number: int, content: str = "") -> Partition:
    date = f"2026-01-{number:02d}"
    return Partition(f"dt={date}", date, content or f"content-{number}")


def test_without_a_parent_everything_is_new() -> None:
    parts = [day(1), day(2)]
    seen = select_partitions(parts, parent_watermark=None, parent_partitions={})
    assert seen == Selection(tuple(parts), (), ())
    assert seen.watermark == "2026-01-02"


def test_only_days_after_the_watermark_are_new_and_changed_old_ones_are_late() -> None:
    trained = {"dt=2026-01-01": "content-1", "dt=2026-01-02": "content-2"}
    seen = select_partitions(
        [day(1), day(2, "rewritten"), day(3)], parent_watermark="2026-01-02", parent_partitions=trained
    )
    assert seen.new == (day(3),)
    assert seen.old == (day(1), day(2, "rewritten"))
    assert seen.late == (day(2, "rewritten"),)
    # A day before the watermark that the parent never saw is late as well, not silently old.
    backfilled = select_partitions([day(1)], parent_watermark="2026-01-02", parent_partitions={})
    assert backfilled.late == (day(1),) and not backfilled.new


def test_flat_data_is_new_when_its_content_is() -> None:
    flat = Partition("flat", "", "a")
    same = select_partitions([flat], parent_watermark="", parent_partitions={"flat": "a"})
    assert same.new == () and same.old == (flat,) and same.late == () and same.watermark == ""
    changed = select_partitions([flat], parent_watermark="", parent_partitions={"flat": "b"})
    assert changed.new == (flat,)


def test_going_from_flat_to_dated_data_takes_all_dates() -> None:
    seen = select_partitions([day(1), day(2)], parent_watermark="", parent_partitions={"flat": "a"})
    assert seen.new == (day(1), day(2))


@given(st.lists(st.integers(1, 28), unique=True), st.none() | st.integers(1, 28))
def test_new_and_old_are_a_split_in_order(days: list[int], watermark: int | None) -> None:
    parts = [day(number) for number in days]
    mark = None if watermark is None else day(watermark).watermark
    seen = select_partitions(parts, parent_watermark=mark, parent_partitions={})
    assert sorted([*seen.new, *seen.old], key=parts.index) == parts
    assert set(seen.late) <= set(seen.old)
    assert [p for p in parts if p in seen.new] == list(seen.new)
