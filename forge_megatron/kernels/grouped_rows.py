"""The tokens of several experts in one tensor, in the order of their experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupedRows:
    """The dY of a segment of a grouped weight.

    Attributes:
        rows: dY ``[T, O]``, the tokens in the order of their experts.
        bounds: int32 ``[E + 1]``, non-decreasing: where the tokens of each expert begin, and where the last's end.
            Tokens before the first and after the last belong to none.
        swapped: the weight is ``[E, I, O]``, whose gradient is ``X^T dY``: ``rows`` are X's, and dY takes X's place.
    """

    rows: Tensor
    bounds: Tensor
    swapped: bool = False

    def of_experts(self, experts: slice) -> GroupedRows:
        """The same for some of the experts; the device is not asked where their tokens are."""
        return GroupedRows(self.rows, self.bounds[experts.start : experts.stop + 1], self.swapped)
