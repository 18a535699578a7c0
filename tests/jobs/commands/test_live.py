"""A cycle while it runs: what its records and newest events say of it."""

from jobs.commands.watch import LiveCycle, doing_text, live_cycle, plain_lines
from jobs.cycle.job_records import JobRecord, JobState
from pipeline.telemetry.events import EventName
from tests.jobs.cycle.cases import cycle, job, plan
from tests.jobs.cycle.record_cases import bad, good, tried, under_way
from tests.jobs.cycle.test_cost_ledger import at, attempt, ledger

SHAPE = plan(job("prepare"), job("health"), job("train", "prepare", "health"), job("embed", "train"))
MOMENTS = (
    at(90, EventName.TRAIN_STEPS, step=70, losses=[9.0], samples_per_s=1, eta_s=1),  # of the try before
    at(101, EventName.TRAIN_STARTED, step=60, max_steps=2000),
    at(120, EventName.TRAIN_STEPS, step=120, losses=[0.5, 0.7], samples_per_s=812.4, eta_s=192.0),
    at(122, EventName.CHECKPOINT_SAVED, step=120),
)


def view(*records: JobRecord, now: float = 130.0) -> LiveCycle:
    found = ledger(SHAPE, list(records), MOMENTS, now=now, outcome=None, deadline_at=3600.0)
    return live_cycle(SHAPE, records, MOMENTS, found, target="local", closed=None, now=now)


def test_a_job_that_runs() -> None:
    running = under_way("train", "RUNNING", tried(75, at=(50.0, 90.0)), attempt(100, None, None))
    seen = view(good("prepare"), good("health"), running)
    prepare, health, train, embed = seen.jobs
    assert (prepare.sign, prepare.depth, health.depth, train.depth, embed.depth) == ("✓", 0, 0, 1, 2)
    assert (train.sign, train.tries, train.ran) == ("●", "2/3", "30s")
    assert train.doing == "step 120/2000 | loss 0.6000 | 812 samples/s | eta 3m12s"
    assert (embed.state, embed.sign) == ("not submitted", "○")
    assert seen.head.startswith("cycle 2026-11-20 on local: under way | 2 of 4 jobs done | for 2m10s | deadline in 57m")
    assert seen.last == "last event: checkpoint saved, 8.0s ago" or seen.last == "last event: checkpoint saved, 8s ago"
    assert "LATE" in view(running, now=7200.0).head


def test_a_job_that_failed_says_why() -> None:
    train = view(good("prepare"), good("health"), bad("train", tried(70, reason="the loss is NaN"))).jobs[2]
    assert (train.sign, train.tries) == ("✗", "1/3") and "the loss is NaN, exit code 70" in train.doing


def test_embedding_counts_parts() -> None:
    moments = (at(1, EventName.EMBED_STARTED, parts=8, done=2), *(at(n, EventName.PART_EMBEDDED) for n in (2, 3, 4)))
    assert doing_text("embed", moments) == "part 5/8"
    assert doing_text("embed", moments[1:]) == ""  # the start is further back than what was read
    assert doing_text("train", ()) == doing_text("verify", moments) == ""


def test_figures_that_are_no_numbers() -> None:
    odd = at(1, EventName.TRAIN_STEPS, step="x", losses=["nan"], samples_per_s=None)
    assert doing_text("train", (odd,)) == "step 0 | loss - | 0 samples/s"


def test_plain_lines_tell_what_is_new() -> None:
    first = view(good("prepare"), under_way("train", "RUNNABLE"))
    lines = plain_lines(first, None)
    assert lines[0] == first.head and len(lines) == 1 + len(SHAPE.jobs)
    assert plain_lines(first, first) == []
    then = view(good("prepare"), under_way("train", "RUNNING", attempt(100, None, None)))
    assert [line.split()[1] for line in plain_lines(then, first)] == ["train"]


def test_an_array_is_one_row() -> None:
    shape = cycle()
    children = tuple(under_way(f"embed:{n}", "RUNNING", attempt(10, None, None)) for n in range(2))
    records = [
        good("train"),
        JobRecord(name="embed", id="e", state=JobState.PENDING, created_at=0.0, children=children),
    ]
    seen = live_cycle(shape, records, (), ledger(shape, records, outcome=None), target="batch", closed=None, now=20.0)
    assert [(one.name, one.sign, one.state, one.ran) for one in seen.jobs][1] == ("embed", "●", "PENDING 0/2", "10s")
