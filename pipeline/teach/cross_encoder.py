"""Score pairs with a cross-encoder that was trained by sentence-transformers or `transformers`."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import tokenizers
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from pipeline.backends import Backend, Batch
from pipeline.context import StageContext
from pipeline.convert.folder import ImportSource, read_tokenizer
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, first_line
from pipeline.core.fingerprint import fingerprint
from pipeline.io.storage import HEAD_BYTES, check_downloaded
from pipeline.model.config import MAX_POSITIONS
from pipeline.model.hf import CONFIG, FAMILIES
from pipeline.parallel.process_group import open_device
from pipeline.settings import Settings
from pipeline.teach.teacher import DOING, RowTexts

_WEIGHTS = "model.safetensors"  # other formats may contain code
_DEFAULT_POSITIONS = 512  # as in transformers
_NAMES = ("input_ids", "token_type_ids", "attention_mask")


class CrossEncoderTeacher:
    """A teacher that reads both texts of a pair together. It runs in fp32 and has no vectors."""

    width: Literal[0] = 0

    def __init__(self, source: ImportSource, buckets: Sequence[Bucket], settings: Settings, ctx: StageContext) -> None:
        """Read the files of the folder. Raises ConfigError if they are not supported."""
        self.name, self._buckets, self._settings, self._ctx = source.uri, buckets, settings, ctx
        scratch = ctx.scratch / "teacher"
        scratch.mkdir(parents=True, exist_ok=True)
        tokenizer, max_tokens, _ = read_tokenizer(source, "", lowercase=False)
        self._folder = source.local(CONFIG, scratch).parent
        with source.local(_WEIGHTS, scratch).open("rb") as file:
            check_downloaded(file.read(HEAD_BYTES), source.where(_WEIGHTS), ConfigError)
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
        self._tokenizer.no_padding()
        config, self._pad_id = json.loads(source.read(CONFIG)), tokenizer.pad_id
        family = FAMILIES.get(config.get("model_type", ""))
        offset = family.offset(self._pad_id) if family else 0
        positions = config.get("max_position_embeddings")
        limit = (positions if isinstance(positions, int) else _DEFAULT_POSITIONS) - offset
        self._max_tokens = min(max_tokens or MAX_POSITIONS, limit)
        self.digest = fingerprint([source.fingerprint, self._max_tokens])

    def scores(self, texts: RowTexts, queries: Int64s, products: Int64s) -> Float32s:
        scores, started = np.zeros(len(queries), dtype=np.float32), deque[Int64s]()

        def feed() -> Iterator[Batch]:
            for chosen, batch in self._batches(texts, queries, products):
                started.append(chosen)
                yield batch

        with self._backend.loader(feed()) as ready:
            for batch in ready:
                self._ctx.stop.raise_if_set(DOING)
                (host,) = self._backend.to_host([self._logits(batch)])
                chosen, logits = started.popleft(), host.numpy().astype(np.float64)
                best, others = logits[:, -1], logits[:, :-1]
                with np.errstate(invalid="ignore"):  # the caller checks for NaN
                    score = best - np.logaddexp.reduce(others, axis=1) if others.shape[1] else best
                scores[chosen] = score[: len(chosen)]
        return scores

    def _batches(self, texts: RowTexts, queries: Int64s, products: Int64s) -> Iterator[tuple[Int64s, Batch]]:
        """Yield batches of static shapes for N pairs of rows, and the indices of the pairs in each batch."""
        lengths = sorted({min(self._max_tokens, shape.query_tokens + shape.product_tokens) for shape in self._buckets})
        self._tokenizer.enable_truncation(lengths[-1], strategy="longest_first")
        sides = texts.decoded("query", queries), texts.decoded("product", products)
        encoded = self._tokenizer.encode_batch(list(zip(*sides, strict=True)))
        kind = np.searchsorted(lengths, [len(pair.ids) for pair in encoded])
        size = min(self._settings.train.micro_batch_size, self._settings.train.global_batch_size)
        for number, length in enumerate(lengths):
            pairs = np.flatnonzero(kind == number)
            for first in range(0, len(pairs), size):
                chosen = pairs[first : first + size]
                batch = np.zeros((3, size, length), dtype=np.int32)
                batch[0] = self._pad_id
                for row, pair in enumerate(np.resize(chosen, size)):  # repeats pairs to fill the last batch
                    ids = encoded[pair].ids
                    batch[:, row, : len(ids)] = ids, encoded[pair].type_ids, [1] * len(ids)
                yield chosen, dict(zip(_NAMES, map(torch.from_numpy, batch), strict=True))

    @torch.no_grad()
    def _logits(self, batch: Batch) -> Tensor:
        inputs = {name: tensor.long() for name, tensor in batch.items()}
        logits: Tensor = self._model(**inputs).logits.float()
        self._backend.step_boundary([logits])
        return logits

    @cached_property
    def _backend(self) -> Backend:
        return open_device(self._settings.backend, self._ctx.world)

    @cached_property
    def _model(self) -> torch.nn.Module:
        try:
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                self._folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
            if missing := sorted(loaded["missing_keys"]):  # transformers would initialise them randomly
                raise ValueError(f"{_WEIGHTS} has no tensor {missing[0]}")
        except Exception as error:  # depends on the versions of transformers and its dependencies
            raise ConfigError(
                f"train.teacher: {self.name} cannot be loaded: {first_line(error)}",
                expected="a cross-encoder that transformers supports without additional code",
                next_command="choose a different --train.teacher",
            ) from error
        module: torch.nn.Module = model.eval().requires_grad_(False).to(self._backend.device)
        self._backend.step_boundary(list(module.parameters()))
        return module
