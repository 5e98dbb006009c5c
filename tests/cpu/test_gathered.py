"""How weights lie in a bucket's buffer after their step: apart, aligned, and in the memory of their gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_megatron.coordinator import Buckets
from forge_megatron.coordinator.bucket import buffer_bytes, cut
from forge_megatron.coordinator.gathered import copy, in_buffer
from forge_megatron.formats import Fp8Weight, in_memory

DTYPES = (torch.float32, torch.bfloat16, "codes of float32", "codes of bfloat16")
#: Rows; columns of no block, of one and of a bit more; some parts then have fewer rows than others, or none.
WEIGHTS = st.tuples(st.sampled_from((1, 3, 16, 37)), st.sampled_from((1, 2, 63, 64, 130)), st.sampled_from(DTYPES))


def made(rows: int, columns: int, dtype) -> torch.Tensor:
    plain = torch.randn(rows, columns, dtype=torch.float32 if "32" in str(dtype) else torch.bfloat16)
    return Fp8Weight.of(plain) if "codes" in str(dtype) else plain


@pytest.mark.parametrize("wire", [None, torch.float32])
@settings(max_examples=60, deadline=None)
@given(st.lists(WEIGHTS, min_size=1, max_size=5), st.integers(1, 4), st.sampled_from((64, 1000, 1 << 20)))
def test_every_part_reaches_the_others_as_it_lies_in_memory(wire, weights, parts, nbytes):
    options, layout = Buckets(nbytes=nbytes, wire_dtype=wire), {"multiple": parts, "gathered": True}
    params = [made(*weight) for weight in weights]
    received = [made(*weight) for weight in weights]
    buckets = cut(params, options, parts, **layout)
    twins = cut(received, options, parts, **layout)
    largest = buffer_bytes(params, options, parts, **layout)
    for bucket, twin in zip(buckets, twins, strict=True):
        buffer = torch.zeros(largest, dtype=torch.uint8)
        assert bucket.elements(buffer, parts, bucket.dtype).nbytes == parts * bucket.length * bucket.dtype.itemsize
        stretches, mine = in_buffer(bucket, buffer, parts)
        assert stretches.is_contiguous()
        assert stretches.shape[1] % 16 == 0
        for places in mine:
            copy((there, weight) for _, there, weight in places)
        for places in in_buffer(twin, buffer, parts)[1]:
            copy((weight, there) for _, there, weight in places)
    for one, other in zip(params, received, strict=True):
        assert all(map(torch.equal, in_memory(one), in_memory(other)))
