"""`trnpipe serving`: the model and the vectors that are served together, and changing them by hand."""

import json

from pipeline.commands import ToolCall
from pipeline.commands.registry import JSON, REASON, check_flags, open_registry, served_line
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.settings import Settings


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Show or roll back what is served of the model. Raises ConfigError, CheckpointError, TransientError."""
    check_flags(call, "serving", frozenset({JSON} if call.action == "show" else {REASON}))
    registry, reason = open_registry(settings, stop, reads=call.action == "show"), call.options.get(REASON, "")
    model = registry.model
    if call.action == "rollback":
        cycle = call.arguments[0] if call.arguments else ""
        say(f"{model}: {served_line(registry.rollback_vectors(cycle, reason=reason))}")
        return EXIT_OK
    pairs, served = registry.pairs(), registry.serving()
    if JSON in call.switches:
        found = {
            "model": model,
            "serving": served.model_dump(mode="json") if served else None,
            "pairs": [pair.model_dump(mode="json") for pair in pairs],
        }
        say(json.dumps(found, indent=1))
        return EXIT_OK
    say(f"{model} | {served_line(served) if served else 'nothing is served: trnpipe embed, trnpipe embed verify'}")
    for pair in reversed(pairs):
        if pair != served:
            say(f"  before: {served_line(pair)}")
    return EXIT_OK
