"""The Python API of a cycle, for scripts and notebooks: `trnpipe.Cycle`.

    cycle = trnpipe.Cycle("configs/quickstart.toml", "workspace/quickstart", "first")
    cycle.submit()
    cycle.wait()
    pandas.DataFrame(cycle.result().table)

Results are records with typed fields. The `table` of a result is a list of plain dicts, from which pandas can build a
data frame. Methods raise the same errors as the corresponding commands. Nothing is printed unless `say` is passed, and
no signal handlers are installed.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from math import inf
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from pydantic import Field

from jobs.commands.show import log_lines
from jobs.commands.submit import cancel_cycle, close_cycle, submit_plan
from jobs.cycle.cycle_store import Claim
from jobs.cycle.job_states import Outcome, exit_code_of_cycle, outcome_of
from jobs.cycle.page.gather import CycleRow, Job, PageData, gather, jobs_of, row_of
from jobs.cycle.page.publish import outcome_sentence, report_key, visible, write_page
from jobs.plan.spec import JobPlan
from jobs.settings import CycleSettings
from jobs.setup import make_plan, open_cycle
from jobs.targets.base import PATIENCE_S
from pipeline.context import Figure
from pipeline.core.errors import Preempted, TransientError
from pipeline.core.format import aligned, format_duration
from pipeline.core.progress import Say
from pipeline.core.record import Record
from pipeline.settings import resolve

Config = str | Path | Sequence[str | Path] | None


class CycleStatus(Record):
    """The current status of a cycle."""

    cycle: str
    target: str = Field(description="Target that the jobs were submitted to (empty: not submitted)")
    outcome: Outcome | Literal["open", "not submitted"]
    reason: str
    jobs: tuple[Job, ...] = Field(description="All jobs of the plan, in its order")

    def __repr__(self) -> str:
        done = sum(job.state == "SUCCEEDED" for job in self.jobs)
        return f"CycleStatus(cycle={self.cycle!r}, outcome={self.outcome!r}, {done} of {len(self.jobs)} jobs succeeded)"

    def __str__(self) -> str:
        rows = [(job.name, job.state, format_duration(job.ran_s), job.why) for job in self.jobs]
        title = f"cycle {self.cycle}: {self.outcome}" + (f", {self.reason}" if self.reason else "")
        return "\n".join([title, *aligned([("job", "state", "ran", "why"), *rows], left=(0, 1, 3))])

    @property
    def has_ended(self) -> bool:
        return self.outcome not in ("open", "not submitted")

    @property
    def table(self) -> list[dict[str, Any]]:
        """Return one dict per job."""
        return [job.model_dump(mode="json") for job in self.jobs]

    def _repr_html_(self) -> str:
        title = str(self).partition("\n")[0]
        return _html(title, ("name", "state", "tries", "ran_s", "exit_code", "why"), self.table)


class CycleResult(CycleRow):
    """The result of a cycle: its row in the index of cycles, plus all figures that its stages have reported."""

    exit_code: int | None = Field(description="Exit code of a command that waits for the cycle (None: still running)")
    figures: Mapping[str, Mapping[str, Figure]] = Field(
        description="Figures of the stages that have finished, by stage"
    )

    @property
    def table(self) -> list[dict[str, Any]]:
        """Return one dict per figure: stage, figure, value."""
        return [
            {"stage": stage, "figure": name, "value": value}
            for stage, figures in self.figures.items()
            for name, value in figures.items()
        ]

    def __str__(self) -> str:
        figures = [(row["stage"], row["figure"], str(row["value"])) for row in self.table]
        return "\n".join([f"cycle {self.cycle}: {self.outcome}", *aligned(figures, left=(0, 1, 2))])

    def _repr_html_(self) -> str:
        return _html(f"cycle {self.cycle}: {self.outcome}", ("stage", "figure", "value"), self.table)


class CyclePage(Record):
    """The report page of a cycle, after it was written to the workspace."""

    uri: str
    data: PageData

    def __repr__(self) -> str:
        return f"CyclePage(uri={self.uri!r})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return visible(Markup("<p><b>{}</b></p><p>{}</p>").format(outcome_sentence(self.data), self.uri))


def _html(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table for a notebook, with all text escaped."""
    cell, line = Markup("<td>{}</td>"), Markup("<tr>{}</tr>")
    body = Markup().join(line.format(Markup().join(cell.format(row[name]) for name in columns)) for row in rows)
    head = Markup().join(Markup("<th>{}</th>").format(name) for name in columns)
    table = Markup("<p><b>{}</b></p><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>")
    return visible(table.format(title, head, body))


class Cycle:
    """A cycle of jobs in a workspace, with methods to plan it, submit it, wait for it and read its results.

    Args:
        config: A TOML or JSON file, or a sequence of files, in which later files override earlier ones.
        workspace: Folder or URI of the workspace. Overrides the value in the files.
        name: Name of the cycle. Defaults to the name in the files, or to today's date if they do not set one.
        settings: Nested settings, such as {"train": {"epochs": 1}}, which override files and environment variables.
        say: Called with each line that the corresponding command would print. By default, nothing is printed.

    Raises ConfigError if a setting is unknown or out of bounds. The error includes the source of the setting.
    """

    def __init__(
        self,
        config: Config = None,
        workspace: str | Path = "",
        name: str = "",
        *,
        settings: Mapping[str, Any] | None = None,
        say: Say | None = None,
    ) -> None:
        files = [] if config is None else [config] if isinstance(config, str | Path) else list(config)
        overrides = dict(settings or {}) | ({"workspace": str(workspace)} if workspace else {})
        overrides |= {"cycle": name} if name else {}
        self.settings: CycleSettings = resolve(
            [Path(file) for file in files], os.environ, model=CycleSettings, overrides=overrides
        ).settings
        opened = open_cycle(self.settings, say or (lambda _: None))
        self._cycle = opened.other(opened.name)  # fix the name now, because the date may change during the cycle
        self.settings, self._store = self._cycle.settings, self._cycle.store
        self._engine: Future[int] | None = None
        """The thread that runs local jobs, or None before it is started and after its result was collected."""

    @property
    def name(self) -> str:
        return self._store.cycle

    def __repr__(self) -> str:
        return f"Cycle({self._store.storage.root!r}, {self.name!r})"

    def plan(self) -> JobPlan:
        """Return the submitted plan, or the plan for the current settings if nothing was submitted yet.

        Raises ConfigError if the settings are inconsistent.
        """
        return self._store.plan() or make_plan(self.settings)

    def submit(self, target: str = "", *, fresh: bool = False) -> CycleStatus:
        """Submit the jobs, or resume an earlier submission, and return without waiting for them.

        This method can safely be called again, because no job is ever started twice. Local jobs run in a thread of
        this process, and the interpreter does not exit until they have ended.

        Args:
            target: Overrides `jobs.target`.
            fresh: Restart a submitted cycle from the beginning. This is only possible if nothing was trained in it.

        Raises ConfigError if the plan is invalid, and TransientError while another process is submitting the cycle.
        """
        target = target or self.settings.jobs.target
        plan = make_plan(self.settings)
        if target == "batch":
            submit_plan(self._cycle, plan, target, again=fresh)
        elif self._engine is None or self._engine.done():
            replaced = self._store.claim() if fresh and self._store.submissions() else None
            thread = ThreadPoolExecutor(1, "cycle")
            self._engine = thread.submit(submit_plan, self._cycle, plan, target, again=fresh)
            thread.shutdown(wait=False)
            while self._runs_here() and not self._has_begun(plan, replaced):  # it also ends if there is nothing to do
                time.sleep(0.05)
        return self.status()

    def _has_begun(self, plan: JobPlan, replaced: Claim | None) -> bool:
        """Return whether the plan was stored, by a submission that is newer than that of the claim `replaced`."""
        claim = self._store.claim()
        is_old = replaced is not None and claim is not None and claim.first_round == replaced.first_round
        return not is_old and self._store.plan() == plan

    def wait(self, timeout_s: float | None = None, every_s: float = 5.0) -> CycleStatus:
        """Wait until the cycle has ended on its target, then close it.

        Interrupting this call does not end the jobs. On SageMaker, it also starts the jobs whose dependencies have
        succeeded.

        Raises TransientError after `timeout_s`, or if AWS or the workspace was unreachable for 15 minutes, ConfigError
        if the cycle was not submitted, and Preempted if the process that ran local jobs has died. An error that ended
        the local jobs is raised here.
        """
        looks_interrupted = 0
        until = time.monotonic() + (inf if timeout_s is None else timeout_s)
        plan, target, answered_at = self._cycle.plan(), self._cycle.target(), time.monotonic()
        while True:
            wait_s = min(every_s, max(0.0, until - time.monotonic()))
            if (engine := self._engine) is not None:  # read once, because another waiting thread may reset it
                wait_for([engine], wait_s)
            runs_here = self._runs_here()
            try:
                closed = None if runs_here else self._store.closed()
                if not runs_here and closed is None:
                    closed = outcome_of(plan, target.advance(plan))
                    if closed is not None:
                        close_cycle(self._cycle)
                answered_at = time.monotonic()
                if closed is not None:
                    return self.status()
                is_interrupted = not runs_here and self._cycle.interrupted_s() is not None
                looks_interrupted = looks_interrupted + 1 if is_interrupted else 0
            except TransientError:
                if time.monotonic() - answered_at > PATIENCE_S:
                    raise
            if looks_interrupted == 2:  # it may be about to write its end when we look for the first time
                raise Preempted(f"cycle {self.name}: {self._cycle.progress()}", next_command="submit() to resume it")
            if time.monotonic() >= until:
                raise TransientError(
                    f"cycle {self.name} has not ended within {timeout_s:g} s",
                    next_command="call wait() again, or status() to see its progress",
                )
            if not runs_here:
                time.sleep(wait_s)

    def _runs_here(self) -> bool:
        """Return whether this process is still running the jobs. If an error ended them, it is raised here once."""
        engine = self._engine
        if engine is None or not engine.done():
            return engine is not None
        self._engine = None
        engine.result()
        return False

    def status(self) -> CycleStatus:
        """Return the current state of the cycle and its jobs. This also works before the cycle is submitted."""
        claim = self._store.claim()
        if self._store.plan() is None:
            jobs = tuple(jobs_of(make_plan(self.settings), ()))
            return CycleStatus(cycle=self.name, target="", outcome="not submitted", reason="", jobs=jobs)
        plan, records, closed = self._cycle.state()
        return CycleStatus(
            cycle=self.name,
            target=claim.target if claim else "",
            outcome=closed.outcome if closed else "open",
            reason=closed.reason if closed else "",
            jobs=tuple(jobs_of(plan, records)),
        )

    def result(self) -> CycleResult:
        """Return the outcome and the figures reported so far. Raises ConfigError if the cycle was not submitted."""
        plan, records, closed = self._cycle.state()
        data = gather(self._store, plan, records, self._cycle.with_stored().settings.jobs, closed)
        row = row_of(self._store, data, closed)
        code = exit_code_of_cycle(closed, records) if closed else None
        return CycleResult(**row.model_dump(), exit_code=code, figures=data.figures)

    def report(self) -> CyclePage:
        """Write the report page of the cycle and its data. Raises ConfigError if the cycle was not submitted."""
        plan, records, closed = self._cycle.state()
        data = write_page(self._store, plan, records, self._cycle.with_stored().settings.jobs, closed)
        return CyclePage(uri=self._store.storage.uri(report_key(self.name)), data=data)

    def logs(self, job: str, *, attempt: int = 0, node: int = 0) -> Iterator[str]:
        """Yield the log lines of one attempt (0: the last) of a job, or of a child of an array such as `embed:3`.

        Raises ConfigError if there is no such log.
        """
        yield from log_lines(self._cycle, job, attempt=attempt, node=node)

    def cancel(self, reason: str = "by hand") -> CycleStatus:
        """End every unfinished job and close the cycle. Raises ConfigError if the cycle was not submitted."""
        cancel_cycle(self._cycle, reason)
        return self.wait()
