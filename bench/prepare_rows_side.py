"""One worker of bench.prepare_rows in a process of its own, so that its peak of memory is its own."""

import argparse
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bench.embed_flow_side import MemoryPeak, cpu_seconds
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.io.storage import open_storage


class Shared(BaseModel):
    """What the share of one worker took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    """Of all partitions that were committed when this worker ended."""
    seconds: float
    cpu_s: float
    """Of this process and of the one that tokenises for it."""
    anonymous_bytes: int
    resident_bytes: int


def share(data: Path, place: Path, worker: int, workers: int) -> Shared:
    """Prepare a share of what lies in a folder, with the tokenizer beside it."""
    tokenizer = TokenizerConfig(path=str(data.parent / "tokenizer.json"))
    config = DataConfig(path=str(data), num_workers=1, workers=workers, tokenizer=tokenizer)
    with MemoryPeak() as memory:
        before, started = cpu_seconds(), time.monotonic()
        done = prepare(
            config,
            open_storage(str(place / "workspace")),
            worker=worker,
            scratch=place / f"scratch-{worker}",
            events=lambda *_, **__: None,
            stop=StopSignal(),
        )
        seconds, cpu_s = time.monotonic() - started, cpu_seconds() - before
    return Shared(
        rows=done.rows,
        seconds=seconds,
        cpu_s=cpu_s,
        anonymous_bytes=memory.anonymous_bytes,
        resident_bytes=memory.resident_bytes,
    )


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.prepare_rows_side", description=__doc__)
    parser.add_argument("data", type=Path, help="folder of the input, beside a tokenizer.json")
    parser.add_argument("place", type=Path, help="folder for workspace and scratch")
    parser.add_argument("worker", type=int)
    parser.add_argument("workers", type=int)
    arguments = parser.parse_args()
    done = share(arguments.data, arguments.place, arguments.worker, arguments.workers)
    print(done.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
