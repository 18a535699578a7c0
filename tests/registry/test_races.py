"""Several promoters and recorders at once: one winner, a pointer to a verified checkpoint at any time, no line lost."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.core.errors import TransientError
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.promote import promote, record_refusal
from pipeline.registry.records import Decision
from tests.kit.killing import FORK
from tests.registry.cases import AUTHOR, MODEL, consistent, passed, prefix, production
from tests.registry.conftest import FAST, Make

pytestmark = pytest.mark.fault

# One promotion is 22 requests, and the S3 server of the tests answers 100 a second.
ROUNDS = {"file": 100, "s3": 8}
WAIT_S = 60.0


def run_together(number: int, work: Callable[[int], object], watch: Callable[[], object]) -> None:
    """`work(0)` to `work(number - 1)` in processes of their own, and `watch()` again and again meanwhile."""
    children = [FORK.Process(target=work, args=(index,)) for index in range(number)]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        watch()
        children[0].join(0.02)
    for child in children:
        child.join()
        assert child.exitcode == 0


@pytest.mark.parametrize(("workspace_uri", "rounds"), list(ROUNDS.items()), indirect=["workspace_uri"])
def test_two_promoters(workspace: Storage, workspace_uri: str, make: Make, rounds: int) -> None:
    barrier, seen = FORK.Barrier(2, timeout=WAIT_S), FORK.Event()
    won: Any = FORK.Array("i", 2 * rounds)
    for racer in range(2):
        for step in (1, 2):
            make(f"r{racer}", step)

    def race(racer: int) -> None:
        mine = open_storage(workspace_uri, retry=FAST)
        for number in range(rounds):
            assert number < rounds // 2 or seen.wait(WAIT_S), "nobody watches"
            candidate = prefix(f"r{racer}", 1 + number % 2)  # another one than may be there from the last round
            expected, decision = production(mine), passed(mine, candidate)
            barrier.wait()
            try:
                pointer = promote(mine, MODEL, candidate, expected=expected, decision=decision, author=AUTHOR)
                won[2 * number + racer] = pointer.checkpoint == candidate
            except TransientError:
                pass
            barrier.wait()

    generations: list[int] = []

    def watch() -> None:
        pointer = production(workspace)
        if pointer is not None:
            assert verify_dir(workspace, pointer.checkpoint, deep=True).digest == pointer.digest
            generations.append(pointer.generation)
            seen.set()

    run_together(2, race, watch)
    watch()
    assert [won[2 * number] + won[2 * number + 1] for number in range(rounds)] == [1] * rounds
    told = consistent(workspace)
    winners = [f"r{0 if won[2 * number] else 1}" for number in range(rounds)]
    assert [entry.cycle for entry in told.history] == winners
    assert generations == sorted(generations) and len(set(generations)) > 1


@pytest.mark.parametrize(("workspace_uri", "lines"), [("file", 10), ("s3", 3)], indirect=["workspace_uri"])
def test_recorders_lose_nothing(workspace: Storage, workspace_uri: str, make: Make, lines: int) -> None:
    make("a")
    promote(workspace, MODEL, prefix("a"), expected=None, decision=passed(workspace, prefix("a")), author=AUTHOR)
    make("b")

    def record(recorder: int) -> None:
        mine = open_storage(workspace_uri, retry=FAST)
        for number in range(lines):
            record_refusal(mine, MODEL, prefix("b"), Decision(passed=False, reasons=(f"{recorder}/{number}",)), AUTHOR)

    run_together(4, record, lambda: consistent(workspace))
    reasons = [entry.reasons[0] for entry in consistent(workspace).history if entry.action == "refused"]
    assert sorted(reasons) == sorted(f"{recorder}/{number}" for recorder in range(4) for number in range(lines))
    for recorder in range(4):
        own = [reason for reason in reasons if reason.startswith(f"{recorder}/")]
        assert own == [f"{recorder}/{number}" for number in range(lines)], "in the order they were told"
