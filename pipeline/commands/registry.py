"""`trnpipe registry` and `trnpipe serving`, which show and change the production model and the served vectors."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from pipeline.commands import ToolCall
from pipeline.context import check_workspace
from pipeline.core.errors import EXIT_OK, CheckpointError, ConfigError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.checkpoints import Ancestor, prefix_in
from pipeline.registry.model import DeployedPair, Registry, resolve_model_name
from pipeline.registry.records import Author, HistoryEntry, Pointer, current_user, list_models, one_line
from pipeline.registry.signing import NO_KEYS, ModelKeys, open_keys
from pipeline.settings import Settings, settings_hash
from pipeline.telemetry.events import code_version

JSON, FORCE, REASON, WITHOUT_VECTORS = "--json", "--force", "--reason", "--without-vectors"
SHOWN_ENTRIES = 10
SHOWN_PARTITIONS = 5
VERBS: Mapping[str, str] = {
    "promoted": "promoted",
    "forced": "promoted by force",
    "rolled_back": "rolled back to",
    "refused": "refused",
}


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Run an action on the registry of the workspace, and return the exit code. Raises TrnpipeError."""
    as_json = JSON in call.switches
    keys = NO_KEYS
    if call.action in ("promote", "rollback"):
        keys = open_keys(settings, stop, to_sign=call.action == "promote")
    is_named = settings.model_name != Settings.model_fields["model_name"].default
    exists = call.action in ("show", "rollback") or (call.action == "promote" and not is_named)
    registry = _open_registry(settings, stop, exists=exists, keys=keys)
    if call.action == "list":
        return _list(registry.workspace, say, as_json=as_json)
    named = prefix_in(registry.workspace, call.arguments[0]) if call.arguments else ""
    if call.action == "show":
        return _show(registry, named, say, as_json=as_json)
    forced = call.options.get(FORCE)
    if forced is not None and not one_line(forced):
        raise ConfigError(
            "the reason is empty",
            expected=f"{FORCE} with a short reason for overriding the gate",
            next_command=f"{FORCE} REASON",
        )
    before, served_before = registry.production(), registry.serving()
    if call.action == "promote":
        say_change(before, registry.promote(named, cycle=settings.cycle, force=forced or ""), say)
        return EXIT_OK
    without, reason = WITHOUT_VECTORS in call.switches, call.options.get(REASON, "")
    say_change(before, registry.rollback(named, reason=reason, without_vectors=without), say)
    if served := registry.serving():
        say(f"{registry.model}: {served_line(served)}")
        fewer = served_before.vectors.rows - served.vectors.rows if served_before else 0
        if fewer > 0:
            say(f"{registry.model}: {fewer:,} vectors fewer. Newer products cannot be found until the next cycle")
    return EXIT_OK


def run_serving(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Show or roll back the served vectors of the model. Raises ConfigError, CheckpointError, TransientError."""
    keys = open_keys(settings, stop) if call.action == "rollback" else NO_KEYS
    registry = _open_registry(settings, stop, keys=keys)
    model = registry.model
    if call.action == "rollback":
        pair = registry.rollback_vectors("".join(call.arguments), reason=call.options.get(REASON, ""))
        say(f"{model}: {served_line(pair)}")
        return EXIT_OK
    pairs, served = registry.pairs(), registry.serving()
    if JSON in call.switches:
        document = {"model": model, "serving": _dump(served), "pairs": [_dump(pair) for pair in pairs]}
        say(json.dumps(document, indent=1))
        return EXIT_OK
    say(
        f"{model} | {served_line(served) if served else 'nothing is served (trnpipe embed, then trnpipe embed verify)'}"
    )
    for pair in reversed(pairs):
        if pair != served:
            say(f"  previously {served_line(pair)}")
    return EXIT_OK


def _open_registry(settings: Settings, stop: StopSignal, *, exists: bool = True, keys: ModelKeys = NO_KEYS) -> Registry:
    """Open the registry of the configured model.

    If no model is configured, this is the only model in the workspace. `exists` can be set to False for actions that
    can create a model or list all of them. Raises ConfigError if the model does not exist.
    """
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    check_workspace(workspace)
    author = Author(by=current_user(), settings_hash=settings_hash(settings), code_version=code_version())
    model = resolve_model_name(settings, workspace) if exists else settings.model_name
    return Registry(workspace, model, author=author, keys=keys)


def _list(workspace: Storage, say: Say, *, as_json: bool) -> int:
    """List all models. If the pointer of a model is damaged, this returns the exit code of CheckpointError."""
    rows, lines = list[dict[str, Any]](), list[str]()
    for model in list_models(workspace):
        try:
            pointer = Registry(workspace, model).production()
            rows.append({"model": model, "production": _dump(pointer)})
            lines.append(f"{model} | {_production_line(pointer)}")
        except CheckpointError as error:
            rows.append({"model": model, "damaged": error.seen})
            lines.append(f"{model} | damaged: {error.seen}")
    nothing = "no models yet: trnpipe evaluate, or trnpipe registry promote CHECKPOINT"
    say(json.dumps(rows, indent=1) if as_json else "\n".join(lines) or nothing)
    return CheckpointError.exit_code if any("damaged" in row for row in rows) else EXIT_OK


def _show(registry: Registry, named: str, say: Say, *, as_json: bool) -> int:
    """Show the production checkpoint of the model, or a given one, with its lineage and history."""
    pointer, entries = registry.production(), registry.history()
    prefix = named or (pointer.checkpoint if pointer else "")
    # Even if the production checkpoint was deleted, show the history, which lists checkpoints to roll back to.
    ancestors, lost = tuple[Ancestor, ...](), ""
    try:
        ancestors = registry.lineage(prefix) if prefix else ()
    except CheckpointError as error:
        if named:
            raise
        lost = error.seen
    if named:
        entries = tuple(entry for entry in entries if entry.digest == ancestors[0].digest)
    if as_json:
        document = {
            "model": registry.model,
            "checkpoint": prefix or None,
            "in_production": pointer is not None and prefix == pointer.checkpoint,
            "production": _dump(pointer),
            "lineage": [asdict(ancestor) for ancestor in ancestors],
            "history": [_dump(entry) for entry in entries],
        }
        say(json.dumps(document | ({"damaged": lost} if lost else {}), indent=1))
    else:
        say(f"{registry.model} | {_production_line(pointer)}")
        if not named and (served := registry.serving()):
            say(f"{registry.model} | {served_line(served)}")
        for line in (*_lineage_lines(ancestors), *_history_lines(entries)):
            say(line)
        if lost:
            say(f"damaged: {lost}")
    return CheckpointError.exit_code if lost else EXIT_OK


def _dump(entry: HistoryEntry | DeployedPair | None) -> dict[str, Any] | None:
    return None if entry is None else entry.model_dump(mode="json")


def _production_line(pointer: Pointer | None) -> str:
    if pointer is None:
        return "nothing is in production"
    by = f"{VERBS[pointer.action]} {_when(pointer)} by {pointer.author.by}"
    return f"{pointer.checkpoint} | generation {pointer.generation} | {by}"


def served_line(pair: DeployedPair) -> str:
    """Describe a deployed pair in a line, including its author."""
    what = f"serving {pair.checkpoint} with {pair.vectors.rows:,} vectors of cycle {pair.vectors.cycle}"
    why = f" | {pair.reason}" if pair.reason else ""
    how = f"{pair.action.replace('_', ' ')} {_when(pair)} by {pair.author.by}"
    return f"{what} | generation {pair.generation} | {how}{why}"


def _when(entry: HistoryEntry | DeployedPair) -> str:
    return entry.author.at.strftime("%Y-%m-%d %H:%M UTC")


def say_change(before: Pointer | None, now: Pointer, say: Say) -> None:
    if now == before:
        say(f"{now.model}: unchanged, production is already {_production_line(now)}")
        return
    replaced = now.replaced.checkpoint if now.replaced else "nothing"
    say(f"{now.model}: {VERBS[now.action]} {now.checkpoint}, replacing {replaced} | every byte verified")


def _lineage_lines(ancestors: tuple[Ancestor, ...]) -> Iterator[str]:
    if ancestors:
        yield "lineage, from the checkpoint to its root:"
    for ancestor, parent in zip_longest(ancestors, ancestors[1:]):
        parts = [ancestor.checkpoint, f"digest {ancestor.digest[:12]}"]
        if ancestor.watermark:
            parts.append(f"data until {ancestor.watermark}")
        if ancestor.partitions:
            names = sorted(ancestor.partitions)
            more = f" and {len(names) - SHOWN_PARTITIONS} more" if len(names) > SHOWN_PARTITIONS else ""
            # If the parent was deleted, it is unknown which of these partitions it was trained on.
            label = "trained on" if parent is not None and not parent.settings_hash else "new"
            parts.append(f"{label} {', '.join(names[:SHOWN_PARTITIONS])}{more}")
        if ancestor.settings_hash:
            parts += [f"settings {ancestor.settings_hash[:12]}", f"code {ancestor.code_version}"]
        if ancestor.published:
            parts.append(f"initialised from {ancestor.published}")
        if ancestor.note:
            parts.append(f"the lineage ends here, because {ancestor.note}")
        yield f"  {' | '.join(map(one_line, parts))}"
        if ancestor.figures:
            yield "    " + ", ".join(f"{name} {value:.4f}" for name, value in ancestor.figures.items())


def _history_lines(entries: tuple[HistoryEntry, ...]) -> Iterator[str]:
    if not entries:
        return
    shown = entries[-SHOWN_ENTRIES:]
    yield f"history, newest first{f' ({len(shown)} of {len(entries)})' if len(shown) < len(entries) else ''}:"
    for entry in reversed(shown):
        yield f"  {_when(entry)} | {VERBS[entry.action]} {entry.checkpoint} | by {entry.author.by}"
        for reason in entry.reasons:
            yield f"    {reason}"
