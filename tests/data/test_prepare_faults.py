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
from pipeline.data.partition import NamedPartition
from pipeline.proc import pool
from tests.pool_worker import PoolWorker

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
    _wait_for(lambda: len(parts(place.folder)) >= 3 or child.poll() is not None)
    child.send_signal(signal.SIGSTOP)
    return child.poll() is None and 3 <= len(parts(place.folder)) < NUM_CHUNKS - CONFIG.num_workers


def parts(folder: Path) -> list[Path]:
    """What proves the chunks that are done."""
    return list((folder / "workspace").glob("tokens/catalogue/share/*/*.safetensors"))


def _wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def _finish_and_compare(place: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run again: finished chunks are skipped, and every byte equals that of a run that was left alone."""
    there, made, publish = {path.stem for path in parts(place.folder)}, list[str](), NamedPartition.publish

    def spy(self: NamedPartition, name: str, files: Any) -> None:
        made.append(name)
        publish(self, name, files)

    monkeypatch.setattr(pool, "_start", PoolWorker)
    with monkeypatch.context() as patch:
        patch.setattr(NamedPartition, "publish", spy)
        again = place.prepare(CONFIG)
    assert there and not there & set(made) and len(there) + len(made) == NUM_CHUNKS
    assert again == other.prepare(CONFIG)
    assert place.bytes_of(again.token_set_prefixes[0]) == other.bytes_of(again.token_set_prefixes[0])
    assert not parts(place.folder), "parts are gone after the commit"
    assert not list((place.folder / "scratch" / "prepare").iterdir()), "and so is what was staged"


@pytest.mark.fault
def test_kill_9_then_again(half_way: Any, workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place, child, workers = half_way
    child.kill()
    child.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "workers must notice that their parent is gone"
    assert not list((place.folder / "workspace").glob("tokens/catalogue/*/MANIFEST.json")), "nothing is half committed"
    _finish_and_compare(place, workplace("whole"), monkeypatch)


@pytest.mark.fault
def test_sigterm_ends_everything_and_a_torn_shard_is_made_again(
    half_way: Any, workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, child, workers = half_way
    child.terminate()
    child.send_signal(signal.SIGCONT)
    assert child.wait(60) == 143
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
    part = min(parts(place.folder))
    shard = place.folder / "workspace/tokens/catalogue" / part.parent.name / f"train-{part.name}"
    shard.write_bytes(shard.read_bytes()[:-1])
    part.unlink()  # as where a chunk was published in part
    _finish_and_compare(place, workplace("whole"), monkeypatch)
