"""Titles a second against sentence-transformers with the same weights: `python -m bench.embed TITLES.parquet MODEL`.

TITLES: a Parquet file with a column `title`. MODEL: the folder of a sentence-transformers BERT or MiniLM (config.json,
model.safetensors, tokenizer.json). Neither is part of the project; sentence-transformers comes with the extra `dev`.
`--int8-python` is the Python of an environment for its int8 backends (see bench/embed_peer.py).
"""

import argparse
import io
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sentence_transformers import SentenceTransformer

from bench.results import ROOT, Figure, Result, Target, figure, finish
from pipeline.backends import Backend, open_backend
from pipeline.backends.xla import XlaBackend
from pipeline.compile.manifest import GraphWatch
from pipeline.core.arrays import Float32s, Int64s
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
In each round every side embeds the same titles in turn, tokenising included: sentence-transformers at each batch size,
in fp32 and, each in a process of its own, in int8 on OpenVINO (static, calibrated with titles) and ONNX Runtime
(dynamic), as its documentation quantises; ours in fp32 and, if the CPU computes with it, in bf16. The ratio of a round
is ours / the fastest batch size of that round. No title comes twice, so nothing is won by computing equal ones once.
Recall: the ten nearest of all distinct titles, found with the vectors of a side for 2,000 of them, that are among the
ten found in fp32. FLOPs are those of the matrix products for the real tokens. The matrix peak is the better of
PyTorch's and oneDNN's fp32 products of 2,048 x 2,048 on all cores (a GPU: bf16, 8,192 x 8,192), measured in every
round. Padding: the whole file in windows of 16,384, without a device.
"""
TARGET = Target(figure="ratio", comparison=">=", value=2.1)
BF16_TARGETS = (
    Target(figure="ratio_bf16", comparison=">=", value=4.3),
    Target(figure="recall_bf16", comparison=">=", value=0.99),
)
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


class Int8Peer:
    """sentence-transformers on another backend in int8, in a process of its own (bench/embed_peer.py)."""

    def __init__(self, python: Path, folder: Path, backend: str, texts: Path) -> None:
        command = [str(python), str(ROOT / "bench" / "embed_peer.py"), str(folder), backend, str(texts)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._command = command

    def encode(self, batch_size: int, titles: Sequence[str]) -> Float32s:
        """Return the vectors [n, D]. Raises RuntimeError if the process has ended."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        asked.write(json.dumps({"texts": list(titles), "batch_size": batch_size}).encode() + b"\n")
        asked.flush()
        size = answers.readline()
        if not size:
            raise RuntimeError(f"a side ended without an answer; run it to see why: {' '.join(self._command)}")
        vectors: Float32s = np.load(io.BytesIO(answers.read(int(size))), allow_pickle=False)
        return vectors

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


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


PEERS = {"theirs": "sentence-transformers", "openvino": "its OpenVINO int8", "onnx": "its ONNX int8"}
TOP, ASKED = 10, 2000


def name_of(peer: str, batch_size: int) -> str:
    return f"{peer}_{batch_size}"


def ratio_name(ours: str, peer: str) -> str:
    """Without what is the plain case: ours in fp32, sentence-transformers as it comes."""
    return "_".join(["ratio", *([ours] if ours != "fp32" else []), *([peer] if peer != "theirs" else [])])


@dataclass
class Rounds:
    """What every side reached, one value a round."""

    ours: tuple[str, ...]
    """Precisions."""
    peers: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    rates: dict[str, list[float]]
    cosines: dict[str, list[float]]
    """Lowest of any title, ours to theirs."""
    peaks: list[float]
    flops: list[float]
    """Reached by ours in fp32."""

    def best(self, peer: str) -> list[float]:
        """A peer at its best batch size of each round."""
        return [max(each) for each in zip(*(self.rates[name_of(peer, size)] for size in self.batch_sizes), strict=True)]

    def best_size(self, peer: str) -> int:
        return max(self.batch_sizes, key=lambda size: sum(self.rates[name_of(peer, size)]))

    def figures(self) -> list[Figure]:
        rows = list[Figure]()
        for peer in self.peers:
            for ours in self.ours:
                ratio = [a / b for a, b in zip(self.rates[ours], self.best(peer), strict=True)]
                rows.append(
                    figure(ratio_name(ours, peer), ratio, "x", f"ours in {ours} / {PEERS[peer]} at its best batch size")
                )
        for ours in self.ours:
            rows.append(figure(ours, self.rates[ours], "titles/s", f"ours, {ours}"))
        for peer in self.peers:
            rows.append(figure(peer, self.best(peer), "titles/s", f"{PEERS[peer]}, best batch size"))
            for size in self.batch_sizes:
                name = name_of(peer, size)
                rows.append(figure(name, self.rates[name], "titles/s", f"{PEERS[peer]} at batch size {size}"))
        for name, lowest in self.cosines.items():
            rows.append(
                figure(f"distance_{name}", [1.0 - value for value in lowest], "", f"largest 1 - cosine, {name}")
            )
        shares = [flops / peak for flops, peak in zip(self.flops, self.peaks, strict=True)]
        return [
            *rows,
            figure("gflops", [value / 1e9 for value in self.flops], "GFLOP/s", "matrix products of ours, fp32"),
            figure("peak_gflops", [value / 1e9 for value in self.peaks], "GFLOP/s", "matrix peak, fp32"),
            figure("peak_share", shares, "share", "of the matrix peak that ours reaches in fp32"),
        ]


def take_turns(
    weights: Weights, backend: Backend, blocks: Sequence[Sequence[str]], sides: dict[str, Encode], rounds: Rounds
) -> None:
    """Every side embeds every block; who goes first alternates."""
    for encode in sides.values():
        encode(blocks[0][:64])
    for number, block in enumerate(blocks):
        vectors: dict[str, Float32s] = {}
        for name in sides if number % 2 else reversed(sides):
            started = time.perf_counter()
            vectors[name] = sides[name](block)
            rounds.rates[name].append(len(block) / (time.perf_counter() - started))
        for name, lowest in rounds.cosines.items():
            lowest.append(float((vectors[name] * vectors[name_of("theirs", rounds.batch_sizes[0])]).sum(1).min()))
        work = matrix_flops(weights.model, weights.tokenizer.encode(block))
        rounds.flops.append(work * rounds.rates["fp32"][-1] / len(block))
        rounds.peaks.append(matrix_peak(backend.device))
        print("  " + " | ".join(f"{name} {values[-1]:.0f}/s" for name, values in rounds.rates.items()), flush=True)


def nearest(vectors: Float32s, asked: Int64s) -> Int64s:
    """Return the TOP nearest other rows of each row that is asked for [asked, TOP]."""
    scores = vectors[asked] @ vectors.T
    scores[np.arange(len(asked)), asked] = -np.inf
    found: Int64s = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
    return found


def recall_figures(sides: dict[str, Encode], rounds: Rounds, titles: Sequence[str]) -> list[Figure]:
    """How many of the nearest titles by fp32 are found with the vectors of the sides that round more."""
    asked = np.random.default_rng(17).permutation(len(titles))[:ASKED]
    expected = nearest(sides["fp32"](titles), asked)
    sides = {name: sides[name] for name in rounds.ours if name != "fp32"} | {
        peer: sides[name_of(peer, rounds.best_size(peer))] for peer in rounds.peers if peer != "theirs"
    }
    rows = []
    for name, encode in sides.items():
        found = nearest(encode(titles), asked)
        share = np.mean([len(np.intersect1d(*pair)) / TOP for pair in zip(found, expected, strict=True)])
        text = f"of the {TOP} nearest of {len(titles):,} titles by fp32, found by {PEERS.get(name, f'ours in {name}')}"
        rows.append(figure(f"recall_{name}", float(share), "share", text))
    return rows


def run(titles_file: Path, folder: Path, *, backend_name: str, int8_python: Path | None, quick: bool) -> Result:
    """Measure; write the result."""
    on_gpu = backend_name == "cuda"
    num_rounds, count = (2, 100) if quick else (5, 50_000 if on_gpu else 2000)
    weights, backend = Weights.read(folder), open_backend(backend_name)
    titles = [title for title in pq.read_table(titles_file, columns=["title"])["title"].to_pylist() if title]
    distinct = list(dict.fromkeys(titles))
    order = np.random.default_rng(17).permutation(len(distinct))[: num_rounds * count]
    blocks = [[distinct[i] for i in part] for part in np.array_split(order, num_rounds)]
    sizes = (256, 1024, 4096) if on_gpu else (32, 64, 128)
    with ExitStack() as stack:
        theirs = SentenceTransformer(str(folder), device=backend.device.type)
        ours = ("fp32",) if backend.emulates_bf16 else ("fp32", "bf16")
        sides: dict[str, Encode] = {name: our_side(weights, backend, name) for name in ours}
        sides |= {name_of("theirs", size): partial(their_side, theirs, size) for size in sizes}
        int8 = ("openvino", "onnx") if int8_python else ()
        for name in int8:
            assert int8_python is not None
            sample = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pq.write_table(pa.table({"title": distinct[:1000]}), sample / "train.parquet")
            peer = Int8Peer(int8_python, folder, name, sample)
            stack.callback(peer.close)
            sides |= {name_of(name, size): partial(peer.encode, size) for size in sizes}
        peers = ("theirs", *int8)
        rounds = Rounds(ours, peers, sizes, {name: [] for name in sides}, {name: [] for name in ours}, [], [])
        take_turns(weights, backend, blocks, sides, rounds)
        recalls = recall_figures(sides, rounds, distinct[: num_rounds * count] if quick else distinct)
    further = [Target(figure=ratio_name(ours[-1], name), comparison=">", value=1.0) for name in int8]
    suffix = "_cuda" if on_gpu else "_bf16" if "bf16" in ours else ""
    return finish(
        f"{NAME}{suffix}",
        TITLE.replace("fp32", "bf16") if suffix else TITLE,
        METHOD,
        [*rounds.figures(), *recalls, *window_figures(weights, titles)],
        target=Target(figure="ratio_bf16", comparison=">=", value=3.0) if on_gpu else TARGET,
        further=() if on_gpu else (*(BF16_TARGETS if "bf16" in ours else ()), *further),
        quick=quick,
        settings={"titles": count, "rounds": num_rounds, "sentence_transformers": version("sentence-transformers")},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=__doc__)
    parser.add_argument("titles", type=Path, help="Parquet file with a column `title`")
    parser.add_argument("model", type=Path, help="folder of a sentence-transformers model")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--int8-python", type=Path, help="Python with sentence-transformers[openvino,onnx]")
    parser.add_argument("--quick", action="store_true", help="few titles: proves that the script works")
    told = parser.parse_args()
    run(told.titles, told.model, backend_name=told.backend, int8_python=told.int8_python, quick=told.quick)
