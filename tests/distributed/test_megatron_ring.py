"""Attention in a ring: against the formula and one process, what a rank holds, and a rank that does not come."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dense_attention import dense, operands
from megatron_ranks import Workers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_megatron.megatron.context import attend, on_this_rank
from forge_megatron.megatron.ring import ring

pytestmark = pytest.mark.timeout(300)

#: Length, heads, groups, d, dv. The last has no kernel.
SHAPES = {"heads": (24, 4, 4, 8, 8), "groups": (40, 6, 2, 8, 8), "wide values": (24, 4, 2, 4, 6)}
# Roundings of sums of up to 40 numbers about 1, and of a log-sum-exp that takes part in each.
BOUNDS = {torch.float64: 1e-13, torch.float32: 4e-6}

workers = Workers()


@pytest.fixture(scope="module", params=[2, 4])
def results(request):
    return workers.results(request.param)


def _with_gradients(attention, tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    out = attention(*tensors)
    return [out, *torch.autograd.grad(out, tensors, dout)]


def _in_ring(wholes: list[Tensor], dout: Tensor) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [on_this_rank(whole.detach(), 0, rank, size).requires_grad_() for whole in wholes]
    over_ranks = partial(ring, group=dist.group.WORLD, scale=None, dropout=0.0)
    return _with_gradients(over_ranks, parts, on_this_rank(dout, 0, rank, size))


def _mine(wholes: list[Tensor]) -> list[Tensor]:
    return [on_this_rank(whole, 0, dist.get_rank(), dist.get_world_size()) for whole in wholes]


@workers
def _distances() -> dict:
    found = {}
    for dtype in BOUNDS:
        for name, shape in SHAPES.items():
            *wholes, dout = operands(dtype, *shape)
            exact = _with_gradients(dense, [w.detach().double().requires_grad_() for w in wholes], dout.double())
            pairs = zip(_in_ring(wholes, dout), _mine(exact), strict=True)
            found[dtype, name] = max((ours.double() - theirs).abs().max().item() for ours, theirs in pairs)
    return found


def test_it_is_the_formula_of_the_whole_sequence(results):
    for rank in results["_distances"]:
        for (dtype, name), distance in rank.items():
            assert distance < BOUNDS[dtype], (dtype, name)


@workers
def _in_bf16() -> dict:
    """Relative errors of the output and the gradients, of the ring and of torch's attention in one process."""
    found = {}
    for name, shape in SHAPES.items():
        *wholes, dout = operands(torch.bfloat16, *shape)
        exact = _with_gradients(dense, [w.detach().double().requires_grad_() for w in wholes], dout.double())
        alone = _with_gradients(partial(attend, scale=None, dropout=0.0), wholes, dout)
        triples = zip(_in_ring(wholes, dout), _mine(alone), _mine(exact), strict=True)
        found[name] = [
            ((ours.double() - right).norm() / right.norm(), (theirs.double() - right).norm() / right.norm())
            for ours, theirs, right in triples
        ]
    return found


def test_bf16_is_as_exact_as_in_one_process(results):
    for rank in results["_in_bf16"]:
        for name, errors in rank.items():
            for ours, theirs in errors:
                # Roundings add up in quadrature, and blocks are rounded before they are put together.
                assert ours < 2 * theirs, name


class _Largest(TorchDispatchMode):
    """The most numbers that a tensor has had."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@workers
def _largest() -> tuple[int, int]:
    *wholes, dout = operands(torch.float32, 64, 2, 2, 8, 8)
    parts, dout = [part.detach().requires_grad_() for part in _mine(wholes)], *_mine([dout])
    with _Largest() as largest:
        _with_gradients(partial(ring, group=dist.group.WORLD, scale=None, dropout=0.0), parts, dout)
    return largest.numbers, parts[1].numel() + parts[2].numel()


def test_no_tensor_has_more_than_the_keys_and_values_of_one_rank(results):
    for largest, own in results["_largest"]:
        assert largest == own


@workers
def _without_one() -> tuple[str, float]:
    """The last rank does not come."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    *wholes, _ = operands(torch.float32, *SHAPES["heads"])
    said, began = "", time.monotonic()
    if dist.get_rank() != dist.get_world_size() - 1:
        try:
            ring(*_mine(wholes), group, scale=None, dropout=0.0)
        except RuntimeError as error:
            said = str(error)
    seconds = time.monotonic() - began
    dist.barrier()
    return said, seconds


def test_a_rank_that_does_not_come_ends_the_others_in_the_time_of_the_group(results):
    *waited, _ = results["_without_one"]
    for said, seconds in waited:
        assert said
        assert seconds < 20


def test_dropout_is_refused():
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1.*a2a or all_gather"):
        ring(*operands(torch.float32, *SHAPES["heads"])[:3], None, scale=None, dropout=0.1)
