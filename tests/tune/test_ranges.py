"""Ranges as text, and Hyperband held against Optuna's own."""

import math
from itertools import pairwise

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.pruners import HyperbandPruner
from optuna.trial import TrialState
from pydantic import ValidationError

from pipeline.tune.config import Choices, Floats, Hyperband, Integers, TuneConfig, parse_range

pytestmark = pytest.mark.unit

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(numbers, numbers, st.booleans())
def test_floats_are_read_back_exactly(low: float, high: float, log: bool) -> None:
    text = f"{'log' if log else 'uniform'} {low!r} {high!r}"
    if low < high and (low > 0 or not log):
        assert parse_range(text) == Floats(low, high, log)
    else:
        with pytest.raises(ValueError, match="expected LOW below HIGH"):
            parse_range(text)


@given(st.integers(), st.integers())
def test_whole_numbers_are_read_back_exactly(low: int, high: int) -> None:
    if low < high:
        assert parse_range(f"int {low} {high}") == Integers(low, high)
    else:
        with pytest.raises(ValueError, match="expected LOW below HIGH"):
            parse_range(f"int {low} {high}")


@given(st.lists(st.text("abc0123456789.,-+", min_size=1), min_size=2, unique=True))
def test_choices_stay_as_they_were_written(texts: list[str]) -> None:
    assert parse_range("  one of  " + "   ".join(texts)) == Choices(tuple(texts))


@given(st.text())
def test_any_text_is_a_range_or_refused_with_a_word(text: str) -> None:
    try:
        assert parse_range(text)
    except ValueError as error:
        assert "expected" in str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected log LOW HIGH, uniform LOW HIGH, int LOW HIGH, or one of A B ..."),
        ("1e-5 1e-3", "expected log LOW HIGH"),
        ("log 1e-5", "expected log LOW HIGH"),
        ("log 0 1", "both above 0"),
        ("log 1e-3 1e-5", "expected LOW below HIGH"),
        ("uniform 0 nan", "'nan' is none"),
        ("uniform 0 inf", "'inf' is none"),
        ("int 2 8.5", "two whole numbers"),
        ("one of 3", "two or more different values"),
        ("one of 3 3", "two or more different values"),
    ],
)
def test_a_wrong_range_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_range(text)


def test_the_config_names_the_setting_with_a_wrong_range() -> None:
    with pytest.raises(ValidationError, match=r"train\.seed: 'int 2': expected log LOW HIGH"):
        TuneConfig(space={"train.seed": "int 2"})


def test_the_config_takes_names_as_tables_and_in_any_spelling() -> None:
    config = TuneConfig.model_validate({"space": {"train": {"Optimizer": {"learning-rate": "log 1e-5 1e-3"}}}})
    assert config.space == {"train.optimizer.learning_rate": "log 1e-5 1e-3"}


def test_the_config_wants_a_rung_before_the_end() -> None:
    with pytest.raises(ValidationError, match="min_steps 500: expected less than steps 500"):
        TuneConfig(min_steps=500)


bands = st.builds(
    lambda low, factor, reduction: Hyperband(low, low * factor, reduction),
    st.integers(1, 60),
    st.integers(2, 400),
    st.integers(2, 6),
)


@given(bands)
def test_rungs_rise_to_the_end_by_the_reduction(band: Hyperband) -> None:
    rungs = band.rungs
    assert rungs[0] == band.min_steps and rungs[-1] == band.max_steps
    assert all(later == earlier * band.reduction for earlier, later in pairwise(rungs[:-1]))
    assert rungs[-1] <= rungs[-2] * band.reduction


@given(bands, st.text(min_size=1), st.integers(0, 10_000))
def test_every_trial_has_a_bracket(band: Hyperband, study: str, number: int) -> None:
    assert 0 <= band.bracket_of(study, number) < len(band.shares)


@given(bands, st.integers(0, 5), numbers, st.lists(numbers))
def test_the_best_of_a_rung_goes_on_and_only_at_a_rung_is_anything_ended(
    band: Hyperband, bracket: int, value: float, others: list[float]
) -> None:
    bracket = min(bracket, len(band.shares) - 1)
    assert not band.is_pruned(bracket, band.min_steps * band.reduction**bracket, max([value, *others]), others)
    first = band.min_steps * band.reduction**bracket
    between = {first - 1, first + 1, band.max_steps + 1} - set(band.rungs)
    assert not any(band.is_pruned(bracket, step, value, others) for step in between)
    if bracket:
        assert not band.is_pruned(bracket, first // band.reduction, value, others)


@given(
    st.sampled_from([(1, 9, 3), (2, 16, 2), (10, 500, 4), (3, 100, 3)]),
    st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=8), min_size=1, max_size=12),
)
def test_decisions_are_those_of_optuna(shape: tuple[int, int, int], figures: list[list[int]]) -> None:
    """Trials one after the other, as one worker has them; many values are equal on purpose."""
    low, high, reduction = shape
    band = Hyperband(low, high, reduction)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    theirs = optuna.create_study(
        study_name="s",
        direction="maximize",
        pruner=HyperbandPruner(min_resource=low, max_resource=high, reduction_factor=reduction),
    )
    assert math.floor(math.log(high / low, reduction)) + 1 == len(band.shares)
    ended: list[dict[int, float]] = []
    for number, values in enumerate(figures):
        trial = theirs.ask({"x": FloatDistribution(0, 1)})
        bracket, mine = band.bracket_of("s", number), dict[int, float]()
        pruned = False
        for step, value in zip(band.rungs[:-1], values, strict=False):
            trial.report(value, step)
            others = [one[step] for n, one in enumerate(ended) if step in one and band.bracket_of("s", n) == bracket]
            pruned = band.is_pruned(bracket, step, float(value), others)
            assert pruned == trial.should_prune(), f"trial {number} of bracket {bracket} at step {step}"
            mine[step] = float(value)
            if pruned:
                break
        ended.append(mine)
        theirs.tell(trial, None if pruned else 1.0, TrialState.PRUNED if pruned else TrialState.COMPLETE)
