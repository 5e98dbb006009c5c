"""The random bits of a weight's coordinates are the same for every tensor-parallel size."""

import pytest
import torch
from megatron_harness import Case, Run, run

from forge_megatron.formats.noise import random_bits

pytestmark = pytest.mark.timeout(600)

GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
CASE = Case(dtype=torch.bfloat16, model=GATED, clip=0.0, forge={"recipe": "sr-store", "seed": 11})


def _bits() -> dict[str, torch.Tensor]:
    session = Run(CASE)
    session.train(1)
    forge = session.optimizer.chained_optimizers[0].forge
    assert forge.random.seed == 11
    found = {}
    for p, name in forge.names.items():
        noise = forge.random.of(p)
        found[name] = random_bits(noise, 0, p.numel()).view(p.shape)
    return found


def test_two_shards_have_the_bits_of_the_whole():
    (whole,) = run(1, _bits)
    first, second = run(2, _bits)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in whole} == {
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "output_layer",
        "word_embeddings",
    }
    for name, bits in whole.items():
        parts = first[name], second[name]
        if "linear_fc1" in name:
            halves = [part.chunk(2) for part in parts]
            joined = torch.cat([half[index] for index in (0, 1) for half in halves])
        else:
            joined = torch.cat(parts, 1 if "linear_proj" in name or "linear_fc2" in name else 0)
        assert torch.equal(joined, bits), name
    layers = [whole[f"decoder.layers.{index}.self_attention.linear_qkv.weight"] for index in (0, 1)]
    assert not torch.equal(*layers)
