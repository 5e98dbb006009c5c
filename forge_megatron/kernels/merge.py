"""The most segments that one launch takes; what is beyond is concatenated first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .slot import Segment

#: Each unrolls another loop in the kernel.
MAX_SEGMENTS = 4


def merge_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Return at most ``MAX_SEGMENTS`` segments that hold the same tokens."""
    segments = list(segments)
    if len(segments) <= MAX_SEGMENTS:
        return segments
    size = -(-len(segments) // MAX_SEGMENTS)
    merged = []
    for start in range(0, len(segments), size):
        dys, xs = zip(*segments[start : start + size], strict=True)
        merged.append((torch.cat(dys), torch.cat(xs)))
    return merged
