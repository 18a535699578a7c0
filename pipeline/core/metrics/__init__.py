"""Metrics over host arrays. What cannot be computed never becomes a 0: it is an error, or is named with its reason."""

from pipeline.core.metrics.binary import best_threshold
from pipeline.core.metrics.classes import ClassFigures, class_figures
from pipeline.core.metrics.config import MetricsConfig
from pipeline.core.metrics.ranking import ndcg
from pipeline.core.metrics.report import (
    MetricReport,
    SliceReport,
    metric_report,
    retrieval_report,
    slice_reports,
)
from pipeline.core.metrics.retrieval import Judgements

__all__ = [
    "ClassFigures",
    "Judgements",
    "MetricReport",
    "MetricsConfig",
    "SliceReport",
    "best_threshold",
    "class_figures",
    "metric_report",
    "ndcg",
    "retrieval_report",
    "slice_reports",
]
