"""From the state on the device to a checkpoint handed to the background, and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pipeline.checkpoint.save import CheckpointWriter, Snapshot
from pipeline.checkpoint.state import Best, TrainState
from pipeline.checkpoint.store import Checkpoint, CheckpointStore
from pipeline.core.errors import TransientError
from pipeline.model.hf import from_hf, hf_config, to_hf
from pipeline.model.temperature import LOG_SCALE
from pipeline.parallel.gang import Gang
from pipeline.train.step import TrainProgram


@dataclass
class Saver:
    """Saves and restores one run. Rank 0 writes; every rank reads for itself."""

    program: TrainProgram
    store: CheckpointStore
    writer: CheckpointWriter
    gang: Gang
    base: TrainState
    """State at step 0; only step and best change."""
    template: dict[str, Tensor]
    """Names and shapes of the model's tensors (on the meta device)."""
    tokenizer: bytes
    warn: Callable[[str], None]
    start_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Of what is learnt in this run, and which a parent may lack."""
    _told: str = field(init=False, default="")

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint of this cycle, the same on every rank."""
        step, checkpoint = -1, None
        if self.gang.world.is_main:
            checkpoint, rejected = self.store.newest_valid()
            for reason in rejected:
                self.warn(f"checkpoint passed over: {reason}")
            step = -1 if checkpoint is None else checkpoint.state.step
        chosen = int(self.gang.gather(step)[0])
        return checkpoint if self.gang.world.is_main else None if chosen < 0 else self.store.open(chosen)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run: weights, moments, guard."""
        weights = from_hf(checkpoint.weights(), self.template, source=checkpoint.prefix)
        self.program.restore(weights, checkpoint.optimizer())

    def start_from(self, parent: Checkpoint) -> None:
        """Take over a parent's weights, with the temperature it learnt where this run learns one; else that of the
        settings. The optimizer starts anew.
        """
        weights = parent.weights()
        if LOG_SCALE in weights and LOG_SCALE not in self.template:
            self.warn(f"{parent.prefix} learnt a temperature, which is left out: train.loss.learn_temperature is off")
        self.program.restore(from_hf({**self.start_values, **weights}, self.template, source=parent.prefix), None)

    def save(self, step: int, best: Best | None) -> None:
        """Copy to the host and hand over, with the `best` evaluation so far. Warns of a failed earlier save, once."""
        if self.writer.failure and self.writer.failure != self._told:
            self._told = self.writer.failure
            self.warn(f"a checkpoint could not be saved, training goes on: {self._told}")
        weights, optimizer = self.program.snapshot()
        if not self.gang.world.is_main:
            return
        state = self.base.model_copy(update={"step": step, "best": best})
        config = hf_config(state.model, state.inputs)
        self.writer.submit(Snapshot(state, to_hf(weights), optimizer, config, self.tokenizer))

    def wait_saved(self, step: int) -> None:
        """Until the checkpoint of `step` is safe. Raises TransientError when it could not be saved."""
        self.writer.wait()
        if self.gang.world.is_main and self.writer.last_saved != step:
            raise TransientError(
                f"the checkpoint of step {step} could not be saved: {self.writer.failure}",
                expected="a workspace with room that can be written",
                next_command="make room, then run the same command; it continues from the last good checkpoint",
            )
