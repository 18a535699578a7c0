"""`trnpipe search`, `encode` and `score`, which use the served model, the model of a cycle, or a given checkpoint."""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

import numpy as np
from rich.cells import cell_len, set_cell_size

from pipeline.backends import auto_uses_xla_cpu, host_backend
from pipeline.commands import ToolCall
from pipeline.core.errors import EXIT_OK, ConfigError, DataError
from pipeline.core.format import aligned
from pipeline.core.progress import Say, use_display
from pipeline.core.stop import StopSignal
from pipeline.data.input_files import open_files
from pipeline.data.rows import RowChunk, cut_chunks, plan_columns
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.validate import CleanRows
from pipeline.inference.model import Hit, Kind, Model, Order, PairScores, open_model
from pipeline.io.atomic import write_atomic
from pipeline.io.paths import temporary_folder, user_path
from pipeline.io.storage import open_storage, os_errors
from pipeline.registry.model import Registry, resolve_model_name
from pipeline.registry.records import one_line
from pipeline.settings import Settings
from pipeline.telemetry.console import Console

TOP, BY, BESIDE, CHECKPOINT, KIND, OUT, JSON = (
    "--top", "--by", "--beside", "--checkpoint", "--kind", "--out", "--json",
)  # fmt: skip
_MOST_HITS = 1000
_WIDTH = 80
"""Minimum width of the output in characters. On wider terminals, more of each title is shown."""
_CHUNK_ROWS = 10_000
_PREVIOUS, _PRODUCTION = "previous", "production"


def run_search(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Print the top products for a query. Raises ConfigError, CheckpointError, DataError, Preempted."""
    query, top, by = call.arguments[0], call.number(TOP, 10, _MOST_HITS), call.options.get(BY, "vectors")
    models, beside = [_open(settings, stop, settings.cycle)], call.options.get(BESIDE)
    if beside is not None:
        models.append(_open(settings, stop, _cycle_of(settings, stop, beside)))
    with use_display(Console(stream=sys.stderr).progress):  # the first search builds the index
        results = [model.search(query, top, cast(Order, by)) for model in models]
    if len({model.index.mapped.vectors_digest for model in models}) < len(models):
        raise ConfigError(
            f"both columns would show the vectors of cycle {models[0].index.mapped.cycle}",
            expected=f"two different models, such as {BESIDE} {_PREVIOUS} for the previously served model",
            next_command=f"{BESIDE} {_PREVIOUS}, or --cycle CYCLE for a different first column",
        )
    if JSON in call.switches:
        columns = [
            {"model": model.checkpoint.uri, "hits": [*map(asdict, hits)]}
            for model, hits in zip(models, results, strict=True)
        ]
        say(json.dumps({"query": query, "by": by, "columns": columns}, indent=1, ensure_ascii=False))
        return EXIT_OK
    width = max(_WIDTH, shutil.get_terminal_size().columns)
    if beside is None:
        say(f"{one_line(query)} | {models[0].name}, {len(models[0].index):,} products, by {by}")
        lines = _one_column(results[0], by)
    else:
        say(f"{one_line(query)} | by {by}")
        lines = two_columns(results[0], results[1], (models[0].name, models[1].name), width)
        lines.append("+2 means two ranks higher than on the right, and new means not listed on the right")
    for line in lines:
        say(_cut(line, width))
    if not results[0]:
        say(f"no product has a word in common with {one_line(query)!r}")
    return EXIT_OK


def _one_column(hits: Sequence[Hit], by: str) -> list[str]:
    """Format the results as a table with a line per product, including its ranks in the other orders."""
    others = [order for order in get_args(Order) if order != by]
    rows = [["", "cosine", *others, "product"]]
    for rank, hit in enumerate(hits, 1):
        cosine = "-" if hit.cosine is None else f"{hit.cosine:.3f}"
        ranks = [str(hit.ranks.get(order, "-")) for order in others]
        rows.append([str(rank), cosine, *ranks, f"{one_line(hit.title)}  {one_line(str(hit.id))}"])
    return aligned(rows, left=(4,))


def two_columns(left: Sequence[Hit], right: Sequence[Hit], names: tuple[str, str], width: int) -> list[str]:
    """Format two lists of results side by side, with the rank change of each product from right to left."""
    room = (width - 4 - 2 - 5 - 2) // 2
    right_ranks = {hit.id: rank for rank, hit in enumerate(right, 1)}
    lines = [f"{'':4}{names[0]:<{room}}  {'':5}  {names[1]}"]
    for rank in range(max(len(left), len(right))):
        hit = left[rank] if rank < len(left) else None
        other_title = right[rank].title if rank < len(right) else ""
        moved = "" if hit is None else _moved(right_ranks.get(hit.id), rank + 1)
        texts = [set_cell_size(_cut(one_line(title), room), room) for title in (hit.title if hit else "", other_title)]
        lines.append(f"{rank + 1:>3} {texts[0]}  {moved:>5}  {texts[1]}".rstrip())
    return lines


def _cut(text: str, width: int) -> str:
    """Truncate a text to `width` terminal cells. A truncated text ends in an ellipsis."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"


def _moved(before: int | None, now: int) -> str:
    if before is None:
        return "new"
    return "=" if before == now else f"{before - now:+d}"


def _open(settings: Settings, stop: StopSignal, cycle: str, checkpoint: str = "") -> Model:
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    if auto_uses_xla_cpu(settings.backend, os.environ):  # compiling graphs for a few texts is not worthwhile
        settings = settings.model_copy(update={"backend": host_backend(compiles_graphs=False)})
    return open_model(settings, workspace, checkpoint, cycle, stop)


def _cycle_of(settings: Settings, stop: StopSignal, beside: str) -> str:
    """Return the cycle whose model is shown in the second column. Raises ConfigError if there is none."""
    if beside not in (_PREVIOUS, _PRODUCTION):
        return beside
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    registry = Registry(workspace, resolve_model_name(settings, workspace))
    served = registry.serving()
    pairs = [pair for pair in registry.pairs() if served and (pair == served) == (beside == _PRODUCTION)]
    if not pairs:
        raise ConfigError(
            f"model {registry.model!r} has no {'previously ' if served else ''}served vectors",
            expected="two cycles with vectors",
            next_command="trnpipe serving show",
        )
    return pairs[-1].vectors.cycle


def run_encode(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Print the vectors of texts as JSON lines, or write them to a file as a matrix.

    Raises ConfigError, CheckpointError, DataError, Preempted.
    """
    kind, out = call.options.get(KIND, "query"), call.options.get(OUT, "")
    if out and not out.endswith(".npy"):
        raise ConfigError(
            f"{OUT} {out}", expected="a .npy file, or no file for JSON lines", next_command=f"{OUT} {out}.npy"
        )
    texts = list(_lines(call.arguments[0] if call.arguments else "-"))
    vectors = _open(settings, stop, settings.cycle, call.options.get(CHECKPOINT, "")).encode(texts, cast(Kind, kind))
    if out:
        path = user_path(out)
        with os_errors("writing", path.as_uri()):
            write_atomic(path, lambda file: np.save(file, vectors, allow_pickle=False))
        say(f"encode: wrote {len(texts):,} vectors of {vectors.shape[1]} dimensions to {out}")
        return EXIT_OK
    for text, vector in zip(texts, vectors, strict=True):
        values = [float(f"{value:.7g}") for value in vector.tolist()]
        say(json.dumps({"text": text, "vector": values}, ensure_ascii=False))
    return EXIT_OK


def _lines(source: str) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input if `source` is "-".

    Raises DataError if a line is empty or not UTF-8.
    """
    path = None if source == "-" else user_path(source)
    with os_errors("reading", path.as_uri() if path else "standard input"):
        data = path.read_bytes() if path else sys.stdin.buffer.read()
    for number, line in enumerate(data.splitlines(), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            text = ""
        if not text:
            raise DataError(
                f"line {number} of {source} is {'empty' if not line.strip() else 'not UTF-8'}",
                expected="a text in every line, so that lines and vectors match",
                next_command="remove or correct the line",
            )
        yield text


def run_score(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Print the grade (or an error) of each row of a file as JSON lines.

    Raises DataError if there are too many errors. Also raises ConfigError, CheckpointError and Preempted.
    """
    model = _open(settings, stop, settings.cycle, call.options.get(CHECKPOINT, ""))
    reasons, scored = Counter[str](), 0
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
        source = call.arguments[0] if call.arguments else "-"
        for chunk in _chunks(model, settings, source if source != "-" else _spooled(Path(folder)), stop):
            rows, scores, bad = model.score_rows(chunk)
            scored += len(scores)
            for row in bad:
                reasons[row.reason] += row.count
            for line in _score_lines(chunk, rows, scores, bad):
                say(line)
    total = scored + reasons.total()
    print(
        f"score: {scored:,} of {total:,} rows" + "".join(f" | {n:,} {why}" for why, n in reasons.items()),
        file=sys.stderr,
    )
    if reasons.total() > settings.data.max_bad_fraction * total:
        raise DataError(
            f"{reasons.total():,} of {total:,} rows could not be scored",
            expected=f"at most {settings.data.max_bad_fraction:.0%} (data.max_bad_fraction)",
            next_command="check the output for lines with an error",
        )
    return EXIT_OK


def _chunks(model: Model, settings: Settings, path: str, stop: StopSignal) -> Iterator[RowChunk]:
    files = open_files(path, settings.data.format if settings.data.format != "esci" else "auto", stop, "FILE")
    plan = partial(plan_columns, model.row_config, judged=False)
    for stat, name in files.entries:
        single = replace(files, entries=((stat, name),))  # chunks must not span multiple files
        batches = single.read(lambda uri: partial(plan, file=uri), _CHUNK_ROWS, "scoring")
        yield from cut_chunks(stat.key, batches, _CHUNK_ROWS)


def _spooled(folder: Path) -> str:
    """Write standard input to a file. Input that starts with a brace is assumed to be JSON lines, and otherwise CSV."""
    data = sys.stdin.buffer.read()
    path = folder / ("stdin.jsonl" if data.lstrip()[:1] == b"{" else "stdin.csv")
    path.write_bytes(data)
    return str(path)


def _score_lines(chunk: RowChunk, rows: CleanRows, scores: PairScores, bad: Sequence[QuarantinedRow]) -> Iterator[str]:
    """Yield a JSON line with scores or an error for each row of a chunk, in the order of the rows."""
    wrong = {row.row for row in bad}
    usable = [number for number in chunk.rows.tolist() if number not in wrong]
    lines: dict[int, dict[str, object]] = {row.row: {"row": row.row, "error": row.reason} for row in bad}
    gains, probabilities = scores.gains.round(6).tolist(), scores.probabilities.round(6).tolist()
    scored = zip(usable, rows.query, rows.title, scores.grades, gains, probabilities, strict=True)
    for number, query, title, grade, gain, values in scored:
        lines[number] = {"row": number, "query": query, "title": title, "grade": grade, "gain": gain}
        lines[number]["probabilities"] = dict(zip(scores.labels, values, strict=True))
    for number in sorted(lines):
        yield json.dumps(lines[number], ensure_ascii=False)
