"""User-defined encoders, which are built by a function that `model.factory` refers to as "package.module:build".

The function is called as `build(vocab_size=..., pad_id=..., max_positions=..., **model.factory_options)` and must
return a torch module. That module is called as `module(input_ids=..., attention_mask=...)`, where both arguments are
int32 tensors of shape [B, T] and texts are padded on the right. It should return either hidden states of shape
[B, T, D], which are pooled here, or one vector per text, of shape [B, D], where D is `model.hidden_size`. If the output
has an attribute `last_hidden_state`, as in transformers, the attribute is used as the hidden states.
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
"""Prefix that is added to the module's tensor names in a checkpoint."""
ARGUMENTS = ("vocab_size", "pad_id", "max_positions")
_PAGE = "docs/encoders.md#your-own-encoder"
_PROBED_TOKENS = 512
"""Maximum text length for checks, since attention over the longest texts takes gigabytes for some models."""
_SHORT, _NARROW = 5, 8
_TOLERANCE = 1e-3
"""Maximum difference between the vectors of a text with and without padding, relative to the largest value."""


class FactoryEncoder(TextEncoder):
    """Encoder that wraps a user-defined module.

    The module only needs to support one text per row, since packed rows are split first.
    """

    packs_rows = False

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int, seed: int) -> None:
        """Build the module and check its output. It is always built on the CPU, since the factory may load weights.

        Raises ConfigError if the factory cannot be imported or fails, or if the module is not a valid encoder.
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
        """Always True, since the module may use random numbers."""
        return True

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """Compute hidden states of shape [B, T, D], or vectors of shape [B, D] if the module does its own pooling."""
        del positions  # the module determines the positions itself
        # Always unmask the first token, since softmax and its gradient are undefined for an empty row.
        is_real = torch.cat([torch.ones_like(masked[:, 0, :1]), ~masked[:, 0, 1:]], dim=1)
        output = self.module(input_ids=tokens, attention_mask=is_real.to(torch.int32))
        states: Tensor = getattr(output, "last_hidden_state", output)
        return states

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Pool hidden states, as TextEncoder.pool does. Vectors are returned unchanged."""
        return hidden if hidden.dim() == 2 else super().pool(hidden, tokens)

    def rows(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Compute embeddings, as TextEncoder.rows does, after moving each text to a separate row."""
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
        """Measure the memory and compute that a text with `tokens` tokens requires.

        Returns the number of bytes that are saved for backward, the size of the largest saved tensor in bytes, and the
        number of FLOPs in the forward pass. Weights are excluded, and FLOPs only include matrix products, convolutions
        and attention.
        """
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        kept: dict[int, int] = {}
        alive = []

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
                alive.append(storage)  # ensures that the address isn't reused
            return tensor

        text = torch.full((1, tokens), (self.pad_id + 1) % 2, dtype=torch.int32)
        counter = FlopCounterMode(display=False)
        with torch.random.fork_rng(devices=[]), saved_tensors_hooks(keep, lambda tensor: tensor), counter:
            self.states(text, None, torch.zeros(1, 1, tokens, dtype=torch.bool))
        return sum(kept.values()), max(kept.values(), default=0), int(counter.get_total_flops())

    @torch.no_grad()
    def _check_vectors(self, vocab_size: int, longest: int) -> None:
        """Run the module on ids from the whole vocabulary and on a long row.

        Raises ConfigError if the output is invalid, or if padding changes the vector of a text.
        """
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
                "a module that ignores tokens that are masked by attention_mask",
            )

    def _probe(self, tokens: Tensor) -> Tensor:
        """Return the vectors for token ids of shape [B, T]. Raises ConfigError if the output is invalid."""
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
    return ConfigError(f"model.factory {name}: {problem}", expected=expected, next_command=f"see {_PAGE}")


@contextmanager
def _user_code(name: str, doing: str) -> Iterator[None]:
    """Convert any error raised by user code to a ConfigError that includes the file and line."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        origin = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        message = f"{doing} raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{origin}"
        raise _error(name, message, "an encoder in an installed package, or in a folder on PYTHONPATH") from error


def _build_module(name: str, arguments: Mapping[str, object]) -> nn.Module:
    """Import and call the factory. Raises ConfigError if it fails, or if the module can't be trained or saved."""
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
    # Checkpoints only contain trained parameters, each of which has exactly one name.
    named, first = dict(module.named_parameters(remove_duplicate=False)), dict[int, str]()
    faults = [] if named else ["no parameter"]
    for key, parameter in named.items():
        if (other := first.setdefault(id(parameter), key)) != key:
            faults.append(f"{other} and {key}, which are tied")
        elif not parameter.requires_grad:
            faults.append(f"{key}, which does not require gradients")
    faults += [f"{key}, a persistent buffer" for key in sorted(module.state_dict().keys() - named.keys())]
    if faults:
        expected = "parameters that are not tied and require gradients, and only buffers with persistent=False"
        raise _error(name, f"its module has {faults[-1]}", expected)
    return module


def module_weights(
    weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, factory: str, source: str
) -> dict[str, Tensor]:
    """Select the tensors that belong to the factory's module and replace the prefix of their names with PREFIX.

    Raises CheckpointError for the first tensor that is missing or has the wrong shape.
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
                next_command="--model.init-from FOLDER with the weights of this module, or change its sizes with"
                " --model.factory-options",
            )
    return {PREFIX + name: weights[prefix + name] for name in expected}
