"""Foreign folders and files: what becomes of them, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.convert.importing import read_model
from pipeline.core.errors import CheckpointError, ConfigError, DataError, TrnpipeError
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import TextTokenizer, train_tokenizer
from pipeline.model.hf import to_hf
from pipeline.model.relevance import build_model
from pipeline.model.weights import initial_model
from tests.convert.conftest import MODEL, SPEC, Folder, bert_json, given, source_of


def refusal(folder: Folder, kind: type[TrnpipeError] = CheckpointError, **changes: Any) -> str:
    with pytest.raises(kind) as caught:
        folder.read(**changes)
    assert str(folder.path) in caught.value.seen, "it says which file"
    return caught.value.seen.replace(f"file://{folder.path}/", "")


def encoder_of(folder: Folder) -> dict[str, torch.Tensor]:
    """The tensors that were imported, under the names in the file."""
    named = to_hf(folder.read().weights)
    return {name.removeprefix("bert."): tensor for name, tensor in named.items() if name.startswith("bert.")}


def test_a_plain_folder(folder: Folder) -> None:
    model = folder.read()
    assert model.config.encoder.model_dump() == MODEL.encoder.model_dump()
    assert (model.spec.vocab_size, model.spec.pad_id) == (folder.vocab_size, 0)
    assert (model.spec.labels, model.spec.numeric) == (SPEC.labels, SPEC.numeric)
    assert (model.max_tokens, model.new_head, model.tokenizer.data) == (24, 5, folder.tokenizer)
    assert (model.origin.format, model.origin.uri) == ("transformers", f"file://{folder.path}")
    found = encoder_of(folder)
    assert found.keys() == folder.weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in folder.weights.items())
    fresh = build_model(model.config, model.spec, 5).state_dict()
    head = [name for name in fresh if not name.startswith("encoder.")]
    assert head and all(torch.equal(model.weights[name], fresh[name]) for name in head)


def test_a_sentence_transformers_folder(folder: Folder) -> None:
    folder.sentence(pooling={"word_embedding_dimension": 16, "pooling_mode_cls_token": True})
    model = folder.read()
    assert (model.config.pooling, model.max_tokens, model.origin.format) == ("cls", 20, "sentence-transformers")
    folder.sentence(pooling={"embedding_dimension": 16, "pooling_mode": "mean"}, max_seq_length=None)
    assert (folder.read().config.pooling, folder.read().max_tokens) == ("mean", 24), "the tokenizer's own limit"
    folder.json("tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": 1e30})
    assert folder.read().max_tokens == 32, "no limit of its own"
    folder.sentence(max_seq_length=999)
    assert folder.read().max_tokens == 32, "no more than there are positions"
    (folder.path / "deep").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"):
        shutil.move(folder.path / name, folder.path / "deep" / name)
    shutil.move(folder.path / "model.safetensors", folder.path / "deep" / "model.safetensors")
    modules = json.loads((folder.path / "modules.json").read_text())
    modules[0]["path"] = "deep"
    folder.json("modules.json", modules)
    assert folder.read().max_tokens == 32, "the encoder may lie in a folder of its own"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_of_either_kind_with_a_pooler_and_a_task_head(folder: Folder, name: str) -> None:
    extra = {"pooler.dense.weight": torch.ones(2), "cls.predictions.bias": torch.ones(3)}
    weights = {f"bert.{name}": tensor for name, tensor in folder.weights.items()} | extra
    (folder.path / "model.safetensors").unlink()
    if name.endswith(".bin"):
        torch.save(weights | {"bert.embeddings.position_ids": torch.arange(32)}, folder.path / name)
    else:
        save_file(weights, folder.path / name)
    found = encoder_of(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in folder.weights.items())


def test_tensors_that_do_not_fit_are_refused_by_name(folder: Folder) -> None:
    whole = dict(folder.weights)
    query = "encoder.layer.1.attention.self.query.weight"
    for changes, seen in (
        ({query: torch.zeros(16, 17)}, f"bert.{query}: shape [16, 17]"),
        ({query: None}, f"bert.{query}: no such tensor"),
        ({"encoder.layer.2.output.dense.bias": torch.zeros(16)}, "bert.encoder.layer.2.output.dense.bias has no place"),
        ({"adapter.weight": torch.zeros(2)}, "bert.adapter.weight has no place"),
        ({f"bert.{query}": torch.zeros(16, 16)}, f"bert.{query} is there twice"),
        ({query: torch.full((16, 16), float("inf"))}, f"{query}: NaN or infinite"),
        ({query: torch.zeros(16, 16, dtype=torch.int8)}, f"{query}: torch.int8"),
    ):
        folder.weights = {name: tensor for name, tensor in {**whole, **changes}.items() if tensor is not None}
        folder.save()
        assert f"model.safetensors: {seen}" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        (
            {"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]},
            "config.json: model_type: architecture deberta-v2",
        ),
        ({"model_type": "distilbert", "architectures": None}, "config.json: model_type: architecture distilbert"),
        ({"model_type": 3}, "config.json: model_type"),
        ({"hidden_act": "gelu_new"}, "config.json: hidden_act"),
        ({"position_embedding_type": "relative_key"}, "config.json: position_embedding_type"),
        ({"is_decoder": True}, "config.json: is_decoder"),
        ({"vocab_size": 10**12}, "config.json: vocab_size"),
        ({"num_hidden_layers": 10**6}, "config.json: num_hidden_layers"),
        ({"hidden_size": "16; rm -rf"}, "config.json: hidden_size"),
        ({"hidden_size": None}, "config.json: hidden_size"),
        ({"num_attention_heads": 3}, "config.json: model.hidden_size 16 with model.num_heads 3"),
        ({"layer_norm_eps": 0}, "config.json: layer_norm_eps"),
        ({"is_encoder_decoder": True}, "config.json: is_encoder_decoder"),
        ({"is_causal": True}, "config.json: is_causal"),
        ({"pruned_heads": {"0": [1]}}, "config.json: pruned_heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, "config.json: quantization_config"),
        ({"rope_scaling": {"factor": 2}}, "config.json: rope_scaling"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "config.json: auto_map"),
    ],
)
def test_an_architecture_that_is_not_ours_is_refused_by_name(folder: Folder, changes: Any, seen: str) -> None:
    folder.json("config.json", bert_json(folder.vocab_size) | changes)
    assert seen in refusal(folder, ConfigError)


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"model_type": NaN}', "\udcff", "[" * 100_000])
def test_rubbish_in_config_json(folder: Folder, content: str) -> None:
    (folder.path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    refusal(folder, ConfigError)


def test_what_sentence_transformers_does_and_we_do_not_is_refused_by_name(folder: Folder) -> None:
    for pooling in (
        {"pooling_mode_max_tokens": True},
        {"pooling_mode": ["cls", "mean"]},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    ):
        folder.sentence(pooling=pooling)
        assert "1_Pooling/config.json: pooling " in refusal(folder, ConfigError)
    folder.sentence()
    modules = json.loads((folder.path / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    for wrong in (
        [*modules, dense],
        modules[:1],
        [],
        [modules[0] | {"type": "custom_code.Transformer"}, *modules[1:]],
        [modules[1], modules[0]],
    ):
        folder.json("modules.json", wrong)
        assert "modules.json: modules " in refusal(folder, ConfigError)
    folder.json("modules.json", [modules[0] | {"path": "../../elsewhere"}, *modules[1:]])
    with pytest.raises(ConfigError, match="elsewhere"):
        folder.read()


SENTENCE, OPTIONS, POOLING = "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"
PROMPTS = {"query": "query: ", "document": "passage: "}


@pytest.mark.parametrize(
    ("name", "content", "seen"),
    [
        (POOLING, {"include_prompt": False}, "include_prompt false, with prompts"),
        (POOLING, {"future_key": 1}, "future_key = 1 has no counterpart"),
        (OPTIONS, {"truncate_dim": 8}, "truncate_dim = 8"),
        (OPTIONS, {"similarity_fn_name": "manhattan"}, "similarity_fn_name"),
        (OPTIONS, {"model_type": "SparseEncoder"}, "model_type"),
        (OPTIONS, {"prompts": {"sts": "x: "}, "default_prompt_name": "sts"}, "default_prompt_name puts 'x: ' before"),
        (
            OPTIONS,
            {"prompts": PROMPTS, "default_prompt_name": "query"},
            "default_prompt_name puts 'query: ' before",
        ),
        (SENTENCE, {"transformer_task": "fill-mask"}, "transformer_task"),
        (SENTENCE, {"module_output_name": "sentence_embedding"}, "module_output_name"),
        (SENTENCE, {"modality_config": {"text": {"method_output_name": "pooler_output"}}}, "method_output_name"),
        (SENTENCE, {"modality_config": {"image": {"method": "forward"}}}, "modality_config.image.method = "),
        (SENTENCE, {"config_args": {"hidden_act": "relu"}}, "config_args.hidden_act = "),
        (SENTENCE, {"processor_kwargs": {"do_lower_case": True}}, "do_lower_case = True"),
        (SENTENCE, {"query_length": 8}, "query_length = 8"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_a_key_that_changes_vectors_is_refused_by_name(folder: Folder, name: str, content: Any, seen: str) -> None:
    folder.sentence()
    folder.json(OPTIONS, {"prompts": PROMPTS, "similarity_fn_name": "cosine", "default_prompt_name": None})
    folder.json("2_Normalize/config.json", {"module_input_name": "sentence_embedding"})
    folder.read()
    before = json.loads((folder.path / name).read_text())
    folder.json(name, before | content)
    text = refusal(folder, ConfigError)
    assert text.startswith(f"{name}: ") and seen in text
    folder.json(name, before | {key: None for key in content if key in ("future_key", "truncate_dim", "query_length")})
    folder.read()


def test_a_pooling_without_the_prompt_is_that_with_it_where_there_is_none(folder: Folder) -> None:
    folder.sentence(pooling={"pooling_mode": "mean", "include_prompt": False})
    folder.json(OPTIONS, {"prompts": {"query": "", "document": None}})
    assert folder.read().config.pooling == "mean"


def test_a_prompt_before_every_text_may_be_that_of_both_sides(folder: Folder) -> None:
    folder.sentence()
    folder.json(OPTIONS, {"prompts": {"query": "x: ", "document": "x: "}, "default_prompt_name": "query"})
    assert (folder.read().spec.query_prefix, folder.read().spec.product_prefix) == ("x: ", "x: ")


@pytest.mark.parametrize(
    ("similarity", "is_taken"), [("cosine", True), (None, True), ("dot", False), ("euclidean", False)]
)
def test_vectors_of_any_length_are_compared_by_their_angle_alone(
    folder: Folder, similarity: str | None, is_taken: bool
) -> None:
    folder.sentence()
    folder.json(OPTIONS, {"similarity_fn_name": similarity})
    folder.read()
    folder.json("modules.json", json.loads((folder.path / "modules.json").read_text())[:2])
    if is_taken:
        folder.read()
    else:
        assert f"similarity_fn_name {similarity} without a Normalize" in refusal(folder, ConfigError)


def test_an_adapter_is_refused_by_name(folder: Folder, tmp_path: Path) -> None:
    folder.json("adapter_config.json", {"peft_type": "LORA"})
    assert "has an adapter (adapter_config.json)" in refusal(folder, ConfigError)
    with pytest.raises(ConfigError, match="has an adapter"):
        initial_model(MODEL.model_copy(update={"init_from": str(folder.path)}), SPEC, 1, tmp_path)


WRAPPERS = ("module.", "_orig_mod.", "model.", "0.auto_model.", "module._orig_mod.", "model.bert.", "bert.")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_others_put_before_every_name_is_taken_away(folder: Folder, wrapper: str, tmp_path: Path) -> None:
    expected = folder.read().weights
    words = folder.weights["embeddings.word_embeddings.weight"]
    weights = {f"{wrapper}{name}": tensor for name, tensor in folder.weights.items()}
    save_file(weights, folder.path / "model.safetensors")
    imported = folder.read().weights
    assert imported.keys() == expected.keys() and all(torch.equal(imported[name], expected[name]) for name in expected)
    config = MODEL.model_copy(update={"init_from": str(folder.path)})
    spec = SPEC.model_copy(update={"vocab_size": folder.vocab_size})
    model = initial_model(config, spec, 1, tmp_path)
    assert torch.equal(model.state_dict()["encoder.word_embeddings.weight"], words)
    save_file(weights | {"1.linear.weight": torch.ones(16, 16)}, folder.path / "model.safetensors")
    assert "has no place" in refusal(folder), "one more module, of which only the names tell"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 90868376\n"


@pytest.mark.parametrize(
    ("content", "seen", "remedy"),
    [
        (POINTER, "is a Git LFS pointer", "git lfs pull"),
        (b"", "is empty", "download it again"),
        (b"\n<!DOCTYPE html><html>", "is a web page", "/resolve/"),
        (None, "is damaged", "copy it again"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "config.json"])
def test_what_lies_there_instead_of_a_file(
    folder: Folder, name: str, content: bytes | None, seen: str, remedy: str, tmp_path: Path
) -> None:
    """None: the second half of the file is missing."""
    path = folder.path / name
    if name.endswith(".bin"):
        (folder.path / "model.safetensors").rename(path)
        torch.save(folder.weights, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    kinds = {"tokenizer.json": DataError, "config.json": ConfigError}
    config = MODEL.model_copy(update={"init_from": str(folder.path)})
    spec = SPEC.model_copy(update={"vocab_size": folder.vocab_size})
    uses: list[Callable[[], object]] = [folder.read]
    uses += [lambda: initial_model(config, spec, 1, tmp_path)] if name != "tokenizer.json" else []
    for use in uses:
        with pytest.raises(kinds.get(name, CheckpointError)) as caught:
            use()
        assert f"file://{path}" in caught.value.seen
        if content is not None:
            assert seen in caught.value.seen and remedy in caught.value.next_command


def test_tokens_that_only_the_file_beside_has_are_refused(folder: Folder) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder.json("tokenizer_config.json", config | {"added_tokens_decoder": {"0": {"content": "[PAD]"}}})
    folder.read()
    folder.json("tokenizer_config.json", config | {"added_tokens_decoder": {"999": {"content": "<new>"}}})
    assert "added_tokens_decoder has '<new>' as 999" in refusal(folder, ConfigError)


def test_notes_tell_what_is_different_here(folder: Folder) -> None:
    folder.sentence()
    folder.json("config_sentence_transformers.json", {"prompts": {"STS": "compare: ", "document": ""}})
    folder.json("modules.json", json.loads((folder.path / "modules.json").read_text())[:2])
    notes = " | ".join(folder.read().notes)
    assert "further prompts before texts (STS 'compare: ')" in notes and "at their length" in notes


@pytest.mark.parametrize("name", ["document", "passage", "corpus"])
def test_prompts_are_prefixes(folder: Folder, name: str) -> None:
    folder.sentence()
    folder.json("config_sentence_transformers.json", {"prompts": {"query": "query: ", name: "passage: "}})
    model = folder.read()
    assert (model.spec.query_prefix, model.spec.product_prefix) == ("query: ", "passage: ")
    assert "queries begin with 'query: ', products with 'passage: '" in " | ".join(model.notes)


def test_embeddings_without_a_token_are_left_out(folder: Folder) -> None:
    rows = folder.vocab_size
    words = "embeddings.word_embeddings.weight"
    padded = torch.cat([folder.weights[words], torch.ones(7, 16)])
    folder.save(**{words: padded})
    folder.json("config.json", bert_json(rows + 7))
    model = folder.read()
    assert torch.equal(model.weights["encoder.word_embeddings.weight"], padded[:rows])
    assert any("7 embeddings" in note for note in model.notes)
    folder.json("config.json", bert_json(rows + 6))
    assert f"{words}: shape [{rows + 7}, 16]" in refusal(folder), "only what config.json accounts for"
    folder.save(**{words: padded[: rows - 1]})
    folder.json("config.json", bert_json(rows - 1))
    assert f"tokenizer.json has {rows} tokens" in refusal(folder, ConfigError)


def test_missing_files_are_named(folder: Folder, tmp_path: Path) -> None:
    (folder.path / "model.safetensors").rename(folder.path / "kept")
    assert "has no weights" in refusal(folder)
    (folder.path / "model.safetensors.index.json").write_text("{}")
    assert "several files (model.safetensors.index.json)" in refusal(folder)
    (folder.path / "kept").rename(folder.path / "model.safetensors")
    (folder.path / "tokenizer.json").unlink()
    assert "tokenizer.json does not exist" in refusal(folder)
    (folder.path / "config.json").unlink()
    assert "has no config.json" in refusal(folder, ConfigError)
    with pytest.raises(ConfigError, match="does not exist"):
        source_of(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not exist"):
        source_of(tmp_path / "empty")


def test_files_beyond_their_limit_are_refused(folder: Folder) -> None:
    with (folder.path / "config.json").open("ab") as file:
        file.truncate(2**33)  # a hole: eight gigabytes that take no room
    assert "config.json has 8.0 GiB" in refusal(folder)


def bare(folder: Folder, name: str = "weights.safetensors", **changes: Any) -> Any:
    return read_model(source_of(folder.path / name), given(**changes), folder.path / "scratch")


def test_a_bare_file_takes_its_sizes_from_the_settings(folder: Folder) -> None:
    save_file(folder.weights, folder.path / "weights.safetensors")
    torch.save(folder.weights, folder.path / "weights.pth")
    tokenizer = TextTokenizer(folder.tokenizer)
    for name in ("weights.safetensors", "weights.pth"):
        model = bare(folder, name, tokenizer=tokenizer)
        found = to_hf(model.weights)
        assert all(torch.equal(found[f"bert.{name}"], tensor) for name, tensor in folder.weights.items())
        assert (model.new_head, model.max_tokens) == (5, None)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        bare(folder)
    (folder.path / "link.safetensors").symlink_to(
        shutil.copy(folder.path / "weights.safetensors", folder.path / "blob")
    )
    assert bare(folder, "link.safetensors", tokenizer=tokenizer).new_head == 5, "as in the cache of huggingface_hub"
    other = TextTokenizer(train_tokenizer(["another text"], TokenizerConfig()))
    with pytest.raises(CheckpointError, match=r"weights.safetensors: bert.embeddings.word_embeddings.weight: shape"):
        bare(folder, tokenizer=other)
    with pytest.raises(CheckpointError, match=r"bert.encoder.layer.1.* has no place"):
        bare(folder, tokenizer=tokenizer, model=MODEL.model_copy(update={"num_layers": 1}))


def test_a_bare_file_of_a_whole_model_must_be_whole(folder: Folder) -> None:
    tokenizer = TextTokenizer(folder.tokenizer)
    spec = SPEC.model_copy(update={"vocab_size": tokenizer.vocab_size})
    whole = to_hf(build_model(MODEL, spec, 9).state_dict())
    path = folder.path / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path)
    model = bare(folder, tokenizer=tokenizer)
    assert model.new_head is None
    assert all(torch.equal(tensor, whole[name]) for name, tensor in to_hf(model.weights).items())
    for changes, seen in (
        ({"head.weight": torch.zeros(3, 20)}, r"head.weight: shape \[3, 20\]"),
        ({"head.bias": None}, "head.bias: no such tensor"),
        ({"head.scale": torch.zeros(1)}, "head.scale has no place"),
        ({"pooler.dense.bias": torch.zeros(16)}, "pooler.dense.bias has no place"),
    ):
        left = {name: tensor.contiguous() for name, tensor in {**whole, **changes}.items() if tensor is not None}
        save_file(left, path)
        with pytest.raises(CheckpointError, match=seen):
            bare(folder, tokenizer=tokenizer)
    assert load_file(path)


@pytest.mark.parametrize(
    ("config", "kind", "seen"),
    [
        ({"tokenizer_class": "DebertaV2Tokenizer"}, ConfigError, "tokenizer class DebertaV2Tokenizer"),
        ({"truncation_side": "left"}, ConfigError, "truncation_side"),
        ({"model_max_length": 2}, ConfigError, "model_max_length"),
        ({"model_max_length": float("nan")}, ConfigError, "model_max_length"),
        ([], ConfigError, "tokenizer_config.json"),
    ],
)
def test_a_tokenizer_that_would_work_otherwise_is_refused(
    folder: Folder, config: Any, kind: type[TrnpipeError], seen: str
) -> None:
    folder.json("tokenizer_config.json", config)
    assert seen in refusal(folder, kind)


def test_a_tokenizer_that_frames_texts_in_another_way_is_refused(folder: Folder) -> None:
    content = json.loads(folder.tokenizer)
    content["post_processor"] = None
    folder.json("tokenizer.json", content)
    assert "tokenizer.json makes [" in refusal(folder, ConfigError)
    folder.json("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
    folder.read()  # transformers puts the frame of a BERT tokenizer there itself
    content["pre_tokenizer"] = {"type": "Whitespace"}
    folder.json("tokenizer.json", content)
    assert "WordPiece after Whitespace in a BERT tokenizer" in refusal(folder, ConfigError)
    (folder.path / "tokenizer.json").write_bytes(b"{}")
    assert "is not a tokenizer.json" in refusal(folder, DataError)
