"""What a replay says: waiting, utilisation, who got what, who starved."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.fairshare.simulate import Replay


@dataclass(frozen=True)
class ShareReport:
    """One share under one policy. Waits in seconds, from runnable to the first start."""

    policy: str
    share: str
    weight: float
    num_jobs: int
    wait_median_s: float
    wait_p95_s: float
    wait_max_s: float
    starved: int
    """Jobs that waited longer than the limit."""
    vcpu_hours: float
    part: float
    """Of everything consumed."""
    entitled: float
    """(1 / weight) over the sum of it: its part while all shares ask for more than there is."""


def share_reports(replay: Replay, starved_after_s: float) -> list[ShareReport]:
    """One row a share, by name."""
    names = sorted(replay.usage)
    inverse = {name: 1.0 / replay.policy.weight_of(name) for name in names}
    total = sum(replay.usage.values())
    reports = []
    for name in names:
        waits = np.array([run.wait_s for run in replay.runs if run.job.share == name])
        reports.append(
            ShareReport(
                policy=replay.policy.name,
                share=name,
                weight=replay.policy.weight_of(name),
                num_jobs=len(waits),
                wait_median_s=float(np.median(waits)),
                wait_p95_s=float(np.quantile(waits, 0.95)),
                wait_max_s=float(waits.max()),
                starved=int((waits > starved_after_s).sum()),
                vcpu_hours=replay.usage[name] / 3600.0,
                part=replay.usage[name] / total,
                entitled=inverse[name] / sum(inverse.values()),
            )
        )
    return reports


def table_lines(replays: Sequence[Replay], starved_after_s: float) -> list[str]:
    """A table for people: one block a policy."""
    lines: list[str] = []
    for replay in replays:
        lines += [
            f"policy {replay.policy.name}: {len(replay.runs):,} jobs in {replay.span_s / 3600:,.1f} h on "
            f"{replay.max_vcpus:,} vCPU, utilisation {replay.utilisation:.1%}, peak {replay.peak_vcpus:,} vCPU",
            f"  {'share':<20} {'weight':>8} {'jobs':>8} {'wait median':>12} {'95 %':>10} {'longest':>10} "
            f"{'starved':>8} {'vCPU-hours':>12} {'part':>7} {'entitled':>9}",
        ]
        for one in share_reports(replay, starved_after_s):
            lines.append(
                f"  {one.share:<20} {one.weight:>8g} {one.num_jobs:>8,} {one.wait_median_s / 60:>8,.1f} min "
                f"{one.wait_p95_s / 60:>6,.1f} min {one.wait_max_s / 60:>6,.0f} min {one.starved:>8,} "
                f"{one.vcpu_hours:>12,.0f} {one.part:>7.1%} {one.entitled:>9.1%}"
            )
    return lines
