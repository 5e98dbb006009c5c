"""The tensor-parallel linears alone: against dense fp64, and the order of collectives and update."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Workers, run, transformer_config

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

HIDDEN, INNER, SEQUENCE, BATCH, STEPS = 24, 48, 8, 3, 4
LR, DECAY = 1e-2, 0.1
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _pair(sequence_parallel: bool):
    from forge_megatron.megatron import ForgeColumnParallelLinear, ForgeRowParallelLinear

    torch.manual_seed(3)
    config = transformer_config(Case(sequence_parallel=sequence_parallel))
    common = {"config": config, "init_method": torch.nn.init.normal_, "bias": True}
    column = ForgeColumnParallelLinear(HIDDEN, INNER, gather_output=False, **common)
    row = ForgeRowParallelLinear(INNER, HIDDEN, input_is_parallel=True, skip_bias_add=False, **common)
    with torch.no_grad():
        for weight in (column.weight, row.weight):
            weight.mul_(0.2)
    return column, row


def _optimizer(modules, **options):
    from forge_megatron import ForgeOptimizer

    weights = [module.weight for module in modules]
    optimizer = ForgeOptimizer(weights, lr=LR, weight_decay=DECAY, **options)
    for index, weight in enumerate(weights):
        optimizer.own(weight, f"layer{index}.weight")
    return optimizer


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, SEQUENCE, BATCH, HIDDEN)
    return list(zip(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), strict=True))


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def _whole(weight: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.detach().contiguous())
    return torch.cat(parts, dim)


def _train_pair(sequence_parallel: bool, waiting: bool) -> dict:
    column, row = _pair(sequence_parallel)
    start = _whole(column.weight, 0), _whole(row.weight, 1)
    optimizer = _optimizer([column, row], waiting=waiting)
    gradients = []
    for x, target in _batches():
        if sequence_parallel:
            x, target = _shard(x), _shard(target)
        x = x.clone().requires_grad_()
        hidden, _ = column(x)
        y, _ = row(torch.tanh(hidden))
        ((y - target).square().sum() / 100).backward()
        gradients.append(_whole(x.grad, 0) if sequence_parallel else x.grad)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "start": start,
        "end": (_whole(column.weight, 0), _whole(row.weight, 1)),
        "dx": gradients,
        "bias": row.bias.detach(),
    }


def _dense(start: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """The same two layers whole, in fp64, stepped by torch.optim.AdamW."""
    weights = [weight.double().requires_grad_() for weight in start]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=DECAY)
    gradients = []
    for x, target in _batches():
        x = x.double().requires_grad_()
        y = torch.tanh(x @ weights[0].t()) @ weights[1].t()
        ((y - target.double()).square().sum() / 100).backward()
        gradients.append(x.grad)
        optimizer.step()
        optimizer.zero_grad()
    return {"end": weights, "dx": gradients}


def _all_pairs() -> dict:
    return {
        (sequence_parallel, waiting): _train_pair(sequence_parallel, waiting)
        for sequence_parallel in (False, True)
        for waiting in (False, True)
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_pair_equals_dense(tp):
    """Column to Row at TP 2 and 4, with and without sequence parallel, in backward and waiting."""
    ranks = run(tp, _all_pairs)
    for key, found in ranks[0].items():
        dense = _dense(found["start"])
        for start, ours, theirs in zip(found["start"], found["end"], dense["end"], strict=True):
            assert (theirs - start).abs().max() > 1e-2
            torch.testing.assert_close(ours.double(), theirs.detach(), rtol=0, atol=2e-6, msg=str(key))
        for ours, theirs in zip(found["dx"], dense["dx"], strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5, msg=str(key))
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found["end"], other[key]["end"], strict=True))


class _Handle:
    def __init__(self, handle, log):
        self.handle, self.log = handle, log

    def wait(self):
        self.log.append("wait")
        return self.handle.wait()


def _order(sequence_parallel: bool) -> list[str]:
    from forge_megatron import kernels

    column, _ = _pair(sequence_parallel)
    optimizer = _optimizer([column])
    log: list[str] = []
    collective = "reduce_scatter_tensor" if sequence_parallel else "all_reduce"
    original, update = getattr(dist, collective), kernels.wgrad_step

    def issued(*positional, **keywords):
        log.append("issue")
        return _Handle(original(*positional, **keywords), log)

    def updated(*positional, **keywords):
        log.append("update")
        return update(*positional, **keywords)

    x = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    y, _ = column(x)
    setattr(dist, collective, issued)
    kernels.wgrad_step = updated
    try:
        y.sum().backward()
    finally:
        setattr(dist, collective, original)
        kernels.wgrad_step = update
    optimizer.step()
    return log


@workers
def _orders() -> dict:
    return {sequence_parallel: _order(sequence_parallel) for sequence_parallel in (False, True)}


def test_the_update_runs_between_issue_and_wait(results):
    for orders in results["_orders"]:
        assert orders == {False: ["issue", "update", "wait"], True: ["issue", "update", "wait"]}


@workers
def _reused_buffer() -> dict:
    from megatron.core.parallel_state import get_global_memory_buffer

    column, row = _pair(sequence_parallel=True)
    start = _whole(column.weight, 0), _whole(row.weight, 1)
    optimizer = _optimizer([column, row], waiting=True)
    for x, target in _batches():
        y, _ = row(torch.tanh(column(_shard(x).clone().requires_grad_())[0]))
        ((y - _shard(target)).square().sum() / 100).backward()
        for buffer in get_global_memory_buffer().buffer.values():
            buffer.fill_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
    return {"start": start, "end": (_whole(column.weight, 0), _whole(row.weight, 1))}


def test_waiting_factors_do_not_live_in_megatrons_reused_buffer(results):
    found = results["_reused_buffer"][0]
    for ours, theirs in zip(found["end"], _dense(found["start"])["end"], strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=0, atol=2e-6)


@workers
def _accumulation_fusion() -> bool:
    """On a GPU the flag is True by default; Megatron's kernel would then add to ``weight.main_grad``."""
    column, row = _pair(sequence_parallel=False)
    column.gradient_accumulation_fusion = row.gradient_accumulation_fusion = True
    optimizer = _optimizer([column, row])
    before = column.weight.detach().clone()
    row(column(torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True))[0])[0].sum().backward()
    optimizer.step()
    return not torch.equal(before, column.weight) and not hasattr(column.weight, "main_grad")


def test_accumulation_fusion_is_not_asked(results):
    assert all(results["_accumulation_fusion"])


@workers
def _as_megatrons() -> dict:
    """A swapped linear whose weight nobody owns, and an owned one in evaluation, beside Megatron's own."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from forge_megatron.megatron import ForgeColumnParallelLinear, ForgeRowParallelLinear

    found = {}
    for sequence_parallel in (False, True):
        config = transformer_config(Case(sequence_parallel=sequence_parallel))
        for theirs, ours, sizes, extra in (
            (ColumnParallelLinear, ForgeColumnParallelLinear, (HIDDEN, INNER), {"gather_output": False}),
            (RowParallelLinear, ForgeRowParallelLinear, (INNER, HIDDEN), {"input_is_parallel": True}),
        ):
            results = []
            for cls, owned in ((theirs, False), (ours, False), (ours, True)):
                torch.manual_seed(11)
                module = cls(
                    *sizes, config=config, init_method=torch.nn.init.normal_, bias=True, skip_bias_add=True, **extra
                )
                optimizer = _optimizer([module]) if owned else None
                width = sizes[0] if cls.__name__.endswith("ColumnParallelLinear") else sizes[0] // 2
                rows = SEQUENCE // 2 if sequence_parallel and width == HIDDEN else SEQUENCE
                x = torch.randn(rows, BATCH, width, generator=torch.Generator().manual_seed(1)).requires_grad_()
                y, bias = module(x)
                y.square().sum().backward()
                metadata = {"dp_cp_group": None}
                keys = {
                    key: (tensor.key, tensor.global_shape, tensor.global_offset, tensor.replica_id)
                    for key, tensor in module.sharded_state_dict("p.", metadata=metadata).items()
                    if hasattr(tensor, "global_shape")
                }
                results.append(
                    {
                        "y": y.detach(),
                        "bias": bias.detach(),
                        "dx": x.grad,
                        "dw": None if module.weight.grad is None else module.weight.grad.clone(),
                        "keys": keys,
                        "names": [name for name, _ in module.named_parameters()],
                    }
                )
                del optimizer
            found[sequence_parallel, ours.__name__] = results
    return found


def test_drop_in_for_megatrons_linears(results):
    for found in results["_as_megatrons"]:
        for key, (theirs, ours, owned) in found.items():
            assert torch.equal(theirs["dw"], ours["dw"]), key
            assert owned["dw"] is None
            for other in (ours, owned):
                assert torch.equal(theirs["y"], other["y"]), key
                assert torch.equal(theirs["bias"], other["bias"]), key
                assert torch.equal(theirs["dx"], other["dx"]), key
                assert theirs["keys"] == other["keys"]
                assert theirs["names"] == other["names"]


@workers
def _second_order() -> list[str]:
    """``create_graph`` through owned weights, and through frozen ones, whose collectives would lose the graph."""
    found = []
    for frozen in (False, True):
        column, row = _pair(sequence_parallel=False)
        optimizer = _optimizer([column, row])
        if frozen:
            column.weight.requires_grad_(False)
            row.weight.requires_grad_(False)
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
        before = [module.weight.detach().clone() for module in (column, row)]
        try:
            torch.autograd.grad(row(column(x)[0])[0].square().sum(), x, create_graph=True)
        except RuntimeError as error:
            found.append(str(error))
        assert all(torch.equal(old, module.weight) for old, module in zip(before, (column, row), strict=True))
        del optimizer
    return found


def test_a_gradient_penalty_is_refused(results):
    """Field log row 74."""
    for owned, frozen in results["_second_order"]:
        assert "create_graph=True through a weight that is updated in backward" in owned
        assert "create_graph=True through a tensor-parallel linear" in frozen


@workers
def _leaves_alone() -> dict:
    column, row = _pair(sequence_parallel=True)
    optimizer = _optimizer([column, row])
    before = [module.weight.detach().clone() for module in (column, row)]
    x = torch.randn(SEQUENCE // 2, BATCH, HIDDEN, requires_grad=True)
    (dx,) = torch.autograd.grad(row(column(x)[0])[0].sum(), x)
    with torch.no_grad():
        row(column(x)[0])
    untouched = all(torch.equal(old, module.weight) for old, module in zip(before, (column, row), strict=True))
    pending = any(owned.factors for owned in optimizer.owned.values())
    steps = [int(state["step"]) for state in optimizer.state.values()]
    return {"untouched": untouched, "pending": pending, "steps": steps, "dx": float(dx.abs().sum())}


def test_autograd_grad_and_no_grad_leave_nothing_behind(results):
    """Field row 40."""
    for found in results["_leaves_alone"]:
        assert found["untouched"]
        assert not found["pending"]
        assert found["steps"] == [0, 0]
        assert found["dx"] > 0


@workers
def _deferred() -> str:
    from forge_megatron.megatron import ForgeColumnParallelLinear

    config = transformer_config(Case())
    config.defer_embedding_wgrad_compute = True
    module = ForgeColumnParallelLinear(
        HIDDEN,
        INNER,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        embedding_activation_buffer=[],
        grad_output_buffer=[],
    )
    optimizer = _optimizer([module])
    try:
        module(torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True))
    except NotImplementedError as error:
        return str(error)
    finally:
        del optimizer
    return "not refused"


def test_deferred_weight_gradient_is_refused_by_name(results):
    for message in results["_deferred"]:
        assert "layer0.weight" in message
        assert "defer_embedding_wgrad_compute" in message
