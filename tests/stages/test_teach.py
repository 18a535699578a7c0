"""`trnpipe teach` with a teacher of each kind, and training with what it leaves."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer

from pipeline import cli
from pipeline.checkpoint.store import open_checkpoint
from pipeline.context import load_result
from pipeline.core.errors import TransientError
from pipeline.data.loader import to_tensors
from pipeline.data.token_sets import TokenSet, open_rows, read_token_sets, token_set_prefixes
from pipeline.io.commit import read_manifest
from pipeline.mine.run import NONE
from pipeline.mine.store import find_negatives, open_negatives
from pipeline.model.hf import from_hf
from pipeline.model.relevance import RelevanceInputs, RelevanceModel
from pipeline.parallel.world import ARRAY_INDEX
from pipeline.retrieval.products import decode_tokens, to_tokens
from pipeline.teach import run as teach_run
from pipeline.teach.run import TeachTask
from tests.fault.harness import DATA, MODEL, TRAIN
from tests.stages.evaluate_case import Case
from tests.train.rows import every_row

pytestmark = [pytest.mark.stage, pytest.mark.timeout(300)]
FLAGS = (
    *DATA,
    *MODEL,
    *TRAIN,
    "--backend=cpu",
    "--data.synthetic.num-days=2",
    "--data.lexical=false",
    "--train.max-steps=10",
    "--train.evaluate-every=0",
)
MINED = ("--mine.source=bm25", "--train.mined-per-query=2")
WIDTH, MAX_TOKENS = 24, 40


@pytest.fixture
def case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    """Prepared data."""
    made = Case(tmp_path, capsys, FLAGS)
    made.run(stage="prepare")
    return made


@pytest.fixture
def foreign(case: Case) -> Callable[[str], Path]:
    """Make the folder of a tiny model that has the words of the data's tokenizer under other ids."""

    def make(kind: str) -> Path:
        folder, plain = case.folder / kind, case.folder / "plain"
        words = Tokenizer.from_str(tokenizer_of(case).decode()).get_vocab()
        ordered = sorted(words, key=lambda word: words[word])
        vocabulary = case.folder / "vocab.txt"
        vocabulary.write_text("\n".join([*ordered[:5], *sorted(ordered[5:])]))
        tokenizer = transformers.BertTokenizer(vocab_file=str(vocabulary))
        torch.manual_seed(1)
        config = transformers.BertConfig(
            vocab_size=len(words),
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=MAX_TOKENS,
        )
        config.num_labels = 3 if kind == "classes" else 1
        if kind == "vectors":
            transformers.BertModel(config).save_pretrained(plain)
            tokenizer.save_pretrained(plain)
            modules = [Transformer(str(plain), max_seq_length=MAX_TOKENS), Pooling(WIDTH, "mean"), Normalize()]
            SentenceTransformer(modules=modules).save(str(folder))
        else:
            transformers.BertForSequenceClassification(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            padded = Tokenizer.from_file(str(folder / "tokenizer.json"))
            padded.enable_padding(length=128)  # as those of published models
            padded.save(str(folder / "tokenizer.json"))
        return folder

    return make


def tokenizer_of(case: Case) -> bytes:
    prepared = load_result(case.storage, "c1", "prepare")
    assert prepared is not None
    return case.storage.read_bytes(f"{prepared.outputs['tokenizer']}/tokenizer.json")


def token_sets(case: Case, cycle: str = "c1") -> list[TokenSet]:
    prepared = load_result(case.storage, cycle, "prepare")
    assert prepared is not None
    return read_token_sets(case.storage, token_set_prefixes(prepared.outputs))


def outputs(case: Case, cycle: str = "c1") -> dict[str, str]:
    result = load_result(case.storage, cycle, "teach")
    assert result is not None
    return dict(result.outputs)


def array(case: Case, prefix: str, name: str) -> npt.NDArray[Any]:
    folder = case.storage.local_path(prefix)
    assert folder is not None
    loaded: npt.NDArray[Any] = np.load(folder / f"{name}.npy")
    return loaded


def load_outputs(case: Case, stage: str) -> Mapping[str, str]:
    result = load_result(case.storage, "c1", stage)
    assert result is not None
    return result.outputs


def texts(case: Case, sets: Sequence[TokenSet]) -> tuple[list[str], list[str]]:
    """The decoded queries and products of partitions, in the order of their rows."""
    rows = open_rows(case.storage, sets, "train", case.folder / "cache")
    every, tokenizer = every_row(rows), tokenizer_of(case)
    query, product = (decode_tokens(to_tokens(every[side], rows.pad_id), tokenizer) for side in ("query", "product"))
    return query, product


def test_a_checkpoint_gives_its_vectors_and_not_the_scores_of_its_head(case: Case) -> None:
    case.run(stage="train")
    teacher = f"--train.teacher={case.trained()}"
    refused = case.run(teacher, stage="train", code=78)
    assert "it is missing for 2 of 2 prepared partitions" in refused and "trnpipe teach" in refused
    assert "2 are new" in case.run(teacher, stage="teach")
    result = load_result(case.storage, "c1", "teach")
    assert result is not None and result.figures["rows"] == 1195 and result.figures["compute_s"]
    assert result.figures["rows_per_s"] == pytest.approx(1195 / float(str(result.figures["compute_s"])))
    checkpoint = open_checkpoint(case.storage, case.trained(), case.folder)
    model = RelevanceModel(checkpoint.state.model, checkpoint.state.inputs).eval()
    model.load_state_dict(from_hf(checkpoint.weights(), model.state_dict(), source="it"))
    for index, one in enumerate(token_sets(case)):
        every = every_row(open_rows(case.storage, [one], "train", case.folder / "cache"))
        with torch.no_grad():
            computed = model(RelevanceInputs(**to_tensors(every)))
        prefix = outputs(case)[f"taught_{index:03d}"]
        vectors = array(case, prefix, "vectors")
        assert case.storage.stat(f"{prefix}/score.npy") is None
        for side in ("query", "product"):
            expected = torch.nn.functional.normalize(getattr(computed, side), dim=1)
            np.testing.assert_allclose(vectors[array(case, prefix, side)], expected, atol=2e-3)
        assert len(vectors) == sum(len(np.unique(every[side], axis=0)) for side in ("query", "product")), "once"
    assert "0 are new" in case.run(teacher, stage="teach")
    assert "was trained with different teacher" in case.run(teacher, stage="train", code=78), "trained without it"
    other = f"--train.teacher={case.storage.uri(case.trained())}"
    assert "but the teacher of cycle c1 was" in case.run(other, stage="train", code=78)
    assert "0 are new" in case.run(other, stage="teach")
    assert "was trained with different teacher" in case.run(other, stage="train", code=78)


@pytest.mark.parametrize("kind", ["scores", "classes"])
def test_a_cross_encoder_gives_its_logit_of_the_original_words(
    case: Case, foreign: Callable[[str], Path], kind: str
) -> None:
    folder = foreign(kind)
    case.run(f"--train.teacher={folder}", stage="teach")
    case.run(*MINED, stage="mine")
    early = case.run(*MINED, f"--train.teacher={folder}", stage="train", code=78)
    assert "it is missing for the mined negatives" in early
    case.run(*MINED, f"--train.teacher={folder}", stage="teach")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def score_of(query: str, product: str) -> float:
        pair = tokenizer(query, product, return_tensors="pt", truncation=True, max_length=MAX_TOKENS)
        with torch.no_grad():
            logits = model(**pair).logits[0]
        return float(logits[-1] - torch.logsumexp(logits[:-1], 0)) if len(logits) > 1 else float(logits[0])

    sets, all_texts = token_sets(case), list[tuple[str, str]]()
    for index, one in enumerate(sets):
        own = list(zip(*texts(case, [one]), strict=True))
        prefix = outputs(case)[f"taught_{index:03d}"]
        score = array(case, prefix, "score")
        assert len(score) == len(own)
        for row in range(0, len(own), 40):
            assert score[row] == pytest.approx(score_of(*own[row]), abs=1e-4)
        assert case.storage.stat(f"{prefix}/vectors.npy") is None
    found = find_negatives(case.storage, load_outputs(case, "mine")["negatives"])
    assert found is not None
    rows = open_rows(case.storage, sets, "train", case.folder / "cache")
    negatives = open_negatives(case.storage, found, rows.sizes, case.folder / "cache")
    scores, query_id = array(case, outputs(case)["mined"], "score"), every_row(rows)["query_id"]
    all_texts = list(zip(*texts(case, sets), strict=True))
    assert (np.isnan(scores) == (negatives.product == NONE)).all() and scores.shape == negatives.product.shape
    for index in range(0, len(scores), 20):
        query = all_texts[int(np.flatnonzero(query_id == negatives.query_id[index])[0])][0]
        expected = score_of(query, all_texts[negatives.product[index, 0]][1])
        assert scores[index, 0] == pytest.approx(expected, abs=1e-4)
    trained = case.run(*MINED, f"--train.teacher={folder}", stage="train")
    plain = case.run(*MINED, stage="train", code=78)
    assert "and 2 mined negatives" in trained and "was trained with different teacher" in plain


def test_a_damaged_cross_encoder_is_refused(case: Case, foreign: Callable[[str], Path]) -> None:
    folder = foreign("scores")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, tensors = weights.read_bytes(), load_file(weights)
    for data, seen in (
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (whole[:2000], "cannot be loaded"),
        (
            save({name: tensor for name, tensor in tensors.items() if name[:10] != "classifier"}),
            "no tensor classifier.b",
        ),
    ):
        weights.write_bytes(data)
        assert seen in case.run(f"--train.teacher={folder}", stage="teach", code=78)
    weights.write_bytes(whole)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": None}))
    assert "cannot be loaded" in case.run(f"--train.teacher={folder}", stage="teach", code=78)


def test_a_sentence_transformers_folder_gives_its_vectors(case: Case, foreign: Callable[[str], Path]) -> None:
    folder = foreign("vectors")
    case.run(f"--train.teacher={folder}", stage="teach")
    model = SentenceTransformer(str(folder))
    for index, one in enumerate(token_sets(case)):
        prefix = outputs(case)[f"taught_{index:03d}"]
        vectors = array(case, prefix, "vectors")
        for side, own in zip(("query", "product"), texts(case, [one]), strict=True):
            np.testing.assert_allclose(vectors[array(case, prefix, side)], model.encode(own), atol=1e-3)
        assert case.storage.stat(f"{prefix}/score.npy") is None
    train = (f"--train.teacher={folder}", "--checkpoint.every-steps=5")
    case.run(*train, stage="train")
    compared = case.run("cpu", "cpu:bf16", *train, "--parity.steps=2", "--parity.max-difference=1", stage="parity")
    assert "parity of A cpu.fp32 and B cpu.bf16" in compared
    weights = case.storage.read_bytes(f"{case.trained()}/model.safetensors")
    case.storage.delete_prefix(case.trained())
    case.storage.delete(["cycles/c1/train/result.json"])
    assert "resuming from" in case.run(*train, stage="train")
    assert case.storage.read_bytes(f"{case.trained()}/model.safetensors") == weights


def test_workers_and_interruptions_change_no_byte_and_the_next_day_reuses_all(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teach_run, "PART_ROWS", 100)
    case.run(stage="train")
    teacher = f"--train.teacher={case.trained()}"
    case.run(teacher, stage="teach")
    whole = {prefix: read_manifest(case.storage, prefix) for prefix in outputs(case).values()}
    for prefix in whole:
        case.storage.delete_prefix(prefix)
    computed, compute = list[tuple[str, int]](), TeachTask.compute

    most = 3

    def counted(task: TeachTask, start: int, stop: int) -> object:
        if start == stop:  # asked for the type of an array
            return compute(task, start, stop)
        if len(computed) == most:
            raise TransientError("the machine is gone", expected="a machine", next_command="again")
        computed.append((task.source, start))
        return compute(task, start, stop)

    monkeypatch.setattr(TeachTask, "compute", counted)
    case.run(teacher, stage="teach", code=75)
    most, each = 1000, [len(computed)]
    for worker in (1, 0):
        monkeypatch.setenv(ARRAY_INDEX, str(worker))
        said = case.run(teacher, "--teach.workers=2", stage="teach")
        assert f"worker {worker} of 2" in said and ("parts of other workers are missing" in said) == (worker == 1)
        each.append(len(computed))
    monkeypatch.delenv(ARRAY_INDEX)
    assert abs(each[1] - each[0] - each[2] / 2) < 2, "half of all parts are those of worker 1"
    assert len(computed) == len({*computed}) > 10, "each part once"
    assert {prefix: read_manifest(case.storage, prefix) for prefix in outputs(case).values()} == whole
    dataset = next(iter(whole)).rpartition("/")[0]
    assert {f"{dataset}/{name}" for name in case.storage.list_dirs(dataset)} == {*whole}, "the parts are gone"

    computed.clear()
    more = "--data.synthetic.num-days=3"
    case.run(more, stage="prepare", cycle="c2")
    assert "3 partitions" in (said := case.run(more, teacher, stage="teach", cycle="c2")) and "1 are new" in said
    assert {source for source, _ in computed} == {token_sets(case, "c2")[2].info.fingerprint}
    assert {*whole} < {*outputs(case, "c2").values()}
    case.run(more, teacher, stage="train", cycle="c2")
    assert "teacher.weight" in open_checkpoint(case.storage, case.trained("c2"), case.folder).weights()
    where = (f"--workspace={case.storage.root}",)
    assert cli.main(["export", case.trained("c2"), "--out", f"{case.folder}/out", "--format=safetensors", *where]) == 0
    assert "teacher.weight" not in load_file(case.folder / "out" / "model.safetensors")
    assert cli.main(["import", f"{case.folder}/out", *where]) == 0


@pytest.mark.parametrize(
    ("teacher", "seen"),
    [
        ("nobody", "no model of this name is in production"),
        ("/nowhere/model", "does not exist"),
        ("checkpoints/none/step-1", "is not a committed checkpoint"),
        ("", "train.teacher is not set"),
    ],
)
def test_a_teacher_that_is_none_is_one_error(case: Case, teacher: str, seen: str) -> None:
    refused = case.run(f"--train.teacher={teacher}", stage="teach", code=74 if "step" in teacher else 78)
    assert seen in refused and "Traceback" not in refused


def test_a_teacher_with_a_nan_is_refused(case: Case) -> None:
    case.run(stage="train")

    def broken(weights: dict[str, torch.Tensor]) -> None:
        weights["bert.embeddings.LayerNorm.bias"][0] = float("nan")

    refused = case.run(f"--train.teacher={case.made('broken', broken)}", stage="teach", code=70)
    assert "scores or vectors that are NaN" in refused
