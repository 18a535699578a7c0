"""backends/neuron.py on the stand-in: what it answers, and the limits of the device that our code has to keep."""

import pytest

from tests.native.conftest import InChild
from tests.native.standin import needs_compiler

pytestmark = [needs_compiler, pytest.mark.stage]


def test_what_the_backend_answers(opened: InChild) -> None:
    opened(
        """
        assert (process_group("auto"), module_device(), on_neuron("auto", {})) == ("neuron", "neuron", True)
        assert backend.device == torch.device("neuron") and backend.device_name() == "neuron" and backend.is_neuron
        values = torch.arange(6.0).reshape(2, 3)
        with backend.loader([{"values": values}]) as batches:
            (batch,) = batches
        assert batch["values"].device.type == "neuron" and torch.equal(backend.to_host([batch["values"]])[0], values)
        before = backend.memory_bytes()
        held = torch.zeros(1000, device=backend.device)
        assert backend.memory_bytes() - before == 4000
        backend.synchronise()
        again = backend.replay()
        first = torch.rand(5, device=backend.device).cpu()
        with again():
            assert torch.equal(torch.rand(5, device=backend.device).cpu(), first)
        with backend.autocast(torch.bfloat16):
            assert nn.Linear(3, 2).to(backend.device)(batch["values"]).dtype == torch.bfloat16
        """,
    )


def test_one_program_for_each_shape_and_none_after_that(opened: InChild) -> None:
    opened(
        """
        layer = nn.Linear(8, 8).to(backend.device)
        step = backend.compiled(lambda values: layer(values).square().mean())
        counts = []
        for rows in (4, 5, 4, 5, 6, 4, 5, 6):
            step(torch.ones(rows, 8, device=backend.device)).backward()
            counts.append(backend.compile_count())
        assert counts == [1, 2, 2, 2, 3, 3, 3, 3], counts
        assert backend.compile_seconds() > 0
        """,
    )


def test_a_program_is_compiled_once_for_all_processes_that_share_the_cache(opened: InChild) -> None:
    code = """
    step = backend.compiled(lambda values: values.exp().sum())
    step(torch.ones(4, device=backend.device))
    print("seconds", backend.compile_seconds())
    """
    assert "seconds 0.001" in opened(code)
    assert "seconds 0.0\n" in opened(code)


def test_the_limit_of_recompiles_is_an_error_and_not_a_slow_run(opened: InChild) -> None:
    opened(
        """
        from torch._dynamo import config
        assert config.recompile_limit >= 64 and config.fail_on_recompile_limit_hit
        step = backend.compiled(lambda values: values.exp().sum())
        for rows in range(1, 21):  # torch's own limit is 8
            step(torch.ones(rows, device=backend.device))
        assert backend.compile_count() == 20
        """,
    )


def test_a_graph_break_raises(opened: InChild) -> None:
    opened(
        """
        def step(values):
            return values * 2 if values.sum().item() > 0 else values
        try:
            backend.compiled(step)(torch.ones(3, device=backend.device))
        except torch._dynamo.exc.TorchDynamoException:
            print("told")
        else:
            raise AssertionError("a read on the host passed")
        """,
    )


def test_an_operator_of_a_users_module_that_runs_on_the_host_is_named(opened: InChild) -> None:
    opened(
        """
        class Theirs(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
            def forward(self, values):
                return self.layer(values).cumsum(dim=1).sum()
        model = Theirs().to(backend.device)
        values = torch.ones(2, 4, device=backend.device)
        model(values).backward()
        backend.compiled(model.forward)(values)
        # Forward, its gradient, and forward within the program.
        assert backend.host_operators() == {"aten::cumsum": 3}, backend.host_operators()
        """,
        missing=("aten::cumsum",),
    )


def test_the_stand_in_has_the_limits_of_the_device(opened: InChild) -> None:
    opened(
        """
        def refused(said, operation):
            try:
                operation()
            except Exception as error:
                assert said in str(error), error
            else:
                raise AssertionError(f"{said}: passed")
        refused("Invalid device id: 1", lambda: torch.zeros(2, device="neuron:1"))
        refused("NCC_ESPP004", lambda: torch.zeros(2, dtype=torch.float64, device="neuron"))
        refused("pin", lambda: torch.zeros(2, pin_memory=True))
        twice = torch.compile(lambda values: values * 2, backend="neuron", dynamic=True)
        refused("NCC_EMOD025", lambda: twice(torch.ones(4, device="neuron")))
        """,
    )


def test_the_process_group_has_to_come_before_the_device(in_child: InChild) -> None:
    join = """
import torch.distributed as dist
from pipeline.backends import open_backend, process_group
def join():
    dist.init_process_group(process_group("neuron"), store=dist.HashStore(), rank=0, world_size=1)
"""
    late = """
open_backend("neuron")
try:
    join()
except RuntimeError as error:
    assert "has to come before" in str(error)
else:
    raise AssertionError("passed")
"""
    in_child(join + late)
    in_child(join + "join()\nopen_backend('neuron')\n")


def test_what_aws_does_not_state_is_refused(opened: InChild) -> None:
    opened(
        """
        from pipeline.parallel.config import Plan
        from pipeline.parallel.mesh import check_plan
        for allowed in (Plan(shard_degree=1, recompute="units"), Plan(shard_degree=2), Plan(tensor_degree=2)):
            check_plan(allowed, backend)
        for more in ({"recompute": "units", "offload": True}, {"process_group": "a:b"}):
            try:
                check_plan(Plan(shard_degree=2, **more), backend)
            except ConfigError as error:
                assert "which is not supported on neuron" in str(error)
            else:
                raise AssertionError(f"{more}: passed")
        """,
    )
