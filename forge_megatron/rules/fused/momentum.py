"""Heavy-ball momentum (Polyak): :mod:`.sgd` with a momentum of 0.9 unless another is given. Weight decay is L2."""

from __future__ import annotations

from dataclasses import replace

from ..rule import register
from .sgd import SGD

register(replace(SGD, name="momentum", states=("momentum_buffer",), defaults={**SGD.defaults, "momentum": 0.9}))
