"""Small records for the tests of jobs."""

from jobs.cycle.job_states import EXITED, NOT_RUN, AttemptRecord, JobRecord, JobState, failed_state


def tried(
    code: int | None = 0, *, status_reason: str = EXITED, reason: str = "", at: tuple[float, float] | None = (0.0, 1.0)
) -> AttemptRecord:
    """One try. `at`: from and to, in seconds."""
    started, stopped = at or (None, None)
    return AttemptRecord(
        started_at=started, stopped_at=stopped, exit_code=code, status_reason=status_reason, reason=reason
    )


def good(name: str, *attempts: AttemptRecord, stopped_at: float = 1.0) -> JobRecord:
    made = attempts or (tried(),)
    return JobRecord(
        name=name,
        id=name,
        state=JobState.SUCCEEDED,
        status_reason=EXITED,
        created_at=0.0,
        stopped_at=stopped_at,
        attempts=made,
    )


def bad(name: str, *attempts: AttemptRecord, why: str = "", stopped_at: float | None = 2.0) -> JobRecord:
    """`why`: the reason of the job; without one that of its last try, or of a dependency."""
    own = attempts[-1].status_reason if attempts else NOT_RUN + "a failed"
    return JobRecord(
        name=name,
        id=name,
        state=failed_state(why or own),
        status_reason=why or own,
        created_at=0.0,
        stopped_at=stopped_at,
        attempts=attempts,
    )


def under_way(name: str, state: str = "RUNNING", *attempts: AttemptRecord, why: str = "") -> JobRecord:
    return JobRecord(name=name, id=name, state=JobState(state), status_reason=why, created_at=0.0, attempts=attempts)


def array(name: str, state: str, *children: JobRecord, why: str = "") -> JobRecord:
    stopped = max((child.stopped_at or 0.0 for child in children), default=0.0) if JobState(state).is_final else None
    return JobRecord(
        name=name,
        id=name,
        state=JobState(state),
        status_reason=why,
        created_at=0.0,
        stopped_at=stopped,
        children=children,
    )
