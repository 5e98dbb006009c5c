"""Megatron's parallel state for the degrees of a case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core import parallel_state

from gates.gate import Degrees


def initialize(degrees: Degrees) -> None:
    """Make the groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        context_parallel_size=degrees.cp,
        expert_model_parallel_size=degrees.ep,
        create_gloo_process_groups=False,
    )


@contextlib.contextmanager
def instead_of(own: Degrees, degrees: Degrees) -> Iterator[None]:
    """Other degrees of the same ranks than a case's ``own``, which come back after."""
    parallel_state.destroy_model_parallel()
    initialize(degrees)
    yield
    parallel_state.destroy_model_parallel()
    initialize(own)
