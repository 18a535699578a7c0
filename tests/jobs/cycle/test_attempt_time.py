"""Where the time of one try went."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jobs.cycle.ledger import NEVER, SPENT, Category, Moment, Try, spent_in, with_kept_until
from pipeline.telemetry.events import EventName

K = Category


def at(second: float, name: EventName, **fields: Any) -> Moment:
    return Moment(round(1000 * second), str(name), fields)


def steps(second: float, step: int, count: int, seconds: float, **fields: Any) -> Moment:
    return at(second, EventName.TRAIN_STEPS, step=step, losses=[0.1] * count, seconds=seconds, **fields)


def seconds(one: Try) -> dict[Category, float]:
    """Without the empty ones."""
    return {kind: ms / 1000 for kind, ms in spent_in(one).items() if ms}


def train(*moments: Moment, stop: int = 100, kept: bool = True, until: float = NEVER) -> Try:
    return Try("train", 0, 1000 * stop, kept, moments, until)


def test_a_training_from_start_to_end() -> None:
    one = train(
        at(8, EventName.STAGE_STARTED, stage="train"),
        at(10, EventName.TRAIN_STARTED, step=0),
        steps(30, 10, 10, 20, data_wait_share=0.25),  # 10 to 30; of them 5 waiting for data, 4 compiling
        at(30, EventName.GRAPH_COMPILED, step=10, compile_s=4),
        at(36, EventName.HOLDOUT_EVALUATED, step=10, seconds=6),
        steps(60, 20, 10, 20),  # 40 to 60; the 4 seconds before went into a checkpoint
        at(50, EventName.CHECKPOINT_SAVED, step=10, seconds=9),  # behind the steps
        at(65, EventName.HOLDOUT_EVALUATED, step=20, seconds=5),
        at(75, EventName.CHECKPOINT_SAVED, step=20, seconds=10),
        at(90, EventName.STAGE_FINISHED, stage="train"),
    )
    assert seconds(one) == {
        K.START_UP: 10 + 10,
        K.DATA_WAIT: 5,
        K.COMPILE: 4,
        K.PRODUCTIVE: 11 + 20,
        K.EVALUATION: 11,
        K.CHECKPOINT: 4 + 25,
    }


def test_steps_that_were_done_again_are_wasted() -> None:
    one = train(
        at(10, EventName.TRAIN_STARTED, step=0),
        steps(30, 10, 10, 20),
        steps(50, 20, 10, 20, data_wait_share=0.5),
        steps(70, 30, 10, 20),
        kept=False,
        until=15.0,
    )
    assert seconds(one) == {K.START_UP: 10, K.PRODUCTIVE: 20 + 5, K.DATA_WAIT: 5, K.WASTED: 10 + 20 + 30}


def test_a_preempted_training_keeps_what_it_saved() -> None:
    one = train(
        at(10, EventName.TRAIN_STARTED, step=0),
        steps(30, 10, 10, 20),
        at(33, EventName.CHECKPOINT_SAVED, step=10, seconds=3),
        at(34, EventName.STAGE_STOPPED, stage="train"),
        stop=40,
        kept=False,
        until=10.0,
    )
    assert seconds(one) == {K.START_UP: 10, K.PRODUCTIVE: 20, K.CHECKPOINT: 3, K.WASTED: 7}


def test_a_try_that_left_nothing_is_wasted_from_its_start() -> None:
    one = train(at(10, EventName.TRAIN_STARTED, step=0), steps(30, 10, 10, 20), kept=False, until=0.0)
    assert seconds(one) == {K.WASTED: 100}
    assert seconds(Try("evaluate", 0, 5000, False, (at(1, EventName.STAGE_STARTED, stage="evaluate"),))) == {
        K.WASTED: 5
    }


def test_other_stages() -> None:
    started, finished = at(2, EventName.STAGE_STARTED), at(8, EventName.STAGE_FINISHED)
    for stage, kind in (("prepare", K.PRODUCTIVE), ("compile", K.COMPILE), ("evaluate", K.EVALUATION)):
        assert seconds(Try(stage, 0, 10_000, True, (started, finished))) == {K.START_UP: 4, kind: 6}
        assert seconds(Try(stage, 0, 10_000, True, (started,))) == {K.START_UP: 2, kind: 8}, "under way"
    assert seconds(Try("health", 0, 10_000, True, (started, finished))) == {K.START_UP: 10}
    assert seconds(Try("verify", 0, 10_000, True)) == {K.EVALUATION: 10}, "it writes no events"
    skipped = (started, at(8, EventName.STAGE_SKIPPED))
    assert seconds(Try("embed", 0, 10_000, True, skipped)) == {K.START_UP: 10}, "it was done before"


def test_parts_of_a_failed_try_are_kept() -> None:
    parts = (
        at(10, EventName.STAGE_STARTED, stage="embed"),
        at(20, EventName.PART_EMBEDDED, part=0, seconds=8),
        at(30, EventName.PART_EMBEDDED, part=1, seconds=12),  # two workers at once
    )
    assert seconds(Try("embed", 0, 40_000, False, parts)) == {K.START_UP: 10, K.PRODUCTIVE: 18, K.WASTED: 12}
    prepared = (at(1, EventName.STAGE_STARTED, stage="prepare"), at(7, EventName.PARTITION_PREPARED, rows=5))
    assert seconds(Try("prepare", 0, 10_000, False, prepared)) == {K.START_UP: 1, K.PRODUCTIVE: 6, K.WASTED: 3}


def tries_of(*starts_and_saves: tuple[int | None, int]) -> list[Try]:
    made = []
    for start, saved in starts_and_saves:
        moments = [] if start is None else [at(1, EventName.TRAIN_STARTED, step=start)]
        made.append(train(*moments, at(2, EventName.CHECKPOINT_SAVED, step=saved), kept=False))
    return made


def until(*starts_and_saves: tuple[int | None, int]) -> list[float]:
    return [one.kept_until for one in with_kept_until(tries_of(*starts_and_saves))]


def test_what_a_later_try_continued_from_is_kept() -> None:
    assert until((0, 100), (100, 150), (50, 60)) == [50.0, 50.0, 150.0], "150 was bad: all from 50 on was done again"
    assert until((0, 100), (None, 0)) == [100.0, 100.0], "the second never began"
    good = train(at(1, EventName.TRAIN_STARTED, step=100))
    assert [one.kept_until for one in with_kept_until([*tries_of((0, 120)), good])] == [100.0, NEVER]


names = st.sampled_from([*EventName])
numbers = st.one_of(st.integers(-5, 300), st.floats(allow_nan=True), st.none(), st.text(max_size=2))
fields = st.fixed_dictionaries(
    {},
    optional={
        "step": numbers,
        "seconds": numbers,
        "compile_s": numbers,
        "data_wait_share": numbers,
        "losses": st.one_of(st.none(), st.lists(st.just(0.5), max_size=9)),
    },
)
moments_of = st.lists(st.builds(Moment, st.integers(-10_000, 200_000), names.map(str), fields), max_size=25)


@given(
    stage=st.sampled_from(["prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report", "other"]),
    length_ms=st.integers(0, 150_000),
    kept=st.booleans(),
    kept_until=st.one_of(st.just(NEVER), st.integers(0, 300).map(float)),
    moments=moments_of,
)
def test_the_parts_of_any_try_add_up_exactly(
    stage: str, length_ms: int, kept: bool, kept_until: float, moments: list[Moment]
) -> None:
    moments.sort(key=lambda moment: moment.at_ms)
    spent = spent_in(Try(stage, 0, length_ms, kept, tuple(moments), kept_until))
    assert sum(spent.values()) == length_ms
    assert set(spent) == set(SPENT) and all(ms >= 0 for ms in spent.values())
