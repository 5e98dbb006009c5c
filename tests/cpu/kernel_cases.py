"""Steps of one weight, built for any backend and device, and their distance from fp64 written by hand."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

import oracles
import torch
from torch import Tensor

from forge_megatron.kernels import Slot, wgrad_step
from forge_megatron.rules import Rule, get

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("reference", "triton")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

#: (weight and operand dtype, state dtype, master)
STORAGE = [
    (FP32, FP32, False),
    (BF16, BF16, False),
    (BF16, FP32, False),
    (BF16, FP32, True),
    (FP16, FP32, False),
    (FP16, FP32, True),
]

HYPERPARAMETERS = {form: {"lr": 0.1, "weight_decay": 0.1} for form in oracles.FORMS}
# What divides by no second moment moves by the gradient itself.
HYPERPARAMETERS.update({form: {"lr": 1e-3, "weight_decay": 0.1} for form in ("sgd", "momentum", "momentum-nesterov")})

#: The step that scalars are made for: not the first, whose bias corrections cancel any factor of the gradient.
STEP = 3


@contextlib.contextmanager
def poisoned_memory():
    """``torch.empty`` returns NaN, so that what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4, device=DEVICE).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    """One step: an ``[O, I]`` weight, the tokens of each segment, how everything is stored and how operands lie."""

    shape: tuple[int, int]
    tokens: tuple[int, ...] = (17,)
    weight: torch.dtype = FP32
    state: torch.dtype = FP32
    master: bool = False
    dy: torch.dtype | None = None  # None: as the weight
    x: torch.dtype | None = None
    layout: str = "contiguous"
    accumulator: torch.dtype | None = None
    multiplier: float | None = None
    rule: str = "adamw"  # one of oracles.FORMS

    def __str__(self) -> str:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        parts = ["x".join(map(str, self.shape)), "T" + "+".join(map(str, self.tokens))]
        for name, default in list(defaults.items())[2:]:
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={str(value).removeprefix('torch.')}")
        return "-".join(parts)


def operand(generator, rows: int, columns: int, dtype, layout: str) -> Tensor:
    """A ``[rows, columns]`` tensor whose neighbours in memory, if it has any, are NaN."""
    values = torch.randn(rows, columns, generator=generator).to(dtype)
    if layout == "contiguous":
        return values
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "strided":
        buffer = torch.full((rows, 3 * columns), torch.nan, dtype=dtype)
        buffer[:, ::3] = values
        return buffer[:, ::3]
    if layout == "inside":
        buffer = torch.full((rows + 3, columns + 9), torch.nan, dtype=dtype)
        buffer[1 : rows + 1, 5 : columns + 5] = values
        return buffer[1 : rows + 1, 5 : columns + 5]
    if layout == "same-token":
        return torch.randn(1, columns, generator=generator).to(dtype).expand(rows, columns)
    if layout == "same-feature":
        return torch.randn(rows, 1, generator=generator).to(dtype).expand(rows, columns)
    raise ValueError(layout)


LAYOUTS = ("contiguous", "transposed", "strided", "inside", "same-token", "same-feature")


def rule_and_scalars(form: str, step: int = STEP) -> tuple[Rule, Tensor]:
    """A form's rule, and its fp32 scalars for one of its updates."""
    rule = get(form.partition("-")[0])
    group = rule.resolve({**HYPERPARAMETERS[form], **oracles.FORMS[form]})
    running = tuple(rule.running.values())
    for earlier in range(1, step if running else 1):
        running = rule.advance(group, earlier, *running)
    return rule.variant(group), torch.tensor(rule.scalars(group, step, *running), dtype=FP32)


def random_state(generator, name: str, shape) -> Tensor:
    """Second moments are positive and not small: the step is then a smooth function of the gradient."""
    state = torch.rand(shape, generator=generator) + 0.5
    # The square of a mean is below the mean of squares.
    return (state - 1.0) * 0.5 if name == "grad_avg" else state


def build(case: Case, seed: int = 0):
    """Return ``(slot, segments, accumulator, multiplier)`` on the CPU; the slot's norm is poisoned with NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = case.shape
    rule, scalars = rule_and_scalars(case.rule)
    weight = operand(generator, rows, columns, case.weight, "contiguous")
    states = tuple(random_state(generator, name, case.shape).to(case.state) for name in rule.states)
    slot = Slot(
        rule,
        weight,
        states,
        scalars,
        master=weight.float() if case.master else None,
        norm_sq=torch.tensor(torch.nan),
        name="layers.0.weight",
    )
    segments = [
        (
            operand(generator, tokens, rows, case.dy or case.weight, case.layout),
            operand(generator, tokens, columns, case.x or case.weight, case.layout),
        )
        for tokens in case.tokens
    ]
    accumulator = None
    if case.accumulator is not None:
        accumulator = operand(generator, rows, columns, case.accumulator, "contiguous")
    multiplier = None if case.multiplier is None else torch.tensor(case.multiplier)
    return slot, segments, accumulator, multiplier


def move(device, slot: Slot, segments, accumulator, multiplier):
    """The same on ``device``; strides are kept, and on the CPU everything the step writes is a copy."""

    def to(tensor):
        if tensor is None or tensor.device.type == torch.device(device).type:
            return tensor
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return moved if 0 in tensor.shape else _fill(moved, tensor)

    slot = dataclasses.replace(
        slot,
        weight=to(slot.weight.clone()),
        states=tuple(to(state.clone()) for state in slot.states),
        scalars=to(slot.scalars),
        master=None if slot.master is None else to(slot.master.clone()),
        norm_sq=None if slot.norm_sq is None else to(slot.norm_sq.clone()),
    )
    return slot, [(to(dy), to(x)) for dy, x in segments], to(accumulator), to(multiplier)


def _fill(target: Tensor, source: Tensor) -> Tensor:
    """Copy into a tensor of any strides; an expanded dimension is written once."""
    for dim, stride in enumerate(source.stride()):
        if stride == 0:
            source, target_view = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
            target_view.copy_(source)
            return target
    return target.copy_(source)


def expected(slot: Slot, grad: Tensor, multiplier: float | None, form: str | None = None) -> dict[str, Tensor]:
    """What fp64 makes of the slot and a gradient: every tensor that a step writes, by name."""
    form = form or slot.rule.name
    oracle = oracles.oracle(form, **HYPERPARAMETERS[form])
    source = slot.weight if slot.master is None else slot.master
    scaled = grad if multiplier is None else grad * multiplier
    before = dict(zip(slot.rule.states, slot.states, strict=True))
    assert set(before) == set(oracle.states)
    weight, states = oracle.step(source.double(), tuple(before[name].double() for name in oracle.states), scaled, STEP)
    want = {"weight": weight, **dict(zip(oracle.states, states, strict=True))}
    if slot.master is not None:
        want["master"] = weight
    return want


def sum_roundings(case: Case) -> float:
    """fp32 roundings that a sum over the tokens may add, of the largest magnitude.

    One for every 64 tokens: tensor cores truncate the sum at each 16 tokens, so its error grows with their number and
    not with its root. Equal tokens meet the worst case of a sequential fp32 sum, half a rounding each (Higham,
    Accuracy and Stability, eq. 3.5), because all of its roundings go the same way.
    """
    tokens = sum(case.tokens)
    return tokens / 2 if case.layout == "same-token" else tokens / 64


def stored_error(got: Tensor, want: Tensor, roundings: float = 0) -> float:
    """How far a stored tensor is from fp64, in units of what is allowed; at most 1 is right.

    Allowed is half a unit in the last place of the stored dtype, from rounding to nearest, and besides 16 fp32
    roundings of the largest magnitude, from the fp32 arithmetic before it, and ``roundings`` of the sum before that.
    """
    if want.numel() == 0:
        return 0.0
    got = got.cpu()
    info = torch.finfo(got.dtype)
    half_ulp = 0.5 * info.eps * want.abs().clamp(min=info.tiny)
    allowed = half_ulp + (16 + roundings) * torch.finfo(FP32).eps * want.abs().max()
    error = ((got.double() - want).abs() / allowed).max().item()
    return error if error == error else float("inf")


def step_errors(case: Case, backend: str, device: str = "cpu") -> dict[str, float]:
    """Run one step and return each output's error: of the norm relative, of tensors in units of what is allowed."""
    built = build(case)
    slot, segments, accumulator, multiplier = move(device, *built)
    wgrad_step(slot, segments, accumulator=accumulator, multiplier=multiplier, backend=backend)
    grad = oracles.wgrad(built[1], built[2], case.shape)
    want = expected(built[0], grad, case.multiplier, case.rule)
    errors = {name: stored_error(tensor, want[name], sum_roundings(case)) for name, tensor in slot.tensors()}
    norm_sq = grad.square().sum().item()
    errors["norm_sq"] = abs(slot.norm_sq.item() - norm_sq) / norm_sq if norm_sq else abs(slot.norm_sq.item())
    return errors


def norm_bound(case: Case) -> float:
    """The relative error that a sum of squares may have; a long sum's truncation, as in ``stored_error``."""
    return 1e-5 * max(1.0, sum(case.tokens) / 512)


def assert_right(case: Case, errors: dict[str, float]) -> None:
    errors = dict(errors)
    assert errors.pop("norm_sq") <= norm_bound(case)
    assert max(errors.values()) <= 1.0, errors
