"""A folder that `transformers.AutoModel` and `sentence_transformers.SentenceTransformer` open."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import processors
from torch import Tensor

from pipeline.checkpoint.state import TrainState
from pipeline.convert.bert_config import CONFIG
from pipeline.convert.foreign_tokenizer import TOKENIZER, TOKENIZER_CONFIG
from pipeline.convert.sentence_folder import LEGACY, MODEL, MODULES, SENTENCE
from pipeline.data.tokenizer import TextTokenizer
from pipeline.model.hf import PREFIX, hf_config

WEIGHTS, HEAD = "model.safetensors", "relevance_head.safetensors"
SPECIAL_TOKENS = "special_tokens_map.json"
_POOLING, _NORMALIZE = "1_Pooling", "2_Normalize"
# The names up to sentence-transformers 5.3, which later versions read too.
_MODULES = (("Transformer", ""), ("Pooling", _POOLING), ("Normalize", _NORMALIZE))


def write_encoder(folder: Path, weights: Mapping[str, Tensor], state: TrainState) -> tuple[str, ...]:
    """config.json and the encoder as BertModel names it; the rest of the model beside it. Returns the files' names."""
    encoder = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
    write_weights(folder / WEIGHTS, encoder)
    write_weights(folder / HEAD, {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)})
    (folder / CONFIG).write_text(hf_config(state.model, state.inputs))
    return WEIGHTS, HEAD


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Plain safetensors. `format` is what transformers asks for. Raises OSError."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors lets nobody else read it


def write_tokenizer(folder: Path, tokenizer: TextTokenizer, max_tokens: int) -> None:
    """tokenizer.json and what AutoTokenizer needs to read it as it is: no class that would change its lower-casing."""
    parsed = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    special = {
        f"{name}_token": parsed.id_to_token(number)
        for name, number in (
            ("cls", tokenizer.cls_id),
            ("pad", tokenizer.pad_id),
            ("sep", tokenizer.sep_id),
            ("unk", tokenizer.unk_id),
        )
    }
    if parsed.token_to_id("[MASK]") is not None:
        special["mask_token"] = "[MASK]"  # noqa: S105 - a token of text
    (folder / TOKENIZER).write_bytes(_framed(parsed, tokenizer))
    _write_json(folder / SPECIAL_TOKENS, special)
    _write_json(
        folder / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "padding_side": "right",
            "truncation_side": "right",
            "clean_up_tokenization_spaces": True,
            **special,
        },
    )


def _framed(parsed: tokenizers.Tokenizer, tokenizer: TextTokenizer) -> bytes:
    """The file as it is; when it does not put [CLS] and [SEP] around a text, as this program does, made to."""
    parsed.no_truncation()
    parsed.no_padding()
    if parsed.encode("a").ids == tokenizer.encode(["a"]).ids.tolist():
        return tokenizer.data
    cls, sep = parsed.id_to_token(tokenizer.cls_id), parsed.id_to_token(tokenizer.sep_id)
    parsed.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )
    return parsed.to_str().encode()


def write_sentence_settings(folder: Path, state: TrainState, max_tokens: int) -> None:
    """The modules of sentence-transformers: encoder, pooling, unit length."""
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(_MODULES)
    ]
    _write_json(folder / MODULES, modules)
    _write_json(folder / SENTENCE, {"max_seq_length": max_tokens, "do_lower_case": False})
    (folder / _POOLING).mkdir()
    pooling = {key: mode == state.model.pooling for key, mode in LEGACY.items()}
    _write_json(folder / _POOLING / CONFIG, {"word_embedding_dimension": state.model.encoder.hidden_size, **pooling})
    _write_json(folder / MODEL, {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
