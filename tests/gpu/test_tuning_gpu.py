"""``forge.tune`` with the device's own kernels and clock: bits, memory, generators, and a captured step afterwards."""

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.kernels import tuned

TOKENS, WIDTH, OUTPUTS = 512, 768, 1024


@pytest.fixture(autouse=True)
def fresh():
    yield
    tuned.clear()


def attached(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, OUTPUTS, bias=False), nn.Linear(OUTPUTS, WIDTH, bias=False))
    net = net.to("cuda", torch.bfloat16)
    return net, forge.attach(net, lr=0.1, **options)


def batch(number):
    generator = torch.Generator("cuda").manual_seed(number)
    return torch.randn(TOKENS, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)


def step(net, optimizer, number):
    net(batch(number)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(net, optimizer):
    states = [state for p in net.parameters() for state in optimizer.state[p].values()]
    return [tensor.detach().clone().view(-1).view(torch.uint8) for tensor in (*net.parameters(), *states)]


def expect_equal(before, after):
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def untimed(launches, device):
    raise AssertionError("it was on disk")


@pytest.mark.parametrize(("backend", "recipe"), [("auto", None), ("auto", "fp32-master"), ("triton", None)])
def test_tuning_changes_no_bit_and_returns_its_memory(tmp_path, backend, recipe):
    untuned = attached(backend=backend, recipe=recipe)
    for number in range(3):
        step(*untuned, number)
    net, optimizer = attached(backend=backend, recipe=recipe)
    # cuBLAS' workspace on this stream is there from here on.
    torch.mm(batch(0).t(), batch(1), out_dtype=torch.float32)
    torch.cuda.synchronize()
    before, memory = bits(net, optimizer), torch.cuda.memory_allocated()
    generator = torch.cuda.get_rng_state()
    found = forge.tune(optimizer, [TOKENS], folder=tmp_path)
    print(found)
    assert torch.cuda.memory_allocated() == memory
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    expect_equal(before, bits(net, optimizer))
    assert len(found.outcomes) == 2
    for outcome in found.outcomes.values():
        # Of one kernel all tiles sum tokens in the same order.
        other = [name for name, why in outcome.left_out.items() if why == "other bits"]
        assert not [name for name in other if name.split()[0] == outcome.default.kernel]
        assert outcome.us[str(outcome.chosen)] <= outcome.us[str(outcome.default)]
    for number in range(3):
        step(net, optimizer, number)
    expect_equal(bits(*untuned), bits(net, optimizer))
    assert all(row.kernel.endswith(f"(tuned) at {TOKENS} tokens") for row in optimizer.coverage)
    again = forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=untimed)
    assert again.outcomes == found.outcomes
    assert not again.measured


def test_a_captured_step_takes_what_was_tuned_and_capture_is_no_time_to_tune(tmp_path):
    twins = [attached() for _ in range(2)]
    forge.tune(twins[1][1], [TOKENS], folder=tmp_path)

    def stepping(net, optimizer):
        def function(x):
            loss = net(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return function

    captured = twins[1][1].capture(stepping(*twins[1]))
    eager = stepping(*twins[0])
    for number in range(6):
        assert torch.equal(eager(batch(number)), captured(batch(number)))
    expect_equal(bits(*twins[0]), bits(*twins[1]))
    with pytest.raises(RuntimeError, match=r"tune\(\) after capture\(\)"):
        forge.tune(twins[1][1], [TOKENS], folder=tmp_path)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            forge.tune(twins[0][1], [TOKENS], folder=tmp_path)
