"""Buckets that fit the texts are chosen once for a dataset, and stay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.batch_order import fit_buckets
from pipeline.core.errors import DataError
from pipeline.data import buckets as buckets_module
from pipeline.data.buckets import PinnedBuckets, given_buckets
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.prepare import PreparedData
from pipeline.data.tokenizer import TextTokenizer
from pipeline.model.config import Attribute

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
    assert names(first) == {expected}
    assert PinnedBuckets.model_validate_json(place.storage.read_bytes(PIN)) == PinnedBuckets(buckets=expected)
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
    assert last.token_set_prefixes == whole.token_set_prefixes
    # Each of them alone comes to the same, also if neither has seen the other's choice.
    apart.storage.delete([PIN])
    assert names(apart.prepare(given, worker=0)) == names(whole)


def test_a_loser_of_the_race_takes_what_the_winner_pinned(
    workplace: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, theirs = workplace("one"), PinnedBuckets(buckets=("8x16", "24x48"))
    fit = fit_buckets

    def slow(*given: Any) -> Any:
        place.storage.write_bytes(PIN, theirs.model_dump_json().encode())
        return fit(*given)

    monkeypatch.setattr(buckets_module, "fit_buckets", slow)
    prepared = place.prepare(config(days(tmp_path / "in", 20)))
    assert names(prepared) == {theirs.buckets}


def test_data_prepared_by_an_earlier_version_keeps_its_buckets(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    place, folder = workplace("one"), days(tmp_path / "in", 20)
    old = place.prepare(config(folder, buckets=OLD))
    days(folder, 20, 30)
    assert given_buckets(config(folder), place.storage, ()) == OLD
    new = place.prepare(config(folder, buckets=OLD))
    assert new.reused == 1 and new.tokenizer_prefix == old.tokenizer_prefix
    assert place.storage.stat(PIN) is None


def test_the_parent_wins_over_what_is_pinned_and_the_settings_over_both(
    workplace: Callable[[str], Any], tmp_path: Path
) -> None:
    place, given = workplace("one"), config(days(tmp_path / "in", 20))
    assert given_buckets(given, place.storage, ()) == ()
    place.prepare(given)
    assert given_buckets(given, place.storage, ()) == (), "those pinned are chosen again, and not given"
    assert given_buckets(given, place.storage, OLD) == OLD
    assert given_buckets(given.model_copy(update={"buckets": ("32x32",)}), place.storage, OLD) == ("32x32",)


def test_texts_are_cut_at_the_positions_of_the_model(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    prepared = workplace("one").prepare(config(days(tmp_path / "in", 60)), longest=20)
    assert prepared.infos[0].buckets[-1].split("x")[1] == "16" and prepared.infos[0].truncated_rows > 0


def test_attributes_are_part_of_the_texts_that_are_measured(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    brand = "one two three four five six seven eight nine ten eleven twelve"
    rows = [f"red shoe,shoe {n % 7},{brand},{n % 2}" for n in range(200)]
    (folder / "a.csv").write_text("query,title,brand,label\n" + "\n".join(rows) + "\n")
    plain, longer = (
        workplace(name).prepare(config(folder, labels=("0", "1"), **more)).infos[0]
        for name, more in (("plain", {}), ("longer", {"attributes": (Attribute(name="brand"),)}))
    )
    assert plain.truncated_rows == longer.truncated_rows == 0
    sides = [int(info.buckets[-1].split("x")[1]) for info in (plain, longer)]
    assert sides[1] >= sides[0] + 8


def test_a_large_input_is_sampled_evenly(
    tmp_path: Path, workplace: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(buckets_module, "_SAMPLE_ROWS", 100)

    def fit(query: Any, product: Any, *more: int) -> Any:
        seen.append(len(product))
        return fit_buckets(query, product, *more)

    monkeypatch.setattr(buckets_module, "fit_buckets", fit)
    folder = days(tmp_path / "in", 20, 60)
    (folder / "dt=2026-01-01/b.csv").write_text("query,title,text,label\nshoe,red shoe,with text,1\n,no query,,1\n")
    prepared = workplace("one").prepare(config(folder, max_bad_fraction=0.5))
    assert 70 <= seen[0] <= 100 and int(prepared.infos[0].buckets[-1].split("x")[1]) > 40, (
        "the second day has long texts"
    )


def test_without_a_usable_row_nothing_is_pinned(tmp_path: Path, workplace: Callable[[str], Any]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("query,title,label\n,,0\n,,1\n")
    place = workplace("one")
    with pytest.raises(DataError, match="rows are bad"):
        place.prepare(config(tmp_path / "in", labels=("0", "1")))
    assert place.storage.stat(PIN) is None
