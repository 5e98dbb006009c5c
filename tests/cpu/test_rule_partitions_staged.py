"""Rules in stages, whatever the hyperparameters, and whatever the weight and the tokens are cut into."""

import dataclasses
import itertools
from unittest import mock

import oracles
import oracles_staged
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernel_regimes import RULES, expect_near, factors, make

from forge_megatron.coordinator import parts
from forge_megatron.kernels import tiles, triton_launch, wgrad_step
from forge_megatron.kernels.tiles import Tile
from forge_megatron.optimizer import ForgeOptimizer
from tests.cpu.thread_ranks import ThreadRanks

few = settings(max_examples=200, deadline=None, derandomize=True)
fewer = settings(max_examples=12, deadline=None, derandomize=True)


@st.composite
def partitions(draw):
    """``shape, dimension, stretches of each rank``: contiguous, of any lengths, also none; or two stretches each."""
    shape = draw(st.tuples(st.integers(1, 16), st.integers(1, 16)))
    dim, world = draw(st.integers(0, 1)), draw(st.integers(1, 4))
    places = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2 * world - 1, max_size=2 * world - 1)))
    ends = list(itertools.pairwise([0, *places, shape[dim]]))
    return shape, dim, tuple((ends[rank], ends[world + rank]) for rank in range(world))


def part_of(slot, part, whole, dim):
    """What one rank has of ``slot``."""
    index = torch.cat([torch.arange(*stretch) for stretch in part])
    own = lambda tensor: tensor.index_select(dim, index)  # noqa: E731
    return dataclasses.replace(
        slot,
        weight=own(slot.weight),
        states=tuple(map(own, slot.states)),
        norm_sq=torch.zeros(()),
        statistics=tuple(statistic.clone() for statistic in slot.statistics),
        whole=whole,
    )


@few
@given(st.sampled_from(RULES), partitions(), st.integers(1, 9), st.sampled_from([0, 3]), st.integers(0, 3))
def test_any_partition_of_the_weight_gives_the_same_update(name, partition, tokens, taken, seed):
    shape, dim, stretches = partition
    dy, x = factors(shape, tokens, seed)
    slot = make(name, shape, taken=taken)
    ranks = ThreadRanks(len(stretches))

    def step(rank):
        whole = parts.Part(torch.Size(shape), dim, stretches, rank, None)
        own = part_of(make(name, shape, taken=taken), stretches[rank], whole, dim)
        index = torch.cat([torch.arange(*stretch) for stretch in stretches[rank]])
        wgrad_step(own, [(dy[:, index], x) if dim == 0 else (dy, x[:, index])], backend="reference")
        return own

    with mock.patch.object(parts, "dist", ranks):
        found = ranks.run(step)
    wgrad_step(slot, [(dy, x)], backend="reference")
    for part, own in zip(stretches, found, strict=True):
        expect_near(own, part_of(slot, part, own.whole, dim))
        assert all(map(torch.equal, own.statistics, found[0].statistics))


@fewer
@given(
    st.sampled_from(RULES),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([16, 32]),
    st.integers(1, 3),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
)
def test_any_tiling_gives_the_same_update(name, block_o, block_i, block_t, group, shape):
    """Of the portable kernels, which alone know of tiles."""
    tile = Tile(block_o, block_i, block_t, group, parts=1 + group % 2, num_warps=4, num_stages=2)
    segments = [factors(shape, 19)]
    slot, twin = make(name, shape, taken=3), make(name, shape, taken=3)
    with mock.patch.object(triton_launch, "choose_tile", return_value=tile):
        wgrad_step(slot, segments, backend="triton")
    assert tiles.choose_tile(*shape, fp32=True, aligned=False) != tile
    wgrad_step(twin, segments, backend="reference")
    expect_near(slot, twin)
    assert slot.norm_sq == twin.norm_sq


betas = st.tuples(st.floats(0.0, 0.95), st.floats(0.5, 0.999))
decay = st.floats(0.0, 0.5)
eps = st.floats(1e-8, 1e-2)

#: Of each rule, what it and its reference are given.
HYPERPARAMETERS = {
    "lamb": st.fixed_dictionaries({"betas": betas, "eps": eps, "weight_decay": decay}),
    "adalomo": st.fixed_dictionaries(
        {"decay_rate": st.floats(-1.0, -0.2), "clip_threshold": st.floats(0.2, 2.0), "weight_decay": decay}
    ),
    "adam_mini": st.fixed_dictionaries(
        {"betas": betas, "eps": eps, "weight_decay": decay, "block_rows": st.sampled_from([1, 2, 3, None])}
    ),
    "adafactor": st.fixed_dictionaries(
        {
            "beta2_decay": st.floats(-1.0, -0.2),
            "d": st.floats(1.0, 3.0),
            "weight_decay": decay,
            "eps": st.tuples(eps, st.floats(1e-3, 0.1)),
        }
    ),
    "lars": st.fixed_dictionaries(
        {
            "momentum": st.floats(0.1, 0.95),
            "dampening": st.floats(0.0, 0.5),
            "weight_decay": decay,
            "trust_coefficient": st.floats(1e-3, 0.1),
            "nesterov": st.booleans(),
        }
    ),
    "sm3": st.fixed_dictionaries({"momentum": st.floats(0.0, 0.9), "beta": st.floats(0.0, 0.9)}),
    "scion": st.fixed_dictionaries(
        {"momentum": st.floats(0.05, 1.0), "scale": st.floats(0.1, 4.0), "weight_decay": decay}
    ),
    "muon": st.fixed_dictionaries(
        {
            "momentum": st.floats(0.0, 0.95),
            "nesterov": st.booleans(),
            "weight_decay": decay,
            "ns_steps": st.integers(1, 7),
            "adjust_lr_fn": st.sampled_from(["original", "match_rms_adamw"]),
        }
    ),
    "galore": st.fixed_dictionaries({"betas": betas, "eps": eps, "weight_decay": decay, "scale": st.floats(0.1, 2.0)}),
    "apollo": st.fixed_dictionaries(
        {
            "betas": betas,
            "eps": eps,
            "weight_decay": decay,
            "scale": st.floats(0.1, 4.0),
            "scale_type": st.sampled_from(["channel", "tensor"]),
        }
    ),
}
#: Of projected rules, what their oracles take from them.
LOW_RANK = {"rank": st.integers(1, 8), "update_proj_gap": st.integers(1, 3)}
PACKAGES = {
    "adafactor": torch.optim.Adafactor,
    "lars": lambda params, **h: pytorch_optimizer.LARS(params, foreach=False, **h),
    "sm3": lambda params, **h: pytorch_optimizer.SM3(params, foreach=False, **h),
    "scion": lambda params, **h: pytorch_optimizer.SCION(params, foreach=False, norm_type=4, **h),
    "muon": torch.optim.Muon,
}
BY_HAND = {
    "lamb": oracles_staged.Lamb64,
    "adalomo": oracles_staged.AdaLomo64,
    "adam_mini": oracles_staged.AdamMini64,
    "galore": oracles_staged.Galore64,
    "apollo": oracles_staged.Apollo64,
}


@few
@given(st.sampled_from(sorted(HYPERPARAMETERS)), st.data(), st.sampled_from([(6, 5), (6, 11), (12, 7)]))
def test_three_steps_equal_the_reference_for_any_hyperparameters(name, data, shape):
    given_to_both, lr = data.draw(HYPERPARAMETERS[name]), data.draw(st.floats(0.01, 0.3))
    ours = {"norm_type": "sign"} if name == "scion" else {}
    if name in ("galore", "apollo"):
        ours = data.draw(st.fixed_dictionaries(LOW_RANK))
    generator = torch.Generator().manual_seed(1)
    # Small, so that most of what is compared is what the steps have added.
    p = torch.nn.Parameter(0.05 * torch.randn(shape, generator=generator))
    # Packages step in fp64; Muon's own rounding to bf16 is of the fp32 momentum.
    twin = torch.nn.Parameter(p.detach().to(torch.float32 if name == "muon" else torch.float64))
    optimizer = ForgeOptimizer([p], name, lr=lr, **given_to_both, **ours)

    def by_hand(index):
        extra = {}
        if name in ("galore", "apollo"):
            extra["projection"] = optimizer.state[p]["projection"].double()
        return BY_HAND[name](lr=lr, **given_to_both, **extra)

    if name in PACKAGES:
        reference = PACKAGES[name]([twin], lr=lr, **given_to_both)
    else:
        reference = oracles_staged.Optimizer64([twin], by_hand)
    start = p.detach().clone()
    for _ in range(3):
        p.grad = torch.randn(shape, generator=generator)
        twin.grad = p.grad.to(twin.dtype)
        optimizer.step()
        reference.step()
    if name == "muon":
        # The weight itself is exact only up to a rounding of an iterate of Newton-Schulz.
        largest = lr * 1.5 * max(1.0, 0.2 * max(shape) ** 0.5, (shape[0] / shape[1]) ** 0.5)
        torch.testing.assert_close(
            p.detach(), twin.detach(), rtol=0, atol=3 * largest * torch.finfo(torch.bfloat16).eps
        )
    else:
        oracles.assert_rounding(p.detach(), twin.detach(), 32)
    assert not torch.equal(p.detach(), start)
