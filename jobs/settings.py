"""The settings of `trnjobs`: those of the pipeline, and `[jobs]` beside them."""

from typing import Any, ClassVar

from pydantic import Field

from jobs.config import JobsConfig
from pipeline.core.fingerprint import fingerprint
from pipeline.settings import Settings


class CycleSettings(Settings):
    """Everything a cycle of jobs can be told."""

    program: ClassVar[str] = "trnjobs"
    other_programs: ClassVar[frozenset[str]] = frozenset()
    jobs: JobsConfig = Field(JobsConfig())


_PER_JOB = {"cycle", "workspace", "launch", "scratch"}


def of_all_jobs(settings: CycleSettings) -> dict[str, Any]:
    """What all jobs of a cycle share, as a JSON file for `--config`.

    Without what differs between jobs or places: they get it by variable or flag.
    """
    return settings.model_dump(mode="json", exclude=_PER_JOB)


def pipeline_fingerprint(settings: CycleSettings) -> str:
    """Names the work; what `[jobs]` makes of it is in the plan itself."""
    return fingerprint(settings.model_dump(mode="json", exclude=_PER_JOB | {"jobs"}))
