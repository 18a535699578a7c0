"""Floors: values the candidate must reach whatever the incumbent does."""

from pipeline.evaluate.config import GateConfig
from pipeline.evaluate.gate.side import Side
from pipeline.evaluate.gate.verdict import GateCheck
from pipeline.evaluate.metrics.names import MetricName
from pipeline.evaluate.metrics.statistic import Missing


def floor_checks(candidate: Side, config: GateConfig) -> list[GateCheck]:
    """One check a floor, by the measured value."""
    return [_check(candidate, MetricName.parse(name), bound, config) for name, bound in config.floors.items()]


def _check(candidate: Side, name: MetricName, bound: float, config: GateConfig) -> GateCheck:
    found = candidate.measure(name)
    if isinstance(found, Missing):
        good, reason = False, f"cannot be computed: {found.reason}"
    elif found.num_queries < config.min_queries:
        good, reason = False, f"{found.num_queries:,} queries bear on it, gate.min_queries is {config.min_queries:,}"
    else:
        good = found.value <= bound if name.lower_is_better else found.value >= bound
        side = "at most" if name.lower_is_better else "at least"
        reason = f"{found.value:.4f}, {side} {bound:g} is {'asked' if good else 'needed'}"
    return GateCheck(
        name=f"floor {name.text}",
        kind="floor",
        outcome="pass" if good else "fail",
        reason=f"{name.text}: {reason}",
        metric=name.text,
        candidate=None if isinstance(found, Missing) else found.value,
        bound=bound,
        num_queries=None if isinstance(found, Missing) else found.num_queries,
    )
