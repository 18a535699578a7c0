"""The embedding program of a device with static shapes: rows that hold several texts each, one graph for each length.

Texts of a row do not see each other (TextEncoder.rows). So a few graphs fit any catalogue with next to no padding:
0.4 % of the tokens of 35,311 real titles in rows of 128. With one text a row the six lengths that suit these titles
best leave 13 %.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pipeline.backends import Backend, Batch
from pipeline.compile.watch import GraphWatch, NoWatch, Place
from pipeline.embed.config import EmbedConfig
from pipeline.model.encoder import TextEncoder
from pipeline.model.ops import choose_forms

PHASE = "embed"
_TOKENS_PER_TEXT = 4  # texts shorter than this on average leave room in their row


@dataclass(frozen=True)
class RowShape:
    """One static shape: `rows` rows of `length` tokens, each of at most `texts` texts."""

    rows: int
    length: int
    texts: int

    def blank(self) -> Batch:
        """A batch without a text."""
        names = ("tokens", "positions", "segments")
        return {name: torch.zeros(self.rows, self.length, dtype=torch.int32) for name in names}


def row_shapes(buckets: Sequence[int], tokens: int) -> tuple[RowShape, ...]:
    """The shape of each bucket, `tokens` tokens or a little less."""
    return tuple(RowShape(tokens // length, length, max(1, length // _TOKENS_PER_TEXT)) for length in buckets)


class RowEncoder(nn.Module):
    """A TextEncoder for rows of several texts."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """As TextEncoder.rows -> fp32 [R * texts, D]."""
        return self.encoder.rows(tokens, positions, segments, texts).flatten(0, 1)


class EmbedProgram:
    """Vectors of texts. Takes the encoder over: it is moved to the device and cast."""

    def __init__(
        self, encoder: TextEncoder, backend: Backend, config: EmbedConfig, watch: GraphWatch | None = None
    ) -> None:
        choose_forms(encoder, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        module = RowEncoder(encoder).eval().requires_grad_(False).to(dtype).to(backend.device)
        compiled = config.compiled and backend.can_compile
        forward = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
        self._forward = cast(Callable[[Tensor, Tensor, Tensor, int], Tensor], forward)
        self.backend = backend
        self.shapes = row_shapes(config.buckets, config.batch_tokens(backend.default_tokens))
        self._by_length = {shape.length: shape for shape in self.shapes}
        self._watch: GraphWatch = watch or NoWatch()
        backend.step_boundary(list(module.parameters()))

    @torch.no_grad()
    def vectors(self, batch: Batch) -> Tensor:
        """A batch of one of `shapes` on the device -> fp32 [rows * texts, D] on the device, not normalised."""
        rows, length = batch["tokens"].shape
        shape = self._by_length.get(length)
        if shape is None or shape.rows != rows:
            raise ValueError(f"{rows} rows of {length} tokens, where shapes are {self.shapes}")
        vectors = self._forward(batch["tokens"], batch["positions"], batch["segments"], shape.texts)
        place = Place(PHASE, str(length), rows)
        self._watch.before(place, lambda: self.backend.hlo_text([vectors]))
        self.backend.step_boundary([vectors])
        self._watch.after(place)
        return vectors
