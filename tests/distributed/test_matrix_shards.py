"""Rules that read more than one coordinate, on shards of 2 and 3 ranks, against torch.optim and fp64 on the whole."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import ranks
import torch
import torch.distributed as dist

from forge_megatron.coordinator import Part
from forge_megatron.optimizer import ForgeOptimizer
from tests.cpu import oracles_staged

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(600)

STEPS = 20
SHAPES = ((12, 9), (9, 12))
Fp64 = oracles_staged.Optimizer64


def fp64(make, **given):
    return lambda params: Fp64(params, lambda index: make(**given))


# rule, options, oracle
CASES = {
    "lamb": ("lamb", {"lr": 0.01}, fp64(oracles_staged.Lamb64, lr=0.01)),
    "adafactor": ("adafactor", {"lr": 0.01}, functools.partial(torch.optim.Adafactor, lr=0.01)),
    "adalomo": ("adalomo", {"lr": 0.1}, fp64(oracles_staged.AdaLomo64, lr=0.1)),
    "adam_mini": ("adam_mini", {"lr": 0.01}, fp64(oracles_staged.AdamMini64, lr=0.01)),
    # Blocks that the ranks' rows cut.
    "blocks": ("adam_mini", {"lr": 0.01, "block_rows": 3}, fp64(oracles_staged.AdamMini64, lr=0.01, block_rows=3)),
    "one block": (
        "adam_mini",
        {"lr": 0.01, "block_rows": None},
        fp64(oracles_staged.AdamMini64, lr=0.01, block_rows=None),
    ),
}


def packages():
    """Of the authors' package, imported where they run."""
    import pytorch_optimizer

    lars = {"lr": 0.1, "weight_decay": 0.1}
    sm3 = {"lr": 0.1, "momentum": 0.9, "beta": 0.9}
    sign = {"lr": 0.01, "scale": 3.0}
    return {
        "lars": ("lars", lars, functools.partial(pytorch_optimizer.LARS, foreach=False, **lars)),
        "sm3": ("sm3", {"lr": 0.1}, functools.partial(pytorch_optimizer.SM3, foreach=False, lr=0.1)),
        "sm3, beta": ("sm3", sm3, functools.partial(pytorch_optimizer.SM3, foreach=False, **sm3)),
        "scion, sign": (
            "scion",
            {**sign, "norm_type": "sign"},
            functools.partial(pytorch_optimizer.SCION, foreach=False, norm_type=4, **sign),
        ),
    }


def cut(rows: int, world: int, *, halves: bool) -> tuple:
    """Shares of unequal size; ``halves``: of two halves that each rank has a part of, as SwiGLU's first linear."""
    if halves:
        ends = [rows // 2 * rank // world for rank in range(world + 1)]
        return tuple(((a, b), (a + rows // 2, b + rows // 2)) for a, b in itertools.pairwise(ends))
    share = -(-rows // world)
    return tuple(((min(r * share, rows), min((r + 1) * share, rows)),) for r in range(world))


def own(whole: torch.Tensor, part: Part) -> torch.Tensor:
    index = torch.cat([torch.arange(a, b) for a, b in part.stretches[part.rank]])
    return whole.index_select(part.dim, index)


def parts(shape, dims=(0, 1)):
    rank, world = dist.get_rank(), dist.get_world_size()
    found = [Part(torch.Size(shape), dim, cut(shape[dim], world, halves=False), rank, dist.group.WORLD) for dim in dims]
    if shape[0] % 2 == 0:
        found.append(Part(torch.Size(shape), 0, cut(shape[0], world, halves=True), rank, dist.group.WORLD))
    return found


def gradients(shapes):
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        yield [torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 2) for shape in shapes]


def train(rule, options, oracle, shapes=SHAPES):
    """Ours and the oracle's weights at this rank's places, our statistics, and the oracle's states."""
    places = [part for shape in shapes for part in parts(shape)]
    shapes = [part.whole for part in places]
    generator = torch.Generator().manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    ours = [torch.nn.Parameter(own(p.detach(), part).clone()) for p, part in zip(theirs, places, strict=True)]
    optimizer = ForgeOptimizer(ours, rule, wholes=dict(zip(ours, places, strict=True)), **options)
    reference = oracle(theirs)
    for grads in gradients(shapes):
        for p, q, g, part in zip(ours, theirs, grads, places, strict=True):
            p.grad, q.grad = own(g, part).clone(), g.clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    expected = [own(q.detach(), part) for q, part in zip(theirs, places, strict=True)]
    statistics = [[*slot.statistics] for slot in optimizer._parameters.slots.values()]
    states = [{k: v for k, v in reference.state[q].items() if isinstance(v, torch.Tensor)} for q in theirs]
    return [p.detach() for p in ours], expected, statistics, states


def _exact() -> dict:
    return {name: train(*case) for name, case in {**CASES, **packages()}.items()}


# rule, options, the oracle and what it is given besides
PROJECTED = {
    "galore": ("galore", {"rank": 4}, oracles_staged.Galore64, {}),
    "galore, svd": ("galore", {"rank": 4, "proj": "svd"}, oracles_staged.Galore64, {}),
    "galore, more than there is": ("galore", {"rank": 99}, oracles_staged.Galore64, {}),
    "apollo": ("apollo", {"rank": 4}, oracles_staged.Apollo64, {}),
    "apollo_mini": ("apollo_mini", {}, oracles_staged.Apollo64, {"scale": 128.0, "scale_type": "tensor"}),
}


def _projected() -> dict:
    """Ours, the oracle's at this rank's places, and the statistics; a vector too, which is not projected."""
    found = {}
    for case, (rule, options, oracle, given) in PROJECTED.items():
        places = [*(part for shape in SHAPES for part in parts(shape)), parts((10,), dims=(0,))[0]]
        shapes = [part.whole for part in places]
        generator = torch.Generator().manual_seed(0)
        wanted = [torch.randn(shape, generator=generator) for shape in shapes]
        ours = [torch.nn.Parameter(own(w, part).clone()) for w, part in zip(wanted, places, strict=True)]
        both = {"lr": 0.01, "weight_decay": 0.1}
        wholes = dict(zip(ours, places, strict=True))
        optimizer = ForgeOptimizer(ours, rule, wholes=wholes, update_proj_gap=7, **both, **options)
        wanted, states = [w.double() for w in wanted], [{} for _ in wanted]
        for t, grads in enumerate(gradients(shapes), start=1):
            for p, g, part in zip(ours, grads, places, strict=True):
                p.grad = own(g, part).clone()
            optimizer.step()
            optimizer.zero_grad()
            for index, (p, g) in enumerate(zip(ours, grads, strict=True)):
                projection = optimizer.state[p].get("projection")
                exact = oracle(**both, **given, projection=None if projection is None else projection.double())
                wanted[index] = exact.step(wanted[index], states[index], g.double(), t)
        expected = [own(w, part) for w, part in zip(wanted, places, strict=True)]
        statistics = [[*slot.statistics] for slot in optimizer._parameters.slots.values()]
        found[case] = [p.detach() for p in ours], expected, statistics
    return found


def _muon() -> dict:
    """Field log row 114: a 256 x 256 gradient; and the parts of a fused weight."""
    found = {}
    for rule in ("muon", "scion"):
        shape = (256, 256)
        generator = torch.Generator().manual_seed(0)
        g = torch.randn(shape, generator=generator)
        for dim in (0, 1, 2):
            part = parts(shape)[dim]
            p = torch.nn.Parameter(torch.zeros_like(own(g, part)))
            split = {"row_split": (128, 128)} if rule == "muon" and dim == 2 else {}
            options = {"weight_decay": 0.0, "momentum": 0.0} if rule == "muon" else {"momentum": 1.0}
            optimizer = ForgeOptimizer([p], rule, lr=1.0, wholes={p: part}, **options, **split)
            p.grad = own(g, part).clone()
            optimizer.step()
            blocks = g.chunk(2) if split else [g]
            wholes = []
            for block in blocks:
                q = torch.nn.Parameter(torch.zeros_like(block))
                q.grad = block.clone()
                torch.optim.Muon([q], lr=1.0, weight_decay=0.0, momentum=0.0).step()
                wholes.append(q.detach())
            found[rule, dim] = p.detach(), own(torch.cat(wholes), part)
    return found


def _skipped() -> dict:
    """A gradient that is not finite, on one rank alone: the weight stays on every rank, and so do statistics."""
    found = {}
    for rule in (
        *("lamb", "lars", "adafactor", "adalomo", "adam_mini", "sm3", "muon", "scion"),
        *("galore", "apollo", "apollo_mini"),
    ):
        part = parts((8, 6))[0]
        p = torch.nn.Parameter(torch.ones(own(torch.ones(8, 6), part).shape))
        every_step = {"update_proj_gap": 1} if rule in ("galore", "apollo", "apollo_mini") else {}
        optimizer = ForgeOptimizer([p], rule, lr=0.1, wholes={p: part}, **every_step)
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        before = p.detach().clone(), copy.deepcopy(optimizer._parameters.slots[p].statistics)
        p.grad = torch.ones_like(p)
        if dist.get_rank() == 0:
            p.grad[0, 0] = float("nan")
        optimizer.step()
        found[rule] = *before, p.detach(), optimizer._parameters.slots[p].statistics
    return found


def _all() -> tuple:
    return _exact(), _muon(), _skipped(), _projected()


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    return ranks.run(request.param, _all)


def test_shards_are_stepped_as_the_whole_weight(results):
    for exact, *_ in results:
        for name, (ours, theirs, statistics, states) in exact.items():
            for w, expected in zip(ours, theirs, strict=True):
                torch.testing.assert_close(w, expected, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            if name in ("adafactor", "adalomo", "adam_mini", "blocks"):
                for mine, whole in zip(statistics, states, strict=True):
                    for value in mine:
                        fits = [v for v in whole.values() if v.numel() == value.numel()]
                        assert any(torch.allclose(value.flatten(), v.flatten().float(), rtol=2e-5) for v in fits), name


def test_projections_of_shards_are_those_of_the_whole_gradient(results):
    for *_, projected in results:
        for case, (ours, theirs, _) in projected.items():
            for w, expected in zip(ours, theirs, strict=True):
                torch.testing.assert_close(
                    w.double(), expected, rtol=2e-5, atol=4e-6, msg=lambda m, c=case: f"{c}: {m}"
                )


def test_statistics_are_whole_and_bit_equal_on_every_rank(results):
    first, *others = [{**exact, **projected} for exact, _, _, projected in results]
    for other in others:
        for name, (_, _, statistics, *_) in first.items():
            for mine, theirs in zip(statistics, other[name][2], strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert torch.equal(a, b), name


def test_newton_schulz_reads_the_whole_matrix(results):
    """Without momentum its input is the gradient to the bit, and so its output is torch.optim.Muon's."""
    for _, muon, *_ in results:
        for case, (ours, theirs) in muon.items():
            assert ((ours - theirs).norm() / theirs.norm()) <= 1e-6, case


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(results):
    for _, _, skipped, _ in results:
        for rule, (weight, statistics, after, statistics_after) in skipped.items():
            assert torch.equal(weight, after), rule
            for a, b in zip(statistics, statistics_after, strict=True):
                assert torch.equal(a, b), rule
