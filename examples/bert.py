"""BERT of Hugging Face, which learns to fill in masked words of random text."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

config = BertConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForMaskedLM(config)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

data = torch.Generator().manual_seed(1)
for step in range(10):
    tokens = torch.randint(5, 9, (16, 32), generator=data)[rank::ranks]
    masked = tokens.clone()
    masked[:, ::4] = 4
    labels = tokens.masked_fill(masked != 4, -100)
    loss = model(input_ids=masked, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.9f}")

dist.destroy_process_group()
