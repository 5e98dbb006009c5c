"""``triton.language`` as rules and formats have it on a GPU: with a division that knows no extreme divisors."""

import triton
import triton.language as tl
from triton.language import *  # noqa: F403 - a rule may use whatever the language has


@triton.jit
def fdiv(x, y):
    """``x / y`` to 2 ulp in two instructions, not nine; ``y`` is neither subnormal nor above 2^126, as no root is."""
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
    )
    return x * inverse
