"""Where a captured step's tables lie: in memory that no other kernel of the graph ever had."""

import pytest
import torch

from forge_megatron.kernels import triton_step, uploads

CPU = torch.device("cpu")


@pytest.fixture
def capturing(monkeypatch):
    """As inside a capture, of which a machine without a GPU has none."""
    monkeypatch.setattr(uploads, "is_capturing", lambda device: True)
    return torch.device("meta")


def test_tables_are_cut_from_what_was_reserved_and_filled_at_the_end(capturing):
    hosts = [torch.arange(5), torch.arange(3, dtype=torch.int32), torch.arange(40).view(4, 10)]
    with uploads.reserved(4096, CPU) as memory:
        tables = [uploads.upload(host, capturing) for host in hosts]
        first, size = memory.data_ptr(), memory.numel()
    places = [table.data_ptr() - first for table in tables]
    assert places == sorted(places)
    assert all(place % uploads.ALIGNMENT == 0 and place < size for place in places)
    for table, host in zip(tables, hosts, strict=True):
        assert torch.equal(table, host)


def test_too_little_is_an_error_that_says_so(capturing):
    with uploads.reserved(8, CPU), pytest.raises(RuntimeError, match="table of 40 bytes"):
        uploads.upload(torch.arange(5), capturing)
    with pytest.raises(RuntimeError, match="none were reserved"):
        uploads.upload(torch.arange(5), capturing)


def test_a_step_needs_no_more_than_was_reserved():
    assert triton_step.BLOCK >= uploads.FEWEST_ELEMENTS
    weights = [torch.empty(shape, device="meta") for shape in [(1,), (33, 101), (4096, 4096)]]
    columns = 9 + 2 * 4
    rows = -(-len(weights) * columns * 8 // uploads.ALIGNMENT) * uploads.ALIGNMENT
    owners = sum(-(-weight.numel() // triton_step.BLOCK) for weight in weights) * 4
    assert rows + owners + uploads.ALIGNMENT <= uploads.table_bytes(weights)
