"""When a run is evaluated and saved, from its length alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.train.config import Cadence, TrainConfig, choose_cadence


def cadence(steps: int, rows: int, *, save: int | None = None, **train: int) -> Cadence:
    return choose_cadence(TrainConfig(**train), save, 10, steps=steps, rows=rows)  # type: ignore[arg-type]


def evaluated(steps: int, every: int) -> list[int]:
    """The steps of all evaluations, as the loop takes them: midway, and the last step."""
    return [*(step for step in range(1, steps) if every and step % every == 0), steps]


@pytest.mark.parametrize(
    ("pairs", "batch", "valid", "expected"),
    [
        # 3 epochs of 6,000 pairs at 64: 281 steps, 8 evaluations of 337 rows are a tenth of the time.
        (6_000, 64, 300, Cadence(log=10, evaluate=36, save=36, rows=337, wait=141)),
        (6_000, 64, 1266, Cadence(log=10, evaluate=36, save=36, rows=337, wait=141)),
        # 3 epochs of 1,000,000 pairs: 8 of 5,000 rows, and a checkpoint at least every 500 steps.
        (1_000_000, 64, 50_000, Cadence(log=10, evaluate=5860, save=500, rows=5000, wait=23438)),
        (1_000_000, 1024, 50_000, Cadence(log=10, evaluate=367, save=367, rows=5000, wait=1465)),
        # 600 pairs at 64: 28 steps, of whose time 268 rows are a tenth. One evaluation of 300 is at the end.
        (600, 64, 5_000, Cadence(log=10, evaluate=0, save=28, rows=300, wait=14)),
        (600, 64, 30, Cadence(log=10, evaluate=4, save=4, rows=300, wait=14)),
    ],
)
def test_the_cadence_of_some_runs(pairs: int, batch: int, valid: int, expected: Cadence) -> None:
    assert cadence(3 * pairs // batch, valid, global_batch_size=batch) == expected


@given(st.integers(1, 200_000), st.integers(2, 4096), st.integers(1, 200_000))
def test_eight_evaluations_of_a_tenth_of_the_time(steps: int, batch: int, valid: int) -> None:
    found = cadence(steps, valid, global_batch_size=batch)
    number, scored = -(-steps // found.evaluate) if found.evaluate else 1, min(found.rows, valid)
    affordable = 0.15 * steps * batch
    assert number * scored <= affordable or number == 1
    assert 300 <= found.rows <= 5000
    if steps >= 8 and affordable >= 16 * min(300, valid):
        assert 8 <= number < 16 and (number == 8 or steps < 64)
    assert found.save == min(found.evaluate or steps, 500)
    if found.evaluate:  # evenly spaced, the last of them too
        steps_of = evaluated(min(steps, 5000), found.evaluate)
        assert all(step % found.evaluate == 0 for step in steps_of[:-1])
        assert steps - (number - 1) * found.evaluate <= found.evaluate


@given(st.integers(1, 5000), st.integers(0, 300), st.integers(1, 9000), st.integers(0, 9))
def test_what_is_set_is_used(steps: int, every: int, rows: int, patience: int) -> None:
    patience = patience if every else 0  # any other is refused
    given_all = {"evaluate_every": every, "evaluate_rows": rows, "patience": patience}
    assert cadence(steps, 100, save=7, **given_all) == Cadence(10, every, 7, rows, patience * every)
    assert cadence(steps, 100, evaluate_every=every).evaluate == every
    assert cadence(steps, 100, evaluate_rows=rows).rows == rows
    assert 300 <= cadence(steps, 100, evaluate_every=every).rows <= 5000


@pytest.mark.parametrize("steps", [57, 64, 281, 1000, 46_875])
def test_a_run_stops_only_after_half_of_it_without_improvement(steps: int) -> None:
    found = cadence(steps, 25)
    stops = [step for step in evaluated(steps, found.evaluate) if step - found.evaluate >= found.wait]
    assert len(evaluated(steps, found.evaluate)) == 8
    assert stops[0] == 5 * found.evaluate, "if the first evaluation was the best, the fifth of eight ends the run"


def test_ndcg_is_measured_on_all_rows_of_a_query() -> None:
    found = cadence(1000, 3000, metric="ndcg")  # type: ignore[arg-type]
    assert (found.rows, found.evaluate) == (3000, 334), "3 evaluations of all 3,000 rows are a tenth of the time"


def test_the_cadence_knows_neither_clock_nor_world() -> None:
    assert cadence(1000, 500, micro_batch_size=8) == cadence(1000, 500, micro_batch_size=64)
