"""The gradient of a head's logits, formed by blocks of the vocabulary from what the forward kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from forge_megatron.kernels import FormedRows, Normaliser, logit_gradient

#: Logits that exist at once, in fp32.
BLOCK_LOGITS = 1 << 23


@dataclass(frozen=True)
class Loss:
    """What the loss of a token is made of; see :mod:`forge_megatron.kernels.softmax`."""

    label_smoothing: float
    z_loss: float
    backend: str
    tp_group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.tp_group is None else self.tp_group.size()

    @property
    def rank(self) -> int:
        return 0 if self.tp_group is None else self.tp_group.rank()


@dataclass(frozen=True)
class Head:
    """The operands of one call: ``logits = x weightᵀ + bias``, never whole.

    Attributes:
        x: ``[T, H]``.
        weight: ``[V, H]``, this rank's rows of the vocabulary, outside the graph.
        bias: ``[V]`` or None, outside the graph.
        targets: int64 ``[T]``, in the whole vocabulary, below 0 where there is none.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    loss: Loss

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0] * self.loss.ranks

    @property
    def rows_before(self) -> int:
        """Of the vocabulary, on the ranks before this one."""
        return self.weight.shape[0] * self.loss.rank

    @property
    def block(self) -> int:
        return max(16, BLOCK_LOGITS // max(1, self.x.shape[0]) // 16 * 16)

    def blocks(self) -> Iterator[slice]:
        for start in range(0, self.weight.shape[0], self.block):
            yield slice(start, min(start + self.block, self.weight.shape[0]))

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """fp32 ``[T, rows]`` without the bias, and the bias."""
        weight = self.weight[rows].to(self.x.dtype)
        return multiply(self.x, weight.t()), None if self.bias is None else self.bias[rows]

    def normalise(self) -> Normaliser:
        normaliser = Normaliser(self.targets, self.loss.backend)
        for rows in self.blocks():
            normaliser.add(*self.logits(rows), self.rows_before + rows.start)
        if self.loss.ranks > 1:
            normaliser.all_reduce(self.loss.tp_group)
        return normaliser


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of one dtype in fp32: summed in fp32, and not rounded before it is stored."""
    if a.dtype is not torch.float32 and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b``, of one dtype, to ``out`` in fp32."""
    if a.dtype is not torch.float32 and a.device.type == "cuda":
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.addmm_(a.float(), b.float())


class LogitGradient(FormedRows):
    """The dY of a head.

    The input gradient is summed up in the first pass over the rows, whoever asks for them: where the pass
    steps the weight, each block has by then been multiplied with its old rows (DESIGN section 2, rule 1).

    Args:
        head: what the forward multiplied.
        log_sum_exp: fp32 ``[T]``.
        upstream: fp32 ``[T]``, of the tokens' losses.
    """

    def __init__(self, head: Head, log_sum_exp: Tensor, upstream: Tensor, *, x_wanted: bool, bias_wanted: bool):
        self._head = head
        self._log_sum_exp = log_sum_exp
        self._upstream = upstream
        self._version = head.weight._version
        self._formed = 0
        self.shape = torch.Size((head.x.shape[0], head.weight.shape[0]))
        self.block = head.block
        self._dx = torch.zeros(head.x.shape, dtype=torch.float32, device=head.x.device) if x_wanted else None
        self._dbias = torch.zeros(self.shape[1], dtype=torch.float32, device=head.x.device) if bias_wanted else None

    def keep(self, x: Tensor) -> None:
        # The bias may be stepped before the weight is.
        bias = None if self._head.bias is None else self._head.bias.clone()
        self._head = replace(self._head, x=x, bias=bias)

    @property
    def version(self) -> int:
        return self._head.weight._version

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._head.targets, self._log_sum_exp, self._upstream))

    def columns(self, rows: slice) -> Tensor:
        head = self._head
        if head.weight._version != self._version:
            raise RuntimeError("the head's weight was written after its backward; its gradient can't be formed anew")
        dy = logit_gradient(
            *head.logits(rows),
            head.targets,
            self._log_sum_exp,
            self._upstream,
            head.rows_before + rows.start,
            vocabulary=head.vocabulary,
            label_smoothing=head.loss.label_smoothing,
            z_loss=head.loss.z_loss,
            dtype=head.x.dtype,
            backend=head.loss.backend,
        )
        if rows.start == self._formed:
            self._formed = rows.stop
            if self._dx is not None:
                add_product(self._dx, dy, head.weight[rows].to(dy.dtype))
            if self._dbias is not None:
                self._dbias[rows] = dy.sum(0, dtype=torch.float32)
        return dy

    def times_x(self) -> Tensor:
        """``dYᵀ X [V, H]`` in fp32, for a weight that an ordinary optimizer steps."""
        gradient = torch.empty(self._head.weight.shape, dtype=torch.float32, device=self._head.x.device)
        for rows in self._head.blocks():
            gradient[rows] = multiply(self.columns(rows).t(), self._head.x)
        return gradient

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """``dX [T, H]`` in x's dtype and ``dbias [V]`` in the bias's, where they are wanted.

        Of this rank's rows: where ranks share the vocabulary, dX is the sum of theirs.

        To be called before the weight is written, by anybody but the pass over these rows.
        """
        head = self._head
        wanted = self._dx is not None or self._dbias is not None
        while wanted and self._formed < self.shape[1]:
            self.columns(slice(self._formed, min(self._formed + self.block, self.shape[1])))
        dx = None if self._dx is None else self._dx.to(head.x.dtype)
        dbias = None if self._dbias is None else self._dbias.to(head.bias.dtype)
        # A gradient that is kept to step() forms its rows again and needs neither.
        self._dx = self._dbias = None
        return dx, dbias
