"""On the GPU: bytes that a step allocates beside weights and states, at the end of backward and at its peak."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import live

import forge_megatron as forge

LARGE = live.WIDTH * live.WIDTH // 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_holds_nothing_of_the_order_of_a_parameter(tied, dtype):
    model = live.LanguageModel(tied).to("cuda", dtype)
    optimizer = forge.attach(model, lr=1e-3)
    for seed in range(3):
        ids = live.ids(seed, "cuda")
        before, allocated = live.storages(live.tensors()), torch.cuda.memory_allocated()
        loss = model(ids)
        loss.backward()
        held = torch.cuda.memory_allocated() - allocated
        names = live.resident(before, LARGE)
        assert not names, f"resident at the end of backward: {names}"
        if seed:
            # The first step keeps tables and launches for the others. A loss, and 512 bytes of the allocator's rounding
            # for each small tensor that waits for step().
            assert held <= 16 * 512, (
                f"{held} bytes are held at the end of backward, by tensors that Python cannot reach"
            )
        optimizer.step()
        optimizer.zero_grad()


def test_the_peak_is_below_the_logits():
    """A vocabulary of 64k and 8k tokens: logits of 2 GiB in fp32, a head and an embedding of 64 MiB each."""
    vocabulary, width, tokens = 65536, 512, 8192
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    head = torch.nn.Linear(width, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    optimizer = forge.attach(torch.nn.ModuleList([embedding, head]), lr=1e-3)
    ids = torch.randint(vocabulary, (tokens,), device="cuda")
    for step in range(2):
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        forge.vocab.linear_cross_entropy(embedding(ids), head, ids).backward()
        peak = torch.cuda.max_memory_allocated() - allocated
        optimizer.step()
        optimizer.zero_grad()
        # One block of 2^25 logits in fp32 and its gradient in bf16, twice over for what is formed from them.
        assert peak <= 2 * (1 << 25) * 6, f"step {step}: {peak / 2**20:.0f} MiB beside weights and states"
