"""The interface that all backends implement. This module doesn't import torch."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")
HostMean = Callable[[list["Tensor"]], list["Tensor"]]
HostGather = Callable[[list["Tensor"]], list["Tensor"]]
"""Gathers CPU tensors from all ranks and concatenates them along the first dimension in rank order."""
Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class RankGroup:
    """The group of ranks that this rank communicates with.

    Collectives inside a graph need to know all groups that the world is divided into, so this keeps track of all of
    them. All groups have the same size.
    """

    rank: int
    """The global rank."""
    groups: tuple[tuple[int, ...], ...]
    """The global ranks in each group."""
    process_group: "ProcessGroup | None" = None
    """The group of this rank, for collectives outside a graph. None is the default process group."""

    @property
    def size(self) -> int:
        return len(self.groups[0])

    @property
    def index(self) -> int:
        """The index of this rank within its group."""
        return next(group.index(self.rank) for group in self.groups if self.rank in group)


class Backend(Protocol):
    """The device of a single rank.

    The defaults are correct for an eager device. All other code should only access devices through this interface.
    """

    name: str
    device: "torch.device"
    is_lazy: bool = False
    """Whether operations are traced first and only executed at step boundaries."""
    reduces_in_graph: bool = False
    """Whether `reduce` is a collective on the device. Otherwise, tensors are reduced on the host."""
    gathers_in_graph: bool = True
    """Whether `gather` can be part of a graph. Otherwise, it ends the graph."""
    sums_by_matmul: bool = False
    """Whether sums over rows are faster if they are expressed as matrix products, as on XLA:CPU."""
    is_neuron: bool = False
    """Whether the device is a NeuronCore."""
    shares_host_memory: bool = False
    """Whether the device uses the CPU cores and the memory of the host."""
    can_compile: bool = False
    """Whether `compiled` uses torch.compile. Otherwise, it returns the function unchanged."""
    compiles_layers: bool = False
    """Whether training should compile the layers of the encoder with `compiled` by default."""
    compiles_steps: bool = False
    """Whether training and evaluation should be compiled with `compiled` too, which creates a program per shape."""
    parallelism: frozenset[str]
    """The supported features of a parallelism plan, which are any of `parameters`, `tensor`, `offload` and
    `process_group` (pipeline/parallel/config.py)."""
    emulates_bf16: bool = False
    """Whether bf16 products are emulated, which is many times slower than fp32."""
    prefers_bf16: bool = False
    """Whether bf16 products are many times faster than fp32."""
    default_tokens: int
    """The default number of tokens per batch when embedding texts."""

    def precision_warning(self, setting: str, precision: str) -> str:
        """Return a warning if a precision is slow on this device, or an empty string. `setting` is its name."""
        if precision == "fp32":
            text = f"{setting} fp32 is many times slower than bf16 on this device: --{setting} bf16"
            return text if self.prefers_bf16 else ""
        text = f"{setting} {precision} is many times slower than fp32 on this CPU, which lacks bf16: --{setting} fp32"
        return text if self.emulates_bf16 else ""

    def runtime_world_size(self) -> int:
        """Return the number of devices that participate in the run, as reported by the runtime."""
        return 1

    def compiled(self, function: Function) -> Function:
        """Compile a function to one program per shape, if the backend supports this (see `can_compile`).

        Raises ConfigError if there is no compiler.
        """
        return function

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        """Iterate over batches on the device. The next batches are copied while the current step is running."""

    def step_boundary(self, computed: Sequence["Tensor"]) -> None:
        """End the current graph and start executing it. This does nothing on eager devices.

        `computed` are the tensors that the graph computes.
        """
        return

    def reduce(self, tensors: Sequence["Tensor"], host_mean: HostMean) -> None:
        """Average tensors over all ranks in place. In a graph, this uses a single collective.

        `host_mean` averages CPU tensors, for devices that can't do so themselves.
        """

    def all_gather(self, tensor: "Tensor", ranks: RankGroup | None = None) -> "Tensor":
        """Gather the tensors of all ranks in a group and concatenate them along the first dimension.

        Args:
            tensor: the tensor [N, ...] of this rank.
            ranks: the group (default: all ranks).

        Returns:
            A tensor [size * N, ...] in the order of the group.
        """

    def all_reduce(self, tensor: "Tensor", ranks: RankGroup) -> "Tensor":
        """Return the sum of the tensors of all ranks in a group."""

    def reduce_scatter(self, tensor: "Tensor", ranks: RankGroup, scale: float = 1.0) -> "Tensor":
        """Sum vectors [size * N] over all ranks in a group, and return this rank's slice [N] multiplied by `scale`."""

    def gather(self, tensors: Sequence["Tensor"], host_gather: HostGather) -> list["Tensor"]:
        """Gather tensors from all ranks in rank order, without propagating gradients.

        `host_gather` gathers CPU tensors, for devices that can't do so themselves.
        """

    def to_host(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Copy tensors to host memory. This synchronizes with the device only once."""
        return self.fetch(tensors)()

    def fetch(self, tensors: Sequence["Tensor"]) -> Callable[[], list["Tensor"]]:
        """Start copying tensors to host memory and return a function that waits for the copies and returns them.

        This must be called after a step boundary.
        """
        return lambda: [tensor.detach().cpu() for tensor in tensors]

    def barrier(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Return tensors with the same values, but hide this from the compiler.

        This prevents it from reusing earlier results when the same computation is repeated on the new tensors.
        """
        return list(tensors)

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        """Save the random state and return a function that opens a context with the saved state.

        On exit, the context restores the random state from before it was entered.
        """

    def autocast(self, dtype: "torch.dtype") -> AbstractContextManager[object]:
        """Enable mixed precision for the forward pass. Raises ConfigError if the device doesn't support it."""

    def seed(self, seed: int) -> None:
        """Seed the random number generators of the device and of the host.

        Dropout uses the former, and user-defined modules may use the latter.
        """

    def compile_count(self) -> int:
        """Return the number of graphs that this process has compiled so far, which is 0 on eager devices."""
        return 0

    def compile_seconds(self) -> float:
        """Return how many seconds this process has spent compiling so far, which is 0 on eager devices."""
        return 0.0

    def host_operators(self) -> dict[str, int]:
        """Return how often each operator fell back to the host, because the device doesn't support it.

        Keys are names such as `aten::<name>`.
        """
        return {}

    def reset_host_operators(self) -> None:
        """Reset the counts of `host_operators` if the device supports this."""
        return

    def device_name(self) -> str:
        """Return the name of the device that graphs are compiled for, such as xla:NEURON or xla:CPU."""
        return self.name

    def hlo_text(self, tensors: Sequence["Tensor"]) -> str:
        """Return the HLO of the pending graph that computes `tensors`, or '' on eager devices."""
        return ""

    def graph_hash(self, tensors: Sequence["Tensor"]) -> str:
        """Return a hash of the pending graph that computes `tensors`, or '' on eager devices.

        The hash is the same in every process that uses the same version of PyTorch/XLA.
        """
        return ""

    def memory_bytes(self) -> int | None:
        """Return how much device memory is in use, or None if there is no safe way to determine it.

        For the CPU, this is the resident set size of the process.
        """

    def synchronise(self) -> None:
        """Wait until all pending operations have finished."""
        return


@contextmanager
def prefetched(items: Iterable[Item], depth: int) -> Iterator[Iterator[Item]]:
    """Iterate over `items`, such as batches, while a background thread reads up to `depth` items ahead.

    If the iterable raises an error, it is raised again when the consumer requests the next item. The thread stops when
    the context exits.
    """
    ready: queue.Queue[tuple[Item] | BaseException | None] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(entry: tuple[Item] | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((item,)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    def consume() -> Iterator[Item]:
        while (entry := ready.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        closed.set()
        thread.join(timeout=10)


NATIVE_SINCE = (2, 13)
"""The first version of torch-neuronx with native support for the device `neuron`. Earlier versions use PyTorch/XLA."""


def native_version() -> tuple[int, int] | None:
    """Return the major and minor version of torch-neuronx, or None if it isn't installed."""
    try:
        major, minor = metadata.version("torch-neuronx").split(".")[:2]
    except metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def pjrt_device(env: Mapping[str, str]) -> str:
    """Return the PJRT device that is set in the environment. The default is NEURON if its plugin is installed."""
    return env.get("PJRT_DEVICE") or ("NEURON" if find_spec("libneuronxla") else "CPU")
