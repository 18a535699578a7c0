"""Llama of Hugging Face with tied embeddings, trained from scratch on synthetic text."""

import torch
import torch.distributed as dist
import trnpipe as trn
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
model = trn.transform(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

data = torch.Generator().manual_seed(1)
for step in range(10):
    first = torch.randint(64, (16, 1), generator=data)[rank::ranks]
    tokens = (first + torch.arange(32)) % 64
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.9f}")

dist.destroy_process_group()
