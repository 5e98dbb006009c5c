"""Which implementation runs, by device and by request."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os

import torch

BACKENDS = ("auto", "hopper", "cublas", "triton", "reference")

#: The versions of Triton whose Gluon compiles the Hopper kernel: from the first, before the second.
GLUON_VERSIONS = ((3, 6), (3, 10))

#: Those on which it has also been run on a GPU, and which "auto" takes.
RUN_ON_GPU = ((3, 6),)

#: Kernels of the fused weight gradient alone; everything else that they are asked for is portable.
WGRAD_ONLY = ("hopper", "cublas")


def resolve_backend(device: torch.device | str, requested: str = "auto") -> str:
    """Return ``"reference"``, ``"triton"``, or one of ``WGRAD_ONLY`` where it was asked for by name.

    ``"auto"`` is Triton on CUDA devices, where :func:`choice.choose` then takes the kernel of a
    weight gradient by shape, and the reference elsewhere. ``"triton"`` on another device needs
    Triton's interpreter: ``TRITON_INTERPRET=1`` in the environment before Triton is imported.

    Raises:
        RuntimeError: Triton was asked for and is not installed.
        ValueError: an unknown name, or a kernel on a device that it cannot run on.
    """
    device = torch.device(device)
    if requested not in BACKENDS:
        raise ValueError(f"backend={requested!r} is unknown; use one of: {', '.join(BACKENDS)}")
    if requested == "reference" or (requested == "auto" and device.type != "cuda"):
        return "reference"
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            f'backend={requested!r} on {device} needs the package "triton", which is not '
            'installed; install it, or use backend="reference"'
        )
    if requested in WGRAD_ONLY:
        _check_wgrad_only(device, requested)
        return requested
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'backend="triton" cannot run on {device}; use backend="reference", or set '
            "TRITON_INTERPRET=1 before Triton is imported to interpret the kernels"
        )
    return "triton"


def _check_wgrad_only(device: torch.device, requested: str) -> None:
    if device.type != "cuda":
        raise ValueError(f'backend={requested!r} cannot run on {device}; use backend="auto"')
    if requested != "hopper":
        return
    if not is_hopper(device):
        raise ValueError(f'backend="hopper" needs compute capability 9.0, which {device} lacks; use backend="auto"')
    if not has_gluon():
        first, end = (".".join(map(str, version)) for version in GLUON_VERSIONS)
        raise RuntimeError(
            f'backend="hopper" needs Triton from {first} and before {end}, whose Gluon compiles it; use backend="auto"'
        )


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def has_gluon() -> bool:
    """Whether the installed Triton compiles the Hopper kernel: Gluon is never interpreted."""
    first, end = GLUON_VERSIONS
    return first <= triton_version() < end


def has_tried_gluon() -> bool:
    """Whether the Hopper kernel has been run on a GPU with the installed Triton."""
    return triton_version() in RUN_ON_GPU


@functools.cache
def triton_version() -> tuple[int, ...]:
    """``(major, minor)``; ``(0,)`` where Triton is not installed or is the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return (0,)
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in version.split(".")[:2])
