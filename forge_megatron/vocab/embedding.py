"""``nn.Embedding`` whose weight may be owned: its gradient goes to the weight's sink as ``(ids, dE)``.

No dense ``[V, H]`` gradient exists. Rows that no token looked up are stepped with G = 0 (DESIGN section 2,
rule 6), as ``torch.optim`` does from a dense gradient: AdamW decays them and moves their states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_megatron.linear import Attached, Use, open_use
from forge_megatron.linear.ownership import reason_not_owned
from forge_megatron.linear.untraced import untraced


class OwnedEmbeddingFunction(torch.autograd.Function):
    """``E = W[ids]``, then ``(ids, dE)`` to the weight's sink."""

    @staticmethod
    def forward(
        ctx, ids: Tensor, ticket: Tensor | None, padding_idx: int | None, outside: Tensor | None, use: Use
    ) -> Tensor:
        ctx.use, ctx.padding_idx = use, padding_idx
        if ticket is not None:
            ctx.save_for_backward(ids, outside)
        embedded = F.embedding(ids, use.weight)
        return embedded if outside is None else embedded.masked_fill_(outside[..., None], 0.0)

    @staticmethod
    def backward(ctx, de: Tensor):
        use: Use = ctx.use
        if use.begin():
            ids, outside = ctx.saved_tensors
            # The next batch may be written to the caller's ids; these are a copy.
            rows = ids.reshape(-1).to(torch.int64, copy=True)
            if ctx.padding_idx is not None:
                rows.masked_fill_(rows == ctx.padding_idx, -1)
            if outside is not None:
                rows.masked_fill_(outside.reshape(-1), -1)
            use.deliver(rows, de.reshape(rows.shape[0], de.shape[-1]))
        return None, None, None, None, None


@untraced
def owned_embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, outside: Tensor | None = None
) -> Tensor:
    """``F.embedding(ids, weight, padding_idx)`` for an owned weight.

    Args:
        ids: int64 or int32, any shape.
        weight: ``[V, H]``, owned.
        padding_idx: at least 0; its row gets no gradient, and is decayed like every other.
        outside: bool, of the shape of ``ids``: the tokens whose rows another rank has. They embed as zeros and
            give no gradient, whatever id stands there.

    Returns:
        ``[*ids.shape, H]`` in the weight's dtype.
    """
    use = open_use(weight)
    embedded = OwnedEmbeddingFunction.apply(ids, use.ticket, padding_idx, outside, use)
    use.bind(embedded.grad_fn)
    return embedded


class ForgeEmbedding(Attached, nn.Embedding):
    """``nn.Embedding`` that hands its gradient to the owner of its weight."""

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        # The options may have been set after attach.
        if self.owner_in_forward() is None or _reason_of_options(self) is not None:
            return super().forward(input)
        return owned_embedding(input, self.weight, self.padding_idx)


def reason_not_fused(module: nn.Embedding) -> str | None:
    """None if the weight of ``module`` can be stepped inside its backward."""
    if type(module).forward not in (nn.Embedding.forward, ForgeEmbedding.forward):
        return f"{type(module).__name__} has a forward of its own"
    return _reason_of_options(module) or reason_not_owned(module)


def _reason_of_options(module: nn.Embedding) -> str | None:
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} writes to the weight in every forward"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True weighs a token by its batch's counts"
    if module.sparse:
        return "sparse=True asks for a sparse .grad"
    return None
