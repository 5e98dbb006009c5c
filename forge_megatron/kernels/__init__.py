"""The fused weight-gradient and optimizer kernels, and the step of materialised gradients."""

from .api import step, wgrad, wgrad_accumulate, wgrad_norm_sq, wgrad_norms_sq, wgrad_step, wgrad_steps
from .backend import resolve_backend
from .blocks import FormedRows, of_rows
from .choice import choose, measures_apart
from .entrance import without_autocast
from .grouped_rows import GroupedRows
from .lookups import is_lookup
from .norms import LateNorms, settle
from .recording import GraphMemory
from .replays import leave_out, replay_bytes
from .shard import is_sharded, local, origin_of, placed_as, shard_like
from .slot import Segment, Slot, without_norm
from .softmax import Normaliser, logit_gradient
from .staged import stacks
from .uploads import TABLE_BYTES_OF_A_PIECE, reserved, table_bytes, upload, write_table

__all__ = [
    "TABLE_BYTES_OF_A_PIECE",
    "FormedRows",
    "GraphMemory",
    "GroupedRows",
    "LateNorms",
    "Normaliser",
    "Segment",
    "Slot",
    "choose",
    "is_lookup",
    "is_sharded",
    "leave_out",
    "local",
    "logit_gradient",
    "measures_apart",
    "of_rows",
    "origin_of",
    "placed_as",
    "replay_bytes",
    "reserved",
    "resolve_backend",
    "settle",
    "shard_like",
    "stacks",
    "step",
    "table_bytes",
    "upload",
    "wgrad",
    "wgrad_accumulate",
    "wgrad_norm_sq",
    "wgrad_norms_sq",
    "wgrad_step",
    "wgrad_steps",
    "without_autocast",
    "without_norm",
    "write_table",
]
