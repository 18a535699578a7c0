"""The Backend interface, through which all other code uses a device. Does not import torch."""

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
"""Takes CPU tensors of this rank. Returns those of all ranks, concatenated in rank order along the first dimension."""
Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class RankGroup:
    """The ranks that this rank communicates with, and the other groups of equal size that the world is divided into."""

    rank: int
    """Global rank."""
    groups: tuple[tuple[int, ...], ...]
    """Global ranks of every group, in order, as collectives in a graph take them."""
    process_group: "ProcessGroup | None" = None
    """The group of this rank for collectives outside graphs (None: the default group)."""

    @property
    def size(self) -> int:
        return len(self.groups[0])

    @property
    def index(self) -> int:
        """Index of this rank in its group."""
        return next(group.index(self.rank) for group in self.groups if self.rank in group)


class Backend(Protocol):
    """The device of one rank. The defaults are those of an eager device."""

    name: str
    device: "torch.device"
    is_lazy: bool = False
    """Operations are traced and executed at step boundaries."""
    reduces_in_graph: bool = False
    """`reduce` is a device collective. Otherwise the host reduces."""
    gathers_in_graph: bool = True
    """`gather` may be called anywhere. Otherwise it ends the graph."""
    sums_by_matmul: bool = False
    """Sums over rows are faster as matrix products (XLA:CPU)."""
    is_neuron: bool = False
    """The device is a NeuronCore."""
    shares_host_memory: bool = False
    """The device uses the cores and memory of this host."""
    can_compile: bool = False
    """`compiled` fuses the operations of a module with torch.compile."""
    compiles_steps: bool = False
    """Training and evaluation are also compiled with `compiled`, one program for each shape."""
    parallelism: frozenset[str]
    """Supported features of a plan, of parameters, tensor, offload and process_group (pipeline/parallel/config.py)."""
    default_tokens: int
    """Default number of tokens in a batch of texts to embed."""

    def runtime_world_size(self) -> int:
        """Return the number of participating devices according to the runtime."""
        return 1

    def compiled(self, function: Function) -> Function:
        """Compile a function, one program per shape, if can_compile. Raises ConfigError without a compiler."""
        return function

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        """Iterate batches on the device. They are copied while the previous step runs."""

    def step_boundary(self, computed: Sequence["Tensor"]) -> None:
        """End the graph and start executing it (lazy devices), or do nothing. `computed`: results of the graph."""
        return

    def reduce(self, tensors: Sequence["Tensor"], host_mean: HostMean) -> None:
        """Average tensors over ranks in place, in a graph with one collective. `host_mean` averages CPU tensors."""

    def all_gather(self, tensor: "Tensor", ranks: RankGroup | None = None) -> "Tensor":
        """Concatenate the tensors [N, ...] of a group (None: all ranks) in its order to [size * N, ...]."""

    def all_reduce(self, tensor: "Tensor", ranks: RankGroup) -> "Tensor":
        """Return the sum over a group."""

    def reduce_scatter(self, tensor: "Tensor", ranks: RankGroup, scale: float = 1.0) -> "Tensor":
        """Return this rank's slice [N] of the sum over a group of vectors [size * N], times `scale`."""

    def gather(self, tensors: Sequence["Tensor"], host_gather: HostGather) -> list["Tensor"]:
        """Gather rows of all ranks, in rank order, without a gradient. `host_gather` gathers CPU tensors."""

    def to_host(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Copy tensors to host memory with one synchronisation."""
        return self.fetch(tensors)()

    def fetch(self, tensors: Sequence["Tensor"]) -> Callable[[], list["Tensor"]]:
        """Start copying tensors to host memory, after a step boundary. The returned function waits for the copies."""
        return lambda: [tensor.detach().cpu() for tensor in tensors]

    def barrier(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Return the same values. Computations on them do not reuse earlier results (lazy devices)."""
        return list(tensors)

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        """Save the random state. The returned function opens a context with that state, and restores it on exit."""

    def autocast(self, dtype: "torch.dtype") -> AbstractContextManager[object]:
        """Use mixed precision in the forward pass. Raises ConfigError if the device does not support it."""

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the device (dropout) and of the host (modules of a factory)."""

    def compile_count(self) -> int:
        """Return how many graphs this process has compiled so far (0 on eager devices)."""
        return 0

    def compile_seconds(self) -> float:
        """Return the seconds this process has spent compiling so far (0 on eager devices)."""
        return 0.0

    def host_operators(self) -> dict[str, int]:
        """Return how often each operator (`aten::<name>`) has run on the host because the device lacks it."""
        return {}

    def reset_host_operators(self) -> None:
        """Reset the counts of `host_operators`, if the device supports it."""
        return

    def device_name(self) -> str:
        """Return the target of compiled graphs, such as xla:NEURON or xla:CPU."""
        return self.name

    def hlo_text(self, tensors: Sequence["Tensor"]) -> str:
        """Return the pending graph that computes `tensors` as HLO text ('' on eager devices)."""
        return ""

    def graph_hash(self, tensors: Sequence["Tensor"]) -> str:
        """Return a hash of that graph, equal in every process of one version ('' on eager devices)."""
        return ""

    def memory_bytes(self) -> int | None:
        """Return the device memory in use (on the host the resident set), None if it cannot be read safely."""

    def synchronise(self) -> None:
        """Wait until all started operations have finished."""
        return


@contextmanager
def prefetched(items: Iterable[Item], depth: int) -> Iterator[Iterator[Item]]:
    """Iterate `items`, such as batches, with one thread that reads up to `depth` items ahead and ends with the context.

    An error in the thread is raised at the consumer's next item.
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
"""First version of torch-neuronx with PyTorch's native device `neuron`. Earlier ones use PyTorch/XLA."""


def native_version() -> tuple[int, int] | None:
    """Return the major and minor version of torch-neuronx, None if it is not installed."""
    try:
        major, minor = metadata.version("torch-neuronx").split(".")[:2]
    except metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def pjrt_device(env: Mapping[str, str]) -> str:
    """Return the PJRT device from the environment, else NEURON if its plug-in is installed, else CPU."""
    return env.get("PJRT_DEVICE") or ("NEURON" if find_spec("libneuronxla") else "CPU")
