"""APOLLO-mini: :mod:`.apollo` at rank 1, with one factor for the whole tensor (arXiv:2412.05270, section 4.3).

Weight decay is decoupled, and last.
"""

from __future__ import annotations

from ..rule import register
from .apollo import apollo

register(apollo("apollo_mini", rank=1, scale=128.0, scale_type="tensor"))
