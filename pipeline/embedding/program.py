"""The embedding program of one device: an encoder with its weights, and one graph for each length of text."""

import torch
from torch import Tensor

from pipeline.backends import Backend
from pipeline.embedding.config import EmbedConfig
from pipeline.graphs.watch import GraphWatch, NoWatch, Place
from pipeline.model.encoder import TextEncoder
from pipeline.model.ops import choose_forms, unit

PHASE = "embed"


class EmbedProgram:
    """Unit vectors of texts. Takes the encoder over: it is moved to the device and cast."""

    def __init__(
        self, encoder: TextEncoder, backend: Backend, config: EmbedConfig, watch: GraphWatch | None = None
    ) -> None:
        choose_forms(encoder, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._encoder = encoder.eval().requires_grad_(False).to(dtype).to(backend.device)
        self.backend, self.batch_size = backend, config.batch_size
        self._watch: GraphWatch = watch or NoWatch()
        backend.step_boundary(list(self._encoder.parameters()))

    @torch.no_grad()
    def vectors(self, tokens: Tensor) -> Tensor:
        """Token ids int32 [batch_size, T] on the device -> fp32 [batch_size, D] of length one, on the device."""
        if tokens.shape[0] != self.batch_size:
            raise ValueError(f"{tokens.shape[0]} texts where every batch has {self.batch_size}")
        vectors = unit(self._encoder(tokens).float())
        place = Place(PHASE, str(tokens.shape[1]), self.batch_size)
        self._watch.before(place, lambda: self.backend.hlo_text([vectors]))
        self.backend.step_boundary([vectors])
        self._watch.after(place)
        return vectors
