"""Retrieval figures of one model, kept so that another attempt need not search again."""

import shutil
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import DataError
from pipeline.core.metrics import MetricReport
from pipeline.core.scored import PerQuery
from pipeline.io.commit import commit_dir, fetch_dir
from pipeline.io.errors import os_errors
from pipeline.io.storage import Storage
from pipeline.io.verify import require_manifest

KIND = "retrieval"
FILE = "per_query.safetensors"
_QUERY = "query_id"


def save_retrieval(storage: Storage, prefix: str, found: PerQuery, report: MetricReport, scratch: Path) -> None:
    """Commit the figures of each query, and the report."""
    folder = scratch / "retrieval"
    shutil.rmtree(folder, ignore_errors=True)
    with os_errors("writing", f"file://{folder}"):
        folder.mkdir(parents=True)
        try:
            tensors = {name: np.ascontiguousarray(values, dtype=np.float64) for name, values in found.values.items()}
            save_file({_QUERY: found.query_id, **tensors}, folder / FILE)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
    commit_dir(storage, folder, prefix, kind=KIND, fields={"report": report.model_dump(mode="json")})


def load_retrieval(storage: Storage, prefix: str, cache_dir: Path) -> tuple[PerQuery, MetricReport]:
    """What was committed, verified. Raises DataError."""
    try:
        manifest = require_manifest(storage, prefix)
        if manifest.kind != KIND:
            raise DataError(f"it is of kind {manifest.kind}")
        report = MetricReport.model_validate(manifest.fields.get("report"))
        arrays = load_file(fetch_dir(storage, prefix, cache_dir) / FILE)
        return PerQuery(arrays.pop(_QUERY), arrays), report
    except (DataError, ValidationError, SafetensorError, OSError, KeyError) as error:
        raise DataError(
            f"{storage.uri(prefix)} holds no retrieval figures: {str(error).splitlines()[0]}",
            expected="what trnpipe evaluate wrote",
            next_command="delete that folder and run trnpipe evaluate again",
        ) from error
