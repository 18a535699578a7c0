"""Foreign folders and files: what becomes of them, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.convert.importing import read_model
from pipeline.core.errors import CheckpointError, ConfigError, DataError, TrnpipeError
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import TextTokenizer, train_tokenizer
from pipeline.model.hf import to_hf
from pipeline.model.relevance import build_model
from pipeline.model.weights import initial_model
from tests.convert.conftest import MODEL, SPEC, Folder, bert_json, given, source_of

CONFIG, TOKENIZER, MODULES = "config.json", "tokenizer_config.json", "modules.json"
SENTENCE, OPTIONS, POOLING = "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"
PROMPTS = {"query": "query: ", "document": "passage: "}
WORDS = "embeddings.word_embeddings.weight"


def refusal(folder: Folder, kind: type[TrnpipeError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        folder.read()
    assert str(folder.path) in caught.value.seen, "it says which file"
    return caught.value.seen.replace(f"file://{folder.path}/", "")


def encoder_of(folder: Folder) -> dict[str, torch.Tensor]:
    """Return the tensors that were imported, under the names in the file."""
    named = to_hf(folder.read().weights)
    return {name.removeprefix("bert."): tensor for name, tensor in named.items() if name.startswith("bert.")}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_plain_folder(folder: Folder) -> None:
    model = folder.read()
    assert model.config.encoder.model_dump() == MODEL.encoder.model_dump()
    assert (model.spec.vocab_size, model.spec.pad_id) == (folder.vocab_size, 0)
    assert (model.spec.labels, model.spec.numeric) == (SPEC.labels, SPEC.numeric)
    assert (model.max_tokens, model.new_head, model.tokenizer.data) == (24, 5, folder.tokenizer)
    assert (model.origin.format, model.origin.uri) == ("transformers", f"file://{folder.path}")
    assert_equal(encoder_of(folder), folder.weights)
    fresh = build_model(model.config, model.spec, 5).state_dict()
    head = [name for name in fresh if not name.startswith("encoder.")]
    assert head and all(torch.equal(model.weights[name], fresh[name]) for name in head)


def test_a_sentence_transformers_folder(folder: Folder) -> None:
    folder.sentence(pooling={"word_embedding_dimension": 16, "pooling_mode_cls_token": True})
    model = folder.read()
    assert (model.config.pooling, model.max_tokens, model.origin.format) == ("cls", 20, "sentence-transformers")
    folder.sentence(pooling={"embedding_dimension": 16, "pooling_mode": "mean"}, max_seq_length=None)
    assert (folder.read().config.pooling, folder.read().max_tokens) == ("mean", 24), "the tokenizer's own limit"
    folder.json(TOKENIZER, {"tokenizer_class": "BertTokenizer", "model_max_length": 1e30})
    assert folder.read().max_tokens == 32, "no limit of its own"
    folder.sentence(max_seq_length=999)
    (folder.path / "deep").mkdir()
    for name in (CONFIG, "tokenizer.json", TOKENIZER, SENTENCE, "model.safetensors"):
        shutil.move(folder.path / name, folder.path / "deep" / name)
    modules = json.loads((folder.path / MODULES).read_text())
    modules[0]["path"] = "deep"
    folder.json(MODULES, modules)
    assert folder.read().max_tokens == 32, "the encoder may lie in a folder of its own; no more than its positions"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_of_either_kind_with_a_pooler_and_a_task_head(folder: Folder, name: str) -> None:
    extra = {"pooler.dense.weight": torch.ones(2), "cls.predictions.bias": torch.ones(3)}
    weights = {f"bert.{name}": tensor for name, tensor in folder.weights.items()} | extra
    (folder.path / "model.safetensors").unlink()
    if name.endswith(".bin"):
        torch.save(weights | {"bert.embeddings.position_ids": torch.arange(32)}, folder.path / name)
    else:
        save_file(weights, folder.path / name)
    assert_equal(encoder_of(folder), folder.weights)


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "seen"),
    [
        (QUERY, torch.zeros(16, 17), f"bert.{QUERY}: shape [16, 17]"),
        (QUERY, None, f"bert.{QUERY}: no such tensor"),
        (
            "encoder.layer.2.output.dense.bias",
            torch.zeros(16),
            "bert.encoder.layer.2.output.dense.bias is not part of this model",
        ),
        (QUERY, torch.full((16, 16), float("inf")), f"{QUERY}: NaN or infinite"),
        (QUERY, torch.zeros(16, 16, dtype=torch.int8), f"{QUERY}: torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    folder: Folder, name: str, tensor: torch.Tensor | None, seen: str
) -> None:
    folder.weights.pop(name, None)
    folder.save(**({} if tensor is None else {name: tensor}))
    assert f"model.safetensors: {seen}" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]}, "model_type: architecture deberta-v2"),
        ({"model_type": 3}, "model_type"),
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"hidden_size": "16; rm -rf"}, "hidden_size"),
        ({"num_attention_heads": 3}, "model.hidden_size 16 is not a multiple of 3"),
        ({"layer_norm_eps": 0}, "layer_norm_eps"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
    ],
)
def test_an_architecture_that_is_not_ours_is_refused_by_name(folder: Folder, changes: Any, seen: str) -> None:
    folder.json(CONFIG, bert_json(folder.vocab_size) | changes)
    assert f"{CONFIG}: {seen}" in refusal(folder, ConfigError)


def test_other_modules_are_refused_by_name(folder: Folder) -> None:
    folder.sentence()
    modules = json.loads((folder.path / MODULES).read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    own = modules[0] | {"type": "custom_code.Transformer"}
    for wrong in ([*modules, dense], modules[:1], [], [own, *modules[1:]], [modules[1], modules[0]]):
        folder.json(MODULES, wrong)
        assert f"{MODULES}: modules " in refusal(folder, ConfigError)
    folder.json(MODULES, [modules[0] | {"path": "../../elsewhere"}, *modules[1:]])
    with pytest.raises(ConfigError, match="elsewhere"):
        folder.read()


@pytest.mark.parametrize(
    ("name", "content", "seen"),
    [
        (POOLING, {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "pooling max"),
        (POOLING, {"pooling_mode": ["cls", "mean"]}, "pooling cls + mean"),
        (POOLING, {"pooling_mode_cls_token": True}, "pooling cls + mean"),
        (POOLING, {"include_prompt": False}, "include_prompt is false, but texts have prompts"),
        (POOLING, {"future_key": 1}, "future_key = 1 has no counterpart"),
        (OPTIONS, {"truncate_dim": 8}, "truncate_dim = 8"),
        (OPTIONS, {"similarity_fn_name": "manhattan"}, "similarity_fn_name"),
        (OPTIONS, {"model_type": "SparseEncoder"}, "model_type"),
        (OPTIONS, {"prompts": {"sts": "x: "}, "default_prompt_name": "sts"}, "default_prompt_name prepends 'x: ' to"),
        (OPTIONS, {"prompts": PROMPTS, "default_prompt_name": "query"}, "default_prompt_name prepends 'query: ' to"),
        (SENTENCE, {"transformer_task": "fill-mask"}, "transformer_task"),
        (SENTENCE, {"module_output_name": "sentence_embedding"}, "module_output_name"),
        (SENTENCE, {"modality_config": {"text": {"method_output_name": "pooler_output"}}}, "method_output_name"),
        (SENTENCE, {"config_args": {"hidden_act": "relu"}}, "config_args.hidden_act = "),
        (SENTENCE, {"max_seq_length": 2}, "max_seq_length 2"),
        (TOKENIZER, {"tokenizer_class": "DebertaV2Tokenizer"}, "tokenizer class DebertaV2Tokenizer"),
        (TOKENIZER, {"truncation_side": "left"}, "truncation_side"),
        (TOKENIZER, {"model_max_length": 2}, "model_max_length"),
        (TOKENIZER, {"model_max_length": float("nan")}, "model_max_length"),
        (TOKENIZER, {"added_tokens_decoder": {"999": {"content": "<new>"}}}, "added_tokens_decoder has '<new>' as 999"),
    ],
)
def test_a_key_that_changes_vectors_is_refused_by_name(folder: Folder, name: str, content: Any, seen: str) -> None:
    folder.sentence()
    folder.json(OPTIONS, {"prompts": PROMPTS, "similarity_fn_name": "cosine", "default_prompt_name": None})
    folder.read()
    before = json.loads((folder.path / name).read_text())
    folder.json(name, before | content)
    text = refusal(folder, ConfigError)
    assert text.startswith(f"{name}: ") and seen in text
    folder.json(name, before | {"unknown_but_null": None})
    folder.read()


def test_prompts_are_prefixes(folder: Folder) -> None:
    for product in ("document", "passage", "corpus"):
        folder.sentence()
        folder.json(OPTIONS, {"prompts": {"query": "query: ", product: "passage: ", "STS": "compare: "}})
        model = folder.read()
        assert (model.spec.query_prefix, model.spec.product_prefix) == ("query: ", "passage: ")
    notes = " | ".join(model.notes)
    assert "using 'query: ' as the prompt of queries and 'passage: ' as that of products" in notes
    assert "the following prompts are not used: STS 'compare: '" in notes
    folder.json(OPTIONS, {"prompts": {"query": "x: ", "document": "x: "}, "default_prompt_name": "query"})
    assert (folder.read().spec.query_prefix, folder.read().spec.product_prefix) == ("x: ", "x: ")
    folder.sentence(pooling={"pooling_mode": "mean", "include_prompt": False})
    folder.json(OPTIONS, {"prompts": {"query": "", "document": None}})
    assert folder.read().config.pooling == "mean", "without prompts, one without them is the same"


def test_vectors_of_any_length_are_compared_by_their_angle_alone(folder: Folder) -> None:
    for similarity in ("cosine", None, "dot"):
        folder.sentence()
        folder.json(OPTIONS, {"similarity_fn_name": similarity})
        folder.read()
        folder.json(MODULES, json.loads((folder.path / MODULES).read_text())[:2])
        if similarity != "dot":
            assert "but not in sentence-transformers" in " | ".join(folder.read().notes)
    assert "similarity_fn_name dot without a Normalize" in refusal(folder, ConfigError)


def test_an_adapter_is_refused_by_name(folder: Folder, tmp_path: Path) -> None:
    folder.json("adapter_config.json", {"peft_type": "LORA"})
    assert "contains an adapter (adapter_config.json)" in refusal(folder, ConfigError)
    with pytest.raises(ConfigError, match="contains an adapter"):
        initial_model(MODEL.model_copy(update={"init_from": str(folder.path)}), SPEC, 1, tmp_path)


@pytest.mark.parametrize("wrapper", ["module.", "model.", "0.auto_model.", "module._orig_mod.", "model.bert.", "bert."])
def test_what_others_put_before_every_name_is_taken_away(folder: Folder, wrapper: str, tmp_path: Path) -> None:
    weights = {f"{wrapper}{name}": tensor for name, tensor in folder.weights.items()}
    save_file(weights, folder.path / "model.safetensors")
    assert_equal(encoder_of(folder), folder.weights)
    config = MODEL.model_copy(update={"init_from": str(folder.path)})
    spec = SPEC.model_copy(update={"vocab_size": folder.vocab_size})
    model = initial_model(config, spec, 1, tmp_path)
    assert torch.equal(model.state_dict()["encoder.word_embeddings.weight"], folder.weights[WORDS])
    save_file(weights | {"1.linear.weight": torch.ones(16, 16)}, folder.path / "model.safetensors")
    assert "is not part of this model" in refusal(folder), "one more module, of which only the names tell"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 90868376\n"


@pytest.mark.parametrize(
    ("content", "seen", "remedy"),
    [
        (POINTER, "is a Git LFS pointer", "git lfs pull"),
        (b"", "is empty", "download it again"),
        (b"\n<!DOCTYPE html><html>", "is a web page", "/resolve/"),
        (None, "", ""),
        *((rubbish, "", "") for rubbish in (b"[]", b"null", b"{", b'{"model_type": NaN}', b"\xff", b"[" * 100_000)),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", CONFIG])
def test_what_lies_there_instead_of_a_file(
    folder: Folder, name: str, content: bytes | None, seen: str, remedy: str, tmp_path: Path
) -> None:
    """None: the second half of the file is missing."""
    path = folder.path / name
    if name.endswith(".bin"):
        (folder.path / "model.safetensors").rename(path)
        torch.save(folder.weights, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    kinds = {"tokenizer.json": DataError, CONFIG: ConfigError}
    config = MODEL.model_copy(update={"init_from": str(folder.path)})
    spec = SPEC.model_copy(update={"vocab_size": folder.vocab_size})
    uses: list[Callable[[], object]] = [folder.read]
    uses += [lambda: initial_model(config, spec, 1, tmp_path)] if name != "tokenizer.json" else []
    for use in uses:
        with pytest.raises(kinds.get(name, CheckpointError)) as caught:
            use()
        assert f"file://{path}" in caught.value.seen
        assert seen in caught.value.seen and remedy in caught.value.next_command


def test_embeddings_without_a_token_are_left_out(folder: Folder) -> None:
    rows = folder.vocab_size
    padded = torch.cat([folder.weights[WORDS], torch.ones(7, 16)])
    folder.save(**{WORDS: padded})
    folder.json(CONFIG, bert_json(rows + 7))
    model = folder.read()
    assert torch.equal(model.weights["encoder.word_embeddings.weight"], padded[:rows])
    assert any("7 embeddings" in note for note in model.notes)
    folder.json(CONFIG, bert_json(rows))
    assert f"{WORDS} has shape [{rows + 7}, 16]" in refusal(folder), "only if config.json accounts for them"
    folder.save(**{WORDS: padded[: rows - 1]})
    folder.json(CONFIG, bert_json(rows - 1))
    assert f"the tokenizer has {rows} tokens" in refusal(folder)


def test_missing_and_far_too_large_files_are_named(folder: Folder, tmp_path: Path) -> None:
    (folder.path / "model.safetensors").rename(folder.path / "kept")
    assert "has no weights" in refusal(folder)
    (folder.path / "model.safetensors.index.json").write_text("{}")
    assert "several files (model.safetensors.index.json)" in refusal(folder)
    (folder.path / "kept").rename(folder.path / "model.safetensors")
    (folder.path / "tokenizer.json").unlink()
    assert "tokenizer.json does not exist" in refusal(folder)
    with (folder.path / CONFIG).open("ab") as file:
        file.truncate(2**33)  # a hole: eight gigabytes that take no room
    assert "config.json has 8.0 GiB" in refusal(folder)
    (folder.path / CONFIG).unlink()
    assert "config.json does not exist" in refusal(folder)
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "empty"):
        with pytest.raises(ConfigError, match="does not exist"):
            source_of(tmp_path / name)


def bare(folder: Folder, name: str = "weights.safetensors", **changes: Any) -> Any:
    return read_model(source_of(folder.path / name), given(**changes), folder.path / "scratch")


def test_a_bare_file_takes_its_sizes_from_the_settings(folder: Folder) -> None:
    save_file(folder.weights, folder.path / "weights.safetensors")
    torch.save(folder.weights, folder.path / "weights.pth")
    (folder.path / "link.safetensors").symlink_to("weights.safetensors")  # as in the cache of huggingface_hub
    tokenizer = TextTokenizer(folder.tokenizer)
    for name in ("weights.safetensors", "weights.pth", "link.safetensors"):
        model = bare(folder, name, tokenizer=tokenizer)
        found = to_hf(model.weights)
        assert all(torch.equal(found[f"bert.{name}"], tensor) for name, tensor in folder.weights.items())
        assert (model.new_head, model.max_tokens) == (5, None)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        bare(folder)
    other = TextTokenizer(train_tokenizer(["another text"], TokenizerConfig()))
    with pytest.raises(CheckpointError, match=r"weights.safetensors: bert.embeddings.word_embeddings.weight has shape"):
        bare(folder, tokenizer=other)
    with pytest.raises(CheckpointError, match=r"bert.encoder.layer.1.* is not part of this model"):
        bare(folder, tokenizer=tokenizer, model=MODEL.model_copy(update={"num_layers": 1}))


def test_a_bare_file_of_a_whole_model_must_be_whole(folder: Folder) -> None:
    tokenizer = TextTokenizer(folder.tokenizer)
    spec = SPEC.model_copy(update={"vocab_size": tokenizer.vocab_size})
    whole = {name: tensor.contiguous() for name, tensor in to_hf(build_model(MODEL, spec, 9).state_dict()).items()}
    path = folder.path / "weights.safetensors"
    save_file(whole, path)
    model = bare(folder, tokenizer=tokenizer)
    assert model.new_head is None
    assert_equal(to_hf(model.weights), whole)
    for changes, seen in (
        ({"head.weight": torch.zeros(3, 20)}, r"head.weight: shape \[3, 20\]"),
        ({"head.bias": None}, "head.bias: no such tensor"),
        ({"head.scale": torch.zeros(1)}, "head.scale is not part of this model"),
        ({"pooler.dense.bias": torch.zeros(16)}, "pooler.dense.bias is not part of this model"),
    ):
        save_file({name: tensor for name, tensor in {**whole, **changes}.items() if tensor is not None}, path)
        with pytest.raises(CheckpointError, match=seen):
            bare(folder, tokenizer=tokenizer)


def test_a_tokenizer_that_frames_texts_in_another_way_is_refused(folder: Folder) -> None:
    content = json.loads(folder.tokenizer)
    content["post_processor"] = None
    folder.json("tokenizer.json", content)
    assert "tokenizer.json: encodes 'a sample text' as [" in refusal(folder, ConfigError)
    folder.json(TOKENIZER, {"tokenizer_class": "BertTokenizer"})
    folder.read()  # transformers puts the frame of a BERT tokenizer there itself
    content["pre_tokenizer"] = {"type": "Whitespace"}
    folder.json("tokenizer.json", content)
    assert "WordPiece after Whitespace in a BERT tokenizer" in refusal(folder, ConfigError)
