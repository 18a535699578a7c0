"""User-defined encoders: `model.factory = "package.module:build"` names a function that returns a torch module.

The function is called as `build(vocab_size=..., pad_id=..., max_positions=..., **model.factory_options)`. Its module is
called as `module(input_ids=..., attention_mask=...)`, both int32 [B, T], texts padded to the right. It returns states
[B, T, D], which are pooled here, or vectors [B, D], where D is `model.hidden_size`. If the output has the attribute
`last_hidden_state`, as in transformers, that is used as the states.
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
"""Prefix of the module's tensor names in a checkpoint."""
ARGUMENTS = ("vocab_size", "pad_id", "max_positions")
_PAGE = "docs/encoders.md#your-own-encoder"
_PROBED_TOKENS = 512
"""Attention over the longest texts of some models takes gigabytes."""
_SHORT, _NARROW = 5, 8
_TOLERANCE = 1e-3
"""Allowed difference of a text's vectors in rows of two lengths, relative to the largest value."""


class FactoryEncoder(TextEncoder):
    """Encoder around a user's module, which gets one text per row. Rows of several texts are split first."""

    packs_rows = False

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int, seed: int) -> None:
        """Build the module on the CPU, because it may read weights, and check its output.

        Raises ConfigError if the factory cannot be imported or raises, or its module is not a valid encoder.
        """
        super().__init__(config, pad_id)
        self.layers = nn.ModuleList()
        self._name = str(config.factory)
        options = {"vocab_size": vocab_size, "pad_id": pad_id, "max_positions": config.max_positions}
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module = _build_module(self._name, {**config.factory_options, **options}).float()
            self._check_vectors(vocab_size, min(config.max_positions, _PROBED_TOKENS))

    @property
    def is_random(self) -> bool:
        """Always True, because the module may draw random numbers."""
        return True

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """Return states [B, T, D], or vectors [B, D] if the module pools. The module counts positions itself."""
        del positions
        # Unmask the first token of a row without a text, because a softmax over nothing has no value and no gradient.
        is_real = torch.cat([torch.ones_like(masked[:, 0, :1]), ~masked[:, 0, 1:]], dim=1)
        output = self.module(input_ids=tokens, attention_mask=is_real.to(torch.int32))
        states: Tensor = getattr(output, "last_hidden_state", output)
        return states

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Pool states as TextEncoder.pool does, and return vectors unchanged."""
        return hidden if hidden.dim() == 2 else super().pool(hidden, tokens)

    def rows(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Return embeddings as TextEncoder.rows does, after splitting rows into [R * texts, the longest text]."""
        length = min(tokens.shape[1], self.longest_text)
        numbers = torch.arange(1, texts + 1, dtype=torch.int32, device=tokens.device)[:, None]
        sizes = (segments[:, None] == numbers).sum(-1, dtype=torch.int32)  # [R, texts]
        before = ((segments[:, None] < numbers) & (segments[:, None] > 0)).sum(-1, dtype=torch.int32)
        inside = torch.arange(length, dtype=torch.int32, device=tokens.device)
        indices = (before[..., None] + inside).clamp(max=tokens.shape[1] - 1).flatten(1)  # [R, texts * length]
        split = torch.gather(tokens, 1, indices.long()).view(-1, length)
        is_real = inside < sizes.view(-1, 1)
        vectors = self(torch.where(is_real, split, self.pad_id)).float()
        return torch.where(is_real[:, :1], vectors, 0.0).view(tokens.shape[0], texts, -1)

    def cost_of_text(self, tokens: int) -> tuple[int, int, int]:
        """Measure (bytes saved for backward, bytes of the largest saved tensor, forward FLOPs) of a text of `tokens`.

        Weights are excluded. FLOPs are those of matrix products, convolutions and attention.
        """
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        kept: dict[int, int] = {}
        alive = []

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
                alive.append(storage)  # so that no later storage reuses its address
            return tensor

        text = torch.full((1, tokens), (self.pad_id + 1) % 2, dtype=torch.int32)
        counter = FlopCounterMode(display=False)
        with torch.random.fork_rng(devices=[]), saved_tensors_hooks(keep, lambda tensor: tensor), counter:
            self.states(text, None, torch.zeros(1, 1, tokens, dtype=torch.bool))
        return sum(kept.values()), max(kept.values(), default=0), int(counter.get_total_flops())

    @torch.no_grad()
    def _check_vectors(self, vocab_size: int, longest: int) -> None:
        """Probe first and last tokens and the longest row. Raises ConfigError if padding changes a text's vector."""
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
            raise _error(
                self._name,
                f"the vector of a text changes by {difference:.2g} when its row is padded from {_NARROW} to"
                f" {wide.shape[1]} tokens",
                "a module that ignores tokens masked by attention_mask",
            )

    def _probe(self, tokens: Tensor) -> Tensor:
        """Return vectors [B, D] of tokens [B, T]. Raises ConfigError if the module's output is invalid."""
        rows, length = tokens.shape
        with _user_code(self._name, f"its module, called with {rows} texts of {length} tokens,"):
            states: object = self.states(tokens, None, (tokens == self.pad_id)[:, None])
        shapes = ((rows, length, self.width), (rows, self.width))
        if not isinstance(states, Tensor):
            output = f"a {type(states).__name__}"
        elif tuple(states.shape) not in shapes:
            output = f"shape {list(states.shape)}"
        elif not states.is_floating_point():
            output = f"a tensor of {states.dtype}"
        elif not bool(states.isfinite().all()):
            output = "NaN or infinite values"
        else:
            return self.pool(states, tokens)
        raise _error(
            self._name,
            f"its module returned {output} for {rows} texts of {length} tokens",
            f"states {list(shapes[0])} or vectors {list(shapes[1])}, where {self.width} is model.hidden_size",
        )


def _error(name: str, problem: str, expected: str) -> ConfigError:
    return ConfigError(f"model.factory {name}: {problem}", expected=expected, next_command=f"correct it; {_PAGE}")


@contextmanager
def _user_code(name: str, doing: str) -> Iterator[None]:
    """Convert any error of the user's code to a ConfigError with its file and line."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        origin = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        message = f"{doing} raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{origin}"
        raise _error(name, message, f"an encoder as in {_PAGE}, in an installed package or PYTHONPATH") from error


def _build_module(name: str, arguments: Mapping[str, object]) -> nn.Module:
    """Import and call the factory. Raises ConfigError if this fails or the module cannot be trained and saved."""
    package, _, attribute = name.partition(":")
    with _user_code(name, f"import of {package}"):
        build = getattr(importlib.import_module(package), attribute, None)
    parameters = inspect.signature(build).parameters if callable(build) else {}
    if not callable(build) or not set(ARGUMENTS) <= parameters.keys():
        actual = f"{attribute}({', '.join(parameters)})" if callable(build) else f"no function {attribute}"
        raise _error(
            name, f"{package} has {actual}", f"def {attribute}(*, {', '.join(ARGUMENTS)}, ...) -> torch.nn.Module"
        )
    with _user_code(name, attribute):
        module = build(**arguments)
    if not isinstance(module, nn.Module):
        raise _error(name, f"{attribute} returned a {type(module).__name__}", "a torch.nn.Module")
    # A checkpoint stores only parameters that are trained, each under one name.
    named, first = dict(module.named_parameters(remove_duplicate=False)), dict[int, str]()
    faults = [] if named else ["no parameter"]
    for key, parameter in named.items():
        if (other := first.setdefault(id(parameter), key)) != key:
            faults.append(f"{other} and {key}, which are one tied parameter")
        elif not parameter.requires_grad:
            faults.append(f"{key}, which does not require a gradient")
    faults += [f"{key}, a persistent buffer" for key in sorted(module.state_dict().keys() - named.keys())]
    if faults:
        expected = "untied parameters that all require gradients, and buffers with persistent=False"
        raise _error(name, f"its module has {faults[-1]}", expected)
    return module


def module_weights(
    weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, factory: str, source: str
) -> dict[str, Tensor]:
    """Return the tensors of a file that belong to the factory's module, with PREFIX instead of the file's prefix.

    Raises CheckpointError naming a tensor that is missing or has another shape.
    """
    expected = {name.removeprefix(PREFIX): tensor for name, tensor in template.items() if name.startswith(PREFIX)}
    first = next(iter(expected))
    prefixes = [name.removesuffix(first) for name in weights if name == first or name.endswith(f".{first}")]
    prefix = max(prefixes, key=lambda prefix: sum(prefix + name in weights for name in expected), default="")
    for name, tensor in expected.items():
        actual = weights.get(prefix + name)
        if actual is None or actual.shape != tensor.shape:
            problem = "no such tensor" if actual is None else f"shape {list(actual.shape)}"
            raise CheckpointError(
                f"{source}: {prefix}{name}: {problem}",
                expected=f"shape {list(tensor.shape)}, as in the module of {factory}",
                next_command="--model.init-from FOLDER with weights of that module, or its sizes in"
                " --model.factory-options",
            )
    return {PREFIX + name: weights[prefix + name] for name in expected}
