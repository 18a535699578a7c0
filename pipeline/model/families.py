"""Families of encoders, by the model_type of their config.json, and those that compute what BERT computes.

RoBERTa, XLM-R and CamemBERT differ from BERT in three tables. Positions begin at `pad_token_id + 1` (rows before that
belong to padding), there is one token type, and tensors may begin with another word. So such a model is BERT with its
first rows of positions cut off, to the last bit, and everything here knows one encoder. Checkpoints have the names of
BERT; an export may have those of the family again. MPNet and ModernBERT are encoders of their own.

Source: modeling_roberta.py and modeling_xlm_roberta.py of transformers (create_position_ids_from_input_ids).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.core.errors import CheckpointError
from pipeline.model.config import Architecture

POSITIONS = "embeddings.position_embeddings.weight"
TYPES = "embeddings.token_type_embeddings.weight"
TASK_HEADS = ("lm_head.", "classifier.", "qa_outputs.", "pooler.")


@dataclass(frozen=True)
class Family:
    """How a family's files differ from those of BERT."""

    model_type: str
    """In config.json."""
    prefix: str
    """What names of the encoder may begin with."""
    class_name: str
    """In transformers."""
    architecture: Architecture
    """Which encoder here computes it."""
    has_offset: bool
    """Positions begin behind the number of the padding token."""

    @property
    def is_bert_with_offset(self) -> bool:
        """Its tables are cut or filled up on the way to the names of BERT."""
        return self.has_offset and self.architecture == "bert"

    def offset(self, pad_id: int) -> int:
        """Rows of positions before that of a text's first token."""
        return pad_id + 1 if self.has_offset else 0


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("bert", "bert.", "BertModel", "bert", has_offset=False),
        Family("roberta", "roberta.", "RobertaModel", "bert", has_offset=True),
        Family("xlm-roberta", "roberta.", "XLMRobertaModel", "bert", has_offset=True),
        Family("camembert", "roberta.", "CamembertModel", "bert", has_offset=True),
        Family("mpnet", "mpnet.", "MPNetModel", "mpnet", has_offset=True),
        Family("modernbert", "model.", "ModernBertModel", "modernbert", has_offset=False),
    )
}


def as_bert(weights: Mapping[str, Tensor], model_type: str, pad_id: int, *, source: str) -> dict[str, Tensor]:
    """Weights of a family of BERT as those of the BERT that computes the same, without prefix or heads of tasks.

    Those of another architecture as they are.

    Raises CheckpointError for tables that are none of it.
    """
    family = FAMILIES[model_type]
    if not family.is_bert_with_offset:
        return dict(weights)
    found = {
        name.removeprefix(family.prefix): tensor
        for name, tensor in weights.items()
        if not name.removeprefix(family.prefix).startswith((*TASK_HEADS, "embeddings.position_ids"))
    }
    offset = family.offset(pad_id)
    for name, rows in ((POSITIONS, offset + 1), (TYPES, 1)):
        table = found.get(name)
        if table is None or table.dim() != 2 or table.shape[0] < rows:
            seen = "no such tensor" if table is None else f"shape {list(table.shape)}"
            raise CheckpointError(
                f"{source}: {name}: {seen}",
                expected=f"{rows} rows or more, as in a {model_type}",
                next_command="look at its config.json: model_type and pad_token_id",
            )
    found[POSITIONS] = found[POSITIONS][offset:].contiguous()
    types = found[TYPES]
    found[TYPES] = torch.cat([types, torch.zeros_like(types[:1])])[:2]  # the second is not asked for
    return found


def from_bert(weights: Mapping[str, Tensor], model_type: str, pad_id: int) -> dict[str, Tensor]:
    """The other way: weights of a BERT, without prefix, as those of a family."""
    family, result = FAMILIES[model_type], dict(weights)
    if family.is_bert_with_offset:
        table = result[POSITIONS]
        result[POSITIONS] = torch.cat([table.new_zeros(family.offset(pad_id), table.shape[1]), table])
        result[TYPES] = result[TYPES][:1].contiguous()
    return result
