"""What a model that is spread over ranks holds, as one process would have it."""

from torch import Tensor, nn

from pipeline.parallel.tensor_plan import fused_parts
from pipeline.parallel.tensors import full_cpu_tensor, plain_entries


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, in host memory. All ranks call it; a tied parameter comes once."""
    parts = fused_parts(model)
    return {name: full_cpu_tensor(tensor, parts.get(name, 1)) for name, tensor in plain_entries(model)}
