"""The multi-tensor step of gradients in memory, on every backend, against fp64 and torch.optim."""

import dataclasses
import math

import kernel_cases
import oracles
import pytest
import torch
from kernel_cases import BACKENDS, BF16, DEVICE, STORAGE, poisoned_memory

from forge_megatron.kernels import Slot, step, wgrad_step
from forge_megatron.rules import get

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def poisoned():
    with poisoned_memory():
        yield


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def multi_tensor_slots(shapes, storage, form="adamw"):
    """A slot for each shape and gradients of the weights' dtype, on the CPU."""
    generator = torch.Generator().manual_seed(5)
    rule, scalars = kernel_cases.rule_and_scalars(form)
    slots, grads = [], []
    for index, (shape, (weight, state, master)) in enumerate(zip(shapes, storage, strict=True)):
        w = torch.randn(shape, generator=generator).to(weight)
        slots.append(
            Slot(
                rule,
                w,
                tuple(kernel_cases.random_state(generator, name, shape).to(state) for name in rule.states),
                scalars,
                master=w.float() if master else None,
                norm_sq=torch.tensor(math.nan),
                name=f"parameter {index}",
            )
        )
        grads.append(torch.randn(shape, generator=generator).to(weight))
    return slots, grads


def move_slot(slot):
    return kernel_cases.move(DEVICE, slot, [], None, None)[0]


@pytest.mark.parametrize("form", oracles.FORMS)
def test_the_multi_tensor_step_equals_fp64(backend, form):
    multiplier = None if form in ("adamw", "rmsprop-both") else 0.25
    shapes = [(7,), (), (4096,), (2, 3, 5), (0,), (4097,), (16, 16), (5000,), (3, 0), (128,), (33, 100), (1,)]
    storage = [STORAGE[index % len(STORAGE)] for index in range(len(shapes))]
    before, grads = multi_tensor_slots(shapes, storage, form)
    slots = [move_slot(slot) for slot in before]
    factor = None if multiplier is None else torch.tensor(multiplier, device=DEVICE)
    step(slots, [grad.to(DEVICE) for grad in grads], multiplier=factor, backend=backend)
    for old, slot, grad in zip(before, slots, grads, strict=True):
        want = kernel_cases.expected(old, grad.double(), multiplier, form)
        for name, tensor in slot.tensors():
            assert kernel_cases.stored_error(tensor, want[name]) <= 1.0, (slot.name, name)
        assert slot.norm_sq.item() == pytest.approx(grad.double().square().sum().item(), rel=1e-5)


def test_the_multi_tensor_step_of_tensors_that_do_not_lie_alike(backend):
    """A transposed weight, a gradient with other strides, an expanded gradient, and a weight with holes."""
    before, grads = multi_tensor_slots([(20, 30), (20, 30), (20, 30)], [STORAGE[0]] * 3)
    slots = [move_slot(slot) for slot in before]
    grads[1] = grads[1].t().contiguous().t()
    grads[2] = torch.randn(20, 1).expand(20, 30)
    holes = torch.full((20, 64), 7.0, device=DEVICE)
    holes[:, 3:33] = slots[2].weight
    slots[2] = dataclasses.replace(slots[2], weight=holes[:, 3:33])
    transposed = [tensor.t().contiguous().t() for _, tensor in slots[0].tensors()]
    slots[0] = dataclasses.replace(slots[0], weight=transposed[0], states=tuple(transposed[1:]))
    step(slots, [grad.to(DEVICE) for grad in grads], backend=backend)
    for old, slot, grad in zip(before, slots, grads, strict=True):
        want = kernel_cases.expected(old, grad.double(), None)
        for name, tensor in slot.tensors():
            assert kernel_cases.stored_error(tensor, want[name]) <= 1.0
    holes[:, 3:33] = 7.0
    assert (holes == 7.0).all()


def test_the_multi_tensor_step_keeps_coordinates_whose_gradient_is_not_finite(backend):
    before, grads = multi_tensor_slots([(100,), (37,)], [STORAGE[3], STORAGE[1]])
    clean = [move_slot(slot) for slot in before]
    step(clean, [grad.to(DEVICE) for grad in grads], backend=backend)
    for grad in grads:
        grad[5], grad[11] = math.nan, -math.inf
    slots = [move_slot(slot) for slot in before]
    step(slots, [grad.to(DEVICE) for grad in grads], backend=backend)
    for old, new, slot in zip(before, clean, slots, strict=True):
        for (_, a), (_, b), (_, got) in zip(old.tensors(), new.tensors(), slot.tensors(), strict=True):
            want = b.cpu().clone()
            want[5], want[11] = a[5], a[11]
            assert torch.equal(got.cpu(), want)


def test_every_weight_counts_its_own_steps(backend):
    """fp32 and bf16 weights in one call, the second with a gradient only on odd steps: as torch.optim.AdamW."""
    generator = torch.Generator().manual_seed(6)
    rule = get("adamw")
    group = rule.resolve({"lr": 1e-2})
    parameters = [torch.nn.Parameter(torch.randn(40, 30, generator=generator).bfloat16().float()) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    masters = [parameter.detach().clone().to(DEVICE) for parameter in parameters]
    weights = [masters[0], masters[1].bfloat16()]
    states = [tuple(torch.zeros(40, 30, device=DEVICE) for _ in rule.states) for _ in parameters]
    steps = [0, 0]
    for index in range(6):
        live = [0, 1] if index % 2 == 0 else [0]
        slots, grads = [], []
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(40, 30, generator=generator) if i in live else None
        for i in live:
            steps[i] += 1
            scalars = torch.tensor(rule.scalars(group, steps[i])).to(DEVICE)
            slots.append(Slot(rule, weights[i], states[i], scalars, master=masters[1] if i else None))
            grads.append(parameters[i].grad.to(DEVICE))
        step(slots, grads, backend=backend)
        optimizer.step()
    assert steps == [6, 3] == [int(optimizer.state[p]["step"]) for p in parameters]
    for parameter, master in zip(parameters, masters, strict=True):
        torch.testing.assert_close(master.cpu(), parameter.detach(), rtol=1e-6, atol=1e-6)


def test_a_multi_tensor_step_that_does_not_fit_changes_no_weight(backend):
    before, grads = multi_tensor_slots([(8,), (9,)], [STORAGE[0]] * 2)
    slots = [move_slot(slot) for slot in before]
    grads = [grads[0].to(DEVICE), torch.zeros(10, device=DEVICE)]
    with pytest.raises(ValueError, match=r"parameter 1: the gradient is \[10\]"):
        step(slots, grads, backend=backend)
    with pytest.raises(ValueError, match="2 slots and 1 gradients"):
        step(slots, grads[:1], backend=backend)
    for old, slot in zip(before, slots, strict=True):
        assert torch.equal(old.weight, slot.weight.cpu())


def test_a_norm_of_more_parts_than_lanes(monkeypatch):
    from forge_megatron.kernels import triton_step

    monkeypatch.setattr(triton_step, "LANES", 2)
    before, grads = multi_tensor_slots([(9001,), (20000,)], [STORAGE[0]] * 2)
    slots = [move_slot(slot) for slot in before]
    step(slots, [grad.to(DEVICE) for grad in grads], backend="triton")
    for slot, grad in zip(slots, grads, strict=True):
        assert slot.norm_sq.item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)


def test_ties_are_stored_to_even(backend):
    """Half a bf16 unit in the last place above 1 goes down, one and a half go up: also a bound of half a unit passes
    for either."""
    ulp = 2.0**-7
    rule = get("sgd")
    scalars = torch.tensor(rule.scalars(rule.resolve({"lr": 1.0}), 1)).to(DEVICE)
    weight = torch.ones(4, dtype=BF16, device=DEVICE)
    grad = torch.tensor([-0.5, -1.5, -0.51, 0.0]).to(DEVICE) * ulp
    step([Slot(rule, weight, (), scalars)], [grad], backend=backend)
    assert weight.tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, 1.0]
    weight = torch.ones(1, 4, dtype=BF16, device=DEVICE)
    wgrad_step(Slot(rule, weight, (), scalars), [], accumulator=grad[None], backend=backend)
    assert weight.tolist() == [[1.0, 1 + 2 * ulp, 1 + ulp, 1.0]]


def test_a_step_finds_its_table_again():
    """Same addresses, same table: what a captured step needs. Another gradient's address makes another table."""
    from forge_megatron.kernels import step_tables

    before, grads = multi_tensor_slots([(64,), (32,)], [STORAGE[0]] * 2)
    slots = [move_slot(slot) for slot in before]
    grads = [grad.to(DEVICE) for grad in grads]
    step_tables._tables.clear()
    counts = []
    for current in (grads, grads, [grad.clone() for grad in grads]):
        step(slots, current, backend="triton")
        counts.append(len(step_tables._tables))
    assert counts == [1, 1, 2]
