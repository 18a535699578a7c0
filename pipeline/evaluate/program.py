"""The scoring program of one device: weights and the forward pass, in the very graphs that training evaluates with."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.backends import Backend
from pipeline.compile.watch import GraphWatch, NoWatch, Place
from pipeline.core.buckets import Bucket
from pipeline.core.errors import CheckpointError, DataError
from pipeline.model.flat import FlatLayout, Precision, flat_forward
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel, RelevanceOutputs

PHASE = "evaluate"


class ScoreProgram:
    """Scores and embeddings of batches. No gradient; a model of the same shape takes the same graphs."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        precision: Precision,
        buckets: Sequence[Bucket],
        watch: GraphWatch | None = None,
        *,
        chunk_mib: float,
        by_layer: bool = False,
    ) -> None:
        """Takes the model over: only its structure stays. Load weights before scoring.

        `chunk_mib`, `by_layer`: as in training.
        """
        choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        self.backend, self._precision = backend, precision
        self._layout = FlatLayout.of(model, chunk_mib, by_layer=by_layer)
        self._model = model.eval().to("meta")
        self._shapes = {(bucket.query_tokens, bucket.product_tokens) for bucket in buckets}
        self._watch: GraphWatch = watch or NoWatch()
        self._flats: list[Tensor] = []

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights (our names, any dtype, on CPU) on the device. Raises CheckpointError for other shapes."""
        for chunk in self._layout.chunks:
            for name, shape in zip(chunk.names, chunk.shapes, strict=True):
                if name not in weights or weights[name].shape != shape:
                    seen = list(weights[name].shape) if name in weights else "missing"
                    raise CheckpointError(f"{name} is {seen}", expected=f"{list(shape)} for this model")
        self._flats = [flat.to(self.backend.device) for flat in self._layout.pack(weights)]

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Of `outputs` the logits."""
        return self.outputs(batch).logits

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Logits over relevance classes [B, K] and embeddings [B, D], fp32, on the device."""
        rows, query_tokens = batch["query"].shape
        shape = (query_tokens, batch["product"].shape[1])
        if shape not in self._shapes:
            known = ", ".join(f"{query}x{product}" for query, product in sorted(self._shapes))
            raise DataError(f"a batch of {shape[0]}x{shape[1]} tokens", expected=f"one of the buckets {known}")
        found = flat_forward(
            self._model, self._layout, self._flats, batch, backend=self.backend, precision=self._precision
        )
        outputs = RelevanceOutputs(*(tensor.float() for tensor in found))
        del found  # what is alive at the end of a graph is an output of it
        place = Place(PHASE, Bucket(*shape).name, rows)
        self._watch.before(place, lambda: self.backend.hlo_text(outputs))
        self.backend.step_boundary(outputs)
        self._watch.after(place)
        return outputs
