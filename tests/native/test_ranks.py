"""Ranks on the stand-in device, whose process group takes no tensor of the host: what goes through gloo."""

import pytest

from tests.native.conftest import InChild
from tests.native.standin import needs_compiler

pytestmark = [needs_compiler, pytest.mark.stage]


def test_what_ranks_agree_on_through_the_host(in_two_ranks: InChild) -> None:
    in_two_ranks(
        """
        from pipeline.parallel.process_group import open_ranks
        from pipeline.parallel.mesh import check_same, raise_on_all_ranks, run_without_timeout
        from pipeline.parallel.world import world_from_env
        world = world_from_env()
        with open_ranks("neuron", world, timeout_s=60) as (gang, backend):
            is_second = world.rank == 1
            assert gang.gather(world.rank * 10) == [0, 10]
            assert [one.tolist() for one in gang.mean([torch.tensor([1.0 + world.rank])])] == [[1.5]]
            assert gang.gather_rows([torch.tensor([world.rank])])[0].tolist() == [0, 1]
            assert [gang.agree(is_second and step == 0) for step in range(3)] == [False, True, False]
            assert gang.agree_now(is_second)
            gang.barrier()
            check_same("plan", "plan")
            with raise_on_all_ranks("testing"):
                pass
            assert run_without_timeout(lambda: world.rank, "testing") == world.rank
            total = torch.full((128,), 1.0 + world.rank, device=backend.device)
            dist.all_reduce(total)
            assert total.cpu().tolist() == [3.0] * 128
        assert not dist.is_initialized()
        """
    )


def test_a_users_script_with_and_without_a_process_group_of_its_own(in_two_ranks: InChild) -> None:
    code = """
    from torch import nn
    import trnpipe as trn
    if %s:
        from pipeline.backends import process_group
        dist.init_process_group(process_group("neuron"))
    place = trn.init({"shard_degree": 2, "seed": 1}, device="neuron")
    torch.manual_seed(place.rank)
    with trn.delayed_init():
        drawn = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    trn.transform(drawn)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    for kind in (torch.bool, torch.uint8, torch.int16, torch.bfloat16):
        model.register_buffer(str(kind).replace(".", "_"), torch.randint(0, 2, (3,)).to(kind))
    from pipeline.parallel.process_group import all_gather_objects
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected, other = all_gather_objects(before, "testing")
    assert any(not torch.equal(expected[name], other[name]) for name in expected)
    for name, value in trn.transform(model).state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert whole.dtype == expected[name].dtype and torch.equal(whole.cpu(), expected[name]), name
    model(torch.ones(2, 8, device="neuron")).sum().backward()
    trn.clip_grad_norm(model, 1.0)
    """
    for has_own in (False, True):
        in_two_ranks(code % has_own)


def test_health_of_the_ranks(in_two_ranks: InChild) -> None:
    in_two_ranks(
        """
        from pathlib import Path
        from tempfile import TemporaryDirectory
        from pipeline.core.stop import StopSignal
        from pipeline.health.check import HealthVerdict
        from pipeline.health.config import HealthConfig
        from pipeline.health.device import rank_checks, report_rank
        from pipeline.parallel.world import world_from_env
        world = world_from_env()
        with TemporaryDirectory() as folder:
            checks = rank_checks("neuron", world, HealthConfig(), os.environ, seed=1)
            report = report_rank(checks, HealthConfig(), world.rank, Path(folder), StopSignal())
        assert report.verdict is HealthVerdict.PASS, report
        assert any(result.name == "collectives" for result in report.results), report
        """
    )


def test_the_stand_in_has_the_limits_of_the_packages_process_group(in_two_ranks: InChild) -> None:
    in_two_ranks(
        """
        from pipeline.backends import process_group
        dist.init_process_group(f"cpu:gloo,neuron:{process_group('neuron')}")
        def refused(kind, said, call):
            try:
                call()
            except kind as error:
                assert said in str(error), error
            else:
                raise AssertionError(f"{said}: passed")
        here, there = torch.ones(4), torch.ones(4, device="neuron")
        for call in (dist.all_reduce, lambda one: dist.broadcast(one, 0), lambda one: dist.all_gather([one, one], one)):
            refused(RuntimeError, "Expected neuron device, got cpu", lambda: call(here))
        empty = torch.ones(0, 4, device="neuron")
        refused(RuntimeError, "zero size in dimension 0", lambda: dist.all_gather([empty, empty], empty))
        mixed = [there, there.to(torch.bfloat16)]
        refused(RuntimeError, "different dtypes", lambda: dist.group.WORLD.allreduce(mixed))
        refused(RuntimeError, "uint8", lambda: dist.broadcast(there.view(torch.uint8), 0))
        refused(NotImplementedError, "send", lambda: dist.send(there, 1 - dist.get_rank()))
        refused(NotImplementedError, "recv", lambda: dist.recv(there, 1 - dist.get_rank()))
        assert dist.distributed_c10d._get_object_coll_device() == "neuron"
        dist.barrier()
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        refused(NotImplementedError, "only for default group", lambda: dist.barrier(group=alone))
        """
    )


def test_the_mean_of_gradients_has_no_eager_operator_of_odd_length(in_two_ranks: InChild) -> None:
    in_two_ranks(
        """
        import torch_neuronx
        from pipeline.parallel.process_group import open_ranks
        from pipeline.parallel.world import world_from_env
        def host_mean(tensors):
            raise AssertionError("through the host")
        sent = []
        reduced = dist.all_reduce
        def all_reduce(tensor, **options):
            sent.append(tensor.numel())
            return reduced(tensor, **options)
        dist.all_reduce = all_reduce
        world = world_from_env()
        with open_ranks("neuron", world, timeout_s=60) as (_, backend):
            for _ in range(2):
                shapes = ((333, 7), (4097,), (1,), (64, 64))
                drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
                drawn.append(torch.ones(5, dtype=torch.bfloat16))
                tensors = [(one * (1 + 2 * world.rank)).to(backend.device) for one in drawn]
                torch_neuronx._C.odd_lengths()
                backend.reduce(tensors, host_mean)
                assert not torch_neuronx._C.odd_lengths(), "eager"
                for one, whole in zip(tensors, drawn):
                    assert torch.allclose(one.cpu(), 2 * whole, rtol=1e-6), one
            assert sent == [12288, 4096] * 2, sent
            assert torch.ones(129, device=backend.device).add(1).sum() == 258
            assert torch_neuronx._C.odd_lengths() == {"aten::add": {129}, "aten::fill_": {129}, "aten::sum": {129}}
        """
    )
