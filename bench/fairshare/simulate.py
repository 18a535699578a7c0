"""A replay of a workload through one fair-share queue, event by event.

The rules are those of the AWS Batch user guide; where it says nothing the rule is a knob or said here:
- the share with the lowest weighted usage goes next; of equal ones the one whose head job waits longest;
- within a share: priority, then retries first, then the time of submission;
- a head job that does not fit stops the queue (no backfill), unless the knob allows it;
- `max_vcpus * (reservation / 100) ** active shares` stays free for shares that are not active yet;
- nothing that runs is stopped; a job that fails is retried in front of its equals.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bench.fairshare.policy import FairSharePolicy
from bench.fairshare.usage import Floats, Kernel, Usage
from bench.fairshare.workload import SimulatedJob, Workload, shares_of
from pipeline.core.errors import ConfigError

_END, _SUBMIT, _WAKE = 0, 1, 2  # at one moment: ends free vCPU before anything is placed


@dataclass(frozen=True)
class Knobs:
    """What AWS does not publish, and what-ifs."""

    kernel: Kernel = Kernel.LINEAR
    backfill: bool = False
    """Let jobs behind a head that does not fit start."""
    group_scaling: bool = False
    """Multiply the weight of a prefix entry by its active identifiers, as pages of 2022-23 had it."""


@dataclass(frozen=True)
class JobRun:
    """What became of one job. Times in seconds after the start."""

    job: SimulatedJob
    runnable_s: float
    starts_s: tuple[float, ...]
    """Of each attempt."""
    end_s: float

    @property
    def wait_s(self) -> float:
        """From when it could have run to its first start."""
        return self.starts_s[0] - self.runnable_s


@dataclass(frozen=True)
class Replay:
    """One workload under one policy."""

    policy: FairSharePolicy
    max_vcpus: int
    runs: tuple[JobRun, ...]
    usage: Mapping[str, float]
    """vCPU-seconds consumed, by share."""
    peak_vcpus: int

    @property
    def span_s(self) -> float:
        """From the first submission to the last end."""
        return max(run.end_s for run in self.runs) - min(run.job.submit_s for run in self.runs)

    @property
    def utilisation(self) -> float:
        """vCPU-seconds consumed over those there were."""
        return sum(self.usage.values()) / (self.max_vcpus * self.span_s)


def replay(workload: Workload, policy: FairSharePolicy, max_vcpus: int, knobs: Knobs | None = None) -> Replay:
    """Run every job to its end. Raises ConfigError for a job that can never start."""
    largest = max(workload.jobs, key=lambda job: job.size)
    if largest.size > max_vcpus:
        raise ConfigError(
            f"job {largest.id} asks for {largest.size:,} vCPU ({largest.nodes} x {largest.vcpus})",
            expected=f"at most the {max_vcpus:,} of the fleet",
            next_command="raise --max-vcpus, or take the job out",
        )
    return _Queue(workload, policy, max_vcpus, knobs or Knobs()).run()


@dataclass
class _Progress:
    runnable_s: float = -1.0
    starts: list[float] = field(default_factory=list)
    end_s: float = -1.0


class _Queue:
    def __init__(self, workload: Workload, policy: FairSharePolicy, max_vcpus: int, knobs: Knobs) -> None:
        self.policy, self.max_vcpus, self.knobs = policy, max_vcpus, knobs
        self.jobs = workload.jobs
        names = list(shares_of(workload))
        self.share_of = self._index(names)
        self.names = names
        self.weights = np.array([policy.weight_of(name) for name in names])
        self.group = self._groups()
        self.usage = Usage(len(names), policy.window_s, knobs.kernel)
        self.waiting: list[list[tuple[int, int, float, int]]] = [[] for _ in names]  # heaps of runnable jobs
        self.here = np.zeros(len(names), dtype=np.int64)  # jobs submitted and not finished
        self.running = np.zeros(len(names), dtype=np.int64)
        self.last_s = np.full(len(names), -np.inf)  # when its last job ended
        self.progress = [_Progress() for _ in self.jobs]
        self.consumed = np.zeros(len(names))
        self.used = self.peak = 0
        self.events: list[tuple[float, int, int]] = [(job.submit_s, _SUBMIT, i) for i, job in enumerate(self.jobs)]
        self.missing = [len(job.depends_on) for job in self.jobs]
        self.dependents = self._dependents()
        heapq.heapify(self.events)

    def _index(self, names: list[str]) -> list[int]:
        place = {name: i for i, name in enumerate(names)}
        return [place[job.share] for job in self.jobs]

    def _groups(self) -> list[int]:
        """Which prefix entry each share falls under; -1 for none."""
        entries = self.policy.shares
        return [
            next((i for i, e in enumerate(entries) if e.share_identifier.endswith("*") and e.matches(name)), -1)
            for name in self.names
        ]

    def _dependents(self) -> dict[int, list[int]]:
        place = {job.id: i for i, job in enumerate(self.jobs)}
        found = defaultdict[int, list[int]](list)
        for i, job in enumerate(self.jobs):
            for name in job.depends_on:
                found[place[name]].append(i)
        return found

    def run(self) -> Replay:
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, kind, index = heapq.heappop(self.events)
                if kind == _END:
                    self._end(index, now)
                elif kind == _SUBMIT:
                    self._submit(index, now)
            self._place(now)
        return Replay(
            self.policy,
            self.max_vcpus,
            tuple(
                JobRun(job, p.runnable_s, tuple(p.starts), p.end_s)
                for job, p in zip(self.jobs, self.progress, strict=True)
            ),
            dict(zip(self.names, self.consumed.tolist(), strict=True)),
            self.peak,
        )

    def _submit(self, index: int, now: float) -> None:
        self.here[self.share_of[index]] += 1
        if not self.missing[index]:
            self._enqueue(index, now, retry=False)

    def _enqueue(self, index: int, now: float, *, retry: bool) -> None:
        job, progress = self.jobs[index], self.progress[index]
        if progress.runnable_s < 0:
            progress.runnable_s = now
        heapq.heappush(self.waiting[self.share_of[index]], (-job.priority, 0 if retry else 1, job.submit_s, index))

    def _end(self, index: int, now: float) -> None:
        job, share, progress = self.jobs[index], self.share_of[index], self.progress[index]
        self.usage.advance(now)
        self.usage.change(share, -job.size)
        self.used -= job.size
        self.running[share] -= 1
        self.consumed[share] += (now - progress.starts[-1]) * job.size
        if self.policy.compute_reservation:  # what is held back changes when all of this is forgotten
            heapq.heappush(self.events, (now + self.policy.window_s, _WAKE, share))
        if len(progress.starts) <= len(job.failed_s):
            self._enqueue(index, now, retry=True)
            return
        progress.end_s = now
        self.here[share] -= 1
        self.last_s[share] = now
        for dependent in self.dependents.get(index, ()):
            self.missing[dependent] -= 1
            if not self.missing[dependent] and self.jobs[dependent].submit_s <= now:
                self._enqueue(dependent, now, retry=False)

    def _place(self, now: float) -> None:
        """Start what may start."""
        usage = self.usage.advance(now)
        stuck = set[int]()
        while True:
            share = self._next_share(usage, now, stuck)
            if share is None:
                return
            index = self.waiting[share][0][3]
            if self._fits(share, self.jobs[index].size, now, usage):
                heapq.heappop(self.waiting[share])
                self._start(index, share, now)
            elif self.knobs.backfill:
                stuck.add(share)
            else:
                return

    def _start(self, index: int, share: int, now: float) -> None:
        job, progress = self.jobs[index], self.progress[index]
        self.usage.change(share, job.size)
        self.used += job.size
        self.running[share] += 1
        self.peak = max(self.peak, self.used)
        attempt = len(progress.starts)
        progress.starts.append(now)
        seconds = job.failed_s[attempt] if attempt < len(job.failed_s) else job.duration_s
        heapq.heappush(self.events, (now + seconds, _END, index))

    def _next_share(self, usage: Floats, now: float, stuck: set[int]) -> int | None:
        candidates = [s for s, heap in enumerate(self.waiting) if heap and s not in stuck]
        if not candidates:
            return None
        scale = self._group_sizes(now) if self.knobs.group_scaling else None

        def order(share: int) -> tuple[float, float]:
            weight = self.weights[share] * (scale[share] if scale else 1)
            return (float(weight * usage[share]), self.waiting[share][0][2])

        return min(candidates, key=order)

    def _active(self, now: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return (self.here > 0) | (self.last_s + self.policy.window_s > now)

    def _group_sizes(self, now: float) -> list[int]:
        active = self._active(now)
        counts = defaultdict[int, int](int)
        for share, group in enumerate(self.group):
            counts[group] += bool(active[share])
        return [max(1, counts[group]) if group >= 0 else 1 for group in self.group]

    def _fits(self, share: int, size: int, now: float, usage: Floats) -> bool:
        if self.used + size > self.max_vcpus:
            return False
        is_new = self.running[share] == 0 and usage[share] == 0
        if is_new or not self.policy.compute_reservation:
            return True
        reserve = self.max_vcpus * (self.policy.compute_reservation / 100) ** int(self._active(now).sum())
        return self.used + size <= self.max_vcpus - reserve
