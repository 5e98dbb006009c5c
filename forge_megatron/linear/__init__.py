"""Linear layers whose weight gradient is handed to a sink instead of to ``.grad``."""

from forge_megatron.linear.attached import Attached
from forge_megatron.linear.function import is_callers, owned_linear
from forge_megatron.linear.grouped import ForgeGroupedLinear, GroupedLinear
from forge_megatron.linear.hooks import has_gradient_hook
from forge_megatron.linear.ledger import Ledger
from forge_megatron.linear.modules import ForgeLinear
from forge_megatron.linear.owned import OwnedWeight, Use, accumulates, open_use, owner_of
from forge_megatron.linear.sink import FusedStep, Sink

__all__ = [
    "Attached",
    "ForgeGroupedLinear",
    "ForgeLinear",
    "FusedStep",
    "GroupedLinear",
    "Ledger",
    "OwnedWeight",
    "Sink",
    "Use",
    "accumulates",
    "has_gradient_hook",
    "is_callers",
    "open_use",
    "owned_linear",
    "owner_of",
]
