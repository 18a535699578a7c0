"""`trnpipe parity A [B]`: the same checkpoint and training on two sides, compared; with A alone, recorded for later.

A side is a backend with a precision (`cpu`, `cuda:bf16`), computed here in a process of its own, or a place where one
was recorded before, on this machine or another.
"""

from pipeline.commands import ToolCall
from pipeline.context import open_context
from pipeline.core.errors import EXIT_OK, ConfigError, GateRefused
from pipeline.core.optional import install_command
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.parity.compare import RecordedSide, compare_sides, lines_of, plot_svg
from pipeline.parity.record import load_side, make_task, parse_side, record_side, sides_text
from pipeline.settings import Settings


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Record what is to be computed here, then compare. The exit code: that of a side that failed, else 0.

    Raises GateRefused when the sides are too far apart, every other error of the family.
    """
    words = call.arguments
    sides = [parse_side(word, settings.train.precision) for word in words]
    to = call.options.get("--to", "")
    if to and len(words) > 1:
        raise ConfigError(
            "--to with two sides",
            expected="one side to record there",
            next_command=f"trnpipe parity {words[0]} --to {to}",
        )
    if sides == [None]:
        raise ConfigError(
            f"{words[0]!r} is not a backend, and a recorded side alone has nothing to compare with",
            expected=sides_text(),
            next_command="trnpipe parity A B, or trnpipe parity BACKEND --to FOLDER",
        )
    if len(words) == 2 and (words[0] == words[1] or (sides[0] is not None and sides[0] == sides[1])):
        raise ConfigError(f"both sides are {words[0]}", expected=f"two different ones: {sides_text()}")
    with open_context(settings, stop) as ctx:
        recorded: dict[str, RecordedSide] = {}
        # What was recorded before is read first: a folder without a record is found before hours of training.
        for word, side in sorted(zip(words, sides, strict=True), key=lambda pair: pair[1] is not None):
            place = word
            if side is not None:
                task = make_task(settings, ctx, side, to)
                if code := record_side(task, stop):
                    return code
                place = task.place
            storage = open_storage(place, retry=settings.storage, stop=stop)
            recorded[word] = load_side(storage, ctx.scratch / "parity" / "scores")
        if len(words) == 1:
            say(f"compare it with another side: trnpipe parity {recorded[words[0]].uri} SIDE")
            return EXIT_OK
        a, b = (recorded[word] for word in words)
        report = compare_sides(a, b, settings.parity)
        for line in lines_of(report):
            say(line)
        prefix = f"cycles/{ctx.cycle}/parity/{report.a.name}-{report.b.name}"
        ctx.workspace.write_bytes(f"{prefix}/parity.json", report.model_dump_json(indent=1).encode() + b"\n")
        say(f"report {ctx.workspace.uri(prefix)}/parity.json")
        picture = plot_svg(report, a.record.curve, b.record.curve)
        if picture is not None:
            ctx.workspace.write_bytes(f"{prefix}/parity.svg", picture)
            say(f"picture {ctx.workspace.uri(prefix)}/parity.svg")
        else:
            say(f"no picture: matplotlib is not installed ({install_command('matplotlib')})")
    failed = [check for check in report.checks if check.outcome == "fail"]
    if failed:
        raise GateRefused(
            f"{report.a.name} and {report.b.name} differ too much: "
            + "; ".join(f"{check.text} {check.value_text}" for check in failed),
            expected="; ".join(check.bound_text for check in failed),
            next_command="see parity.json for where they differ; the thresholds are under [parity]",
        )
    return EXIT_OK
