"""Matrix stages that are replayed: one graph a shape, with the bits of what it replaces, and what runs as it is."""

import contextlib
import copy

import pytest
import torch

import forge_megatron as forge
from forge_megatron.kernels import Slot, replays, staged
from forge_megatron.rules import get
from tests.cpu.training import batch, expect_bit_equal, mean_square, mlp, snapshot


class Stream:
    """In the place of the current one."""

    def synchronize(self):
        pass


@pytest.fixture
def known(monkeypatch):
    """The one :class:`Replays` of the CPU, whose stream stands still."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    mine = replays.Replays(torch.device("cpu"), 0)
    monkeypatch.setattr(staged, "replays_of", lambda slots, backend: mine)
    return mine


@pytest.fixture
def recorded(known, monkeypatch):
    """The shapes that were captured; what stands in for a graph works on the memory that it was given then."""
    shapes = []

    def record(u, function):
        shapes.append(tuple(u.shape))
        return lambda: function(u)

    monkeypatch.setattr(known, "_record", record)
    return shapes


def trained(model, rule, **options):
    """Weights and states after four steps."""
    optimizer = forge.attach(model, rule, lr=1e-2, **options)
    for seed in range(4):
        mean_square(batch(7, 12, seed=seed))(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}], ids=["in backward", "in stacks"])
@pytest.mark.parametrize("rule", ["muon", "scion"])
def test_a_replayed_stage_has_the_bits_of_the_plain_one(rule, options, recorded, monkeypatch):
    """The largest matrix comes last in backward: what was captured in a smaller scratch is captured again."""
    model = mlp(12, 40, 8, 8, 8, bias=False)
    twin = copy.deepcopy(model)
    replayed = trained(model, rule, **options)
    assert {shape[-2:] for shape in recorded} == {(8, 8), (8, 40), (40, 12)}
    # In backward the second [8, 8] was captured before the scratch had grown.
    assert len(recorded) == (4 if not options else 3)
    monkeypatch.setattr(staged, "replays_of", lambda slots, backend: None)
    expect_bit_equal(trained(twin, rule, **options), replayed)


def test_what_lies_elsewhere_is_not_replayed(known, recorded):
    u = known.scratch((1, 3, 2))[0].fill_(1.0)

    def double(x):
        return x.mul_(2)

    for _ in range(3):
        known.transform(u, double, torch.float32)
    assert recorded == [(3, 2)]
    elsewhere = torch.ones(3, 2)
    known.transform(elsewhere, double, torch.float32)
    assert elsewhere.eq(2).all()
    assert u.eq(8).all()


def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(known, monkeypatch):
    @contextlib.contextmanager
    def failing(*operands):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(known._graph_memory, "recorded", failing)
    u = known.scratch((1, 3, 2))[0].fill_(1.0)
    known.transform(u, torch.neg, torch.float32).fill_(1.0)
    with pytest.warns(UserWarning, match=r"\[3, 2\] could not be captured .* not permitted") as warned:
        known.transform(u, torch.neg, torch.float32)
    known.transform(u, torch.neg, torch.float32)
    assert len(warned) == 1
    assert u.eq(1).all()


def test_on_a_cpu_nothing_is():
    rule = get("muon").variant(get("muon").resolve({"lr": 1.0}))
    slot = Slot(rule, torch.zeros(4, 4), (torch.zeros(4, 4),), torch.zeros(rule.n_scalars))
    assert replays.replays_of([slot], "auto") is None
    assert replays.replay_bytes([slot]) == 0
