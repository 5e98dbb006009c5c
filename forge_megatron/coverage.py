"""What is fused, and what each parameter's states cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from forge_megatron.formats import Fp8Weight
from forge_megatron.kernels import Slot, local, measures_apart, resolve_backend, tuned
from forge_megatron.linear import OwnedWeight, has_gradient_hook


@dataclass(frozen=True)
class Row:
    """One parameter: its name, shape, whether it is fused, how it is stepped, and its states' bytes.

    Attributes:
        waits_as: what its last gradient that waited for ``step()`` was kept as: "factors", or "accumulator" where they
            would have outgrown it; "": none has waited.
        waiting_bytes: the most that its waiting gradients have taken.
        kernel: what its last launches were chosen to be, or were tuned to, by the number of tokens; "": none yet.
    """

    name: str
    shape: tuple[int, ...]
    fused: bool
    how: str
    state_bytes: int
    waits_as: str = ""
    waiting_bytes: int = 0
    kernel: str = ""


@dataclass(frozen=True)
class Coverage:
    """A table that prints itself; ``rows`` for programs.

    Attributes:
        bucket_bytes: of the buckets in which gradients are summed over ranks.
        replay_bytes: device memory of the CUDA graphs of matrix stages, those of other optimizers included.
    """

    rows: list[Row]
    bucket_bytes: int = 0
    replay_bytes: int = 0

    @property
    def fused_parameters(self) -> int:
        """Coordinates whose gradient is never stored."""
        return sum(_numel(row.shape) for row in self.rows if row.fused)

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        table = [("parameter", "shape", "stepped", "state bytes", "waited as", "kernel")]
        table += [
            (r.name, "×".join(map(str, r.shape)), r.how, f"{r.state_bytes:,}", _waiting(r), r.kernel) for r in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        total = sum(_numel(row.shape) for row in self.rows)
        lines.append(f"{self.fused_parameters:,} of {total:,} parameters fused, {self.state_bytes:,} bytes of state")
        if self.bucket_bytes:
            lines.append(f"{self.bucket_bytes:,} bytes of buckets")
        if self.replay_bytes:
            lines.append(f"{self.replay_bytes:,} bytes of CUDA graphs of matrix stages")
        return "\n".join(lines)


def cover(
    labels: Mapping[Tensor, str],
    states: Mapping[Tensor, Mapping[str, Tensor]],
    owned: Mapping[Tensor, OwnedWeight],
    reasons: Mapping[Tensor, str],
    bucket_bytes: int = 0,
    backend: str = "auto",
    micro_batches: int = 1,
    replay_bytes: int = 0,
) -> Coverage:
    """The table of an optimizer.

    Args:
        labels: each parameter's name, in the order of the groups.
        states: what exists of its states.
        owned: the weights that are fused unless something reads them without calling their module.
        reasons: why others are not.
        bucket_bytes, replay_bytes: see :class:`Coverage`.
        backend: of the kernels.
        micro_batches: of a window whose last one is stepped in its backward.
    """
    last = f", micro-batch {micro_batches} of {micro_batches} in its backward" if micro_batches > 1 else ""
    rows = []
    for p, name in labels.items():
        hooked = p in owned and has_gradient_hook(p)
        fused = p in owned and not owned[p].bypassed and not hooked
        if not p.requires_grad:
            how = "frozen"
        elif fused:
            how = (
                "fused"
                if owned[p].slot is None
                else _HOW[owned[p].slot.rule.regime] + _measured(owned[p].slot, backend) + last
            )
            if isinstance(p, Fp8Weight):
                how += f", weight as e4m3 codes of {p.nbytes:,} bytes"
        elif hooked:
            how = "a gradient hook is registered: stepped from .grad"
        elif p in owned:
            how = "read without calling its module: stepped from .grad"
        else:
            how = reasons.get(p, "not the weight of a linear layer or an embedding")
        kernel = tuned.describe(owned[p].slot, backend) if fused and owned[p].slot is not None else ""
        waited = (owned[p].factors.waited_as, owned[p].factors.most_bytes) if p in owned else ("", 0)
        rows.append(Row(name, tuple(p.shape), fused, how, _bytes(states.get(p, {})), *waited, kernel))
    return Coverage(rows, bucket_bytes, replay_bytes)


#: How an owned weight is stepped, by the regime of its rule. A projection approximates the gradient.
_HOW = {
    "fused": "fused",
    "split": "fused, then the weight from its whole matrix",
    "deferred": "in backward, from one layer's gradient",
    "projected": "in backward, from an approximate low-rank projection of its gradient",
}


def _measured(slot: Slot, backend: str) -> str:
    """Where a gradient is measured, of a rule that measures one."""
    measures = () if slot.rule.stages is None else slot.rule.stages.measures
    weight = slot.weight
    if slot.rule.regime != "deferred" or not measures or resolve_backend(weight.device, backend) == "reference":
        return ""
    if measures_apart(weight.dtype, weight.device, backend):
        return f", formed by cuBLAS and then measured ({len(measures)}x)"
    again = "" if len(measures) == 1 else f", and {len(measures) - 1}x again"
    return f", measured while it is formed{again}"


def _waiting(row: Row) -> str:
    return f"{row.waits_as}, at most {row.waiting_bytes:,} bytes" if row.waits_as else ""


def _bytes(state: Mapping[str, Tensor]) -> int:
    tensors: Iterable[Tensor] = (tensor for name, tensor in state.items() if name != "step")
    return sum(local(tensor).nbytes for tensor in tensors)


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
