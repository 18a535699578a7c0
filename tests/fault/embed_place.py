"""A workspace with a promoted model and a catalogue, in which `trnpipe embed` runs as real processes and is killed."""

import hashlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import cli
from pipeline.checkpoint.save import Snapshot, commit_snapshot
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import TextTokenizer, train_tokenizer
from pipeline.embed.vectors import find_vectors
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import hf_config, to_hf
from pipeline.model.relevance import build_model
from tests.embed.checkpoints import state_of
from tests.fault.harness import CYCLE, Place, Run
from tests.fault.s3_server import S3Server
from tests.registry.cases import put

PHASES = ("start", "reading", "device", "write", "commit", "finish")
_WORDS = ("phone", "laptop", "camera", "drill", "kettle", "shoe", "black", "white", "large", "new", "case", "cable")


def made_up(rows: int, seed: int = 5) -> pa.Table:
    """Products of two to nine words."""
    words = np.random.default_rng(seed)
    titles = [" ".join(words.choice(_WORDS, words.integers(2, 10))) + f" {row}" for row in range(rows)]
    return pa.table({"product_id": [f"p{row}" for row in range(rows)], "title": titles})


def write_catalogue(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=5_000)
    return path


def snapshot(titles: list[str], model: ModelConfig) -> Snapshot:
    """A model that was never trained, with a tokenizer of these titles."""
    tokenizer = TextTokenizer(train_tokenizer(titles, TokenizerConfig(vocab_size=8192)))
    spec = InputSpec(
        vocab_size=tokenizer.vocab_size, pad_id=tokenizer.pad_id, labels=("no", "yes"), label_gains=(0.0, 1.0)
    )
    state = state_of(model, spec, tokenizer, cycle="c0", max_tokens=64)
    weights = to_hf(build_model(model, spec, 1).state_dict())
    return Snapshot(state, weights, {}, hf_config(model, spec), tokenizer.data)


def promote(place: Place, model: Snapshot) -> None:
    commit_snapshot(place.storage, model, place.folder / "snapshot")
    put(place.storage, "checkpoints/c0/step-1")


def flags(catalogue: Path, rows_per_part: int) -> tuple[str, ...]:
    return (
        "--backend=cpu",
        f"--embed.catalogue.path={catalogue}",
        f"--embed.output.rows-per-part={rows_per_part}",
        "--embed.output.carry-over=none",
        "--data.num-workers=1",
    )


def run_here(place: Place, *words: str) -> None:
    """Embed in this process, to the end: no start of a new one to wait for, where nobody kills it."""
    places = (f"--workspace={place.workspace}", f"--cycle={CYCLE}", f"--scratch={place.scratch}")
    assert cli.main(["embed", *places, *place.flags, *words]) == 0


def digests(storage: Storage) -> dict[str, str]:
    """sha256 of every file of the finished vectors; asserts that they are whole and that every id is there once."""
    verify_dir(storage, f"embeddings/{CYCLE}", deep=True)
    vectors = find_vectors(storage, CYCLE)
    ids: list[object] = []
    for part in range(len(vectors.info.parts)):
        ids += vectors.columns(part, ["id"])["id"].to_pylist()
    assert len(ids) == len(set(ids)) == vectors.info.rows
    return {
        stat.key: hashlib.sha256(storage.read_bytes(stat.key)).hexdigest()
        for stat in storage.list(f"embeddings/{CYCLE}")
    }


@dataclass(frozen=True)
class Seen:
    """What has been left so far (file:// only)."""

    parts: frozenset[str]
    records: frozenset[str]
    temps: int
    manifest: bool

    @property
    def open_parts(self) -> frozenset[str]:
        """Files of parts that no record proves."""
        return frozenset(name for name in self.parts if f"{name[5:10]}.json" not in self.records)


def look(place: Place) -> Seen:
    vectors = place.path / "embeddings" / CYCLE
    names = _names(vectors)
    folders = [path for path in (place.path / "cycles" / CYCLE / "embed").glob("parts-*")]
    records = {name for folder in folders for name in _names(folder)}
    return Seen(
        frozenset(name for name in names if name.startswith("part-")),
        frozenset(name for name in records if name.endswith(".json") and not name.startswith(".")),
        sum(name.startswith(".trnpipe-tmp-") for name in names),
        "MANIFEST.json" in names,
    )


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def kill_in(place: Place, phase: str, rng: random.Random, *, num_parts: int, start_s: float, part_s: float) -> str:
    """Start, kill -9 in that phase if it can be hit; what the process was doing, "" when it had ended."""
    before, num_events = look(place), len(place.events("embed_started"))
    run = place.start("embed")

    def started() -> bool:
        return len(place.events("embed_started")) > num_events

    conditions: dict[str, Callable[[], bool]] = {
        "start": lambda: True,
        "reading": started,
        "device": lambda: len(look(place).records) > len(before.records),
        "write": lambda: look(place).temps > before.temps,
        "commit": lambda: bool(look(place).open_parts - before.open_parts),
        "finish": lambda: len(look(place).records) == num_parts,
    }
    delays = {"start": rng.uniform(0.0, start_s), "reading": rng.uniform(0.0, 0.4), "device": rng.uniform(0.0, part_s)}
    if run.until(conditions[phase], every_s=0.0003):
        time.sleep(delays.get(phase, 0.0))
    return _killed(run, place, before, num_parts, phase)


def _killed(run: Run, place: Place, before: Seen, num_parts: int, phase: str) -> str:
    alive = run.is_alive
    run.kill()
    if not alive or run.process.returncode != -9:
        return ""
    after = look(place)
    if after.manifest:
        return "after the manifest"
    if len(after.records) == num_parts:
        return "finish, before the manifest"
    if after.open_parts - before.open_parts:
        return "commit, between a part and its record"
    if after.temps > before.temps:
        return "write of a part"
    return {"start": "start", "reading": "reading, before the first part"}.get(phase, "device, between parts")


def kill_in_upload(place: Place, phase: str, rng: random.Random, server: S3Server) -> str:
    """The same on S3: while a PUT of a part, of a record or of the manifest is being answered, or after a delay."""
    wanted = {
        "part": f"/embeddings/{CYCLE}/part-",
        "record": f"/cycles/{CYCLE}/embed/parts-",
        "marker": f"/embeddings/{CYCLE}/MANIFEST.json",
    }.get(phase)
    skip = rng.randint(0, 3) if phase != "marker" else 0
    ready, hit = threading.Event(), list[str]()

    def watch(method: str, path: str) -> None:
        nonlocal skip
        if wanted is None or method != "PUT" or wanted not in path or hit:
            return
        if skip:
            skip -= 1
            return
        hit.append(path)
        ready.wait(30)
        run.kill()

    num_events = len(place.events("embed_started"))
    server.watcher = watch
    try:
        run = place.start("embed")
        ready.set()
        if wanted is not None:
            run.until(lambda: False)
        else:
            if phase == "reading":
                run.until(lambda: len(place.events("embed_started")) > num_events)
            time.sleep(rng.uniform(0.0, 3.0 if phase == "start" else 2.0))
            alive = run.is_alive
            run.kill()
            hit += [phase] if alive else []
    finally:
        server.watcher = None
    run.wait()
    return f"PUT of a {phase}" if wanted and hit else phase if hit and run.process.returncode == -9 else ""
