"""From DescribeJobs to records. Times of AWS are milliseconds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobs.cycle.records import AttemptRecord, JobRecord, JobState
from jobs.targets.batch.client import AWS_ERRORS, Detail, is_retryable, name_of, translate
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy, call_with_retry

_STARTED = (JobState.STARTING, JobState.RUNNING)


def num_nodes(detail: Detail) -> int:
    """Of a gang; 0 for other jobs."""
    return int(detail.get("nodeProperties", {}).get("numNodes", 0))


def parts(detail: Detail) -> list[str]:
    """Ids of what a job consists of: the children of an array, the nodes of a gang."""
    job_id = detail["jobId"]
    size = int(detail.get("arrayProperties", {}).get("size", 0))
    return [*(f"{job_id}:{i}" for i in range(size)), *(f"{job_id}#{i}" for i in range(num_nodes(detail)))]


def job_record(name: str, detail: Detail, described: Mapping[str, Detail]) -> JobRecord:
    """One job. `described`: also its children or nodes, by id; those that are not there yet are left out."""
    ids = parts(detail)
    nodes = [described.get(one, {}) for one in ids if "#" in one]
    children = [
        job_record(f"{name}:{one.rpartition(':')[2]}", described[one], {})
        for one in ids
        if "#" not in one and one in described
    ]
    return JobRecord(
        name=name,
        id=str(detail["jobId"]),
        state=JobState(detail["status"]),
        status_reason=str(detail.get("statusReason") or ""),
        created_at=_seconds(detail.get("createdAt")) or 0.0,
        started_at=_seconds(detail.get("startedAt")),
        stopped_at=_seconds(detail.get("stoppedAt")),
        attempts=_attempts(detail, nodes),
        children=tuple(children),
        num_nodes=num_nodes(detail),
    )


def _attempts(detail: Detail, nodes: Sequence[Detail]) -> tuple[AttemptRecord, ...]:
    """Those that ended, and the one under way, which AWS Batch describes at the top of the job only."""
    if detail.get("arrayProperties", {}).get("size"):
        return ()  # its children run, it does not
    ended = list(detail.get("attempts") or ())
    found = [_attempt(one, nodes or [detail], index) for index, one in enumerate(ended)]
    under_way = JobState(detail["status"]) in _STARTED and all(one.get("stoppedAt") for one in ended)
    only_one = not ended and detail.get("startedAt")
    if under_way or only_one:
        found.append(_attempt(detail, nodes or [detail], len(ended)))
    return tuple(found)


def _attempt(detail: Detail, nodes: Sequence[Detail], index: int) -> AttemptRecord:
    container = detail.get("container") or {}
    code = container.get("exitCode")
    return AttemptRecord(
        started_at=_seconds(detail.get("startedAt")),
        stopped_at=_seconds(detail.get("stoppedAt")),
        exit_code=None if code is None else int(code),
        status_reason=str(detail.get("statusReason") or ""),
        reason=str(container.get("reason") or ""),
        log_streams=tuple(_log_stream(node, index) for node in nodes),
    )


def _log_stream(node: Detail, index: int) -> str:
    """Of attempt `index` (from 0) of a node or single container; empty when it has none (yet)."""
    ended = node.get("attempts") or ()
    one = ended[index] if index < len(ended) else node
    return str((one.get("container") or {}).get("logStreamName") or "")


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1000 if milliseconds else None


# Lines of CloudWatch Logs. Rights: logs:GetLogEvents on the group.


class LogsClient:
    """CloudWatch Logs. `raw` is boto3's client, or what answers like it."""

    def __init__(self, raw: Any, *, policy: RetryPolicy | None = None, stop: StopSignal | None = None) -> None:
        self._raw, self._policy, self._stop = raw, policy or RetryPolicy(), stop or StopSignal()

    def lines(self, group: str, stream: str) -> Iterator[str]:
        """All lines of a stream, oldest first. Raises ConfigError when there is none."""
        where: dict[str, Any] = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
        token = ""
        while True:
            answer = self._get(where | ({"nextToken": token} if token else {}))
            yield from (str(event["message"]) for event in answer["events"])
            if answer["nextForwardToken"] == token:  # at the end it repeats; pages before may be empty
                return
            token = answer["nextForwardToken"]

    def _get(self, request: dict[str, Any]) -> Any:
        doing = f"reading log {request['logGroupName']} {request['logStreamName']}"
        try:
            return call_with_retry(
                lambda: self._raw.get_log_events(**request),
                self._policy,
                retryable=is_retryable,
                stop=self._stop,
                doing=doing,
                on_retry=lambda: None,
            )
        except AWS_ERRORS as error:
            if name_of(error) == "ResourceNotFound":
                raise ConfigError(
                    f"no log stream {request['logStreamName']} in {request['logGroupName']}",
                    expected="a job that has started, within the retention of the group",
                    next_command="trnjobs status",
                ) from error
            raise translate(error, doing) from error
