"""sentence-transformers on the same data, trained by its own trainer. Needs `datasets` beside the extra `dev`."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ["USE_TORCH_XLA"] = "0"  # read on import: the peer trains without XLA, where it is fastest
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
    OnlineContrastiveLoss,
)
from sentence_transformers.util import mine_hard_negatives

from bench.quality.part import CPU, SPLIT_DIGITS
from bench.quality.tasks import Pairs
from pipeline.convert.exporting import write_tokenizer
from pipeline.core.arrays import Float32s
from pipeline.data.tokenizer import TOKENIZER_FILE, TextTokenizer

Encode = Callable[[Sequence[str]], Float32s]
"""Texts to unit vectors [N, D]."""
MAX_TOKENS = 64
"""Of a text: as many as our buckets hold."""


def open_model(folder: Path, device: str) -> SentenceTransformer:
    """The published weights."""
    model = SentenceTransformer(str(folder), device=device, local_files_only=True)
    model.max_seq_length = MAX_TOKENS
    return model


def _with_split_digits(folder: Path, scratch: Path) -> Path:
    """A copy of a model's folder with that tokenizer."""
    copied = Path(shutil.copytree(folder, scratch / "model"))
    (copied / "vocab.txt").unlink(missing_ok=True)
    split = TextTokenizer((folder / TOKENIZER_FILE).read_bytes()).with_split_digits()
    write_tokenizer(copied, split, MAX_TOKENS)
    return copied


def encoder(model: SentenceTransformer, precision: str, device: str) -> Encode:
    """Texts to unit vectors, in the precision of training."""

    def encode(texts: Sequence[str]) -> Float32s:
        with torch.autocast(device, torch.bfloat16, enabled=precision != "fp32"):
            found = model.encode(list(texts), batch_size=256, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(found, dtype=np.float32)

    return encode


def dataset_of(name: str, pairs: Pairs, model: SentenceTransformer) -> Any:
    """What the loss called `name` trains on."""
    from datasets import Dataset

    if name == "contrastive":
        columns = {"query": pairs.query, "title": pairs.title, "label": pairs.positive.astype(int).tolist()}
        return Dataset.from_dict(columns)
    right = pairs.only_positive()
    positives = Dataset.from_dict({"query": right.query, "title": right.title})
    if name != "hard_negatives":
        return positives
    return mine_hard_negatives(
        positives,
        model,
        corpus=sorted(set(pairs.title)),
        range_max=100,
        relative_margin=0.05,
        num_negatives=1,
        batch_size=256,
        output_format="triplet",
        verbose=False,
    )


LOSSES: dict[str, Callable[[SentenceTransformer], Any]] = {
    "mnrl": MultipleNegativesRankingLoss,
    SPLIT_DIGITS: MultipleNegativesRankingLoss,
    "cached_mnrl": CachedMultipleNegativesRankingLoss,
    "hard_negatives": CachedMultipleNegativesRankingLoss,
    "contrastive": OnlineContrastiveLoss,
}


def train(
    name: str, folder: Path, pairs: Pairs, *, steps: int, batch: int, rate: float, seed: int, bf16: bool, device: str
) -> Any:
    """The model after `steps` of `batch` pairs; MNRL learns from positive pairs alone, as its users do."""
    with tempfile.TemporaryDirectory() as out:
        model = open_model(_with_split_digits(folder, Path(out)) if name == SPLIT_DIGITS else folder, device)
        data = dataset_of(name, pairs, model)
        arguments = SentenceTransformerTrainingArguments(
            output_dir=out,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=rate,
            warmup_steps=max(1, steps // 10),
            lr_scheduler_type="cosine",
            bf16=bf16,
            use_cpu=device == CPU,
            seed=seed,
            batch_sampler="batch_sampler" if name == "contrastive" else "no_duplicates",
            save_strategy="no",
            logging_steps=50,
            report_to="none",
            disable_tqdm=True,
            dataloader_drop_last=True,
        )
        SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=LOSSES[name](model)).train()
    return model.eval()
