"""How many queries a refusal says there are, and the split that it says would give enough."""

import pytest

from pipeline.data.token_sets import JudgedSplit, TokenSetInfo
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.gate.compare import CheckKind, GateCheck, Outcome, Verdict
from pipeline.evaluate.gate.judge import count_queries, fraction_for, precision_warning, size_advice, verdict_advice


def info(**queries: int) -> TokenSetInfo:
    """A partition with so many queries in each split."""
    judged = {
        split: JudgedSplit(
            gains=({},),
            labels=(),
            label_gain_sums=(),
            query_best={0: number // 2, 100: number - number // 2},
            query_worst={},
        )
        for split, number in queries.items()
    }
    return TokenSetInfo.model_construct(judged=judged)  # type: ignore[call-arg,arg-type]


def check(
    queries: int | None, needed: int | None, outcome: Outcome = "fail", kind: CheckKind = "delta", **more: object
) -> GateCheck:
    fields = {"name": "a", "kind": kind, "outcome": outcome, "reason": "r", "metric": "ndcg@10", **more}
    return GateCheck.model_validate({**fields, "num_queries": queries, "needed_queries": needed})


def advice(*checks: GateCheck, **more: object) -> str:
    verdict = Verdict(
        promote=False,
        checks=checks,
        num_rows=1,
        num_queries=1,
        confidence=0.95,
        slice_confidence=0.95,
        resamples=200,
        seed=1,
    )
    given = {"split": "test", "rows": 10, "rows_in_split": 10, "all_partitions": True, "later": False, **more}
    config = given.pop("config", EvaluateConfig())
    infos = given.pop("infos", [info(train=270, valid=17, test=13)])
    return verdict_advice(verdict, config, infos, **given)  # type: ignore[arg-type]


def test_queries_are_counted_over_all_partitions() -> None:
    assert count_queries([info(train=10, test=3), info(train=5, valid=2)]) == {"train": 15, "valid": 2, "test": 3}
    assert count_queries([info()]) == {}, "an earlier version did not count them"


@pytest.mark.parametrize(
    ("total", "needed", "share"),
    [(300, 50, 0.25), (2000, 50, 0.05), (100, 50, None), (0, 50, None), (144, 50, None), (160, 50, 0.4)],
)
def test_the_smallest_fraction_that_is_enough(total: int, needed: int, share: float | None) -> None:
    assert fraction_for(total, needed) == share


def test_the_advice_names_what_there_is_and_the_setting_that_gives_enough() -> None:
    said = size_advice("test", 13, 50, {"train": 270, "valid": 17, "test": 13})
    assert "split test has 13 queries" in said and "about 50 are needed" in said
    assert "--data.test-fraction 0.25 gives about 75 of 300" in said and "--gate.min-queries" in said
    assert "--data.valid-fraction 0.25" in size_advice("valid", 13, 50, {"train": 270, "valid": 13, "test": 17})
    half = size_advice("test", 13, 50, {"train": 548, "valid": 26, "test": 26})
    assert "of 300 " in half, "half of the test queries bear on the metric, so half of the others are taken to"
    few = size_advice("test", 5, 50, {"train": 90, "valid": 5, "test": 5})
    assert "fraction" not in few and "judge more queries" in few and "about 100" in few
    unknown = size_advice("test", 5, 50, {})
    assert "fraction" not in unknown and "judge more queries" in unknown and "all splits" not in unknown


@pytest.mark.parametrize(
    ("queries", "train", "said"),
    [
        (2500, 9000, None),
        (2499, 9000, ("below 0.01 ", "--data.valid-fraction 0.25 gives")),
        (100, 1900, ("below 0.05 ", "all splits together have about 2,000")),
        (0, 1900, None),
    ],
)
def test_a_split_that_cannot_tell_a_hundredth(queries: int, train: int, said: tuple[str, str] | None) -> None:
    found = precision_warning("valid", {"train": train, "valid": queries, "test": 0})
    assert bool(found) == (said is not None) and all(part in found for part in said or ())


def test_only_a_failed_check_for_want_of_queries_gets_advice() -> None:
    assert advice(check(13, 50, "skipped")) == ""
    assert advice(check(13, None)) == ""
    assert "13 queries" in advice(check(40, 50), check(13, 50), check(45, 50)), "the worst of them"
    assert "has 0 queries" in advice(check(None, 50)) and "judge more" in advice(check(None, 50))
    assert "--data.test-fraction 0.2 " in advice(check(0, 50), infos=[info(train=400)]), "the split is empty so far"


def test_a_difference_that_was_too_small_to_show_asks_for_a_larger_drop_not_fewer_queries() -> None:
    said = advice(check(13, 5000, low=-0.1, high=0.1))
    assert "--gate.drops" in said and "--gate.min-queries" not in said
    floor, first = (advice(check(13, 50, kind=kind, metric="", low=None)) for kind in ("floor", "comparison"))
    assert "--gate.min-queries" in floor and "--gate.first-without-comparison" not in floor
    assert "--gate.min-queries" in first and "--gate.first-without-comparison" in first
