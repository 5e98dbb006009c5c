"""What a load leaves of the states' formats."""

import pytest
import torch

import forge_megatron as forge
from tests.cpu.training import batch, mean_square, mlp, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_format", ["int8", "fp8", "bf16"])
def test_a_load_keeps_every_dtype_and_every_byte(state_format, dtype):  # field log row 104
    """States of one byte and of two, beside parameters of four bytes and of two."""

    def trained(steps, seed):
        model = mlp(12, 70, 8, seed=seed).to(dtype)
        optimizer = forge.attach(model, lr=1e-3, state_format=state_format)
        for step in range(steps):
            mean_square(batch(6, 12, seed=step).to(dtype))(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    saved, loaded = trained(3, seed=0), trained(0, seed=1)
    loaded.load_state_dict(saved.state_dict())
    stored = {"int8": {torch.int8, torch.uint8}, "fp8": {torch.float8_e4m3fn}, "bf16": {torch.bfloat16}}[state_format]
    for mine, theirs in zip(states(loaded), states(saved), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype is theirs[name].dtype, name
            assert torch.equal(value.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name
        assert {mine["exp_avg"].dtype, mine["exp_avg_sq"].dtype} <= stored
