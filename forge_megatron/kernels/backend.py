"""Which implementation runs, by device and by request."""

from __future__ import annotations

import importlib.util
import os

import torch

BACKENDS = ("auto", "triton", "reference")


def resolve_backend(device: torch.device | str, requested: str = "auto") -> str:
    """Return ``"triton"`` or ``"reference"``.

    ``"auto"`` is Triton on CUDA devices and the reference elsewhere. ``"triton"`` on another
    device needs Triton's interpreter: ``TRITON_INTERPRET=1`` in the environment before Triton is
    imported.

    Raises:
        NotImplementedError: ``"hopper"``, which is not built.
        RuntimeError: Triton was asked for and is not installed.
        ValueError: an unknown name, or ``"triton"`` on a device that it cannot run on.
    """
    device = torch.device(device)
    if requested == "hopper":
        raise NotImplementedError('backend="hopper" is not built; use backend="triton"')
    if requested not in BACKENDS:
        raise ValueError(f"backend={requested!r} is unknown; use one of: {', '.join(BACKENDS)}")
    if requested == "reference" or (requested == "auto" and device.type != "cuda"):
        return "reference"
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            f'backend={requested!r} on {device} needs the package "triton", which is not '
            'installed; install it, or use backend="reference"'
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'backend="triton" cannot run on {device}; use backend="reference", or set '
            "TRITON_INTERPRET=1 before Triton is imported to interpret the kernels"
        )
    return "triton"
