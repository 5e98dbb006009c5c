"""The 8-bit codes, and a kernel that encodes and decodes, for any device."""

import torch
import triton
import triton.language as tl

from forge_megatron.formats import fp8, int8
from forge_megatron.formats.code import in_blocks, spread
from forge_megatron.kernels.triton_language import compiled

CODES = {
    "int8-signed": int8.SIGNED,
    "int8-nonnegative": int8.NONNEGATIVE,
    "fp8-signed": fp8.SIGNED,
    "fp8-nonnegative": fp8.NONNEGATIVE,
    "fp8-weight": fp8.WEIGHT,
}
SIGNED = (int8.SIGNED, fp8.SIGNED, fp8.WEIGHT)


def every_code(code) -> torch.Tensor:
    """All codes that are ever written, ascending."""
    written = torch.arange(256).to(torch.uint8)
    if code is int8.NONNEGATIVE:
        return written
    if code is int8.SIGNED:
        return torch.arange(-127, 128).to(torch.int8)
    values = written.view(torch.float8_e4m3fn).float()
    kept = ~values.isnan() & (written != 0x80) & ((values >= 0) | (code in SIGNED))
    return written[kept][values[kept].argsort()]


def raw(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.uint8)


@triton.jit
def there_and_back(x, scales, stored, values, ENCODE: tl.constexpr, DECODE: tl.constexpr):
    lane = tl.arange(0, 2048)
    scale = tl.load(scales + lane)
    tl.store(stored + lane, ENCODE(tl.load(x + lane), scale))
    tl.store(values + lane, DECODE(tl.load(stored + lane), scale))


def assert_kernels_agree(code, device: str) -> None:
    """Triton's functions on ``device`` give torch's codes and values on the CPU, bit for bit; also every code again."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-20, 2, 2048)
    x = x if code in SIGNED else x.square()
    scale = spread(code.scale(in_blocks(x.abs()).amax(-1)), 2048)
    every = every_code(code)
    x[: len(every)] = code.decode(every, scale[0].expand(every.shape))
    scale[: len(every)] = scale[0]
    expected = code.encode(x, scale)
    stored = torch.empty_like(expected, device=device)
    values = torch.empty(2048, device=device)
    there_and_back[(1,)](x.to(device), scale.to(device), stored, values, compiled(code.encode), compiled(code.decode))
    assert torch.equal(raw(stored.cpu()), raw(expected))
    assert torch.equal(raw(expected[: len(every)]), raw(every))
    assert torch.equal(values.cpu(), code.decode(expected, scale))
