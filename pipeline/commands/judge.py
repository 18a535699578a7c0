"""`trnpipe judge`, which converts impressions and clicks to judgements."""

import shlex
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.commands import ToolCall
from pipeline.core.arrays import Float64s
from pipeline.core.errors import EXIT_OK, ConfigError, DataError
from pipeline.core.format import aligned, format_percent
from pipeline.core.progress import Say, use_display
from pipeline.core.stop import StopSignal
from pipeline.data.click_model import ClickCounts, estimate_propensities, estimate_rates
from pipeline.data.impressions import ClickLog
from pipeline.data.input_files import open_files
from pipeline.data.rows import CLICK_COLUMNS
from pipeline.data.survey import names_text
from pipeline.embed.catalogue import CatalogueColumns
from pipeline.io.storage import open_parent
from pipeline.settings import Settings
from pipeline.telemetry.console import Console

OUT, PRODUCTS, POSITION, CLICKED, MAX_WIDTH = "--out", "--products", "--position", "--clicked", "--max-width"
GRADES = ("0", "1", "2", "3")
"""The labels if data.labels is not set. Pairs that are clicked as often as an average clicked pair get the last one."""
_DEFAULT_WIDTH = 75
"""In percent of a gain of 1. With 20 simulated impressions of each pair of the synthetic catalogue, the nDCG@10 on true
judgements was 0.932 for 75, 0.927 for 90 and 0.955 for training on true judgements (tiny model, one run each, standard
error of the difference 0.004). With boosting, it was 0.927 for 75, 0.937 for 90, but only 0.815 for 50."""
_SHOWN_POSITIONS = 20
_BATCH_ROWS = 65_536


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Write a Parquet file of judgements.

    Raises ConfigError if an option is invalid, and DataError if the log does not suffice to judge any pair.
    """
    out, products = call.options.get(OUT, ""), call.options.get(PRODUCTS)
    max_width = call.number(MAX_WIDTH, _DEFAULT_WIDTH, 100)
    if not out.endswith(".parquet"):
        raise ConfigError(f"{OUT} {out!r}", expected="a Parquet file or URI", next_command=f"{OUT} judgements.parquet")
    storage, key = open_parent(out, retry=settings.storage, stop=stop, follow_links=True)
    data, labels = settings.data, settings.data.labels or GRADES
    position, clicked = call.options.get(POSITION, "position"), call.options.get(CLICKED, "clicked")
    log = ClickLog(data, position, clicked, has_titles=products is None)
    with use_display(Console(stream=sys.stderr).progress):
        file_format = "auto" if data.format == "esci" else data.format
        log.read(open_files(call.arguments[0], file_format, stop, "LOG", settings.storage))
        counts, query, product = log.counts()
        try:
            propensities, errors = estimate_propensities(counts, stop)
        except DataError:
            for reason in log.unused:
                say(f"judge: not used: {log.describe(reason)}")
            raise
        rates = estimate_rates(counts, propensities)
        texts = _read_products(products, settings, log, stop) if products else {}
    titles = {number: title for number, (title, _) in texts.items()} if products else log.titles
    low, gain, high = (np.minimum(1.0, rate / rates.typical) for rate in (rates.low, rates.rate, rates.high))
    is_sure = high - low <= max_width / 100
    has_title = np.isin(product, np.fromiter(titles, np.int64, len(titles)))
    pairs = np.flatnonzero(is_sure & has_title)
    unjudged = f"{(~is_sure).sum():,} unjudged, because the 90% interval of their gain is wider than {max_width}%"
    if missing := int((is_sure & ~has_title).sum()):
        unjudged += f", and {missing:,} because their product has no title in {products or 'the log'}"
    for line in _log_lines(log, counts, propensities, errors):
        say(line)
    say(f"judge: {counts.num_pairs:,} pairs | {len(pairs):,} judged | {unjudged}")
    if not len(pairs):
        raise DataError(
            f"none of {counts.num_pairs:,} pairs of a query and a product is judged",
            expected="pairs with more impressions, and products with a title",
            next_command=f"add more days of impressions, raise {MAX_WIDTH}, or correct {PRODUCTS}",
        )
    grades = np.floor(gain[pairs] * (len(labels) - 1) + 1e-9).astype(np.int64)
    columns, items = data.columns, product[pairs].tolist()
    table: dict[str, object] = {
        columns.query: [log.queries.texts[number] for number in query[pairs].tolist()],
        columns.product_id or "product_id": [log.products.texts[number] for number in items],
        columns.title: [titles[number] for number in items],
        columns.label: [labels[grade] for grade in grades.tolist()],
    }
    if products and columns.text and columns.text not in table:
        table[columns.text] = [texts[number][1] for number in items]
    measured = (rates.impressions, rates.clicks, rates.rate, rates.low, rates.high)
    table |= {name: values[pairs] for name, values in zip(CLICK_COLUMNS, measured, strict=True)}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(table), sink)
    storage.write_bytes(key, sink.getvalue().to_pybytes())
    by_label = ", ".join(f"{label} ({rows:,})" for label, rows in zip(labels, np.bincount(grades), strict=False))
    say(f"judge: labels {by_label} | a click rate of {rates.typical:.3g} at the first position is a gain of 1")
    flags = [out, "--data.labels", names_text(labels)]
    for name, column in columns.model_dump(exclude_defaults=True).items():
        flags += [f"--data.columns.{name.replace('_', '-')}", column] if column in table else []
    say(f"next: trnpipe prepare --data.path {shlex.join(flags)}")
    return EXIT_OK


def _read_products(path: str, settings: Settings, log: ClickLog, stop: StopSignal) -> dict[int, tuple[str, str]]:
    """Return the title and the text of each product in the log that has a title in the catalogue, by its number."""
    catalogue, texts = settings.embed.catalogue, dict[int, tuple[str, str]]()
    columns = CatalogueColumns(id=catalogue.id, title=catalogue.title, text=catalogue.text)
    files = open_files(path, catalogue.format, stop, PRODUCTS, settings.storage)
    for batch in files.read(lambda uri: partial(columns.plan, file=uri), _BATCH_ROWS, "reading products"):
        fields = {field: batch.columns[field].to_pylist() for field in batch.columns.schema.names}
        nothing = [None] * len(batch.rows)
        for cells in zip(fields["id"], fields["title"], fields.get("text", nothing), strict=True):
            product, title, text = ((cell or b"").decode(errors="replace").strip() for cell in cells)
            number = log.products.numbers.get(product)
            if number is not None and title:
                texts.setdefault(number, (title, text))
    return texts


def _log_lines(log: ClickLog, counts: ClickCounts, propensities: Float64s, errors: Float64s) -> Iterator[str]:
    """Describe how many rows are used, and the propensities of the positions."""
    num_places = len(counts.positions)
    shown, clicked = (np.bincount(counts.place, each, num_places) for each in (counts.impressions, counts.clicks))
    unused, unknown = [log.describe(reason) for reason, rows in log.unused.items() if rows], np.isnan(propensities)
    apart = int((shown + clicked * log.is_ubi)[unknown].sum())
    if apart:
        unused.append(f"{apart:,} at {unknown.sum():,} position(s) without a propensity")
    yield ", ".join([f"judge: {log.rows:,} rows | {log.rows - log.unused.total() - apart:,} used", *unused])
    rows = [["position", "impressions", "clicked", "propensity", "+-"]]
    for place, position in enumerate(counts.positions[:_SHOWN_POSITIONS].tolist()):
        numbers = [f"{value:.3f}" for value in (propensities[place], errors[place])]
        rows.append([str(position), f"{shown[place]:,.0f}", format_percent(clicked[place] / shown[place]), *numbers])
    yield from aligned(rows)
    if num_places > _SHOWN_POSITIONS:
        yield f"and {num_places - _SHOWN_POSITIONS:,} more positions"
