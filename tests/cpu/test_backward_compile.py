"""torch.compile of an attached model works or is refused; it never leaves a weight untrained."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounter

from tests.cpu import live
from tests.cpu.training import Pair, batch, expect_bit_equal, mean_square, mlp, snapshot


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block, with arithmetic of its own around each linear."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.up(self.norm(x))
        return x + self.down(torch.nn.functional.gelu(h) * 0.5)


def compiled_step(pair, compiled, x):
    compiled(x).square().mean().backward()
    pair.twin(x).square().mean().backward()
    pair.close()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("options", [{}, {"clip": 0.1}], ids=["immediate", "clipped"])
def test_a_compiled_model_trains(compiler, options):
    pair = Pair(Block(), **options)
    compiled = torch.compile(pair.model, backend=compiler)
    for seed in range(3):
        compiled_step(pair, compiled, batch(5, 8, seed=seed))
    pair.expect_equal()
    assert all(state["step"] == 3 for state in pair.optimizer.state.values())


@pytest.mark.parametrize("order", ["attach_first", "compile_first"])
def test_module_compile_in_either_order(order):
    model, twin = Block(), Block()
    if order == "compile_first":
        model.compile(backend="aot_eager")
    pair = Pair(model, twin=twin)
    if order == "attach_first":
        model.compile(backend="aot_eager")
    for _ in range(3):
        pair.train(mean_square(batch(5, 8)))
    pair.expect_equal()


def test_a_layer_that_a_compiled_model_calls_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    pair = Pair(Twice())
    compiled = torch.compile(pair.model, backend="aot_eager")
    for _ in range(3):
        compiled_step(pair, compiled, batch(5, 6))
    pair.expect_equal()


def test_attach_after_the_first_compiled_call():
    """Whether torch traces the swapped linears anew or goes on with its graph (then from .grad), it trains."""
    model, twin = Block(), Block()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(batch(5, 8)).square().mean().backward()
    model.zero_grad()
    pair = Pair(model, twin=twin)
    for _ in range(2):
        compiled_step(pair, compiled, batch(5, 8))
    pair.expect_equal()
    rows = [row for row in pair.optimizer.coverage if row.name in ("up.weight", "down.weight")]
    assert all(row.fused or "without calling its module" in row.how for row in rows)


def test_detach_after_a_compiled_call():
    pair = Pair(Block())
    compiled = torch.compile(pair.model, backend="aot_eager")
    compiled_step(pair, compiled, batch(5, 8))
    pair.optimizer.detach()
    compiled_step(pair, compiled, batch(5, 8))
    pair.expect_equal()


@pytest.mark.parametrize("options", [{}, {"clip": 0.1}], ids=["immediate", "clipped"])
def test_a_compiled_training_step(options):
    """Backward and ``step()`` are called by what the compiler made of the function; it may not trace into either."""
    pair = Pair(nn.Sequential(nn.Embedding(9, 8), Block(), nn.Linear(8, 9)), **options)

    def step(x):
        pair.model(x).square().mean().backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()

    compiled = torch.compile(step, backend="aot_eager")
    for seed in range(3):
        x = torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(seed))
        compiled(x)
        pair.twin(x).square().mean().backward()
        if pair.clip is not None:
            nn.utils.clip_grad_norm_(pair.twin.parameters(), pair.clip)
        pair.oracle.step()
        pair.oracle.zero_grad()
    pair.expect_equal()


def test_gradients_set_to_none_do_not_recompile():  # field log row 76
    pair = Pair(Block())
    counter = CompileCounter()
    compiled = torch.compile(pair.model, backend=counter)
    compiled_step(pair, compiled, batch(5, 8))
    compiled_step(pair, compiled, batch(5, 8))
    frames = counter.frame_count
    for _ in range(8):
        compiled_step(pair, compiled, batch(5, 8))
    assert frames > 0
    assert counter.frame_count == frames
    pair.expect_equal(atol=2e-6)


def test_a_schedule_does_not_recompile_and_is_followed():  # field log row 77
    pair = Pair(mlp(6, 8, 4), weight_decay=0.0)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 30)))
        for _, optimizer in pair.sides()
    ]
    counter = CompileCounter()
    compiled = torch.compile(pair.model, backend=counter)
    for step in range(30):
        compiled_step(pair, compiled, batch(5, 6, seed=step))
        for schedule in schedules:
            schedule.step()
        if step == 1:
            frames = counter.frame_count
    assert counter.frame_count == frames
    pair.expect_equal(atol=1e-5)


def test_fullgraph_is_refused():  # field log row 78
    pair = Pair(Block())
    before = snapshot(pair.model, pair.optimizer)
    compiled = torch.compile(pair.model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ForgeLinear"):
        compiled(batch(5, 8))
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    # As torch says itself, fullgraph is the only thing in the way.
    pair.train(mean_square(batch(5, 8)))
    pair.expect_equal()


@pytest.mark.parametrize("options", [{}, {"clip": 0.1}], ids=["immediate", "clipped"])
def test_compiled_autograd_is_refused(options):  # field log row 75
    pair = Pair(mlp(6, 8, 4), **options)
    before = snapshot(pair.model, pair.optimizer)
    loss = pair.model(batch(5, 6)).square().mean()
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match=r"2\.weight: compiled autograd"),
    ):
        loss.backward()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    pair.optimizer.zero_grad()
    pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


def test_a_compiled_model_in_evaluation():
    pair = Pair(Block())
    compiled = torch.compile(pair.model, backend="aot_eager")
    compiled_step(pair, compiled, batch(5, 8))
    pair.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch(3, 8)), pair.twin(batch(3, 8)), rtol=0, atol=1e-6)
    pair.model.train()
    compiled_step(pair, compiled, batch(5, 8))
    pair.expect_equal()


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_and_a_fused_head(tied):
    """One compiled model; a schedule makes no new graph (field log row 77)."""
    model, twin = live.LanguageModel(tied), live.LanguageModel(tied, fused=False)
    pair = Pair(model, twin=twin, eps=1e-6)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    graphs = []
    for seed in range(4):
        for _, optimizer in pair.sides():
            optimizer.param_groups[0]["lr"] = 1e-3 / (seed + 1)
        compiled(live.ids(seed)).backward()
        twin(live.ids(seed)).backward()
        pair.close()
        graphs.append(counter.frame_count)
    pair.expect_equal()
    assert graphs[1:] == graphs[1:2] * 3


def test_layers_do_not_compile_one_anothers_forward_again():
    """Each layer has weights of its own: a forward that was compiled for one of them would be compiled for all."""
    torch.manual_seed(0)
    pair = Pair(nn.Sequential(*(Block() for _ in range(12))))
    counter = CompileCounter()
    compiled = torch.compile(pair.model, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2):
            compiled_step(pair, compiled, batch(5, 8, seed=seed).requires_grad_())
    pair.expect_equal()
