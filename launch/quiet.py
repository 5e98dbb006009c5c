"""What megatron-core says on every rank at import and at every start, and nobody can act on."""

from __future__ import annotations

import logging
import os
import warnings


def hush() -> None:
    """Hide megatron-core's start-up warnings; FORGE_VERBOSE=1 shows them."""
    if os.environ.get("FORGE_VERBOSE") == "1":
        return
    for module in (r"megatron\.", r"torch\.distributed\.c10d_logger"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
