"""What a backend answers. The only things the rest of the code may ask of a device. Imports no torch."""

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
"""CPU tensors of this rank to those of all ranks, concatenated in rank order along their first dimension."""
Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class RankGroup:
    """This rank and those it exchanges with. The whole world is cut into such groups, of one size."""

    rank: int
    """Of the world."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of the world, in each group's order: what a collective in a graph is given."""
    process_group: "ProcessGroup | None" = None
    """This rank's, for collectives outside graphs; None: that of the world."""

    @property
    def size(self) -> int:
        return len(self.groups[0])

    @property
    def index(self) -> int:
        """Of this rank in its group."""
        return next(group.index(self.rank) for group in self.groups if self.rank in group)


class Backend(Protocol):
    """One device of one rank. What is answered here is true of one that runs each operation as it comes."""

    name: str
    device: "torch.device"
    is_lazy: bool = False
    """True when operations are traced and run at step boundaries."""
    reduces_in_graph: bool = False
    """True when `reduce` is a device collective; False when it goes through the host."""
    gathers_in_graph: bool = True
    """True when `gather` can stand within a graph or between operations; False when it ends the graph."""
    sums_by_matmul: bool = False
    """True where sums over rows are better written as matrix products (XLA:CPU)."""
    is_neuron: bool = False
    """True on a NeuronCore."""
    shares_host_memory: bool = False
    """True where the device is but a share of this host's cores and memory."""
    can_compile: bool = False
    """True where torch.compile fuses the operations of a module."""
    compiles_steps: bool = False
    """True where training and evaluation, too, are modules that `compiled` makes programs of, one for each shape."""
    spreads: frozenset[str]
    """Which of parameters, tensor, offload, process_group a plan may ask for (pipeline/parallel/config.py)."""
    default_tokens: int
    """Tokens of a batch of texts to embed, where the settings leave it to the device."""

    def runtime_world_size(self) -> int:
        """How many devices the runtime believes take part."""
        return 1

    def compiled(self, function: Function) -> Function:
        """Return the same as one program for each shape of its arguments. Where can_compile. Raises ConfigError."""
        return function

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        """Iterate batches on the device, moved there behind the step."""

    def step_boundary(self, computed: Sequence["Tensor"]) -> None:
        """Cut the graph here and start executing it (lazy devices); nothing elsewhere. `computed`: its results."""
        return

    def reduce(self, tensors: Sequence["Tensor"], host_mean: HostMean) -> None:
        """Take means over ranks, in place; one collective for all in a graph. `host_mean`: for CPU tensors."""

    def all_gather(self, tensor: "Tensor", ranks: RankGroup | None = None) -> "Tensor":
        """Concatenate the tensors [N, ...] of a group in its order, [size * N, ...]; None: of all ranks."""

    def all_reduce(self, tensor: "Tensor", ranks: RankGroup) -> "Tensor":
        """Return the sum over a group."""

    def reduce_scatter(self, tensor: "Tensor", ranks: RankGroup, scale: float = 1.0) -> "Tensor":
        """Return this rank's part [N] of the sum over a group of vectors [size * N], times `scale`."""

    def gather(self, tensors: Sequence["Tensor"], host_gather: HostGather) -> list["Tensor"]:
        """Gather rows of all ranks, in rank order, without a gradient. `host_gather` does it for CPU tensors."""

    def to_host(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Copy to host memory, with one synchronisation for all."""
        return self.fetch(tensors)()

    def fetch(self, tensors: Sequence["Tensor"]) -> Callable[[], list["Tensor"]]:
        """Copy to host memory once what computes the tensors has run; only the call waits. After a step boundary."""
        return lambda: [tensor.detach().cpu() for tensor in tensors]

    def barrier(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Return the same values; what is computed of them does not reuse earlier results (lazy devices)."""
        return list(tensors)

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which random numbers are once more those from here on; after it all is as before."""

    def autocast(self, dtype: "torch.dtype") -> AbstractContextManager[object]:
        """Mixed precision for the forward pass. Raises ConfigError where the device has none."""

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the device (dropout), and of the host, where a factory's module may draw."""

    def compile_count(self) -> int:
        """Return how many graphs this process has compiled so far (0 on eager devices)."""
        return 0

    def compile_seconds(self) -> float:
        """Return the seconds this process has spent compiling so far (0 on eager devices)."""
        return 0.0

    def host_operators(self) -> dict[str, int]:
        """Count the operators of traced programs that had to run on the host so far, by `aten::<name>`."""
        return {}

    def forget_host_operators(self) -> None:
        """Let `host_operators` begin anew, where the device can."""
        return

    def device_name(self) -> str:
        """Return what graphs are compiled for, such as xla:NEURON or xla:CPU."""
        return self.name

    def hlo_text(self, tensors: Sequence["Tensor"]) -> str:
        """Return the graph that computes `tensors`, traced and not yet run, as HLO text; empty on eager devices."""
        return ""

    def graph_hash(self, tensors: Sequence["Tensor"]) -> str:
        """Name that graph, the same in every process of one version; empty on eager devices."""
        return ""

    def memory_bytes(self) -> int | None:
        """Return the device memory in use; on the host the resident set; None where nothing tells it safely."""

    def synchronise(self) -> None:
        """Wait until everything started has finished."""
        return


@contextmanager
def prefetched(items: Iterable[Item], depth: int) -> Iterator[Iterator[Item]]:
    """Iterate `items`, such as batches, made up to `depth` ahead by one thread. Leaving the context ends the thread.

    An error in it is raised at the consumer's next item.
    """
    ready: queue.Queue[tuple[Item] | BaseException | None] = queue.Queue(maxsize=depth)
    left = threading.Event()

    def put(found: tuple[Item] | BaseException | None) -> bool:
        while not left.is_set():
            try:
                ready.put(found, timeout=0.1)
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
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found[0]

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        left.set()
        thread.join(timeout=10)


NATIVE_SINCE = (2, 13)
"""Of torch-neuronx: the first whose device is PyTorch's own, `neuron`. Before it was PyTorch/XLA's."""


def native_version() -> tuple[int, int] | None:
    """Return major and minor of the torch-neuronx that is installed, of either kind; None: there is none."""
    try:
        major, minor = metadata.version("torch-neuronx").split(".")[:2]
    except metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def pjrt_device(env: Mapping[str, str]) -> str:
    """Return the kind of PJRT device that is set, else NEURON where its plug-in is installed, else CPU."""
    return env.get("PJRT_DEVICE") or ("NEURON" if find_spec("libneuronxla") else "CPU")
