"""Lines of CloudWatch Logs. Rights: logs:GetLogEvents on the group."""

from collections.abc import Iterator
from typing import Any

from jobs.targets.batch.errors import AWS_ERRORS, is_retryable, name_of, translate
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.retry import RetryPolicy, call_with_retry


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
