"""What an evaluation found, as one record: `cycles/<cycle>/evaluate/report.json`."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.core.errors import DataError
from pipeline.evaluate.gate.verdict import Verdict
from pipeline.evaluate.metrics.report import MetricReport, SliceReport
from pipeline.io.errors import KeyNotFound
from pipeline.io.storage import Storage


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HybridReport(_Record):
    """Search of a model fused with that of BM25."""

    name: Literal["rrf", "weighted"] = Field(description="By reciprocal ranks, or by a weighted mean of scores")
    weight: float | None = Field(None, description="Of the vectors, the rest of BM25; of the weighted fusion only")
    valid_queries: int = Field(0, description="Queries of the valid split from which the weight was chosen")
    retrieval: MetricReport | None = None
    missing: str = Field("", description="Why there is none")


class BaselineReport(_Record):
    """A simple tool on the holdout."""

    name: Literal["bm25", "boosting"]
    scores: str = Field("", description="Key of its scores in the workspace; it is shared by cycles")
    metrics: MetricReport | None = Field(None, description="Of rows")
    retrieval: MetricReport | None = None
    threshold: float | None = Field(None, description="As of a model")
    missing: str = Field("", description="Why it was not scored")

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of rows or of retrieval by name."""
        return {name: value for part in (self.metrics, self.retrieval) if part for name, value in part.values.items()}


class ModelReport(_Record):
    """One model on the holdout."""

    checkpoint: str = Field(description="URI")
    digest: str
    cycle: str
    step: int
    scores: str = Field(description="Key of its scores in the workspace")
    metrics: MetricReport
    retrieval: MetricReport | None = Field(description="None when retrieval is not evaluated")
    retrieval_by_width: dict[int, MetricReport] = Field(
        {}, description="The same with vectors cut to their leading dimensions (evaluate.retrieval.dimensions)"
    )
    hybrids: tuple[HybridReport, ...] = ()
    slices: tuple[SliceReport, ...]
    threshold: float | None = Field(description="Probability from which a row is called a match; of two classes only")

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of rows and of retrieval by name."""
        return self.metrics.values | (self.retrieval.values if self.retrieval else {})


class HoldoutReport(_Record):
    """What was scored."""

    split: str
    partitions: tuple[str, ...]
    new_partitions: tuple[str, ...] = Field(description="Those the incumbent was not trained on")
    rows: int
    rows_in_split: int = Field(description="Before evaluate.max_rows")
    queries: int
    leaked_by_id: int = Field(description="Queries that were trained on")
    leaked_by_text: int = Field(description="Further ones whose text was trained on under another id")
    leak_checked: bool
    unchecked_partitions: tuple[str, ...] = Field(description="Trained on, and not prepared any more")
    retrieval_queries: int = 0
    retrieval_items: int = 0


class EvaluationReport(_Record):
    """All figures of one evaluation."""

    schema_version: Literal[1] = 1
    cycle: str
    inputs: dict[str, str] = Field(description="What was judged by what: fingerprints by name")
    backend: str
    device: str
    precision: str
    candidate: ModelReport
    incumbent: ModelReport | None
    baselines: tuple[BaselineReport, ...] = ()
    holdout: HoldoutReport
    verdict: Verdict
    warnings: tuple[str, ...]
    seconds: dict[str, float] = Field(description="By part of the work, of the attempt that finished it")
    settings_hash: str
    code_version: str
    at: datetime = Field(description="UTC")

    def figures(self) -> dict[str, float]:
        """Metrics of the candidate by name; those of the others with a prefix."""
        others = {"incumbent": self.incumbent.figures} if self.incumbent else {}
        others |= {f"hybrid_{one.name}": one.retrieval.values for one in self.candidate.hybrids if one.retrieval}
        others |= {one.name: one.figures for one in self.baselines}
        theirs = {f"{who}_{name}": value for who, found in others.items() for name, value in found.items()}
        return self.candidate.figures | theirs


def report_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/report.json"


def store_report(workspace: Storage, report: EvaluationReport) -> str:
    """Publish it (atomic) and return its key."""
    key = report_key(report.cycle)
    workspace.write_bytes(key, report.model_dump_json(indent=1).encode() + b"\n")
    return key


def load_report(workspace: Storage, cycle: str) -> EvaluationReport | None:
    """The report of a cycle; None when there is none. Raises DataError when it cannot be read."""
    key = report_key(cycle)
    try:
        return EvaluationReport.model_validate_json(workspace.read_bytes(key))
    except KeyNotFound:
        return None
    except ValidationError as error:
        raise DataError(
            f"{workspace.uri(key)} is no report: {error.errors(include_url=False)[0]['msg']}",
            expected="a report.json written by trnpipe evaluate",
            next_command=f"delete it and run trnpipe evaluate --cycle {cycle} again",
        ) from error
