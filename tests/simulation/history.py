"""One history per seed: a few days, each with a cycle, its faults, and the people who look after it."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from random import Random
from typing import Any

from tests.simulation.batch import Platform, SimulatedBatch
from tests.simulation.faults import Service, Weather, server_error, slow_down, throttled, throttled_ml
from tests.simulation.invariants import HISTORY, PAIR, POINTER, Invariants
from tests.simulation.nodes import container
from tests.simulation.people import Account, using
from tests.simulation.s3 import PREFIX, FakeS3
from tests.simulation.service_jobs import SimulatedServiceJobs
from tests.simulation.world import DAY_S, EPOCH, Process, World

NUM_DAYS = 2
SCHEDULED_S = 2 * 3600.0
MAX_SUBMISSIONS = 12
RACES = ("production.json", "serving.json", "history.jsonl", "verdict.json", "claim.json", "closed.json")
"""Names of objects whose writes a second command may compete with."""


@dataclass(frozen=True)
class Result:
    """The result of one seed."""

    seed: int
    violation: str
    num_faults: int
    num_cycles: int
    history: tuple[str, ...] = ()


def run_history(seed: int, *, max_faults: int | None = None, keeps_history: bool = False) -> Result:
    """Run the history of a seed. The product must be in the world (see product_in_world)."""
    world = World(seed, max_faults=max_faults, keeps_history=keeps_history)
    gc.collect()  # of the earlier history
    gc.freeze()
    _, num_cycles = _run(world, Weather.of(Random(seed)), range(NUM_DAYS), _earlier_cycles())
    return Result(seed, world.violation, world.num_faults, num_cycles, tuple(world.history or ()))


@lru_cache(1)
def _earlier_cycles() -> dict[str, bytes]:
    """Return the objects of three cycles that ended well, so that every history may roll back twice."""
    s3, _ = _run(World(0), Weather.clear(), range(-3, 0), {})
    return {key: stored for key in s3.keys("") if "/jobs/" not in key and (stored := s3.read(key)) is not None}


def _run(world: World, weather: Weather, numbers: range, earlier: dict[str, bytes]) -> tuple[FakeS3, int]:
    """Run some days and return the bucket and the number of cycles. Numbers of days are relative to EPOCH."""
    world.now = EPOCH + numbers[0] * DAY_S
    s3 = FakeS3(Service(world, weather, "s3", (slow_down,)))
    kind, refusal = (SimulatedServiceJobs, throttled_ml) if world.seed % 4 == 3 else (SimulatedBatch, throttled)
    service = Service(world, weather, kind.target, (refusal, server_error))
    platform: Platform = kind(service, container(world, s3))
    s3.restore(earlier)
    account, invariants = Account(world, s3, platform), Invariants(world, s3, platform)
    invariants.adopt(earlier)
    days = [_Day(account, invariants, weather, number) for number in numbers]
    for place, day in enumerate(days):
        world.at(place * DAY_S, day.plan)
    with using(account):
        world.run(len(days) * DAY_S + SCHEDULED_S)
    return s3, sum(bool(s3.keys(f"cycles/{day.cycle}/jobs/")) for day in days)


def shortest(seed: int) -> Result:
    """Return the shortest prefix of the faults of a seed that still violates an invariant, with its history."""
    for num_faults in range(run_history(seed).num_faults + 1):
        result = run_history(seed, max_faults=num_faults)
        if result.violation:
            return run_history(seed, max_faults=num_faults, keeps_history=True)
    raise AssertionError(f"seed {seed} does not fail again")


class _Day:
    """The commands of one day. A person looks every 20 to 60 minutes and repeats what has failed."""

    def __init__(self, account: Account, invariants: Invariants, weather: Weather, number: int) -> None:
        self.account, self.invariants, self.weather = account, invariants, weather
        self.world, self.rng = account.world, account.world.rng
        self.ends_at = EPOCH + (number + 1) * DAY_S + SCHEDULED_S
        self.scheduled = datetime.fromtimestamp(self.ends_at - DAY_S, UTC)
        self.cycle = f"{self.scheduled:%Y-%m-%d}"
        self.people = dict[Process, None]()

    def plan(self) -> None:
        at, people = self.world.at, self.weather.people
        at(SCHEDULED_S, self._scheduled)
        for hour in range(1, 23, 2):
            at(SCHEDULED_S + 3600.0 * hour, self._watch)
        at(SCHEDULED_S + 1200.0, self._look)
        at(SCHEDULED_S + DAY_S - 60.0, self._check_end)
        rng = Random(f"{self.world.seed} {self.cycle}")
        for kind, command in (
            ("cancel", lambda: self.account.cancel(self.cycle)),
            ("roll_back", self._roll_back),
            ("look", self.account.reconcile),
        ):
            if rng.random() < people.get(kind, 0.0):
                at(SCHEDULED_S + 6 * 3600 * rng.random(), partial(self._start, kind, command, is_fault=True))

    def _watch(self) -> None:
        """Start the watch, which finds nothing to do if the cycle is closed."""
        if self._closed() is None:
            self._start("watch", self.account.reconcile)

    def _scheduled(self) -> None:
        self.account.s3.service.on_put = self._compete
        self._driver(1)
        if self.weather.happens(self.world, "twin_driver", self.weather.people.get("twin_driver", 0.0)):
            self.world.at(5 * self.rng.random(), lambda: self._driver(1))

    def _compete(self, key: str) -> bool:
        """Let a person start a command that competes with a write. Returns whether this happens."""
        key = key.removeprefix(f"{PREFIX}/")
        if not key.endswith(RACES):
            return False
        if key in (POINTER, HISTORY, PAIR, f"cycles/{self.cycle}/evaluate/verdict.json"):
            rivals = [("roll_back", self._roll_back)]
        elif key in (f"cycles/{self.cycle}/jobs/{file}.json" for file in ("claim", "closed")):
            rivals = [
                ("submit", lambda: self.account.submit(self.cycle)),
                ("retry", lambda: self.account.retry(self.cycle)),
                ("look", self.account.reconcile),
            ]
        else:
            return False
        name, rival = self.world.faults_rng.choice(rivals)
        rate = self.weather.people.get("race", 0.0)
        if key.endswith("claim.json"):  # it is written before each job
            rate /= 10
        happens = len(self.people) < 3 and self.weather.happens(self.world, f"race of {name} for {key}", rate)
        if happens:
            self._start(name, rival)
        return happens

    def _driver(self, attempt: int) -> None:
        """Run the driver, which AWS Batch retries once (driver_attempts)."""

        def ended(code: int | None) -> None:
            if code in (None, 75, 143) and attempt == 1:
                self.world.at(60.0 + 120 * self.rng.random(), lambda: self._driver(2))

        self._start("driver", lambda: self.account.drive(self.scheduled), ended)

    def _roll_back(self) -> int:
        if self.account.s3.read(POINTER) is None:
            return 0
        self.invariants.num_roll_backs += 1
        return self.account.roll_back()

    def _look(self) -> None:
        """Decide what to do, following the runbook, and look again later.

        On SageMaker, a command that follows the jobs must run until the cycle has ended.
        """
        closed, (recorded, number) = self._closed(), self.invariants.newest_submission(self.cycle)
        if self.world.now > self.ends_at - 3600:
            return
        self.world.at(1200 + 2400 * self.rng.random(), self._look)
        if closed and closed["outcome"] in ("succeeded", "refused"):
            return
        if any(not process.name.startswith("watch") for process in self.people):
            return
        follows = self.account.platform.target == "sagemaker"
        if closed or (number > 1 and not follows and self._is_incomplete(recorded, number)):
            self._start("retry", lambda: self.account.retry(self.cycle))
            if self.weather.happens(self.world, "second_retry", self.weather.people.get("second_retry", 0.0)):
                self.world.at(
                    5 * self.rng.random(), lambda: self._start("retry", lambda: self.account.retry(self.cycle))
                )
        elif follows or self._is_incomplete(recorded, number):
            self._start("submit", lambda: self.account.submit(self.cycle))

    def _is_incomplete(self, recorded: dict[str, str], number: int) -> bool:
        jobs = self.account.platform.jobs
        if len(recorded) < len(self.account.plan_of(self.cycle).jobs):
            return True
        states = {name: jobs[job_id] for name, job_id in recorded.items()}
        return any(job["status"] == "FAILED" and int(job["tags"]["round"]) < number for name, job in states.items())

    def _closed(self) -> dict[str, Any] | None:
        data = self.account.s3.read(f"cycles/{self.cycle}/jobs/closed.json")
        closed: dict[str, Any] | None = json.loads(data) if data else None
        _, newest = self.invariants.newest_submission(self.cycle)
        return closed if closed and closed.get("round", 0) >= newest else None

    def _start(
        self,
        name: str,
        command: Callable[[], int],
        on_exit: Callable[[int | None], object] = lambda code: None,
        *,
        is_fault: bool = False,
    ) -> None:
        if is_fault and not self.weather.happens(self.world, name):
            return

        def ended(code: int | None) -> None:
            del self.people[process]
            self.invariants.check_excused()
            if name in ("driver", "submit", "retry") and code == 0:
                self.invariants.check_submission(self.cycle, process.name)
            on_exit(code)

        skew_s = self.rng.uniform(-2, 2)
        if "clock_jump" in self.weather.people:
            skew_s *= 50
        self._number = getattr(self, "_number", 0) + 1
        process = Process(f"{name}-{self.cycle[-2:]}-{self._number}", lambda _: command(), ended, skew_s)
        self.people[process] = None
        self.world.start(process)

    def _check_end(self) -> None:
        closed, (_, number) = self._closed(), self.invariants.newest_submission(self.cycle)
        outcome = closed["outcome"] if closed else "open"
        if outcome not in ("succeeded", "refused"):
            self.world.violate(5, f"cycle {self.cycle} has not ended by the end of the day: {outcome}")
        if number > MAX_SUBMISSIONS:
            self.world.violate(5, f"cycle {self.cycle} needed {number} submissions")
