"""An encoder of the user's own: `model.factory = "package.module:build"` names a function that returns any module.

The function is called as `build(vocab_size=..., pad_id=..., max_positions=..., **model.factory_options)`. Its module is
called as `module(input_ids=..., attention_mask=...)`, both int32 [B, T], texts padded to the right, and returns states
[B, T, D], which are pooled here, or vectors [B, D]; D is `model.hidden_size`. An output with `last_hidden_state`, as
models of transformers have it, is taken for its states. What stands behind the encoder does not know the difference.
"""

import importlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.model.config import ModelConfig
from pipeline.model.encoder import TextEncoder

PREFIX = "encoder.module."
"""How names of its tensors begin in a checkpoint; what follows are those of the module."""
ARGUMENTS = ("vocab_size", "pad_id", "max_positions")
_PAGE = "docs/encoders.md#your-own-encoder"
_PROBED_TOKENS = 512
"""Attention over the longest texts of some models takes gigabytes."""
_SHORT, _NARROW = 5, 8
_TOLERANCE = 1e-3
"""Of vectors of one text in rows of two lengths, against its largest value."""


class FactoryEncoder(TextEncoder):
    """A module of the user's as an encoder. It sees one text a row: rows of several are taken apart first."""

    packs_rows = False

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int, seed: int) -> None:
        """Made on the CPU, whatever the device at the time, since it may read weights.

        Raises ConfigError for a factory that cannot be imported or raises, and for a module that is no encoder.
        """
        super().__init__(config, pad_id)
        self.layers = nn.ModuleList()
        self._name = str(config.factory)
        options = {"vocab_size": vocab_size, "pad_id": pad_id, "max_positions": config.max_positions}
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module = _built(self._name, {**config.factory_options, **options}).float()
            self._check_vectors(vocab_size, min(config.max_positions, _PROBED_TOKENS))

    @property
    def is_random(self) -> bool:
        """Nobody here knows what it draws in training."""
        return True

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """States [B, T, D], or vectors [B, D] of a module that pools. It counts positions itself: one text a row."""
        del positions
        # A row without a text sees its first token: a softmax over nothing has no value and no gradient.
        seen = torch.cat([torch.ones_like(masked[:, 0, :1]), ~masked[:, 0, 1:]], dim=1)
        found = self.module(input_ids=tokens, attention_mask=seen.to(torch.int32))
        states: Tensor = getattr(found, "last_hidden_state", found)
        return states

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """As TextEncoder.pool; vectors as they are."""
        return hidden if hidden.dim() == 2 else super().pool(hidden, tokens)

    def rows(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """As TextEncoder.rows, by way of rows of one text: [R * texts, the longest text]."""
        length = min(tokens.shape[1], self.longest_text)
        numbers = torch.arange(1, texts + 1, dtype=torch.int32, device=tokens.device)[:, None]
        sizes = (segments[:, None] == numbers).sum(-1, dtype=torch.int32)  # [R, texts]
        before = ((segments[:, None] < numbers) & (segments[:, None] > 0)).sum(-1, dtype=torch.int32)
        inside = torch.arange(length, dtype=torch.int32, device=tokens.device)
        places = (before[..., None] + inside).clamp(max=tokens.shape[1] - 1).flatten(1)  # [R, texts * length]
        found = torch.gather(tokens, 1, places.long()).view(-1, length)
        is_real = inside < sizes.view(-1, 1)
        vectors = self(torch.where(is_real, found, self.pad_id)).float()
        return torch.where(is_real[:, :1], vectors, 0.0).view(tokens.shape[0], texts, -1)

    def cost_of_text(self, tokens: int) -> tuple[int, int, int]:
        """Measured here on one text of `tokens`: bytes kept for its backward pass, the largest tensor's, forward FLOPs.

        Weights are kept anyway and left out. FLOPs are those of matrix products, convolutions and attention.
        """
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        kept: dict[int, int] = {}
        alive = []

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
                alive.append(storage)  # so that no later one takes its place
            return tensor

        text = torch.full((1, tokens), (self.pad_id + 1) % 2, dtype=torch.int32)
        counter = FlopCounterMode(display=False)
        with torch.random.fork_rng(devices=[]), saved_tensors_hooks(keep, lambda tensor: tensor), counter:
            self.states(text, None, torch.zeros(1, 1, tokens, dtype=torch.bool))
        return sum(kept.values()), max(kept.values(), default=0), int(counter.get_total_flops())

    @torch.no_grad()
    def _check_vectors(self, vocab_size: int, longest: int) -> None:
        """Probe two texts with the first and the last token of the vocabulary, then one of them in the longest row."""
        was_training = self.module.training
        self.module.eval()
        ids = torch.linspace(0, vocab_size - 1, _NARROW, dtype=torch.float64).round().to(torch.int32)
        ids[ids == self.pad_id] = (self.pad_id + 1) % vocab_size
        narrow = torch.full((2, _NARROW), self.pad_id, dtype=torch.int32)
        narrow[0], narrow[1, :_SHORT] = ids, ids[-_SHORT:]
        wide = torch.full((1, max(longest, _NARROW)), self.pad_id, dtype=torch.int32)
        wide[0, :_SHORT] = ids[-_SHORT:]
        short, padded = self._probe(narrow)[1], self._probe(wide)[0]
        self.module.train(was_training)
        difference = float((short - padded).abs().max())
        if not difference <= _TOLERANCE * max(1.0, float(short.abs().max())):
            raise _refused(
                self._name,
                f"the vector of a text changes by {difference:.2g} when its row is padded from {_NARROW} to"
                f" {wide.shape[1]} tokens",
                "a module that leaves out what attention_mask masks",
            )

    def _probe(self, tokens: Tensor) -> Tensor:
        """Return vectors [B, D] of tokens [B, T]. Raises ConfigError for anything else."""
        rows, length = tokens.shape
        with _user_code(self._name, f"its module, given {rows} texts of {length} tokens,"):
            states: object = self.states(tokens, None, (tokens == self.pad_id)[:, None])
        shapes = ((rows, length, self.width), (rows, self.width))
        if not isinstance(states, Tensor):
            seen = f"a {type(states).__name__}"
        elif tuple(states.shape) not in shapes:
            seen = f"shape {list(states.shape)}"
        elif not states.is_floating_point():
            seen = f"a tensor of {states.dtype}"
        elif not bool(states.isfinite().all()):
            seen = "numbers that are not finite"
        else:
            return self.pool(states, tokens)
        raise _refused(
            self._name,
            f"its module returned {seen} for {rows} texts of {length} tokens",
            f"states {list(shapes[0])} or vectors {list(shapes[1])}, {self.width} being model.hidden_size",
        )


def _refused(name: str, seen: str, expected: str) -> ConfigError:
    return ConfigError(f"model.factory {name}: {seen}", expected=expected, next_command=f"correct it; {_PAGE}")


@contextmanager
def _user_code(name: str, doing: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a ConfigError with its place in that code."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        message = f"{doing} raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{where}"
        raise _refused(name, message, f"an encoder as in {_PAGE}, its package installed or in PYTHONPATH") from error


def _built(name: str, arguments: Mapping[str, object]) -> nn.Module:
    """Import the factory and call it. Raises ConfigError if it is none, or its module cannot be trained and saved."""
    place, _, attribute = name.partition(":")
    with _user_code(name, f"import of {place}"):
        build = getattr(importlib.import_module(place), attribute, None)
    parameters = inspect.signature(build).parameters if callable(build) else {}
    if not callable(build) or not set(ARGUMENTS) <= parameters.keys():
        seen = f"{attribute}({', '.join(parameters)})" if callable(build) else f"no function {attribute}"
        raise _refused(
            name, f"{place} has {seen}", f"def {attribute}(*, {', '.join(ARGUMENTS)}, ...) -> torch.nn.Module"
        )
    with _user_code(name, attribute):
        module = build(**arguments)
    if not isinstance(module, nn.Module):
        raise _refused(name, f"{attribute} returned a {type(module).__name__}", "a torch.nn.Module")
    # All a checkpoint holds of a model are parameters that are trained, each under one name.
    named, first = dict(module.named_parameters(remove_duplicate=False)), dict[int, str]()
    faults = [] if named else ["no parameter"]
    for key, parameter in named.items():
        if (other := first.setdefault(id(parameter), key)) != key:
            faults.append(f"{other} and {key}, which are one parameter")
        elif not parameter.requires_grad:
            faults.append(f"{key}, which does not require a gradient")
    faults += [f"{key}, a buffer that is saved" for key in sorted(module.state_dict().keys() - named.keys())]
    if faults:
        expected = "parameters under one name each, all of them trained, and buffers with persistent=False"
        raise _refused(name, f"its module has {faults[-1]}", expected)
    return module


def module_weights(
    weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, factory: str, source: str
) -> dict[str, Tensor]:
    """Of a file, those of the module, in our names. They may begin with a prefix of their own; others are left out.

    Raises CheckpointError naming a tensor that is missing or of another shape.
    """
    wanted = {name.removeprefix(PREFIX): tensor for name, tensor in template.items() if name.startswith(PREFIX)}
    some = next(iter(wanted))
    prefixes = [name.removesuffix(some) for name in weights if name == some or name.endswith(f".{some}")]
    prefix = max(prefixes, key=lambda one: sum(one + name in weights for name in wanted), default="")
    for name, tensor in wanted.items():
        found = weights.get(prefix + name)
        if found is None or found.shape != tensor.shape:
            seen = "no such tensor" if found is None else f"shape {list(found.shape)}"
            raise CheckpointError(
                f"{source}: {prefix}{name}: {seen}",
                expected=f"shape {list(tensor.shape)}, of the module that {factory} builds",
                next_command="--model.init-from FOLDER with weights of that module, or its sizes in"
                " --model.factory-options",
            )
    return {PREFIX + name: weights[prefix + name] for name in wanted}
