"""Collectives between all ranks, with contents by which a wrong rank, a stale buffer or a swapped chunk is seen.

Every call has a time limit, and each rank signs in before it. So a hang is not a hang: the ranks that never came are
named. Signing in goes through the store that torchrun's agent keeps, which outlives any rank.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.core.health import CheckResult, Verdict
from pipeline.core.stop import StopSignal

NAME = "collectives"
SIZES_BYTES = (8, 64 * 2**10, 4 * 2**20)
"""Of what each rank gives: latency, the middle, and a gradient bucket's order of size."""
_POLL_S = 0.05
_STORE_LIMIT_S = 60.0


class Store(Protocol):
    """What is needed of torch.distributed's TCPStore."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Ranks:
    """This rank among the others. `device`: where tensors must lie for the process group."""

    rank: int
    world_size: int
    store: Store
    device: torch.device
    limit_s: float
    stop: StopSignal

    def arrive(self, place: str) -> list[int]:
        """Sign in at `place` and wait for the others: the ranks that did not come in time, [] when all did."""
        self.store.set(_key(place, self.rank), "1")
        end = time.monotonic() + self.limit_s
        while missing := self.missing(place):
            self.stop.raise_if_set(f"waiting for rank {', '.join(map(str, missing))}")
            if time.monotonic() > end:
                break
            time.sleep(_POLL_S)
        return missing

    def missing(self, place: str) -> list[int]:
        return [rank for rank in range(self.world_size) if not self.store.check([_key(place, rank)])]


def agent_store(address: str, port: int, *, is_agent: bool = False) -> Any:
    """The store of torchrun's agent, as one more client of it (port 0: any, for an agent)."""
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(address, port, is_master=is_agent, wait_for_workers=False, timeout=timedelta(seconds=_STORE_LIMIT_S))


def join(ranks: Ranks, kind: str) -> CheckResult | None:
    """Bring up the process group of torchrun's environment; the verdict when a rank does not come or it fails."""
    if missing := ranks.arrive("start"):
        return _absent(missing, "start", ranks, {})
    try:
        dist.init_process_group(kind, timeout=timedelta(seconds=ranks.limit_s))
    except RuntimeError as error:
        return _broken("start", str(error).splitlines()[0], ranks, {})
    return None


def contents(source: int, target: int, turn: int, count: int) -> Tensor:
    """What rank `source` has for rank `target`, fp32 [count]: whole numbers below 2^12, so that sums are exact.

    It differs with source, target and turn, and along the tensor.
    """
    start = 997 * source + 389 * target + 101 * turn
    return ((torch.arange(count, dtype=torch.int64) * 7 + start) % 4093).to(torch.float32)


class Collective(Protocol):
    """Runs one on `ranks`; returns (what arrived here, what should have). `turn` makes contents new."""

    def __call__(self, ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]: ...


def _from_all(ranks: Ranks, target: int, turn: int, count: int) -> list[Tensor]:
    return [contents(source, target, turn, count) for source in range(ranks.world_size)]


def _wait(ranks: Ranks, call: Callable[[], dist.Work | None]) -> None:
    work = call()
    if work is not None:
        work.wait(timedelta(seconds=ranks.limit_s))


def all_reduce(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    mine = contents(ranks.rank, 0, turn, count).to(ranks.device)
    _wait(ranks, lambda: dist.all_reduce(mine, async_op=True))
    return mine, torch.stack(_from_all(ranks, 0, turn, count)).sum(0)


def all_gather(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    found = torch.zeros(count * ranks.world_size, device=ranks.device)
    mine = contents(ranks.rank, 0, turn, count).to(ranks.device)
    _wait(ranks, lambda: dist.all_gather_into_tensor(found, mine, async_op=True))
    return found, torch.cat(_from_all(ranks, 0, turn, count))


def broadcast(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    root = turn % ranks.world_size
    sent = contents(root, 0, turn, count)
    mine = sent.to(ranks.device) if ranks.rank == root else torch.zeros(count, device=ranks.device)
    _wait(ranks, lambda: dist.broadcast(mine, root, async_op=True))
    return mine, sent


def reduce_scatter(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    given = torch.cat([contents(ranks.rank, target, turn, count) for target in range(ranks.world_size)])
    found = torch.zeros(count, device=ranks.device)
    _wait(ranks, lambda: dist.reduce_scatter_tensor(found, given.to(ranks.device), async_op=True))
    return found, torch.stack(_from_all(ranks, ranks.rank, turn, count)).sum(0)


def all_to_all(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    given = torch.cat([contents(ranks.rank, target, turn, count) for target in range(ranks.world_size)])
    found = torch.zeros(count * ranks.world_size, device=ranks.device)
    _wait(ranks, lambda: dist.all_to_all_single(found, given.to(ranks.device), async_op=True))
    return found, torch.cat(_from_all(ranks, ranks.rank, turn, count))


COLLECTIVES: dict[str, Collective] = {
    "all-gather": all_gather,
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
    "broadcast": broadcast,
    "all-to-all": all_to_all,
}


def bus_factor(name: str, ranks: int) -> float:
    """Bytes over the slowest link for each byte a rank gives or gets (the nccl-tests convention for bus bandwidth)."""
    if name == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if name == "broadcast" else float(ranks - 1)


def check_collectives(
    ranks: Ranks,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    turns: int = 2,
    minimum_gb_s: float = 0.0,
    collectives: dict[str, Collective] | None = None,
) -> CheckResult:
    """Every collective at every size, on all ranks at once; `minimum_gb_s`: bus bandwidth of the largest all-reduce.

    The process group must be up. The first problem ends the check, on every rank with a verdict of its own.
    """
    figures: dict[str, float | int | str] = {}
    for name, collective in (collectives or COLLECTIVES).items():
        for size in sizes_bytes:
            count, best_s = max(1, size // 4), float("inf")
            for turn in range(turns):
                place = f"{name}/{size}/{turn}"
                ranks.stop.raise_if_set(f"checking {name}")
                if missing := ranks.arrive(place):
                    return _absent(missing, place, ranks, figures)
                started = time.monotonic()
                try:
                    found, expected = collective(ranks, count, turn)
                    host = found.cpu()
                except RuntimeError as error:  # time-out, lost peer
                    ranks.stop.raise_if_set(f"checking {name}")
                    return _broken(place, str(error).splitlines()[0], ranks, figures)
                best_s = min(best_s, time.monotonic() - started)
                if not torch.equal(host, expected):
                    return _wrong(place, host, expected, ranks, figures)
            figures[f"{name}_{size}_bytes_gb_s"] = float(
                f"{bus_factor(name, ranks.world_size) * count * 4 / best_s / 1e9:.3g}"
            )
    slowest = float(figures.get(f"all-reduce_{sizes_bytes[-1]}_bytes_gb_s", 0.0))
    if slowest < minimum_gb_s:
        return CheckResult(
            NAME,
            Verdict.RETRY,
            f"all-reduce reaches {slowest:.3g} GB/s bus bandwidth",
            f"at least {minimum_gb_s:g} GB/s",
            "this job elsewhere",
            figures,
        )
    return CheckResult(NAME, Verdict.PASS, figures=figures)


def _key(place: str, rank: int) -> str:
    return f"trnpipe/health/{place}/{rank}"


_problem = partial(CheckResult, NAME, Verdict.RETRY, expected="every rank in every collective, with its own contents")


def _absent(missing: list[int], place: str, ranks: Ranks, figures: dict[str, float | int | str]) -> CheckResult:
    who = ", ".join(map(str, missing))
    return _problem(
        seen=f"rank {who} of {ranks.world_size} did not arrive at {place} within {ranks.limit_s:g} s",
        next_command="look at the last lines of that rank; this job elsewhere",
        figures=figures,
    )


def _broken(place: str, reason: str, ranks: Ranks, figures: dict[str, float | int | str]) -> CheckResult:
    """All signed in and the call failed: whoever does not sign out is the one that died or hangs."""
    left = f"{place}/left"
    missing = ranks.arrive(left)
    who = f"rank {', '.join(map(str, missing))} was lost in" if missing else "no rank came through"
    return _problem(
        seen=f"{who} {place}: {reason}",
        next_command="look at the last lines of that rank; this job elsewhere",
        figures=figures,
    )


def _wrong(
    place: str, found: Tensor, expected: Tensor, ranks: Ranks, figures: dict[str, float | int | str]
) -> CheckResult:
    wrong = (found != expected).nonzero().reshape(-1)
    first = int(wrong[0])
    chunk = first * ranks.world_size // len(expected) if len(expected) >= ranks.world_size else 0
    whose = f" (from rank {chunk})" if place.startswith(("all-gather", "all-to-all")) else ""
    return _problem(
        seen=f"rank {ranks.rank} got {len(wrong)} wrong numbers of {len(expected)} from {place}, "
        f"the first at {first}{whose}: {float(found[first]):g} for {float(expected[first]):g}",
        next_command="this job elsewhere; take the machine out of service if it fails again",
        figures=figures,
    )
