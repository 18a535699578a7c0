"""Sides of bench.peer_speed, each in a process of its own (bench/side_process.py).

`make` writes what they share into a folder: pairs of texts, a MiniLM-L6 with its tokenizer, token shards.
"""

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from bench.side_process import Line
from bench.stepper import ENDLESS, make_program, open_stepper
from pipeline.backends import open_backend
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.shards import TokenRows
from pipeline.data.synthetic import generate, partitions
from pipeline.data.token_sets import open_rows, read_token_sets, spec_of
from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.io.storage import open_storage
from pipeline.model.config import InputSpec, LossConfig, ModelConfig
from pipeline.model.weights import initial_model
from pipeline.telemetry.events import EventName
from pipeline.train.config import TrainConfig
from pipeline.train.loss import Targets, contrastive_loss
from pipeline.train.step import TrainProgram

BATCH, MAX_TOKENS = 64, 64
BUCKETS = ("16x24", "24x32", "32x48", "64x64")
WARM_UP_STEPS = 3
LOG_EVERY = 20
LOSS = LossConfig(graded_weight=0.0, contrastive_weight=1.0, temperature=0.05)
"""MultipleNegativesRankingLoss: cosine similarities times 20, from query to product."""


@dataclass(frozen=True)
class Place:
    """What the sides share."""

    folder: Path

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs.parquet"

    @property
    def model(self) -> Path:
        """Of Hugging Face: config.json, model.safetensors, tokenizer.json."""
        told = json.loads((self.folder / "model.json").read_text(encoding="utf-8"))
        return Path(told) if told else self.folder / "model"

    def texts(self) -> tuple[list[str], list[str]]:
        """Queries and titles, pair by pair."""
        table = pq.read_table(self.pairs)
        return table["query"].to_pylist(), table["title"].to_pylist()

    def model_config(self) -> ModelConfig:
        return ModelConfig(preset="small", init_from=str(self.model))

    def rows(self) -> tuple[TokenRows, InputSpec]:
        """Token shards of the pairs, and what they are to a model: its whole vocabulary."""
        workspace = open_storage(str(self.folder / "workspace"))
        prefixes = json.loads((self.folder / "prepared.json").read_text(encoding="utf-8"))
        sets = read_token_sets(workspace, prefixes)
        vocab_size = json.loads((self.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        spec = spec_of(sets[0].info).model_copy(update={"vocab_size": vocab_size})
        return open_rows(workspace, sets, "train", self.folder / "cache"), spec


def make(folder: Path, data: Path | None, model: Path | None, count: int) -> None:
    """Write what the sides share. `data`: a Parquet file with query, title, gain and split; none: made-up texts."""
    place = Place(folder)
    query, title = distinct(*(_synthetic_positives(count) if data is None else _positives(data)), count)
    columns = {"query": query, "title": title, "label": ["match"] * len(query), "split": ["train"] * len(query)}
    pq.write_table(pa.table(columns), place.pairs)
    (folder / "model.json").write_text(json.dumps(None if model is None else str(model.resolve())), encoding="utf-8")
    tokenizer = None if model is None else str(model.resolve() / "tokenizer.json")
    config = DataConfig(
        name="pairs",
        path=str(place.pairs),
        labels=("other", "match"),
        lexical=False,
        buckets=BUCKETS,
        tokenizer=TokenizerConfig(path=tokenizer),
    )
    workspace = open_storage(str(folder / "workspace"))
    done = prepare(config, workspace, scratch=folder / "scratch", events=_no_events, stop=StopSignal())
    if model is None:
        random_model(folder / "model", workspace.read_bytes(f"{done.tokenizer_prefix}/tokenizer.json"))
    (folder / "prepared.json").write_text(json.dumps(done.token_set_prefixes), encoding="utf-8")


def distinct(query: list[str], title: list[str], count: int) -> tuple[list[str], list[str]]:
    """The first `count` pairs of which neither text came before: no batch holds a text twice, on either side."""
    queries: dict[str, str] = {}
    titles: set[str] = set()
    for asked, found in zip(query, title, strict=True):
        if asked not in queries and found not in titles and len(queries) < count:
            queries[asked] = found
            titles.add(found)
    return list(queries), list(queries.values())


def _synthetic_positives(count: int) -> tuple[list[str], list[str]]:
    config = SyntheticConfig(num_queries=max(10, 2 * count))
    table = pa.Table.from_batches(generate(config, partitions(config)[0]))
    table = table.filter(pc.equal(table["label"], "exact"))
    return table["query"].to_pylist(), table["title"].to_pylist()


def _positives(data: Path) -> tuple[list[str], list[str]]:
    table = pq.read_table(data, columns=["query", "title", "gain", "split"])
    chosen = pc.and_(pc.equal(table["split"], "train"), pc.equal(table["gain"], 1.0))
    table = table.filter(chosen)
    return table["query"].to_pylist(), table["title"].to_pylist()


def random_model(folder: Path, tokenizer: bytes) -> None:
    """A MiniLM-L6 of random weights with a tokenizer, as sentence-transformers and `model.init_from` read it."""
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    size = ModelConfig(preset="small").encoder
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        intermediate_size=size.intermediate_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names).save_pretrained(folder)  # type: ignore[no-untyped-call]


def train_config(precision: str, micro: int) -> TrainConfig:
    """Our contrastive loss alone, a query with each product, as the peer computes it."""
    return TrainConfig.model_validate(
        {
            "global_batch_size": BATCH,
            "micro_batch_size": micro,
            "candidates_per_query": 1,
            "precision": precision,
            "loss": LOSS,
            "metric": "retrieval_ndcg",
        }
    )


def serve_ours(place: Place, line: Line, device: str, precision: str, micro: int) -> None:
    """Our loop on token shards."""
    config, backend = train_config(precision, micro), open_backend(device)
    rows, spec = place.rows()
    program = make_program(place.model_config(), spec, config, backend, rows.buckets, LOG_EVERY, TrainProgram)
    with open_stepper(program, backend, rows, config, LOG_EVERY) as stepper:
        stepper.warm_up()
        line.serve(stepper.seconds, backend.compile_count)


def serve_peer(place: Place, line: Line, precision: str) -> None:
    """sentence-transformers' trainer on the texts, on the CPU."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "USE_TORCH_XLA": "0"}  # read on import
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    from bench.hf_pair import BlockCallback
    from bench.quality import peers

    model = peers.open_model(place.model, "cpu")
    query, title = place.texts()
    loss = MultipleNegativesRankingLoss(model)
    check_same_loss(place, model, loss, query[:BATCH], title[:BATCH])

    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=ENDLESS,
            per_device_train_batch_size=BATCH,
            learning_rate=5e-4,
            bf16=precision == "autocast",
            use_cpu=True,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_drop_last=True,
        )
        SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"query": query, "title": title}),
            loss=loss,
            callbacks=[BlockCallback(line.blocks(WARM_UP_STEPS, lambda: None))],
        ).train()


def check_same_loss(place: Place, model: Any, loss: torch.nn.Module, query: list[str], title: list[str]) -> None:
    """Both sides give the same loss for the same texts, else the comparison would mean nothing. Raises ValueError."""
    tokenizer = TextTokenizer((place.model / "tokenizer.json").read_bytes())
    _, spec = place.rows()
    with tempfile.TemporaryDirectory() as scratch:
        ours = initial_model(place.model_config(), spec, 1, Path(scratch)).eval()
    whole = [i for i, length in enumerate(_longest(tokenizer, query, title)) if length <= MAX_TOKENS]
    query, title = [query[i] for i in whole], [title[i] for i in whole]
    number, gain = torch.arange(len(whole), dtype=torch.int32), torch.ones(len(whole))
    with torch.no_grad():
        queries, products = (ours.encoder(_padded(tokenizer.encode(texts), spec.pad_id)) for texts in (query, title))
        mine = float(contrastive_loss(queries, products, Targets(number, gain, number, number), LOSS))
        peers = float(loss.eval()([model.preprocess(texts) for texts in (query, title)], None))
    if not abs(mine - peers) <= 1e-4 * abs(mine):
        raise ValueError(f"our loss is {mine}, the peer's {peers}: not the same model")


def _longest(tokenizer: TextTokenizer, query: list[str], title: list[str]) -> list[int]:
    """Tokens of the longer text of each pair."""
    longest: list[int] = np.maximum(tokenizer.encode(query).lengths, tokenizer.encode(title).lengths).tolist()
    return longest


def _padded(tokens: Tokens, pad_id: int) -> torch.Tensor:
    """Token ids [N, T]."""
    found = [torch.from_numpy(tokens.part(i, i + 1).ids.copy()) for i in range(len(tokens.lengths))]
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=pad_id)


def _no_events(name: EventName, /, **fields: object) -> None:
    del name, fields


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peer_speed_side", description=__doc__)
    parser.add_argument("side", choices=("make", "peer", "ours"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=int, default=2048)
    parser.add_argument("--device", choices=("cpu", "xla"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "autocast"), default="fp32")
    parser.add_argument("--micro", type=int, default=BATCH, help="pairs of a micro-batch")
    told = parser.parse_args()
    if told.side == "make":
        make(told.folder, told.data, told.model, told.pairs)
        return
    line = Line.open()
    if told.side == "peer":
        serve_peer(Place(told.folder), line, told.precision)
    else:
        serve_ours(Place(told.folder), line, told.device, told.precision, told.micro)


if __name__ == "__main__":
    main()
