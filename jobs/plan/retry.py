"""When a job is tried again, by what ended it."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_serializer, model_validator

from pipeline.core.errors import EXIT_TABLE
from pipeline.core.record import Record


class Retry(Record):
    """When a job is tried again: after a lost machine, a container that did not start, and these exit codes.

    Everything else is final. Stored as the rules that AWS Batch gets of it (see `as_rules`).
    """

    attempts: int = Field(1, description="Tries in all, the first included")
    exit_codes: tuple[int, ...] = ()

    @classmethod
    def of(cls, attempts: int) -> Self:
        """For any stage: the codes that the table of exit codes calls worth another try."""
        return cls(attempts=attempts, exit_codes=tuple(sorted(rule.exit_code for rule in EXIT_TABLE if rule.retry)))

    def as_rules(self) -> tuple[dict[str, str], ...]:
        """Conditions and what follows: the first that matches decides. A trailing * matches any rest.

        Source: the API reference of AWS Batch, EvaluateOnExit. Without a matching entry it would try again, so the last
        entry matches everything.
        """
        again = [
            {"on_status_reason": "Host EC2*"},
            {"on_status_reason": "Task failed to start*"},  # images not pulled, containers not created
            *({"on_exit_code": str(code)} for code in self.exit_codes),
        ]
        none = {"on_status_reason": "", "on_reason": "", "on_exit_code": ""}
        return (*({"action": "RETRY"} | none | one for one in again), {"action": "EXIT"} | none | {"on_reason": "*"})

    @model_validator(mode="before")
    @classmethod
    def _from_rules(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "rules" in data:
            codes = [int(rule["on_exit_code"]) for rule in data["rules"] if rule["on_exit_code"]]
            return {"attempts": data["attempts"], "exit_codes": codes}
        return data

    @model_serializer
    def _stored(self) -> dict[str, Any]:
        return {"attempts": self.attempts, "rules": self.as_rules()}
