"""What the engine says of a job whose state has changed, for people. Pure."""

from jobs.cycle.records import AttemptRecord, JobRecord, JobState
from jobs.cycle.states import EXITED, INTERRUPTED


def change_line(record: JobRecord) -> str:
    """`train  RUNNABLE  attempt 1 ended with exit code 75; tried again`."""
    return "  ".join([f"{record.name:<12} {record.state.value:<9}", *_words(record)]).rstrip()


def _words(record: JobRecord) -> list[str]:
    tries = len(record.attempts)
    if not tries:
        return [record.status_reason]
    last = record.attempts[-1]
    again = "" if last.status_reason == INTERRUPTED else "; tried again"
    match record.state:
        case JobState.STARTING:
            return [f"attempt {tries}"]
        case JobState.RUNNING:
            return [f"attempt {tries}", *last.log_streams[:1]]
        case JobState.SUCCEEDED:
            return []
        case JobState.RUNNABLE:
            return [f"attempt {tries} {_end(last)}{again}"]
        case _:
            is_by_attempt = record.status_reason == last.status_reason
            return [f"attempt {tries} {_end(last)}" if is_by_attempt else record.status_reason]


def _end(attempt: AttemptRecord) -> str:
    code = "" if attempt.exit_code is None else f" with exit code {attempt.exit_code}"
    why = attempt.status_reason if attempt.status_reason != EXITED or not code else ""
    said = ", ".join(word for word in (why, attempt.reason) if word)
    return f"ended{code}{': ' if said else ''}{said}"
