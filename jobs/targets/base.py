"""Where jobs run: this machine, AWS Batch, or SageMaker. All keep the same words, states and records."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from jobs.cycle.records import JobRecord
from jobs.plan.dag import Plan


class Target(Protocol):
    """One place that runs the jobs of a cycle."""

    @property
    def name(self) -> str:
        """`local`, `batch` or `sagemaker`."""

    def submit(self, plan: Plan, round_: int, jobs: Sequence[str]) -> None:
        """Hand over these jobs of a claimed plan in its order; those handed over in this round before stay as they are.

        `local` and `sagemaker` also see them through, and return when the last has ended. Dependencies on jobs that are
        not among `jobs` are those of earlier rounds, which have succeeded.
        """

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        """What is known of every submitted job now, in the order of the plan."""

    def advance(self, plan: Plan) -> tuple[JobRecord, ...]:
        """The records, after whatever is due now was done; `local` and `batch` need nobody for that."""

    def check(self, plan: Plan) -> None:
        """Whether the plan could run there; changes nothing. Raises ConfigError with what is wrong."""

    def check_blocked(self, records: Sequence[JobRecord], *, dwell_s: float) -> tuple[str, ...]:
        """Why jobs cannot start, in words; those that never will are ended, once the reason has stood for `dwell_s`."""

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        """Lines of one try (from 1) on one node. Raises ConfigError when there is no such log."""

    def cancel(self, plan: Plan, reason: str) -> None:
        """End everything that is not final, from the sinks backwards; what runs gets SIGTERM, and 30 s."""


def seconds_of(milliseconds: float | None) -> float | None:
    """A time of AWS Batch, as records have it."""
    return milliseconds / 1000 if milliseconds else None
