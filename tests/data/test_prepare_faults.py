"""prepare() killed and stopped: nobody is left behind, and the next run ends with the same bytes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.data.config import DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.encode import ChunkRecord, Staging
from pipeline.proc import pool
from tests.kit.pool_worker import PoolWorker

CONFIG = DataConfig(
    synthetic=SyntheticConfig(num_queries=220),
    rows_per_chunk=100,
    num_workers=2,
    tokenizer=TokenizerConfig(vocab_size=800),
)
NUM_CHUNKS = 27
SCRIPT = """
import signal, sys
from pathlib import Path
from pipeline.core.errors import exit_code_of
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.prepare import prepare
from pipeline.io.storage import open_storage
stop = StopSignal()
signal.signal(signal.SIGTERM, lambda *_: stop.set("SIGTERM"))
folder = Path(sys.argv[1])
try:
    prepare(DataConfig.model_validate_json(sys.argv[2]), open_storage(str(folder / "workspace"), stop=stop),
            scratch=folder / "scratch", events=lambda name, **fields: None, stop=stop)
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit(exit_code_of(error))
"""


@pytest.fixture
def half_way(workplace: Any) -> Iterator[tuple[Any, subprocess.Popen[bytes], list[psutil.Process]]]:
    """A prepare that is halted with a few chunks done, and its worker processes."""
    for attempt in range(3):  # on a busy machine it may be done before anybody looks
        place = workplace(f"killed-{attempt}")
        child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(place.folder), CONFIG.model_dump_json()])
        try:
            if _halted(place, child):
                workers = psutil.Process(child.pid).children(recursive=True)
                assert workers
                yield place, child, workers
                return
        finally:
            child.kill()
            child.wait()
    pytest.fail("it ended before it could be halted")


def _halted(place: Any, child: subprocess.Popen[bytes]) -> bool:
    """Whether it could be, before its workers have the last chunks."""
    _wait_for(lambda: len(records(place.folder)) >= 3 or child.poll() is not None)
    child.send_signal(signal.SIGSTOP)
    return child.poll() is None and 3 <= len(records(place.folder)) < NUM_CHUNKS - CONFIG.num_workers


def records(folder: Path) -> list[Path]:
    return list((folder / "scratch").glob("tokens/*/records/*.json"))


def _wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def _finish_and_compare(place: Any, other: Any, monkeypatch: pytest.MonkeyPatch, *, num_torn: int = 0) -> None:
    """Run again: finished chunks are skipped, and every byte equals that of a run that was left alone."""
    finished, skipped = Staging.finished, []

    def spy(self: Staging, index: int) -> ChunkRecord | None:
        record = finished(self, index)
        if record:
            skipped.append(index)
        return record

    monkeypatch.setattr(Staging, "finished", spy)
    monkeypatch.setattr(pool, "_start", PoolWorker)
    num_records = len(records(place.folder))
    again = place.prepare(CONFIG)
    assert len(skipped) == num_records - num_torn > 0
    assert again == other.prepare(CONFIG)
    assert place.bytes_of(again.token_set_prefixes[0]) == other.bytes_of(again.token_set_prefixes[0])
    assert not list((place.folder / "scratch" / "tokens").iterdir()), "staging is gone after the commit"


@pytest.mark.fault
@pytest.mark.parametrize("is_killed", [True, False])
def test_killed_or_stopped_it_ends_everything_and_the_next_run_goes_on(
    half_way: Any, workplace: Any, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """After SIGTERM a torn shard is made again as well."""
    place, child, workers = half_way
    if is_killed:
        child.kill()
        child.wait()
    else:
        child.terminate()
        child.send_signal(signal.SIGCONT)
        assert child.wait(60) == 143
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "workers must notice that their parent is gone"
    assert not list((place.folder / "workspace").glob("tokens/catalogue/*/*.safetensors")), "nothing is half committed"
    if not is_killed:
        done = min(records(place.folder))
        name = next(iter(ChunkRecord.model_validate_json(done.read_bytes()).sizes_bytes))
        shard = done.parents[1] / "files" / name
        shard.write_bytes(shard.read_bytes()[:-1])
    _finish_and_compare(place, workplace("whole"), monkeypatch, num_torn=int(not is_killed))
