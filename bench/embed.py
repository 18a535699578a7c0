"""Titles a second against sentence-transformers with the same weights: `python -m bench.embed TITLES.parquet MODEL`.

TITLES: a Parquet file with a column `title`. MODEL: the folder of a sentence-transformers BERT or MiniLM (config.json,
model.safetensors, tokenizer.json). Neither is part of the project; sentence-transformers comes with the extra `dev`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from sentence_transformers import SentenceTransformer

from bench.results import Figure, Result, Target, figure, finish
from pipeline.backends import Backend, open_backend
from pipeline.backends.xla import XlaBackend
from pipeline.compile.manifest import GraphWatch
from pipeline.core.arrays import Float32s
from pipeline.core.footprint import EncoderSizes
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import Embedder, distinct_texts, open_engine, row_batches, row_shapes
from pipeline.embed.unpadded import PackedLinear, supports_packed_weights
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.weights import initial_model

NAME = "embed"
TITLE = "Titles/s of offline embedding against sentence-transformers `encode`: same weights, CPU and titles, fp32"
METHOD = """
One process; in each round every side embeds the same titles in turn, tokenising included: sentence-transformers at each
batch size, ours in fp32 and in bf16 (matrix products alone, the sums between them in fp32). The ratio of a round is
ours / the fastest batch size of that round. No title comes twice, so nothing is won by computing equal ones once. FLOPs
are those of the matrix products for the real tokens. The matrix peak is the better of PyTorch's and oneDNN's fp32
products of 2,048 x 2,048 on all cores (a GPU: bf16, 8,192 x 8,192), measured in every round. Padding: the whole file in
windows of 16,384, without a device.
"""
TARGET = Target(figure="ratio", comparison=">=", value=1.6)
WINDOW = 16_384
TOLD = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
Encode = Callable[[Sequence[str]], Float32s]


@dataclass(frozen=True)
class Weights:
    """A folder of sentence-transformers."""

    folder: Path
    model: ModelConfig
    spec: InputSpec
    limit: int
    """Tokens of a text that are read."""
    tokenizer: TextTokenizer

    @staticmethod
    def read(folder: Path) -> "Weights":
        config = json.loads((folder / "config.json").read_text())
        same = ("hidden_size", "intermediate_size", "layer_norm_eps")
        sizes = {name: config[name] for name in same} | {ours: config[theirs] for ours, theirs in TOLD.items()}
        return Weights(
            folder,
            ModelConfig.model_validate({**sizes, "preset": "small", "init_from": str(folder)}),
            InputSpec(
                vocab_size=config["vocab_size"], pad_id=config["pad_token_id"], labels=("no", "yes"), label_gains=(0, 1)
            ),
            json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"],
            TextTokenizer((folder / "tokenizer.json").read_bytes()),
        )

    def windows(self, titles: Sequence[str]) -> Iterator[Tokens]:
        for first in range(0, len(titles), WINDOW):
            yield self.tokenizer.encode(titles[first : first + WINDOW])


def our_side(weights: Weights, backend: Backend, precision: str) -> Encode:
    """Titles to vectors, as the embed stage does it."""
    with tempfile.TemporaryDirectory() as scratch:
        encoder = initial_model(weights.model, weights.spec, 1, Path(scratch)).encoder
    engine = open_engine(encoder, backend, EmbedConfig.model_validate({"precision": precision}), GraphWatch())
    embedder = Embedder(engine, backend, limit=weights.limit, sep_id=weights.tokenizer.sep_id, stop=StopSignal())
    return lambda titles: np.concatenate(list(embedder.stream(weights.windows(titles))))


def their_side(model: SentenceTransformer, batch_size: int, titles: Sequence[str]) -> Float32s:
    vectors: Float32s = model.encode(list(titles), batch_size=batch_size, show_progress_bar=False)
    return vectors


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def matrix_peak(device: torch.device) -> float:
    """fp32 FLOP/s of a CPU, by one product on all cores or one with packed weights on each; bf16 of a GPU."""
    size, repeats = (8192, 20) if device.type == "cuda" else (2048, 4)
    flops = 2.0 * size**3
    if device.type == "cuda":
        large = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        return max(flops / seconds_of(lambda: (large @ large)[0, 0].item()) for _ in range(repeats))
    cores, left, layer = torch.get_num_threads(), torch.randn(size, size), torch.nn.Linear(size, size)
    packed = PackedLinear(layer, torch.float32, size, packed=supports_packed_weights(torch.float32))
    best = min(seconds_of(lambda: left @ left) for _ in range(repeats))
    with torch.no_grad(), ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        each = min(seconds_of(lambda: list(pool.map(packed, [left] * cores))) for _ in range(repeats))
    torch.set_num_threads(cores)
    return flops / min(best, each / cores)


def matrix_flops(model: ModelConfig, tokens: Tokens) -> float:
    """Two a matrix weight and token; for attention 4 T D a token and layer, T the tokens of its text."""
    size, lengths = model.encoder, tokens.lengths.astype(np.float64)
    sizes = EncoderSizes(0, 0, size.num_layers, size.hidden_size, size.num_heads, size.intermediate_size)
    attention = 4.0 * size.num_layers * size.hidden_size * float((lengths**2).sum())
    return 2.0 * sizes.matrix_parameters * float(lengths.sum()) + attention


def window_figures(weights: Weights, titles: Sequence[str]) -> list[Figure]:
    """What static shapes cost on the whole file, and what computing equal titles once saves."""
    config = EmbedConfig()
    shapes = row_shapes(config.buckets, config.batch_tokens(XlaBackend.default_tokens))
    slots = tokens = distinct = 0
    for window in weights.windows(titles):
        texts = distinct_texts(window, weights.limit, weights.tokenizer.sep_id)[0]
        distinct += len(texts.lengths)
        for batch in row_batches(texts, shapes, weights.spec.pad_id):
            slots += batch.num_slots
            tokens += int(batch.lengths.sum())
    rows = " or ".join(map(str, config.buckets))
    return [
        figure("padding", 1.0 - tokens / slots, "share", f"padding of {len(titles):,} titles in rows of {rows} tokens"),
        figure("repeated", 1.0 - distinct / len(titles), "share", "titles that are in their window already"),
    ]


@dataclass
class Rounds:
    """What every side reached, one value a round."""

    batch_sizes: tuple[int, ...]
    rates: dict[str, list[float]]
    cosines: dict[str, list[float]]
    """Lowest of any title, ours to theirs."""
    peaks: list[float]
    flops: list[float]
    """Reached by ours in fp32."""

    @property
    def best(self) -> list[float]:
        """sentence-transformers at its best batch size of each round."""
        return [max(values) for values in zip(*(self.rates[f"batch_{size}"] for size in self.batch_sizes), strict=True)]

    def figures(self) -> list[Figure]:
        ratios = {ours: [a / b for a, b in zip(self.rates[ours], self.best, strict=True)] for ours in self.cosines}
        shares = [flops / peak for flops, peak in zip(self.flops, self.peaks, strict=True)]
        return [
            figure("ratio", ratios["fp32"], "x", "ours in fp32 / sentence-transformers at its best batch size"),
            figure("ratio_bf16", ratios["bf16"], "x", "ours in bf16 / sentence-transformers (fp32) at its best"),
            figure("fp32", self.rates["fp32"], "titles/s", "ours, fp32"),
            figure("bf16", self.rates["bf16"], "titles/s", "ours, bf16"),
            figure("theirs", self.best, "titles/s", "sentence-transformers, best batch size"),
            *(
                figure(f"theirs_{size}", self.rates[f"batch_{size}"], "titles/s", f"at batch size {size}")
                for size in self.batch_sizes
            ),
            figure("distance", [1.0 - value for value in self.cosines["fp32"]], "", "largest 1 - cosine, fp32"),
            figure("distance_bf16", [1.0 - value for value in self.cosines["bf16"]], "", "largest 1 - cosine, bf16"),
            figure("gflops", [value / 1e9 for value in self.flops], "GFLOP/s", "matrix products of ours, fp32"),
            figure("peak_gflops", [value / 1e9 for value in self.peaks], "GFLOP/s", "matrix peak, fp32"),
            figure("peak_share", shares, "share", "of the matrix peak that ours reaches in fp32"),
        ]


def take_turns(weights: Weights, backend: Backend, blocks: Sequence[Sequence[str]], sizes: tuple[int, ...]) -> Rounds:
    """Every side embeds every block; who goes first alternates."""
    theirs = SentenceTransformer(str(weights.folder), device=backend.device.type)
    sides: dict[str, Encode] = {name: our_side(weights, backend, name) for name in ("fp32", "bf16")}
    sides |= {f"batch_{size}": partial(their_side, theirs, size) for size in sizes}
    for encode in sides.values():
        encode(blocks[0][:64])
    rounds = Rounds(sizes, {name: [] for name in sides}, {"fp32": [], "bf16": []}, [], [])
    for number, block in enumerate(blocks):
        vectors: dict[str, Float32s] = {}
        for name in sides if number % 2 else reversed(sides):
            started = time.perf_counter()
            vectors[name] = sides[name](block)
            rounds.rates[name].append(len(block) / (time.perf_counter() - started))
        for name, lowest in rounds.cosines.items():
            lowest.append(float((vectors[name] * vectors[f"batch_{sizes[0]}"]).sum(1).min()))
        work = matrix_flops(weights.model, weights.tokenizer.encode(block))
        rounds.flops.append(work * rounds.rates["fp32"][-1] / len(block))
        rounds.peaks.append(matrix_peak(backend.device))
        print("  " + " | ".join(f"{name} {values[-1]:.0f}/s" for name, values in rounds.rates.items()), flush=True)
    return rounds


def run(titles_file: Path, folder: Path, *, backend_name: str, quick: bool) -> Result:
    """Measure; write the result."""
    on_gpu = backend_name == "cuda"
    rounds, count = (2, 100) if quick else (5, 50_000 if on_gpu else 1000)
    weights, backend = Weights.read(folder), open_backend(backend_name)
    titles = [title for title in pq.read_table(titles_file, columns=["title"])["title"].to_pylist() if title]
    distinct = list(dict.fromkeys(titles))
    order = np.random.default_rng(17).permutation(len(distinct))[: rounds * count]
    blocks = [[distinct[i] for i in part] for part in np.array_split(order, rounds)]
    measured = take_turns(weights, backend, blocks, (256, 1024, 4096) if on_gpu else (32, 64, 128))
    return finish(
        f"{NAME}_cuda" if on_gpu else NAME,
        TITLE.replace("fp32", "bf16") if on_gpu else TITLE,
        METHOD,
        [*measured.figures(), *window_figures(weights, titles)],
        target=Target(figure="ratio_bf16", comparison=">=", value=3.0) if on_gpu else TARGET,
        quick=quick,
        settings={"titles": count, "rounds": rounds, "sentence_transformers": version("sentence-transformers")},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=__doc__)
    parser.add_argument("titles", type=Path, help="Parquet file with a column `title`")
    parser.add_argument("model", type=Path, help="folder of a sentence-transformers model")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few titles: proves that the script works")
    arguments = parser.parse_args()
    run(arguments.titles, arguments.model, backend_name=arguments.backend, quick=arguments.quick)
