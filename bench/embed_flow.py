"""Memory and time of offline embedding as the catalogue grows, without the model: `python -m bench.embed_flow`."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.embed_flow_side import MAX_TOKENS, WIDTH, Passed
from bench.results import ROOT, Figure, Result, Target, figure, finish
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import train_tokenizer

NAME = "embed_flow"
TITLE = "Memory of offline embedding from 1 to 10 million rows, the model replaced by a table"
METHOD = """
Made-up products (ids as text; titles of 3 to 15 words, 9 on average; 1 % without a title, 0.1 % with the id of another)
in Parquet files of 500,000 rows. Each size in a process of its own, default settings, with as many processes that
tokenise as there are cores: plan, read, judge, tokenise, batch, write vectors of 384 x fp16, look for duplicates over
all parts, commit. A vector is a row of a table instead of a model's answer. Memory is that of all processes together
every 50 ms, anonymous: heaps and stacks, without code and page cache. memory: the largest peak of any size / the
smallest. time: CPU seconds a row of all processes, with the most rows / with the fewest; 1 is linear growth. wall_time:
the same by the clock, which other work on the machine lengthens.
"""
TARGET = Target(figure="memory", comparison="<=", value=1.25)
FILE_ROWS, GROUP_ROWS = 500_000, 100_000
BAD_EVERY, AGAIN_EVERY = 100, 1000
_WORDS = 6000
_SYLLABLES = ("ba", "cor", "de", "fil", "gra", "hex", "ki", "lum", "mo", "nex", "or", "pla", "qui", "ro", "sta", "tri")


def made_up_words(random: np.random.Generator) -> pa.Array:
    """Words of two to four syllables, every sixth a number with a unit."""
    units = ("gb", "mm", "inch", "w", "ml", "")
    words = ["".join(random.choice(_SYLLABLES, random.integers(2, 5))) for _ in range(_WORDS)]
    words[::6] = [f"{random.integers(1, 2000)}{units[place % len(units)]}" for place in range(len(words[::6]))]
    return pa.array(words)


def made_up_rows(number: int, rows: int, words: pa.Array) -> pa.Table:
    """File `number` of the catalogue. Few words are in most titles, as in any language."""
    random = np.random.default_rng([number, 7])
    offsets = np.concatenate([[0], np.cumsum(random.integers(3, 16, rows))])
    chosen = (_WORDS * random.random(offsets[-1]) ** 3).astype(np.int32)
    titles = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), words.take(pa.array(chosen))), " ")
    place = np.arange(number * rows, (number + 1) * rows)
    titles = pc.if_else(pa.array(place % BAD_EVERY == BAD_EVERY // 2), None, titles)
    names = np.where(place % AGAIN_EVERY == 1, place - 1, place)
    ids = pc.binary_join_element_wise("sku", pc.cast(pa.array(names), pa.string()), "-")
    return pa.table({"product_id": ids, "title": titles})


def write_catalogue(folder: Path, files: int, file_rows: int) -> None:
    """Files and a tokenizer.json trained on titles of the first."""
    words = made_up_words(np.random.default_rng(3))
    for number in range(files):
        table = made_up_rows(number, file_rows, words)
        pq.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=GROUP_ROWS, compression="zstd")
        if not number:
            titles = [title for title in table["title"].slice(0, 20_000).to_pylist() if title]
            (folder / "tokenizer.json").write_bytes(train_tokenizer(titles, TokenizerConfig(vocab_size=8192)))


def embed(catalogue: Path, files: int, place: Path) -> Passed:
    """One size in a process of its own. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "bench.embed_flow_side", str(catalogue), str(files), str(place)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(place)
    return Passed.model_validate_json(done.stdout)


def figures_of(passed: dict[int, Passed]) -> list[Figure]:
    """By number of rows."""

    peaks = [one.anonymous_bytes for one in passed.values()]
    (few, small), (many, large) = min(passed.items()), max(passed.items())
    figures = [
        figure("memory", max(peaks) / min(peaks), "x", "largest peak of anonymous memory / smallest"),
        figure("time", large.cpu_s / many / (small.cpu_s / few), "x", "CPU seconds a row, most rows / fewest"),
        figure("wall_time", large.seconds / many / (small.seconds / few), "x", "seconds a row, most rows / fewest"),
    ]
    for rows, one in passed.items():
        millions, name, size = rows / 1e6, f"{rows / 1e6:g}m", f"{rows:,} rows"
        mib = {"anonymous": one.anonymous_bytes, "resident": one.resident_bytes, "start": one.start_bytes}
        texts = {"anonymous": "peak of anonymous memory", "resident": "with code and files", "start": "before the plan"}
        figures += [
            figure(f"{what}_{name}", mib[what] / 2**20, "MiB", f"{text}, {size}") for what, text in texts.items()
        ]
        figures += [
            figure(f"seconds_{name}", one.seconds / millions, "s", f"seconds a million rows, {size}"),
            figure(f"cpu_{name}", one.cpu_s / millions, "s", f"CPU seconds a million rows, {size}"),
            figure(f"plan_{name}", one.plan_s, "s", f"plan, {size}"),
            figure(f"finish_{name}", one.finish_s, "s", f"duplicates and commit, {size}"),
        ]
    return figures


def run(*, quick: bool) -> Result:
    """Make the catalogue once; embed its first files, then more."""
    file_rows, sizes = (5_000, (1, 2)) if quick else (FILE_ROWS, (2, 5, 10, 20))
    passed: dict[int, Passed] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "catalogue").mkdir()
        write_catalogue(folder / "catalogue", max(sizes), file_rows)
        for files in sizes:
            rows = files * file_rows
            passed[rows] = one = embed(folder / "catalogue", files, folder / "place")
            check(one, rows)
            print(f"  {rows:,} rows: {one.seconds:.0f} s, {one.anonymous_bytes / 2**20:.0f} MiB", flush=True)
    return finish(
        NAME,
        TITLE,
        METHOD,
        figures_of(passed),
        quick=quick,
        target=TARGET,
        also=shown(list(passed)),
        settings={"width": WIDTH, "max_tokens": MAX_TOKENS, "file_rows": file_rows},
    )


def check(one: Passed, rows: int) -> None:
    """Every usable row has its vector. Raises RuntimeError."""
    bad = rows // BAD_EVERY + rows // AGAIN_EVERY
    if (one.rows, one.bad) != (rows - bad, bad):
        raise RuntimeError(f"{one.rows:,} vectors and {one.bad:,} bad of {rows:,} rows; expected {bad:,} bad")


def shown(sizes: Sequence[int]) -> tuple[str, ...]:
    """Figures for the table."""
    few, many = (f"{rows / 1e6:g}m" for rows in (min(sizes), max(sizes)))
    return (f"anonymous_{few}", f"anonymous_{many}", "time", f"cpu_{many}", f"seconds_{many}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few rows: proves that the script works")
    run(quick=parser.parse_args().quick)
