"""What can go wrong with a request, and how often in one history."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from botocore.exceptions import ReadTimeoutError

from tests.jobs.targets.faults import client_error
from tests.simulation.world import DAY_S, EPOCH, Died, World

Refusal = Callable[[], Exception]
"""Makes an error. An error that is raised again and again would keep all of its tracebacks."""
slow_down: Refusal = partial(client_error, "SlowDown", status=503)
throttled_ml: Refusal = partial(client_error, "ThrottlingException", status=400)
throttled: Refusal = partial(client_error, "TooManyRequestsException", status=429)
server_error: Refusal = partial(client_error, "ServerException", status=500)

CRITICAL = ("production.json", "serving.json", "history.jsonl", "verdict.json", "closed.json", "MANIFEST.json")
"""Names of objects whose writes fail more often, because they decide what a cycle leaves behind.

So do the requests that start jobs."""
SUBMITTING = ("submit_job", "submit_service_job", "create_training_job")

REQUEST_FAULTS = ("refused", "lost", "die_before", "die_after", "slow", "freeze", "outage")
"""refused: not executed (503, 429 or 500). lost: executed, but the response is lost. die: SIGKILL before or after the
request is executed. slow: up to 20 s. freeze: the process stands still for longer than its lease. outage: all
requests to the service fail for up to 5 minutes."""
JOB_FAULTS = ("transient", "bug", "host_lost", "no_start", "hang", "sigterm", "no_capacity", "misconfigured")
PEOPLE = ("twin_driver", "cancel", "roll_back", "second_retry", "look", "clock_jump", "race")
"""race: a second command starts just before a write that it competes with, and the write is delayed."""


@dataclass(frozen=True)
class Weather:
    """The probability of each fault in one history.

    Every history has only some kinds of faults (swarm testing), because a history with all of them rarely gets far.
    """

    requests: tuple[tuple[str, float], ...]
    jobs: dict[str, float]
    people: dict[str, float]
    lag_s: float
    page_size: int
    until_s: float = 16 * 3600.0
    """Time of day from which nothing goes wrong any more, so that every cycle has time to end."""
    most: int = 40
    """Number of faults in one history."""

    def happens(self, world: World, what: str, rate: float = 1.0) -> bool:
        """Decide whether a fault happens now, and count it."""
        is_drawn = rate >= 1.0 or world.faults_rng.random() < rate
        is_time = (world.now - EPOCH) % DAY_S < self.until_s and world.num_faults < self.most
        return is_drawn and is_time and world.fault(what)

    @classmethod
    def clear(cls) -> "Weather":
        """Return the weather in which nothing goes wrong."""
        return cls((), {}, {}, 0.0, 1000)

    @classmethod
    def of(cls, rng: Random) -> "Weather":
        def some(kinds: tuple[str, ...], low: float, high: float) -> dict[str, float]:
            return {kind: low * (high / low) ** rng.random() for kind in kinds if rng.random() < 0.5}

        requests = some(REQUEST_FAULTS, 0.0005, 0.02)
        if "freeze" in requests:  # a process that stands still and one that dies meanwhile: see invariants.py
            requests = {kind: rate for kind, rate in requests.items() if not kind.startswith("die")}
        if "outage" in requests:
            requests["outage"] /= 10
        return cls(
            requests=tuple(requests.items()),
            jobs=some(JOB_FAULTS, 0.03, 0.3),
            people=some(PEOPLE, 0.1, 0.7),
            lag_s=rng.choice((0.0, 1.0, 5.0)),
            page_size=rng.choice((2, 5, 1000)),
        )


class Service:
    """Requests to one service, which take time, fail and are lost."""

    def __init__(self, world: World, weather: Weather, name: str, refused: tuple[Refusal, ...]) -> None:
        self.world, self.weather, self.name, self._refused = world, weather, name, refused
        self._total, self._down_until = sum(rate for _, rate in weather.requests), 0.0
        self.on_put: Callable[[str], bool] = lambda key: False
        """Called before each write. Returns whether something competes with it."""

    def request(self, doing: str, what: str, work: Callable[[], Any]) -> Any:
        """Execute a request of the current process. Raises what boto3 raises, or Died."""
        world = self.world
        world.sleep(0.005 + 0.05 * world.rng.random() ** 4)
        if world.current and world.current.troubles:
            world.meet_trouble(world.current)
        if doing == "put" and self.on_put(what):
            world.sleep(2 * world.faults_rng.random())
        fault = self._fault(doing, what)
        if fault == "die_before":
            self._die(world)
        elif fault == "slow":
            world.sleep(20 * world.faults_rng.random())
        elif fault == "freeze":
            world.sleep(60 + 120 * world.faults_rng.random())
        elif fault == "outage":
            self._down_until = world.now + 300 * world.faults_rng.random()
        if world.now < self._down_until or fault == "refused":
            raise world.faults_rng.choice(self._refused)()
        answer = work()
        if world.history is not None:
            world.log(self.name, doing, what)
        if fault == "die_after":
            self._die(world)
        if fault == "lost":
            raise ReadTimeoutError(endpoint_url="http://service")
        return answer

    def _fault(self, doing: str, what: str) -> str:
        world, drawn = self.world, self.world.faults_rng.random()
        if doing in SUBMITTING or (doing == "put" and what.endswith(CRITICAL)):
            drawn /= 10
        if drawn > self._total:
            return ""
        for kind, rate in self.weather.requests:
            drawn -= rate
            if drawn < 0:
                if kind == "freeze" and world.current and world.current.is_node:  # nodes do not have a lease
                    return ""
                return kind if self.weather.happens(world, f"{kind} at {self.name} {doing}") else ""
        return ""

    @staticmethod
    def _die(world: World) -> None:
        if world.current is not None:
            world.current.is_dead = True
        raise Died
