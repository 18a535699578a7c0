"""Buckets that fit the texts are chosen once for a dataset, and stay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.batch_order import fit_buckets
from pipeline.data import buckets as buckets_module
from pipeline.data.buckets import PinnedBuckets, known_buckets
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.prepare import PreparedData
from pipeline.data.tokenizer import TextTokenizer

OLD = ("16x16", "16x32", "64x64")  # the default of earlier versions
PIN = "tokens/catalogue/buckets.json"


def days(folder: Path, *words: int, rows: int = 120) -> Path:
    """A day per number: titles of half as many to as many words, queries of three."""
    for number, most in enumerate(words):
        day = folder / f"dt=2026-01-{number + 1:02d}"
        day.mkdir(parents=True, exist_ok=True)
        lines = [
            f"red shoe w{n % 9},{' '.join(['shoe'] * (most // 2 + n % (most // 2 + 1)))},{n % 2}" for n in range(rows)
        ]
        (day / "a.csv").write_text("query,title,label\n" + "\n".join(lines) + "\n")
    return folder


def config(folder: Path, **settings: Any) -> DataConfig:
    given = {"num_workers": 1, "rows_per_chunk": 100, "tokenizer": TokenizerConfig(vocab_size=256), **settings}
    return DataConfig(path=str(folder), **given)


def names(prepared: PreparedData) -> set[tuple[str, ...]]:
    return {info.buckets for info in prepared.infos}


def test_buckets_fit_the_texts_and_stay_when_these_drift(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    place, given = workplace("one"), config(days(tmp_path / "in", 20, 30))
    first = place.prepare(given)
    tokenizer = TextTokenizer(place.storage.read_bytes(f"{first.tokenizer_prefix}/tokenizer.json"))
    texts = [
        line.split(",")
        for path in sorted((tmp_path / "in").rglob("*.csv"))
        for line in path.read_text().splitlines()[1:]
    ]
    query, product = (tokenizer.encode([text[side] for text in texts]).lengths for side in (0, 1))
    expected = tuple(bucket.name for bucket in fit_buckets(query, product))
    assert names(first) == {expected} and first.rows_measured == 240
    assert PinnedBuckets.model_validate_json(place.storage.read_bytes(PIN)) == PinnedBuckets(buckets=expected, rows=240)
    assert sum(info.truncated_rows for info in first.infos) <= 0.01 * 240

    days(tmp_path / "in", 20, 30, 90)
    drifted = place.prepare(given)
    assert names(drifted) == {expected} and (drifted.reused, drifted.prepared) == (2, 1)
    assert drifted.tokenizer_prefix == first.tokenizer_prefix, "the vocabulary does not depend on who pinned"
    assert drifted.infos[-1].truncated_rows > 0.05 * 120
    explicit = place.prepare(given.model_copy(update={"buckets": (*expected, "128x128")}))
    assert names(explicit) == {(*expected, "128x128")}
    assert names(place.prepare(given)) == {expected}, "what is set once for a run pins nothing"


def test_workers_of_an_array_agree(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    given = config(days(tmp_path / "in", 20, 40, 30), workers=2)
    apart, alone = workplace("apart"), workplace("alone")
    first = apart.prepare(given, worker=1)
    last = apart.prepare(given, worker=0)
    whole = alone.prepare(config(tmp_path / "in"))
    assert first.missing == 2 and last.missing == 0
    assert last.token_set_prefixes == whole.token_set_prefixes and last.rows_measured == whole.rows_measured == 360
    # Each of them alone comes to the same, also if neither has seen the other's choice.
    apart.storage.delete([PIN])
    assert names(apart.prepare(given, worker=0)) == names(whole)


def test_a_loser_of_the_race_takes_what_the_winner_pinned(
    workplace: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, theirs = workplace("one"), PinnedBuckets(buckets=("8x16", "24x48"), rows=7)
    fit = fit_buckets

    def slow(*given: Any) -> Any:
        place.storage.write_bytes(PIN, theirs.model_dump_json().encode())
        return fit(*given)

    monkeypatch.setattr(buckets_module, "fit_buckets", slow)
    prepared = place.prepare(config(days(tmp_path / "in", 20)))
    assert names(prepared) == {theirs.buckets} and prepared.rows_measured == 7


def test_data_prepared_by_an_earlier_version_keeps_its_buckets(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    place, folder = workplace("one"), days(tmp_path / "in", 20)
    old = place.prepare(config(folder, buckets=OLD))
    days(folder, 20, 30)
    new = place.prepare(config(folder))
    assert names(new) == {OLD} and (new.reused, new.rows_measured) == (1, 0)
    assert new.tokenizer_prefix == old.tokenizer_prefix and new.token_set_prefixes[:1] == old.token_set_prefixes
    assert place.storage.stat(PIN) is None


def test_the_buckets_of_the_parent_win_over_the_pinned_ones(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    place, given = workplace("one"), config(days(tmp_path / "in", 20))
    pinned = place.prepare(given).infos[0].buckets
    assert names(place.prepare(given, parent_buckets=OLD)) == {OLD}
    assert names(place.prepare(given.model_copy(update={"buckets": ("32x32",)}), parent_buckets=OLD)) == {("32x32",)}
    assert names(place.prepare(given)) == {pinned}
    same = known_buckets(given, place.storage, pinned)
    assert same is not None and same.rows == 120, "a parent with the pinned ones changes nothing"


def test_texts_are_cut_at_the_positions_of_the_model(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    prepared = workplace("one").prepare(config(days(tmp_path / "in", 60)), longest=20)
    assert prepared.infos[0].buckets[-1].split("x")[1] == "16" and prepared.infos[0].truncated_rows > 0


@pytest.mark.parametrize("limit", [10, 40, 119, 10_000])
def test_the_sample_is_even_and_bounded(
    tmp_path: Path, workplace: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(buckets_module, "_SAMPLE_ROWS", limit)
    prepared = workplace("one").prepare(config(days(tmp_path / "in", 20, 30, 24)))
    assert limit / 2 < prepared.rows_measured <= limit or prepared.rows_measured == 360 <= limit
    longest = np.max([int(name.split("x")[1]) for name in prepared.infos[0].buckets])
    assert longest >= 24, "longer texts are in the second file"


def test_files_are_read_from_their_beginning_only_and_not_all_of_many(
    tmp_path: Path, workplace: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets_module, "_MAX_FILES", 2)
    assert workplace("one").prepare(config(days(tmp_path / "in", 20, 30, 24))).rows_measured == 240


def test_without_a_usable_row_nothing_is_pinned(tmp_path: Path, workplace: Callable[[str], Any]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("query,title,label\n,,0\n,,1\n")
    place = workplace("one")
    with pytest.raises(Exception, match="rows are bad"):
        place.prepare(config(tmp_path / "in", labels=("0", "1")))
    assert place.storage.stat(PIN) is None
