"""What a run trains on: what its weights have seen when it is done, and what does not fit together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint.store import Checkpoint
from pipeline.core.errors import ConfigError, DataError
from pipeline.data.token_sets import JudgedSplit, TokenSet, TokenSetInfo, select_partitions
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage, open_storage
from pipeline.mine.store import Negatives, NegativesInfo, commit_negatives
from pipeline.model.config import NUMBER_BINS, Attribute, LossConfig, ModelConfig
from pipeline.train.config import TrainConfig
from pipeline.train.inputs import RunInputs, data_warnings, gather_inputs
from tests.train.rows import MODEL, SPEC, TRAIN, checkpoint_of, grouped, make_rows, token_set_info


def parent_of(partitions: Mapping[str, str], **state: Any) -> Checkpoint:
    return checkpoint_of(partitions=dict(partitions), **state)


def inputs(days: Mapping[str, str], parent: Checkpoint | None, *, replays: bool = False) -> RunInputs:
    """Of partitions, day to fingerprint."""
    sets = tuple(TokenSet(f"tokens/d/{mark}", token_set_info(day, mark)) for day, mark in days.items())
    selection = select_partitions(
        [one.partition for one in sets],
        parent_watermark=parent.state.watermark if parent else None,
        parent_partitions=parent.state.partitions if parent else {},
    )
    return RunInputs(sets, selection, SPEC, parent, replays, None, None, {})


DAYS = ["dt=2026-01-01", "dt=2026-01-02", "dt=2026-01-03", "dt=2026-01-04"]
PARENT = parent_of(
    {DAYS[0]: "one", DAYS[1]: "two", DAYS[2]: "three"}, watermark="2026-01-03", also_seen={"zero": DAYS[0]}
)


def test_a_first_run_has_seen_its_partitions() -> None:
    run = inputs({DAYS[0]: "one", DAYS[1]: "two"}, None)
    assert [one.info.partition for one in run.new_sets] == DAYS[:2] and run.old_sets == []
    assert run.partitions == {DAYS[0]: "one", DAYS[1]: "two"} and run.also_seen == {}
    assert (run.watermark, run.parent_record, run.max_tokens) == ("2026-01-02", None, 8)


def test_a_later_run_has_seen_those_of_its_parent_too() -> None:
    run = inputs({DAYS[1]: "two", DAYS[3]: "four"}, PARENT)
    assert [one.info.partition for one in run.new_sets] == DAYS[3:]
    assert [one.info.partition for one in run.old_sets] == DAYS[1:2]
    assert run.partitions == {DAYS[0]: "one", DAYS[1]: "two", DAYS[2]: "three", DAYS[3]: "four"}
    assert run.also_seen == {"zero": DAYS[0]} and run.watermark == "2026-01-04"
    assert run.parent_record is not None and (run.parent_record.cycle, run.parent_record.step) == ("c0", 7)


@pytest.mark.parametrize("days", [{DAYS[1]: "two"}, {DAYS[1]: "late"}, {"flat": "x"}])
def test_the_watermark_never_goes_back(days: dict[str, str]) -> None:
    """Also where the newest days of the parent are no longer in the input: they are not new when they return."""
    run = inputs(days, PARENT)
    assert run.watermark == "2026-01-03"
    again = inputs({DAYS[2]: "three"}, parent_of(run.partitions, watermark=run.watermark))
    assert again.new_sets == []


@pytest.mark.parametrize("replays", [False, True])
def test_what_is_replayed_late_is_on_record_beside_what_had_its_name(replays: bool) -> None:
    run = inputs({DAYS[1]: "late", DAYS[3]: "four"}, PARENT, replays=replays)
    assert run.partitions[DAYS[1]] == "two"
    assert run.also_seen == {"zero": DAYS[0]} | ({"late": DAYS[1]} if replays else {})


def test_flat_data_that_changed_is_new_and_what_it_was_stays_on_record() -> None:
    run = inputs({"flat": "after"}, parent_of({"flat": "before"}))
    assert [one.info.partition for one in run.new_sets] == ["flat"]
    assert (run.partitions, run.also_seen, run.watermark) == ({"flat": "after"}, {"before": "flat"}, "")


@pytest.mark.parametrize(("parent", "longest"), [(6, 8), (64, 64), (None, 8)])
def test_the_longest_text_is_the_parents_where_its_own_was_longer(parent: int | None, longest: int) -> None:
    assert inputs({DAYS[0]: "one"}, parent_of({}, max_tokens=parent)).max_tokens == longest


def gather(
    tmp_path: Path,
    *,
    parent: Checkpoint | None = None,
    train: TrainConfig = TRAIN,
    model: ModelConfig = MODEL,
    negatives: str | None = None,
    **info: Any,
) -> RunInputs:
    workspace: Storage = open_storage(str(tmp_path / "workspace"))
    (tmp_path / "staging").mkdir(parents=True)
    made: TokenSetInfo = token_set_info("flat").model_copy(update=info)
    commit_dir(workspace, tmp_path / "staging", "tokens/d/print", kind="tokens", fields=made.model_dump(mode="json"))
    return gather_inputs(workspace, ["tokens/d/print"], parent, train, model, negatives)


def test_inputs_that_fit(tmp_path: Path) -> None:
    gains = SPEC.model_copy(update={"label_gains": (0.0, 0.5)})
    model = MODEL.model_copy(update={"max_positions": 8})
    run = gather(tmp_path, parent=parent_of({}, inputs=gains, model=model), model=model)
    assert run.spec.label_gains == (0.0, 0.5), "those that the parent was trained with"
    assert (run.negatives, run.replays) == (None, TRAIN.replay_share > 0)


def test_a_run_has_indicators_unless_its_parent_was_trained_without(tmp_path: Path) -> None:
    without = {"price": 3}
    new = gather(tmp_path / "new", without_number=without).spec
    assert new.missing == ("price",) and new.bins == NUMBER_BINS
    old = gather(tmp_path / "old", parent=parent_of({}), without_number=without)
    assert old.spec == SPEC and not {"missing", "bins"} & {*old.spec.used_fields()}
    newer = parent_of({}, inputs=SPEC.model_copy(update={"missing": ("price",)}))
    assert gather(tmp_path / "newer", parent=newer).spec.missing == ("price",), "also of data from before"


def test_parent_and_mined_negatives_are_in_the_identity_and_choose_what_is_new(tmp_path: Path) -> None:
    alone = gather(tmp_path / "alone")
    child = gather(tmp_path / "child", parent=parent_of({"flat": "print"}))
    assert [one.info.partition for one in alone.new_sets] == [one.info.partition for one in child.old_sets] == ["flat"]
    workspace, info = (
        open_storage(str(tmp_path / "mined" / "workspace")),
        NegativesInfo(dataset="d", token_sets=("print",), rows=(), source="bm25", settings={}, figures={}),
    )
    none = np.zeros(0, dtype=np.int64)
    made = Negatives(none, none.reshape(0, 2))
    commit_negatives(workspace, "negatives/d/x", made, info, tmp_path / "staged")
    train = TRAIN.model_copy(update={"mined_per_query": 2})
    mined = gather(tmp_path / "mined", train=train, negatives="negatives/d/x")
    assert mined.negatives is not None and mined.negatives.prefix == "negatives/d/x"
    for name, run in (("parent", child), ("negatives", mined)):
        assert run.identity[name] != alone.identity[name]
    unused = gather(tmp_path / "unused", negatives="negatives/d/x")
    assert unused.negatives is None and unused.identity == alone.identity


def other_inputs(**changes: Any) -> dict[str, Checkpoint]:
    return {"parent": parent_of({}, inputs=SPEC.model_copy(update=changes))}


@pytest.mark.parametrize(
    ("case", "error", "seen"),
    [
        ({"labels": ("yes",), "label_gains": (1.0,)}, DataError, "1 relevance classes"),
        ({"model": MODEL.model_copy(update={"max_positions": 7})}, ConfigError, "the longest bucket has 8 tokens"),
        ({"parent": parent_of({}, tokenizer_fingerprint="other")}, ConfigError, "tokenised with tok"),
        (other_inputs(numeric=()), ConfigError, "numeric differs between the data and .*: new: price"),
        (
            other_inputs(numeric=("price", "brand_age")),
            ConfigError,
            "numeric differs between the data and .*: missing: brand_age\n",
        ),
        (
            other_inputs(attributes=(Attribute(name="brand", kind="text"),)),
            ConfigError,
            "attributes differs between the data and .*: missing: {'name': 'brand', ",
        ),
        (other_inputs(labels=("a", "b")), ConfigError, "labels differs between the data and .*: missing: a, b; new: "),
        (
            other_inputs(query_prefix="q: "),
            ConfigError,
            "query_prefix differs between the data and .*: '' instead of 'q: '",
        ),
        ({"model": MODEL.model_copy(update={"num_layers": 2}), "parent": parent_of({})}, ConfigError, "num_layers"),
        ({"train": TRAIN.model_copy(update={"mined_per_query": 2})}, ConfigError, "none were mined"),
        (
            {"train": TRAIN.model_copy(update={"mined_per_query": 2}), "negatives": "negatives/d/x"},
            ConfigError,
            "none were mined",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, case: dict[str, Any], error: type[Exception], seen: str) -> None:
    with pytest.raises(error, match=seen):
        gather(tmp_path, **case)


GOOD = JudgedSplit(
    gains=({0: 60, 100: 30}, {0: 20, 100: 10}),
    labels=(40, 40, 40),
    label_gain_sums=(0.0, 4.0, 40.0),
    query_best={100: 40},
    query_worst={0: 38, 100: 2},
)
NO_POSITIVE = {"gains": ({0: 90}, {0: 30})}


@pytest.mark.parametrize(
    ("judged", "train", "words"),
    [
        ({}, {}, []),
        (NO_POSITIVE, {}, ["no row has a gain of at least 0.99 (train.loss.positive_gain)"]),
        (NO_POSITIVE, {"loss": LossConfig(contrastive_weight=0.0)}, []),
        ({"query_best": {0: 25, 100: 15}}, {}, ["25 of 40 queries have no row with a gain"]),
        ({"query_worst": {0: 15, 100: 25}}, {}, ["25 of 40 queries have no judged negative"]),
        ({"label_gain_sums": (40.0, 4.0, 0.0)}, {}, ["mean gains are no 1, some 0.1, yes 0"]),
        ({"labels": (40, 0, 40), "label_gain_sums": (0.0, 0.0, 40.0)}, {}, []),
        ({}, {"loss": LossConfig(graded_weight=0.0)}, ["the relevance head is not trained"]),
        ({}, {"candidates_per_query": 16, "global_batch_size": 16}, ["product slots per query are filled"]),
    ],
)
def test_what_costs_quality_in_silence_is_warned_of(
    tmp_path: Path, judged: dict[str, object], train: dict[str, object], words: list[str]
) -> None:
    config = TRAIN.model_copy(update=train)
    split = {"labels": ("no", "some", "yes"), "judged": {"train": GOOD.model_copy(update=judged)}}
    info = token_set_info("flat").model_copy(update=split)
    found = data_warnings(grouped(make_rows(tmp_path, [(30, 10)]), config), config, [info])
    assert len(found) == len(words) and all(word in message for word, message in zip(words, found, strict=True))
