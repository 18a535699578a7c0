"""One evaluation on this rank: what it says of a device that failed, and which partitions it judges by."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.evaluate import run
from pipeline.parallel.world import World

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("is_known", [False, True])
def test_an_error_of_the_device_is_explained_where_it_is_known(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    failed = RuntimeError("execution failed")
    raised: Exception = TransientError("the device is gone") if is_known else failed

    @contextmanager
    def ranks(*args: Any, **more: Any) -> Iterator[tuple[None, None]]:
        yield None, None

    def fail(*args: Any) -> None:
        raise failed

    monkeypatch.setattr(run, "open_ranks", ranks)
    monkeypatch.setattr(run, "Evaluation", fail)
    monkeypatch.setattr(run, "diagnose_device_error", lambda *args, **more: raised)
    settings = SimpleNamespace(backend=None, health=None, train=SimpleNamespace(collective_timeout_s=1))
    ctx = SimpleNamespace(world=World(), stop=StopSignal())
    with pytest.raises(type(raised)) as caught:
        run.run_evaluation(settings, ctx, None, [], {})  # type: ignore[arg-type]
    assert caught.value is raised and caught.value.__cause__ is (failed if is_known else None)
