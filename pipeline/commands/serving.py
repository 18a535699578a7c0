"""`trnpipe serving`: the model and the vectors that are served together, and changing them by hand."""

import json

from pipeline.commands import ToolCall
from pipeline.commands.registry import served_line
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.registry.records import Author, who
from pipeline.registry.serving import CHALLENGER, past_pairs, promote_challenger, read_pair, roll_back_pair
from pipeline.settings import Settings, settings_hash
from pipeline.telemetry.events import code_version

JSON, REASON = "--json", "--reason"


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """One action on what is served of the model. Raises ConfigError, CheckpointError, TransientError."""
    workspace, model = open_storage(settings.workspace, retry=settings.storage, stop=stop), settings.model_name
    given, fitting = call.switches | call.options.keys(), {JSON} if call.action == "show" else {REASON}
    if wrong := sorted(given - fitting):
        raise ConfigError(
            f"{wrong[0]} does not apply to trnpipe serving {call.action}",
            expected=f"{', '.join(fitting)} and settings",
            next_command="trnpipe serving --help",
        )
    author = Author(by=who(), settings_hash=settings_hash(settings), code_version=code_version())
    reason = call.options.get(REASON, "")
    if call.action == "promote":
        say(f"{model}: {served_line(promote_challenger(workspace, model, reason=reason, author=author))}")
        return EXIT_OK
    if call.action == "rollback":
        cycle = call.arguments[0] if call.arguments else ""
        say(f"{model}: {served_line(roll_back_pair(workspace, model, cycle, reason=reason, author=author))}")
        return EXIT_OK
    pairs, challenger = past_pairs(workspace, model), read_pair(workspace, model, CHALLENGER)
    if JSON in call.switches:
        found = {
            "model": model,
            "serving": pairs[-1].model_dump(mode="json") if pairs else None,
            "challenger": challenger[0].model_dump(mode="json") if challenger else None,
            "pairs": [pair.model_dump(mode="json") for pair in pairs],
        }
        say(json.dumps(found, indent=1))
        return EXIT_OK
    say(f"{model} | {served_line(pairs[-1]) if pairs else 'nothing is served: trnpipe embed, trnpipe embed verify'}")
    if challenger and challenger[0].is_of not in {pair.is_of for pair in pairs[-1:]}:
        say(f"challenger: {challenger[0].checkpoint} with the vectors of cycle {challenger[0].vectors.cycle}")
    for pair in reversed(pairs[:-1]):
        say(f"  before: {served_line(pair)}")
    return EXIT_OK
