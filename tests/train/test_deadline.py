"""Arithmetic of being late."""

import pytest

from pipeline.train.loop import forecast


@pytest.mark.parametrize(
    ("deadline_s", "spare_s", "at_risk"), [(130.0, 20.0, False), (100.0, -10.0, True), (None, None, False)]
)
def test_forecast(deadline_s: float | None, spare_s: float | None, at_risk: bool) -> None:
    seen = forecast(steps_left=50, seconds_per_step=2.0, seconds_to_deadline=deadline_s, tail_s=10.0)
    assert seen.eta_s == 110.0
    assert seen.spare_s == spare_s
    assert seen.at_risk is at_risk


def test_in_time_to_the_second_is_not_late() -> None:
    assert not forecast(steps_left=5, seconds_per_step=1.0, seconds_to_deadline=5.0).at_risk
