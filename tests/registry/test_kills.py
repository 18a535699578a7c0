"""Killed between any two writes, the registry tells the old state or the new one, and the next attempt finishes."""

import os
import signal
import threading
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest

from pipeline.io.storage import Storage, open_storage
from pipeline.registry.model import roll_back_model as roll_back
from pipeline.registry.promote import record_refusal
from pipeline.registry.records import Decision, history_key
from tests.kit.killing import FORK
from tests.kit.s3 import MotoServer
from tests.registry.cases import AUTHOR, MODEL, Dying, Killed, consistent, prefix, put
from tests.registry.conftest import FAST, Make

pytestmark = pytest.mark.fault

Action = Callable[[Storage], object]


def promoting(name: str, **changes: Any) -> Action:
    return lambda workspace: put(workspace, prefix(name), **changes)


def rolling_back(workspace: Storage) -> object:
    return roll_back(workspace, MODEL, prefix("a"), reason="bad", author=AUTHOR)


def refusing(workspace: Storage) -> object:
    return record_refusal(workspace, MODEL, prefix("c"), Decision(passed=False, reasons=("worse",)), AUTHOR)


ACTIONS = {
    "promote": (promoting("c"), ("promoted", prefix("c"))),
    "force": (promoting("c", passed=False, forced="why"), ("forced", prefix("c"))),
    "rollback": (rolling_back, ("rolled_back", prefix("a"))),
    "refuse": (refusing, ("refused", prefix("c"))),
}
OLD = [("promoted", prefix("a")), ("promoted", prefix("b"))]


def files_of(workspace: Storage) -> dict[str, bytes]:
    return {stat.key: workspace.read_bytes(stat.key) for stat in workspace.list("registry")}


def restore(workspace: Storage, files: dict[str, bytes]) -> None:
    workspace.delete([stat.key for stat in workspace.list("registry") if stat.key not in files])
    for key, data in files.items():
        workspace.write_bytes(key, data)


@pytest.fixture
def unfinished(workspace: Storage, make: Make) -> dict[str, bytes]:
    """Three checkpoints; b is in production, and its promoter died before its entry was in the log. The files."""
    for name in ("a", "b", "c"):
        make(name)
    put(workspace, prefix("a"))
    with pytest.raises(Killed):
        put(cast(Storage, Dying(workspace, 2, after=False)), prefix("b"))
    assert workspace.read_bytes(history_key(MODEL)).count(b"\n") == 1
    assert consistent(workspace).actions == OLD
    return files_of(workspace)


@pytest.mark.parametrize(
    ("workspace_uri", "name", "after"),
    [*(("file", name, after) for name in ACTIONS for after in (False, True)), ("s3", "promote", False)],
    indirect=["workspace_uri"],
)
def test_killed_at_every_write(workspace: Storage, unfinished: dict[str, bytes], name: str, after: bool) -> None:
    action, told = ACTIONS[name]
    killed = 0
    for number in count(1):
        restore(workspace, unfinished)
        try:
            action(cast(Storage, Dying(workspace, number, after)))
        except Killed:
            killed += 1
            assert consistent(workspace).actions in (OLD, [*OLD, told])
            action(workspace)
            assert consistent(workspace).actions == [*OLD, told], "told once, however often it was tried"
        else:
            break
    assert killed == (1 if name == "refuse" else 3)


@pytest.mark.parametrize("workspace_uri", ["s3"], indirect=True)
def test_kill_9_around_every_put(
    workspace: Storage, workspace_uri: str, unfinished: dict[str, bytes], server: MotoServer
) -> None:
    """The server kills the promoter when a request arrives: the n-th PUT, which is lost or not, or the one after."""
    requests, started = list[str](), threading.Event()
    child = FORK.Process(target=lambda: None)

    def promoter() -> None:
        put(open_storage(workspace_uri, retry=FAST), prefix("c"))

    def run(kill_at: int) -> int:
        nonlocal child
        requests.clear()
        started.clear()
        child = FORK.Process(target=promoter)
        server.watcher = lambda method, path: watch(method, kill_at)
        child.start()
        started.set()
        child.join()
        server.watcher = None
        server.settle()
        assert child.exitcode is not None
        return child.exitcode

    def watch(method: str, kill_at: int) -> None:
        requests.append(method)
        if len(requests) == kill_at:
            started.wait(60)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    assert run(0) == 0
    puts = [number for number, method in enumerate(requests, start=1) if method == "PUT"]
    assert len(puts) == 3
    for number in sorted({*puts, *(put_ + 1 for put_ in puts[:-1])}):
        restore(workspace, unfinished)
        assert run(number) == -signal.SIGKILL
        assert consistent(workspace).actions in (OLD, [*OLD, ("promoted", prefix("c"))])
    put(workspace, prefix("c"))
    assert consistent(workspace).actions == [*OLD, ("promoted", prefix("c"))]
