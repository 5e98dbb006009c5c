"""What is called twice, at an odd moment, or on the module instead of the optimizer: as torch, or an error."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron import kernels

INPUTS = [torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def build(*, bias=True, last=None):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, bias=bias), nn.Tanh(), nn.Linear(6, 6, bias=bias)]
    return nn.Sequential(*layers, *([] if last is None else [last]))


def pair(model, **options):
    """The model under FORGE and a copy under torch, both stepped by SGD."""
    other = copy.deepcopy(model)
    return (model, forge.attach(model, "sgd", lr=0.1, **options)), (other, torch.optim.SGD(other.parameters(), lr=0.1))


def backward(model, index):
    model(INPUTS[index]).square().sum().backward()


def assert_equal(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("second", [None, 10.0, 0.05], ids=str)
def test_clipping_twice_is_clipping_by_the_smaller_norm(second):
    (model, ours), (other, theirs) = pair(build(), waiting=True)
    backward(model, 0)
    backward(other, 0)
    norms = [ours.clip_grad_norm_(0.1), ours.clip_grad_norm_(second)]
    limits = [0.1, torch.inf if second is None else second]
    wanted = [nn.utils.clip_grad_norm_(other.parameters(), limit) for limit in limits]
    torch.testing.assert_close(norms, wanted, rtol=1e-5, atol=0)
    ours.step()
    theirs.step()
    assert_equal(model, other)


@pytest.mark.parametrize("leave", ["zero_grad", "rollback"])
def test_a_discarded_window_takes_its_clipping_with_it(leave):
    (model, ours), (other, theirs) = pair(build(), waiting=True)
    backward(model, 0)
    ours.clip_grad_norm_(0.01)
    getattr(ours, leave)()
    backward(model, 1)
    backward(other, 1)
    ours.step()
    theirs.step()
    assert_equal(model, other)


@pytest.mark.parametrize("clip", ["global", "weight"])
def test_a_negative_multiplier_is_clipped_by_its_size(clip):
    (model, ours), (other, theirs) = pair(build(), clip_grad_norm=0.1, clip=clip)
    backward(model, 0)
    backward(other, 0)
    for p in other.parameters():
        p.grad.mul_(-0.5)
    norm = nn.utils.get_total_norm([p.grad for p in other.parameters()])
    for group in [list(other.parameters())] if clip == "global" else [[p] for p in other.parameters()]:
        nn.utils.clip_grad_norm_(group, 0.1)
    ours.step(gradient_multiplier=-0.5)
    theirs.step()
    assert_equal(model, other)
    torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": None}], ids=["in backward", "waiting"])
def test_a_modules_zero_grad_inside_a_window_is_refused(options, set_to_none, bias):
    model = build(bias=bias)
    optimizer = forge.attach(model, "sgd", lr=0.1, **options)
    model.zero_grad(set_to_none)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"0\.weight: a module's zero_grad\(\)"):
        model.zero_grad(set_to_none)
    with pytest.raises(RuntimeError, match=r"0\.weight: a module's zero_grad\(\)"):
        nn.ModuleList([model]).zero_grad(set_to_none)
    optimizer.step()
    model.zero_grad(set_to_none)
    build().zero_grad()


def refuse(model, how):
    with pytest.raises(RuntimeError, match=r"second backward|backward number 3|create_graph"):
        model(INPUTS[2]).square().sum().backward(create_graph=how == "create_graph")


@pytest.mark.parametrize("how", ["one too many", "create_graph"])
def test_what_a_refused_backward_added_to_a_later_layer_is_not_stepped(how):
    (model, ours), (other, theirs) = pair(build(last=nn.LayerNorm(6)), accumulation_steps=2)
    backward(model, 0)
    if how == "one too many":
        backward(model, 1)
    before = copy.deepcopy(model.state_dict())
    refuse(model, how)
    with pytest.raises(
        RuntimeError, match=r"3\.\w+: a backward that was refused had added to its .grad; call zero_grad"
    ):
        ours.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ours.zero_grad()
    for index in (0, 3):
        backward(model, index)
        backward(other, index)
    ours.step()
    theirs.step()
    assert_equal(model, other)


def test_in_backward_it_is_kept_by_accepting_half_a_step():
    model = build(last=nn.LayerNorm(6))
    optimizer = forge.attach(model, "sgd", lr=0.1)
    backward(model, 0)
    refuse(model, "second")
    with pytest.raises(RuntimeError, match=r"rollback\(accept=True\)"):
        optimizer.step()
    assert optimizer.rollback(accept=True)
    backward(model, 1)
    optimizer.step()


def test_a_refused_backward_that_came_to_no_other_parameter_changes_nothing():
    (model, ours), (other, theirs) = pair(build(), accumulation_steps=2)
    for index in (0, 1):
        backward(model, index)
        backward(other, index)
    refuse(model, "one too many")
    ours.step()
    theirs.step()
    assert_equal(model, other)


def test_a_hook_that_sees_sums_is_refused_inside_a_window():
    model = build()
    optimizer = forge.attach(model, "sgd", lr=0.1, accumulation_steps=None)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"2\.weight: a post-accumulate hook inside a window"):
        model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    seen = []
    optimizer.step()
    optimizer.zero_grad()
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for index in (0, 1):
        backward(model, index)
    wanted = build()
    wanted.load_state_dict(model.state_dict())
    for index in (0, 1):
        backward(wanted, index)
    torch.testing.assert_close(seen[1], wanted[2].weight.grad, rtol=1e-5, atol=1e-6)


def test_waiting_has_torchs_order_of_a_forward_before_step():
    """A generator's and a discriminator's backwards, then both steps: in backward the second reads new weights."""
    torch.manual_seed(1)
    nets = [build(), build()]
    copies = copy.deepcopy(nets)
    ours = [forge.attach(net, "sgd", lr=0.1, waiting=True) for net in nets]
    theirs = [torch.optim.SGD(net.parameters(), lr=0.1) for net in copies]
    for (generator, critic), optimizers in ((nets, ours), (copies, theirs)):
        for p in critic.parameters():
            p.requires_grad_(False)
        critic(generator(INPUTS[0])).square().sum().backward()
        for p in critic.parameters():
            p.requires_grad_(True)
        critic(generator(INPUTS[1]).detach()).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for net, other in zip(nets, copies, strict=True):
        assert_equal(net, other)


@contextmanager
def interrupted_behind(kernel, monkeypatch):
    """Inside, an interrupt comes when a kernel has been launched."""
    launch = getattr(kernels, kernel)

    def interrupted(*args, **kwargs):
        launch(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kernels, kernel, interrupted)
        yield


@pytest.mark.parametrize("bias", [True, False])
def test_an_interrupt_at_the_first_weight_of_a_step_is_no_window_to_discard(monkeypatch, bias):
    model = build(bias=bias)
    optimizer = forge.attach(model, "sgd", lr=0.1, skip="atomic")
    backward(model, 0)
    with pytest.raises(KeyboardInterrupt), interrupted_behind("wgrad_steps", monkeypatch):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        backward(model, 1)


def test_an_interrupt_behind_the_kernel_of_an_update_in_backward(monkeypatch):
    model = build()
    optimizer = forge.attach(model, "sgd", lr=0.1)
    with pytest.raises(KeyboardInterrupt), interrupted_behind("wgrad_step", monkeypatch):
        backward(model, 0)
    assert not optimizer.rollback()
    with pytest.raises(RuntimeError, match="had updated 1 of 2 weights"):
        optimizer.step()


def test_an_edited_gradient_is_measured_anew():
    (model, ours), (other, theirs) = pair(build(), waiting=True)
    for net in (model, other):
        net[2].weight.register_hook(lambda g: g * 1.0)
        backward(net, 0)
    ours.clip_grad_norm_(None)
    for net in (model, other):
        net[2].weight.grad.mul_(3)
    norm = ours.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(other.parameters(), 0.1), rtol=1e-5, atol=0)
    ours.step()
    theirs.step()
    assert_equal(model, other)


def test_an_infinity_that_only_somebody_else_has_seen_skips_the_step():
    """torch.amp's protocol: ``found_inf`` of other parameters of the same scaler comes as an attribute."""
    model = build()
    optimizer = forge.attach(model, "sgd", lr=0.1, skip="atomic")
    before = copy.deepcopy(model.state_dict())
    backward(model, 0)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.skipped_steps == 1
