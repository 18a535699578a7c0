"""Rows a second of each core, and memory, of preparing as the judgements grow: `python -m bench.prepare_rows`."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.embed_flow import made_up_rows, made_up_words
from bench.prepare_rows_side import Shared
from bench.results import ROOT, Figure, Result, Target, figure, finish
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import train_tokenizer

NAME = "prepare_rows"
TITLE = "Memory of preparing judgements as an array of two, from 1 to 50 million rows"
METHOD = """
Made-up judgements (queries of 1 to 4 words with 20 products each, titles of 3 to 15 words, four labels with gains; 1 %
without a title) in Parquet files of 500,000 rows, of two days. Each size by two workers of an array at once, each a
process that reads and one that tokenises, with default settings, labels found in the data, a given tokenizer, a
workspace on the disk: survey, read, judge, tokenise, lexical features, pack, write, account, commit. rate: rows / CPU
seconds of all four processes, with the most rows. time: CPU seconds a row, most rows / fewest; 1 is linear growth.
memory: of one worker with its tokenising process, the larger one, anonymous (heaps and stacks), the largest peak of any
size / the smallest.
"""
TARGET = Target(figure="memory", comparison="<=", value=1.25)
WORKERS = 2
FILE_ROWS, GROUP_ROWS, PER_QUERY = 500_000, 100_000, 20
BAD_EVERY = 100
MILLIONS = (1, 10, 50)
_GAINS = {"irrelevant": 0.0, "complement": 0.01, "substitute": 0.1, "exact": 1.0}


def made_up_judgements(number: int, rows: int, words: pa.Array) -> pa.Table:
    """File `number` of the day."""
    random = np.random.default_rng([number, 11])
    titles = made_up_rows(number, rows, words)
    queries = -(-rows // PER_QUERY)
    offsets = np.concatenate([[0], np.cumsum(random.integers(1, 5, queries))])
    chosen = words.take(pa.array((len(words) * random.random(offsets[-1]) ** 3).astype(np.int32)))
    texts = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), chosen), " ")
    grade = random.integers(0, len(_GAINS), rows)
    return pa.table(
        {
            "query": texts.take(pa.array(np.arange(rows) // PER_QUERY)),
            "title": titles["title"],
            "product_id": titles["product_id"],
            "label": pa.array(list(_GAINS)).take(pa.array(grade)),
            "gain": pa.array(np.array(list(_GAINS.values()))[grade]),
        }
    )


def add_files(folder: Path, there: int, files: int, rows: int) -> None:
    """Files up to number `files`, the days in turn, and a tokenizer.json trained on titles of the first."""
    words = made_up_words(np.random.default_rng(3))
    for number in range(there, files):
        table = made_up_judgements(number, rows, words)
        day = folder / "data" / f"dt=2026-01-0{1 + number % WORKERS}"
        day.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, day / f"part-{number:03d}.parquet", row_group_size=GROUP_ROWS, compression="zstd")
        if not number:
            titles = [title for title in table["title"].slice(0, 20_000).to_pylist() if title]
            (folder / "tokenizer.json").write_bytes(train_tokenizer(titles, TokenizerConfig(vocab_size=8192)))


def share(folder: Path) -> list[Shared]:
    """Both workers at once. Raises RuntimeError when one fails."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        words = [sys.executable, "-m", "bench.prepare_rows_side", str(folder / "data"), place]
        children = [
            subprocess.Popen([*words, str(worker), str(WORKERS)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for worker in range(WORKERS)
        ]
        said = [child.communicate()[0] for child in children]
        if any(child.returncode for child in children):
            raise RuntimeError(f"workers ended with {[child.returncode for child in children]}")
    return [Shared.model_validate_json(text) for text in said]


def figures_of(shared: dict[int, list[Shared]]) -> list[Figure]:
    """By number of rows."""
    cpu_s = {rows: sum(one.cpu_s for one in done) for rows, done in shared.items()}
    peaks = {rows: max(one.anonymous_bytes for one in done) for rows, done in shared.items()}
    few, many = min(shared), max(shared)
    figures = [
        figure("memory", max(peaks.values()) / min(peaks.values()), "x", "largest peak of anonymous memory / smallest"),
        figure("rate", many / cpu_s[many], "rows/s", f"rows a second of a core, {many:,} rows"),
        figure("time", (cpu_s[many] / many) / (cpu_s[few] / few), "x", "CPU seconds a row, most rows / fewest"),
    ]
    for rows, done in shared.items():
        name, size = f"{rows / 1e6:g}m", f"{rows:,} rows"
        seconds = max(one.seconds for one in done)
        resident = max(one.resident_bytes for one in done)
        figures += [
            figure(f"rate_{name}", rows / cpu_s[rows], "rows/s", f"rows a second of a core, {size}"),
            figure(f"seconds_{name}", seconds / (rows / 1e6), "s", f"seconds a million rows by both workers, {size}"),
            figure(f"anonymous_{name}", peaks[rows] / 2**20, "MiB", f"peak of anonymous memory of a worker, {size}"),
            figure(f"resident_{name}", resident / 2**20, "MiB", f"with code and files, {size}"),
        ]
    return figures


def run(*, quick: bool, most: float = MILLIONS[-1]) -> Result:
    """Add files, and prepare all there are in a fresh workspace. `most`: millions of rows to go up to."""
    file_rows, sizes = (2000, (1, 3)) if quick else (FILE_ROWS, tuple(2 * one for one in MILLIONS if one <= most))
    shared: dict[int, list[Shared]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, there = Path(name), 0
        for files in sizes:
            add_files(folder, there, files, file_rows)
            there, rows = files, files * file_rows
            shared[rows] = done = share(folder)
            good = rows - rows // BAD_EVERY
            if max(one.rows for one in done) != good:
                raise RuntimeError(f"{max(one.rows for one in done):,} rows prepared; expected {good:,}")
            print(f"  {rows:,} rows: {max(one.seconds for one in done):.0f} s", flush=True)
    also = (f"rate_{min(shared) / 1e6:g}m", "rate", "time", f"anonymous_{max(shared) / 1e6:g}m")
    settings: dict[str, str | int | float] = {"workers": WORKERS, "file_rows": file_rows}
    return finish(NAME, TITLE, METHOD, figures_of(shared), quick=quick, target=TARGET, also=also, settings=settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few rows: proves that the script works")
    parser.add_argument("--millions", type=float, default=MILLIONS[-1], help="rows to go up to (default: 50)")
    given = parser.parse_args()
    run(quick=given.quick, most=given.millions)
