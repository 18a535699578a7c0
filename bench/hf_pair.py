"""The peer: the same two-text model on transformers' BertModel, trained by Hugging Face Trainer on the same device."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments

from pipeline.data.loader import target_tensors, to_tensors
from pipeline.data.shards import Arrays
from pipeline.model.config import InputSpec, LossConfig, ModelConfig
from pipeline.model.hf import to_hf
from pipeline.model.relevance import Interactions, RelevanceModel, RelevanceOutputs
from pipeline.train.config import TrainConfig
from pipeline.train.loss import Targets, relevance_loss


class HfPairModel(nn.Module):
    """BertModel for both texts with our pooling, interactions, head and loss. Weights are copied from ours."""

    def __init__(self, ours: RelevanceModel, config: ModelConfig, spec: InputSpec, loss: LossConfig) -> None:
        super().__init__()
        size = config.encoder
        self.bert = BertModel(
            BertConfig(
                vocab_size=spec.vocab_size,
                hidden_size=size.hidden_size,
                num_hidden_layers=size.num_layers,
                num_attention_heads=size.num_heads,
                intermediate_size=size.intermediate_size,
                max_position_embeddings=config.max_positions,
                layer_norm_eps=config.layer_norm_eps,
                hidden_dropout_prob=config.dropout,
                attention_probs_dropout_prob=0.0,
                pad_token_id=spec.pad_id,
            ),
            add_pooling_layer=False,
        )
        self.interactions = Interactions(config, spec)
        self.head = nn.Linear(self.interactions.width, spec.num_classes)
        self._pad_id, self._loss_config = spec.pad_id, loss
        missing, extra = self.load_state_dict(_peer_names(ours.state_dict()), strict=False)
        if extra or any("position_ids" not in name and "token_type_ids" not in name for name in missing):
            raise ValueError(f"the peer's weights differ from ours: missing {missing}, extra {extra}")

    def forward(
        self,
        query: Tensor,
        product: Tensor,
        numeric: Tensor,
        categorical: Tensor,
        label: Tensor,
        gain: Tensor,
        query_key: Tensor,
        product_key: Tensor,
    ) -> dict[str, Tensor]:
        """Tensors of one batch (see data/loader.py) to {"loss": fp32 scalar}."""
        if query.shape == product.shape:
            left, right = self._embed(torch.cat([query, product], dim=0)).chunk(2, dim=0)
        else:
            left, right = self._embed(query), self._embed(product)
        logits = self.head(self.interactions(left, right, numeric, categorical))
        outputs = RelevanceOutputs(logits, left, right)
        return {"loss": relevance_loss(outputs, Targets(label, gain, query_key, product_key), self._loss_config)}

    def _embed(self, tokens: Tensor) -> Tensor:
        mask = (tokens != self._pad_id).to(torch.int32)
        hidden: Tensor = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        real = mask.to(hidden.dtype).unsqueeze(-1)
        return (hidden * real).sum(1) / real.sum(1).clamp(min=1.0)


def _peer_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(to_hf(state))


class RowDataset(Dataset[dict[str, Tensor]]):
    """The same rows as ours, one sample an item, every text padded to the same shape (XLA needs static shapes)."""

    def __init__(self, arrays: Arrays) -> None:
        is_row = np.ones(len(arrays["label"]), dtype=np.bool_)
        keys = {"query_key": arrays["query_id"], "product_key": arrays["sample_id"]}
        alone = {"is_row": is_row, "is_mined": ~is_row, **keys}
        self._tensors = {**to_tensors(arrays), **target_tensors({**arrays, **alone})}

    def __len__(self) -> int:
        return len(self._tensors["label"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self._tensors.items()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """A whole batch at once, so that the peer loses no time in a Python loop over samples."""
        chosen = torch.tensor(indices)
        return [{name: tensor[chosen] for name, tensor in self._tensors.items()}]


def take_only(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The collator for RowDataset: its batch is made already."""
    (batch,) = batches
    return batch


class BlockCallback(TrainerCallback):
    """Pauses a run: `blocks` gives the steps until the next pause and does its work there; its end ends the run."""

    def __init__(self, blocks: Iterator[int]) -> None:
        self._blocks = blocks
        self._left = next(blocks)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = next(self._blocks, 0)
            control.should_training_stop = self._left == 0


def run_trainer(
    model: HfPairModel,
    rows: Arrays,
    config: TrainConfig,
    max_steps: int,
    callback: TrainerCallback,
    **chosen: Any,
) -> None:
    """Trainer in the configuration found fastest on XLA:CPU, with `chosen` arguments over it.

    AdamW is `adamw_torch`: the default (fused) has no XLA kernel. Nothing is logged, saved, evaluated or reported.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    optimizer = config.optimizer
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=str(Path(folder) / "out"),
            max_steps=max_steps,
            per_device_train_batch_size=config.global_batch_size,
            learning_rate=optimizer.learning_rate,
            lr_scheduler_type=optimizer.schedule,
            warmup_steps=round(optimizer.warmup_fraction * max_steps),
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_epsilon=optimizer.eps,
            max_grad_norm=optimizer.max_grad_norm,
            seed=config.seed,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_drop_last=True,
            dataloader_num_workers=0,
            **{"optim": "adamw_torch", **chosen},
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=RowDataset(rows),
            data_collator=take_only,
            callbacks=[callback],
        )
        trainer.train()
