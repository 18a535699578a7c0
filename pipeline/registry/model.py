"""The registry of one model: what is in production, what is served with which vectors, and changing either."""

from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.checkpoints import Ancestor, lineage, prefix_in, read_checkpoint
from pipeline.registry.promote import promote
from pipeline.registry.records import (
    Author,
    Entry,
    Pointer,
    check_model,
    list_models,
    one_line,
    read_history,
    read_pointer,
    stored_decision,
    who,
)
from pipeline.registry.serving import Pair, past_pairs, read_pair, roll_back_model, roll_back_vectors
from pipeline.settings import Settings
from pipeline.telemetry.events import code_version


class Registry:
    """What a workspace knows of one model. Each call reads what is there now.

    Args:
        workspace: folder or URI, or an open storage.
        model: its name; empty: the only one there is.

    Raises ConfigError for a workspace that cannot be opened, and without a name where there are several models or none.
    """

    def __init__(self, workspace: str | Storage, model: str = "", *, author: Author | None = None) -> None:
        self.workspace = open_storage(workspace, stop=StopSignal()) if isinstance(workspace, str) else workspace
        self.model = check_model(model) if model else self._only()
        self._author = author

    def production(self) -> Pointer | None:
        """Return the checkpoint in production, and how it came there; None before the first. Raises CheckpointError."""
        found = read_pointer(self.workspace, self.model)
        return found[0] if found else None

    def history(self) -> tuple[Entry, ...]:
        """Return every promotion, refusal and rollback, oldest first."""
        return read_history(self.workspace, self.model)

    def lineage(self, checkpoint: str = "") -> tuple[Ancestor, ...]:
        """Return a checkpoint (default: in production), its parent, and so on. Raises CheckpointError, ConfigError."""
        if checkpoint:
            return lineage(self.workspace, prefix_in(self.workspace, checkpoint))
        pointer = self.production()
        return lineage(self.workspace, pointer.checkpoint) if pointer else ()

    def serving(self) -> Pair | None:
        """Return the model and the vectors that are served together; None before the first pair was verified."""
        found = read_pair(self.workspace, self.model)
        return found[0] if found else None

    def pairs(self) -> tuple[Pair, ...]:
        """Return every pair that was served, oldest first."""
        return past_pairs(self.workspace, self.model)

    def vectors_uri(self, pair: Pair | None = None) -> str:
        """Return the URI of the vectors of a pair (default: the served one), for `trnpipe.open_vectors`."""
        pair = pair or self.serving()
        if pair is None:
            raise ConfigError(
                f"nothing is served of {self.model}",
                expected="a pair that was verified",
                next_command="trnpipe embed, then trnpipe embed verify",
            )
        return self.workspace.uri(pair.vectors.prefix)

    def promote(self, checkpoint: str, *, cycle: str = "", force: str = "") -> Pointer:
        """Put a checkpoint into production that the gate has passed, or with a reason to overrule it.

        `cycle`: one that has judged it, beside the one that trained it. Raises GateRefused, CheckpointError,
        TransientError.
        """
        prefix, before = prefix_in(self.workspace, checkpoint), self.production()
        candidate = read_checkpoint(self.workspace, prefix)
        cycles = [name for name in (cycle, candidate.state.cycle) if name]
        incumbent = before.place if before else None
        judged = stored_decision(self.workspace, self.model, candidate.place, incumbent, cycles)
        decision = judged.model_copy(update={"forced": one_line(force)})
        return promote(self.workspace, self.model, prefix, expected=before, decision=decision, author=self.author())

    def rollback(self, checkpoint: str = "", *, reason: str, without_vectors: bool = False) -> Pointer:
        """Put an earlier checkpoint back (default: the one before), and serve it with its vectors: both or neither.

        Raises ConfigError, CheckpointError, TransientError.
        """
        to = prefix_in(self.workspace, checkpoint) if checkpoint else ""
        return roll_back_model(
            self.workspace, self.model, to, reason=reason, author=self.author(), without_vectors=without_vectors
        )

    def rollback_vectors(self, cycle: str = "", *, reason: str) -> Pair:
        """Serve earlier vectors of the served model: those of `cycle`, or the newest before. Production stays."""
        return roll_back_vectors(self.workspace, self.model, cycle, reason=reason, author=self.author())

    def author(self) -> Author:
        """Return who is recorded for a change."""
        return self._author or Author(by=who(), code_version=code_version())

    def _only(self) -> str:
        models = list_models(self.workspace)
        if len(models) != 1:
            raise ConfigError(
                f"{self.workspace.root} knows {len(models)} models" + (f": {', '.join(models)}" if models else ""),
                expected="the name of one of them" if models else "a workspace in which a model was promoted",
                next_command="trnpipe registry list",
            )
        return models[0]


def readable_model(settings: Settings, workspace: Storage) -> str:
    """Return the model that the settings name; if that is the default and does not exist, the only one that exists.

    Raises ConfigError where another one must be named.
    """
    known = list_models(workspace)
    if settings.model_name in known or not known:
        return settings.model_name
    if len(known) == 1 and settings.model_name == Settings.model_fields["model_name"].default:
        return known[0]
    raise ConfigError(
        f"{workspace.root} has no model {settings.model_name}",
        expected=f"one of {', '.join(known)}",
        next_command=f"--model-name {known[0]}, or the --config of its cycles",
    )
