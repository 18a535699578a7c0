"""Will the run be done in time? Arithmetic only; the clock is read at the rim."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """Where a run stands against its deadline. Seconds; `spare_s` is negative when it will be late."""

    eta_s: float
    spare_s: float | None

    @property
    def at_risk(self) -> bool:
        return self.spare_s is not None and self.spare_s < 0


def forecast(
    *, steps_left: int, seconds_per_step: float, seconds_to_deadline: float | None, tail_s: float = 0.0
) -> Forecast:
    """Time to the end from the recent pace, plus `tail_s` for the final evaluation and save."""
    eta_s = steps_left * seconds_per_step + tail_s
    return Forecast(eta_s, None if seconds_to_deadline is None else seconds_to_deadline - eta_s)
