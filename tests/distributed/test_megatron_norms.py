"""What the gradient norm counts, and how often, with weights that are fused and with such as are stepped from .grad."""

from __future__ import annotations

import pytest
import torch
from megatron_harness import Case, Run, Workers, run, step_from_grad

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

FORGE = Case(sequence_parallel=True).with_forge()
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


@workers
def _norm_of_known_gradients() -> list[float]:
    """Sharded gradients of norm² 9 over the ranks, replicated ones of norm² 16: as a sum that waits, and in .grad."""
    found = []
    for fused in (True, False):
        session = Run(FORGE)
        session.chunk.zero_grad_buffer()
        session.optimizer.zero_grad()
        norm = session.model.decoder.final_layernorm.weight
        norm.main_grad.zero_()[0] = 4.0
        owned = next(iter(session.optimizer.chained_optimizers[0].forge.owned.values()))
        gradient = torch.zeros_like(owned.weight)
        gradient[0, 0] = (9.0 / 2) ** 0.5
        if fused:
            owned.factors.accumulator = gradient
        else:
            owned.weight.grad = gradient
        session.optimizer.prepare_grads()
        found.append(float(session.optimizer.get_grad_norm()))
    return found


def test_replicated_gradients_are_counted_once(results):
    """Field log row 5: 5.0 on every rank, not 6.40, on the fused path and on the fallback."""
    assert results["_norm_of_known_gradients"] == [pytest.approx([5.0, 5.0], rel=1e-6)] * 2


def _head_scale(tagged: bool):
    """A user's head-wise parameter beside FORGE's linears, sharded over TP."""

    def edit(model) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        core = model.decoder.layers[0].self_attention.core_attention
        scale = torch.linspace(0.5, 2.0, 4).chunk(size)[rank].clone()
        core.head_scale = torch.nn.Parameter(scale)
        if tagged:
            set_tensor_model_parallel_attributes(core.head_scale, True, 0, 1)
        core.register_forward_hook(lambda module, _, out: out * module.head_scale.repeat_interleave(8))

    return edit


def _user_parameter(tagged: bool, fused: bool = True):
    session = Run(Case(clip=0.1).with_forge(), edit=_head_scale(tagged))
    if not fused:
        step_from_grad(session)
    before = session.weights()
    try:
        return session.train(3)["norms"]
    except ValueError as error:
        assert all(torch.equal(before[name], weight) for name, weight in session.weights().items())
        return str(error)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "fallback"])
def test_an_untagged_shard_is_named_before_anything_changes(fused):
    """Field log row 8."""
    for message in run(2, _user_parameter, False, fused):
        assert "core_attention.head_scale" in message
        assert "set_tensor_model_parallel_attributes" in message


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "fallback"])
def test_a_tagged_shard_is_in_the_norm(fused):
    """Field log row 8: as in one process."""
    assert run(2, _user_parameter, True, fused)[0] == pytest.approx(run(1, _user_parameter, False)[0], rel=1e-5)
