"""Average the trained weights with those that the run started from, as WiSE-FT does (Wortsman et al., CVPR 2022)."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeline.checkpoint.store import Best
from pipeline.data.tokenizer import has_vocabulary
from pipeline.evaluate.score import HoldoutFigures
from pipeline.model.hf import from_hf
from pipeline.model.weights import initial_model
from pipeline.train.build import Run

SHARES = (0.85, 0.7, 0.5)
"""Shares of the trained weights to evaluate, in addition to 1."""


def interpolate(start: Mapping[str, Tensor], trained: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return `share` of the trained weights and the rest of the start. Weights that `start` lacks stay as trained."""
    return {
        name: torch.lerp(start[name], tensor, share) if name in start else tensor for name, tensor in trained.items()
    }


def start_weights(run: Run) -> dict[str, Tensor]:
    """Return the weights of the parent, or those of the published encoder. Empty if the run started from scratch."""
    parent, config, inputs = run.inputs.parent, run.config, run.inputs
    if parent is not None:
        return from_hf(parent.weights(), run.program.strategy.template, source=parent.prefix)
    if (folder := config.model.init_from) is None:
        return {}
    same = has_vocabulary(folder, run.saver.tokenizer)
    model = initial_model(config.model, inputs.spec, config.train.seed, run.ctx.scratch, same_vocabulary=same)
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith("encoder.")}


def average_with_start(
    run: Run, best: Best, measure: Callable[[], tuple[float | None, HoldoutFigures]]
) -> tuple[str, float] | None:
    """Commit the best average of step `best.step` with the start, if its metric is higher than that of the step.

    `measure` scores the validation split with the weights on the device. Returns the prefix and the temperature of the
    average, which is then on the device. Otherwise, returns None, and the weights of the step are on the device.
    """
    start, metric = start_weights(run), best.metric
    if not start:
        return None
    checkpoint = run.saver.store.open(best.step)
    trained = from_hf(checkpoint.weights(), run.program.strategy.template, source=checkpoint.prefix)
    chosen, highest, temperature = 1.0, best.value, 1.0
    for share in SHARES:
        started = time.monotonic()
        run.program.restore(interpolate(start, trained, share), None)
        value, figures = measure()
        is_better = value is not None and value > highest
        if value is not None and is_better:
            chosen, highest, temperature = share, value, figures.temperature
        run.emit_evaluation(best.step, "valid", figures, started, trained_share=share, **{metric: value})
        run.ctx.console.info(
            f"valid with {share:.0%} of the weights of step {best.step} and {1 - share:.0%} of the start:"
            f" {metric} {'undefined' if value is None else f'{value:.4f}'}{' (best)' if is_better else ''}"
        )
    weights = interpolate(start, trained, chosen)
    run.program.restore(weights, None)
    if chosen == 1.0:
        return None
    state = checkpoint.state.model_copy(
        update={
            "averaged": chosen,
            "best": best.model_copy(update={"value": highest}),
            "temperature": temperature if run.config.train.loss.trains_head else 1.0,
        }
    )
    return run.saver.save_average(state, weights, checkpoint), state.temperature
