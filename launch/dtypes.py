"""Names of dtypes in recipes."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
