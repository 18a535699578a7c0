"""`cycles/<cycle>/evaluate/verdict.json`: what the gate said of one candidate against one incumbent."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from pydantic import Field, JsonValue

from pipeline.core.errors import DataError
from pipeline.io.storage import Storage, read_record
from pipeline.registry.records import Decision, Figures, ModelName, Place, Reasons, Record
from pipeline.registry.verified import Known


class StoredVerdict(Record):
    """Written by evaluate before anything is promoted or refused by it."""

    schema_version: Literal[1] = 1
    model: ModelName
    cycle: str = Field(description="The cycle that evaluated")
    candidate: Place
    incumbent: Place | None = Field(description="None: nothing was in production")
    promote: bool
    reasons: Reasons = Field(description="The verdict in plain lines")
    figures: Figures = Field({}, description="Metrics of the candidate")
    checks: tuple[dict[str, JsonValue], ...] = Field((), description="Every check of the gate")
    settings_hash: str
    code_version: str
    at: datetime = Field(description="UTC")

    def decision(self) -> Decision:
        """What promote() and record_refusal() want to know of it."""
        return Decision(
            passed=self.promote,
            digest=self.candidate.digest,
            reasons=self.reasons,
            figures=self.figures,
            verdict=verdict_key(self.cycle),
        )


def verdict_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/verdict.json"


def store_verdict(workspace: Storage, verdict: StoredVerdict) -> str:
    """Publish it (atomic) and return its key."""
    key = verdict_key(verdict.cycle)
    workspace.write_bytes(key, verdict.model_dump_json(indent=1).encode() + b"\n")
    return key


def load_verdict(workspace: Storage, cycle: str) -> StoredVerdict | None:
    """The stored verdict; None when the cycle has none. Raises DataError when it cannot be read."""
    key = verdict_key(cycle)
    return read_record(
        workspace,
        key,
        StoredVerdict,
        what="a verdict",
        writer="trnpipe evaluate",
        next_command=f"delete it and run trnpipe evaluate --cycle {cycle} again",
    )


def stored_decision(
    workspace: Storage, model: str, candidate: Known, incumbent: Place | None, cycles: Iterable[str]
) -> Decision:
    """What the first of these cycles that judged this content says of it; not passed, with the reason, when none did.

    A verdict counts only for the model and the incumbent that it was made against.
    """
    reasons = []
    for cycle in dict.fromkeys(cycles):
        try:
            verdict = load_verdict(workspace, cycle)
        except DataError as error:
            reasons.append(error.seen)
            continue
        if verdict is not None and verdict.candidate.digest == candidate.digest:
            reason = _misfit(verdict, model, incumbent)
            decision = verdict.decision()
            return decision.model_copy(update={"passed": False, "reasons": (reason,)}) if reason else decision
    return Decision(passed=False, reasons=(*reasons, f"no verdict of {candidate.prefix} is stored"))


def _misfit(verdict: StoredVerdict, model: str, incumbent: Place | None) -> str:
    """Why the verdict does not count here; empty when it does."""
    if verdict.model != model:
        return f"it was judged as a model {verdict.model}, not {model}"
    if verdict.incumbent == incumbent:
        return ""
    judged, now = (place.checkpoint if place else "nothing" for place in (verdict.incumbent, incumbent))
    same = " (other content)" if judged == now else ""
    return f"it was judged against {judged} in production, which is {now} now{same}"
