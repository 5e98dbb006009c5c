"""What one step of one weight reads and writes, and the checks before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..formats import WEIGHT_DTYPES, Noise, StateFormat, state_format, state_format_of
from ..formats.code import SCALE_DTYPE, Code, scale_shape
from ..formats.noise import WORDS
from ..formats.weight import Fp8Weight
from ..rules import Rule
from ..rules.whole import WHOLE, Whole
from .lookups import is_lookup
from .norms import LateNorms

#: ``(dY [T, O], X [T, I])``: the factors of one use of a weight. Any strides; T may be 0. An embedding's
#: are ``(ids [T], dE [T, I])``, int64 ids for the one-hot rows of dY; see :mod:`.lookups`.
Segment = tuple[Tensor, Tensor]


@dataclass
class Slot:
    """One weight, its optimizer state and its hyperparameters.

    Attributes:
        rule: the rule that steps it.
        weight: fp32, bf16, fp16 or an ``Fp8Weight``; ``[O, I]`` for a weight gradient, any shape for ``step``.
        states: one tensor a state of the rule, with the weight's shape, stored as its code says.
        scalars: fp32 ``[rule.n_scalars]`` on the weight's device: what ``rule.scalars`` returned.
        master: fp32 copy that is stepped in the weight's place, with the weight's shape.
        norm_sq: 0-dim fp32 tensor that receives the sum of squares of the gradient, before the
            multiplier; None where it is not wanted.
        name: what errors call the weight.
        scales: bfloat16, one tensor a state, contiguous, of its blocks; none where the states' format has none.
        weight_scale, weight_dtype: bfloat16, of its blocks, and what the weight is to its readers, where
            :func:`of_codes` put the codes of an ``Fp8Weight``.
        noise: where the random bits are that round a weight of bf16 or codes stochastically; None: to nearest.
        update_norm_sq: 0-dim fp32 tensor that receives the sum of squares of what the step adds to the weight;
            None where it is not wanted.
        statistics: fp32 states of a rule with stages that are not weight-shaped, in the rule's order.
        whole: the weight of which this one is a part, where a rule in stages reads all of it.
        step: count of updates so far, 0-dim fp32 on the CPU; read by projected rules alone.
        late_norms: where launches leave partial sums for ``norms.settle``; None: they are added up at once.
        memo: what launches keep from one step to the next, for as long as the weight stays where it is: that its
            tensors were checked, which kernel takes which operands, descriptors.
    """

    rule: Rule
    weight: Tensor
    states: tuple[Tensor, ...]
    scalars: Tensor
    master: Tensor | None = None
    norm_sq: Tensor | None = None
    name: str = "weight"
    noise: Noise | None = None
    update_norm_sq: Tensor | None = None
    statistics: tuple[Tensor, ...] = ()
    whole: Whole = WHOLE
    step: Tensor | None = None
    scales: tuple[Tensor, ...] = ()
    weight_scale: Tensor | None = None
    weight_dtype: torch.dtype | None = None
    late_norms: LateNorms | None = field(default=None, repr=False, compare=False)
    memo: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the weight-shaped tensors that a step writes, named."""
        named = [("weight", self.weight), *zip(self.rule.states, self.states, strict=True)]
        return named if self.master is None else [*named, ("master", self.master)]

    @property
    def stepped_dtype(self) -> torch.dtype:
        """Of the numbers that are stepped: the master's, where there is one."""
        if self.weight_dtype is not None:
            return self.weight_dtype
        return (self.weight if self.master is None else self.master).dtype

    def stepped(self) -> Tensor:
        """The numbers that are stepped, outside autograd; those of codes are a copy, one layer's scratch."""
        if self.weight_scale is not None:
            return Fp8Weight(self.weight, self.weight_scale, self.weight_dtype).dequantize()
        return (self.weight if self.master is None else self.master).detach()

    @property
    def element_bytes(self) -> int:
        """Bytes of one coordinate: weight, master and states."""
        return sum(tensor.element_size() for _, tensor in self.tensors())

    def state_format(self) -> StateFormat:
        """Return the one format of all states; fp32 where the rule has none.

        Raises:
            TypeError: they are stored in several, or a dtype is no format's.
        """
        formats = {state_format_of(state) for state in self.states}
        if len(formats) > 1:
            names = ", ".join(sorted(f.name for f in formats))
            raise TypeError(f"{self.name}: its states are stored as {names}; store all of them alike")
        return formats.pop() if formats else state_format("fp32")

    def codes(self) -> list[Code]:
        """Return how each state is stored."""
        fmt = self.state_format()
        # Only these formats ask the rule, which says it of its states.
        signs = [fmt.is_scaled and name in self.rule.nonnegative for name in self.rule.states]
        return [fmt.code(nonnegative=sign) for sign in signs]

    @property
    def is_scaled(self) -> bool:
        """Whether a step goes by blocks of coordinates that share a scale."""
        return bool(self.scales) or self.weight_scale is not None

    @property
    def blocks(self) -> int:
        return scale_shape(self.weight.shape).numel()


def of_codes(slot: Slot) -> Slot:
    """The slot of an ``Fp8Weight``'s codes and scales; any other slot itself."""
    weight = slot.weight
    if type(weight) is not Fp8Weight:
        return slot
    known = slot.memo.get("codes of the weight")
    if known is None or known.weight is not weight.codes:
        known = replace(slot, weight=weight.codes, weight_scale=weight.scales, weight_dtype=weight.dtype)
        slot.memo["codes of the weight"] = known
    known.rule, known.norm_sq, known.update_norm_sq = slot.rule, slot.norm_sq, slot.update_norm_sq
    return known


def without_norm(slot: Slot) -> Slot:
    """``slot`` whose norm has been measured; kept by ``slot``, for its launches remember much."""
    known = slot.memo.get("without norm")
    if known is None:
        known = slot.memo["without norm"] = replace(slot, norm_sq=None)
    known.rule, known.update_norm_sq = slot.rule, slot.update_norm_sq
    return known


def check_slot(slot: Slot) -> None:
    """Raise ``ValueError`` or ``TypeError`` unless the slot's tensors belong together.

    Once checked, only the weight is looked at again: a user may move it, the others are the optimizer's.
    """
    weight = slot.weight
    now = place(weight)
    if slot.memo.get("place") == now:
        return
    slot.memo.clear()
    if len(slot.states) != len(slot.rule.states):
        raise ValueError(
            f"{slot.name}: {slot.rule.name} has the states {slot.rule.states}, got {len(slot.states)} tensors"
        )
    if slot.weight_scale is not None:
        _check_weight_codes(slot)
    elif weight.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"{slot.name}: a weight of dtype {weight.dtype} cannot be stepped")
    for name, tensor in slot.tensors():
        if tensor.shape != weight.shape or tensor.device != weight.device:
            raise ValueError(f"{slot.name}: {name} is {_describe(tensor)}, the weight is {_describe(weight)}")
    if slot.master is not None and slot.master.dtype is not torch.float32:
        raise TypeError(f"{slot.name}: the master is {slot.master.dtype}, it must be float32")
    _check_fp32(slot.name, "scalars", slot.scalars, (slot.rule.n_scalars,), weight.device)
    if slot.norm_sq is not None:
        _check_fp32(slot.name, "norm_sq", slot.norm_sq, (), weight.device)
    if slot.noise is not None:
        _check_noise(slot)
    _check_codes(slot)
    slot.memo["place"] = now


def place(weight: Tensor) -> tuple:
    """Where a weight lies, and how: it changes if a user moves the weight."""
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


def layout(tensor: Tensor) -> tuple:
    """What decides whether a kernel takes ``tensor``, and nothing else of it."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


def has_shared_strides(slot: Slot) -> bool:
    """Whether the states and the master of ``slot`` have one layout."""
    return len(_used_strides(slot)[1]) == 1


def _used_strides(slot: Slot) -> tuple[list[Tensor], set[tuple[int, ...]]]:
    others = [tensor for name, tensor in slot.tensors() if name != "weight"] or [slot.weight]
    # The stride of a dimension of size 1 is never used, and torch sets it as it likes.
    return others, {tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in others}


def shared_strides(slot: Slot) -> tuple[int, ...]:
    """Return the one stride of the states and the master of ``slot``; the weight may differ."""
    others, used = _used_strides(slot)
    if len(used) > 1:
        raise ValueError(f"{slot.name}: states and master have the strides {used}; use one layout")
    return others[0].stride()


def _check_codes(slot: Slot) -> None:
    fmt = slot.state_format()
    if len(slot.scales) != (len(slot.states) if fmt.is_scaled else 0):
        raise ValueError(f"{slot.name}: {len(slot.states)} states of format {fmt.name} have {len(slot.scales)} scales")
    for name, code, state in zip(slot.rule.states, slot.codes(), slot.states, strict=True):
        if state.dtype is not code.dtype:
            raise TypeError(f"{slot.name}: {name} is {state.dtype}, in format {fmt.name} it is {code.dtype}")
    for name, scale in zip(slot.rule.states, slot.scales, strict=False):
        _check_scale(slot, f"the scale of {name}", scale)


def _check_weight_codes(slot: Slot) -> None:
    weight = slot.weight
    if weight.dtype is not torch.float8_e4m3fn or slot.noise is None or slot.master is not None:
        raise TypeError(f"{slot.name}: a weight of codes is e4m3 and rounded stochastically; it is {_describe(weight)}")
    if not all(tensor.is_contiguous() for _, tensor in slot.tensors()):
        raise ValueError(f"{slot.name}: the codes of a weight and its states must be contiguous")
    _check_scale(slot, "the scale of the weight", slot.weight_scale)


def _check_scale(slot: Slot, name: str, scale: Tensor) -> None:
    shape, device = scale_shape(slot.weight.shape), slot.weight.device
    if scale.dtype is not SCALE_DTYPE or scale.shape != shape or scale.device != device:
        raise ValueError(f"{slot.name}: {name} is {_describe(scale)}, expected {list(shape)} bfloat16 on {device}")


def _check_noise(slot: Slot) -> None:
    if slot.weight.dtype is not torch.bfloat16 and slot.weight_scale is None:
        raise TypeError(f"{slot.name}: a {slot.weight.dtype} weight is not rounded stochastically; use bfloat16")
    words = slot.noise.words
    if words.dtype is not torch.int64 or words.shape != (WORDS,) or words.device != slot.weight.device:
        raise ValueError(f"{slot.name}: noise is {_describe(words)}, expected [{WORDS}] int64 on {slot.weight.device}")


def check_multiplier(name: str, multiplier: Tensor | None, device: torch.device) -> None:
    """Raise unless ``multiplier`` is None or a 0-dim fp32 tensor on ``device``."""
    if multiplier is not None:
        _check_fp32(name, "multiplier", multiplier, (), device)


def check_segments(name: str, segments: Sequence[Segment], shape: torch.Size | None, device: torch.device) -> None:
    """Raise ``ValueError`` unless every segment is ``dY [T, O], X [T, I]`` of one ``[O, I]``."""
    for dy, x in segments:
        if is_lookup((dy, x)):
            _check_lookup(name, dy, x, shape, device)
            continue
        if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0]:
            raise ValueError(
                f"{name}: dY is {_describe(dy)} and X is {_describe(x)}; flatten both to [tokens, features]"
            )
        produced = torch.Size((dy.shape[1], x.shape[1]))
        if shape is not None and produced != shape:
            raise ValueError(f"{name}: dY and X make {list(produced)}, expected {list(shape)}")
        if dy.device != device or x.device != device:
            raise ValueError(f"{name}: dY is on {dy.device} and X on {x.device}, expected {device}")
        if dy.dtype not in WEIGHT_DTYPES or x.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"{name}: dY is {dy.dtype} and X {x.dtype}; use float32/bfloat16/float16")


def _check_lookup(name: str, ids: Tensor, values: Tensor, shape: torch.Size | None, device: torch.device) -> None:
    fits = shape is None or values.shape[-1:] == shape[1:]
    if ids.dim() != 1 or values.dim() != 2 or ids.shape[0] != values.shape[0] or not fits:
        raise ValueError(
            f"{name}: ids are {_describe(ids)} and their gradients {_describe(values)}; flatten them to [tokens] and "
            "[tokens, features]"
        )
    if ids.device != device or values.device != device:
        raise ValueError(f"{name}: ids are on {ids.device} and their gradients on {values.device}, expected {device}")
    if values.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"{name}: the gradients of ids are {values.dtype}; use float32/bfloat16/float16")


def check_accumulator(name: str, accumulator: Tensor, shape, device: torch.device) -> None:
    """Raise unless ``accumulator`` is fp32 or bf16 of ``shape`` on ``device``."""
    if accumulator.shape != torch.Size(shape) or accumulator.device != device:
        raise ValueError(f"{name}: the accumulator is {_describe(accumulator)}, expected {list(shape)} on {device}")
    if accumulator.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{name}: the accumulator is {accumulator.dtype}; use float32 or bfloat16")


def _check_fp32(owner: str, name: str, tensor: Tensor, shape: tuple, device) -> None:
    if tensor.dtype is not torch.float32 or tensor.shape != shape or tensor.device != device:
        raise ValueError(f"{owner}: {name} is {_describe(tensor)}, expected {list(shape)} float32 on {device}")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
