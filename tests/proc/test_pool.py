import importlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.core.errors import DataError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.proc.pool import run_tasks


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with task functions that worker processes can import."""
    (tmp_path / "pool_tasks.py").write_text(
        "import os, signal, sys, time\n"
        "from pipeline.core.errors import DataError\n"
        "def times(factor, x): print('noise'); return factor * x\n"
        "def refuse(context, x): raise DataError('seen', expected='other', next_command='do')\n"
        "def bug(context, x): return 1 // 0\n"
        "def die(context, x): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def sleep(context, x): time.sleep(60)\n"
        "def imports(context, x): return 'torch' in sys.modules, os.environ['TOKENIZERS_PARALLELISM']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(name: str, tasks: Iterator[int], *, num_workers: int = 2, stop: StopSignal | None = None) -> list[object]:
    function = getattr(importlib.import_module("pool_tasks"), name)
    return list(
        run_tasks(function, 3, tasks, num_workers=num_workers, stop=stop or StopSignal(), doing="testing the pool")
    )


@pytest.mark.stage
@pytest.mark.usefixtures("functions")
def test_all_results_arrive_and_tasks_are_made_on_demand() -> None:
    held: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(9):
            held.append(number)
            yield number

    assert sorted(run("times", tasks(), num_workers=1)) == [3 * x for x in range(9)]  # type: ignore[type-var]
    assert held == list(range(9))


@pytest.mark.stage
@pytest.mark.usefixtures("functions")
def test_no_tasks_start_no_process() -> None:
    before = psutil.Process().children()
    assert run("times", iter([])) == []
    assert {*psutil.Process().children()} <= {*before}


@pytest.mark.stage
@pytest.mark.usefixtures("functions")
def test_errors_come_back_as_they_are() -> None:
    with pytest.raises(DataError, match="expected: other") as caught:
        run("refuse", iter([1]))
    assert caught.value.next_command == "do"
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run("bug", iter([1]))


@pytest.mark.fault
@pytest.mark.usefixtures("functions")
def test_a_dead_worker_is_a_transient_error_and_leaves_nobody() -> None:
    before = psutil.Process().children()  # a zygote, where other tests have used one
    with pytest.raises(TransientError, match="signal 9"):
        run("die", iter(range(5)))
    left = [child for child in psutil.Process().children() if child not in before]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.fault
@pytest.mark.usefixtures("functions")
def test_stop_ends_busy_workers() -> None:
    stop, before = StopSignal(), psutil.Process().children()

    def tasks() -> Iterator[int]:
        yield 1
        yield 2
        stop.set("SIGTERM")

    with pytest.raises(Preempted, match="testing the pool"):
        run("sleep", tasks(), stop=stop)
    assert {*psutil.Process().children()} <= {*before}  # a child of another test may have been taken away meanwhile


@pytest.mark.stage
@pytest.mark.usefixtures("functions")
def test_workers_do_without_torch_and_threads() -> None:
    assert run("imports", iter([1])) == [(False, "false")]
