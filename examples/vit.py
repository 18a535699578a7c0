"""A vision transformer of Hugging Face, which learns to classify random images by brightness."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

config = ViTConfig(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    image_size=32,
    patch_size=8,
    num_labels=2,
)
model = ViTForImageClassification(config)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

data = torch.Generator().manual_seed(1)
for step in range(10):
    labels = torch.randint(2, (16,), generator=data)[rank::ranks]
    images = torch.randn(16, 3, 32, 32, generator=data)[rank::ranks] + labels.view(-1, 1, 1, 1)
    loss = model(pixel_values=images, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.9f}")

dist.destroy_process_group()
