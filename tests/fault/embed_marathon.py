"""`python -m tests.fault.embed_marathon --kills 20 [--catalogue FILE] [--s3]`: embedding is killed until it is done.

Kills fall at random into reading, device, write and commit. Each cycle is restarted until it finishes and must then
equal, byte for byte, the one that nobody touched, with every id once; so must those of 2, 3 and 7 workers. Exit 0 when
all of them do.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq

from pipeline.checkpoint.save import Snapshot
from pipeline.model.config import ModelConfig
from tests.fault.embed_place import (
    PHASES,
    digests,
    flags,
    kill_in,
    kill_in_upload,
    made_up,
    promote,
    snapshot,
    write_catalogue,
)
from tests.fault.harness import Place
from tests.fault.kills import lose_scratch
from tests.fault.s3_server import S3Server

ROWS_PER_PART = 2_000
S3_PHASES = ("start", "reading", "part", "record", "marker")
WORKERS = (2, 3, 7)


def main() -> int:
    """Parse, kill, compare, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--catalogue", type=Path, help="Parquet file with product_id and title (default: 35,311 made up)"
    )
    parser.add_argument("--s3", action="store_true", help="workspace on S3 (a moto server in this process)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(S3Server()) if arguments.s3 else None
        if server is not None:
            os.environ.update(server.env)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="trnpipe-embed-")))
        catalogue = arguments.catalogue or write_catalogue(folder / "in" / "rows.parquet", made_up(35_311))
        return _Marathon(catalogue, folder, server, random.Random(arguments.seed)).run(arguments.kills)


class _Marathon:
    def __init__(self, catalogue: Path, folder: Path, server: S3Server | None, rng: random.Random) -> None:
        titles = pq.read_table(catalogue, columns=["title"])["title"].to_pylist()
        self._model: Snapshot = snapshot([title or "" for title in titles], ModelConfig(preset="tiny"))
        self._flags = flags(catalogue, ROWS_PER_PART)
        self._folder, self._server, self._rng = folder, server, rng
        self._num_parts = 0

    def run(self, wanted: int) -> int:
        started = time.monotonic()
        whole = self._whole()
        whole_s = time.monotonic() - started
        print(f"reference: {len(whole) - 2} files of parts in {whole_s:.0f} s", flush=True)
        problems = [f"{workers} workers" for workers in WORKERS if not self._shared(whole, workers)]
        counts, cycles = Counter[str](), 0
        while counts.total() < wanted:
            cycles += 1
            place = self._place(f"cycle-{cycles}")
            counts.update(self._kill_some(place, min(self._rng.randint(3, 7), wanted - counts.total()), whole_s))
            place.run("embed")
            same = digests(place.storage) == whole
            problems += [] if same else [f"cycle {cycles}"]
            print(f"cycle {cycles}: {'identical' if same else 'DIFFERENT'}, {counts.total()} kills so far", flush=True)
        print(f"{'DIFFERENT: ' + ', '.join(problems) if problems else 'ALL IDENTICAL'}: {counts.total()} kills")
        for what, number in sorted(counts.items()):
            print(f"  {number:3d}  {what}")
        return bool(problems)

    def _place(self, name: str) -> Place:
        folder = self._folder / name
        folder.mkdir()
        place = (
            Place(str(folder / "workspace"), folder, self._flags)
            if self._server is None
            else Place(f"s3://{self._server.bucket}/{name}", folder, self._flags, self._server.env)
        )
        promote(place, self._model)
        return place

    def _whole(self) -> dict[str, str]:
        place = self._place("whole")
        place.run("embed")
        self._num_parts = int(place.result("embed")["figures"]["parts"])
        return digests(place.storage)

    def _shared(self, whole: dict[str, str], workers: int) -> bool:
        place = self._place(f"workers-{workers}")
        for worker in self._rng.sample(range(workers), workers):
            place.run("embed", f"--embed.workers={workers}", f"--embed.worker={worker}")
        same = digests(place.storage) == whole
        print(f"{workers} workers: {'identical' if same else 'DIFFERENT'}", flush=True)
        return same

    def _kill_some(self, place: Place, wanted: int, whole_s: float) -> list[str]:
        """Kill `wanted` times; a process that ended before its moment counts as no kill."""
        hits: list[str] = []
        for _ in range(3 * wanted):
            if len(hits) == wanted or place.storage.stat("embeddings/c1/MANIFEST.json"):
                break
            if self._server is None:
                phase = self._rng.choice(PHASES)
                part_s = whole_s / max(1, self._num_parts)
                doing = kill_in(place, phase, self._rng, num_parts=self._num_parts, start_s=3.0, part_s=part_s)
            else:
                phase = self._rng.choice(S3_PHASES)
                doing = kill_in_upload(place, phase, self._rng, self._server)
                if self._rng.random() < 0.3:
                    lose_scratch(place)
            if doing:
                hits.append(doing)
                print(f"  kill in {phase}: {doing}", flush=True)
        return hits


if __name__ == "__main__":
    sys.exit(main())
