"""megatron-core on a CPU.

megatron-core 0.16 and 0.19 name CUDA where they mean "this process's device". ``enable()`` gives
those names a CPU meaning for the life of the process; where a GPU is present it does nothing, so
that the trainer calls it without asking. What stays the caller's: ``use_cpu_initialization=True``,
the gloo backend, and under pipeline parallelism ``batch_p2p_sync=False`` and, with ``overlap_p2p_comm``, no
``deallocate_pipeline_outputs``: gloo reads an output's memory when it sends it, and the schedule has freed it by then.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_TYPE_PREFIX = "torch."
_installed: _CudaMeansCpu | None = None


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """``device="cuda"``, ``Tensor.cuda()`` and the CUDA names of ``Tensor.type()``, on a CPU.

    schedules.py and optimizer.py allocate with ``device='cuda'``; language_module.py moves tied
    embeddings with ``.cuda()``; clip_grads.py and optimizer.py compare ``Tensor.type()`` names; rope_utils.py
    pins the context rank's chunk numbers.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace(_TYPE_PREFIX, _TYPE_PREFIX + "cuda.", 1)
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """The one stream of a CPU, in order by nature."""

    def __init__(self, device: object = None, priority: int = 0):
        pass

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: object = None) -> _Stream:
        """Itself, which has nothing to wait for."""
        return self

    def synchronize(self) -> None:
        pass


def _get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False):
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _on_the_host(tensor, as_numpy: bool = False, record_stream: bool = False):
    """Of the sizes that experts' tokens are sent by: they are there already."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _rng_tracker():
    """Megatron's RNG tracker over the CPU's only generator.

    The stock ``fork`` warns when the CPU generator moved inside it: here it must move, because it
    is the generator that dropout and initialisation draw from.
    """
    from megatron.core.tensor_parallel import random

    class CpuRngStatesTracker(random.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"RNG state {name!r} was never added; there are {list(self.states_)}")
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return CpuRngStatesTracker()


def _patch_torch() -> None:
    stream = _Stream()
    torch.cuda.Stream = _Stream
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = lambda s: contextlib.nullcontext()
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.set_rng_state = _set_rng_state
    torch.cuda.manual_seed = torch.manual_seed


def _patch_megatron() -> None:
    from megatron.core import jit

    # jit_fuser is torch.compile, which would ask a fresh machine for a C++ compiler.
    jit.disable_jit_fuser()
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch.cuda.current_stream()
    token_dispatcher.maybe_move_tensor_to_cpu = _on_the_host
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    random._CUDA_RNG_STATE_TRACKER = _rng_tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def enable(device: str = "auto") -> bool:
    """Make megatron-core usable on a CPU. Call before the first import of ``megatron.core``.

    Args:
        device: "cpu", "cuda", or "auto" for what torch finds.

    Returns:
        True where the CPU meaning is in force, False where a GPU is used and nothing was changed.

    Raises:
        ModuleNotFoundError: psutil is missing; megatron-core's checkpoint writer then hangs.
    """
    global _installed
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return False
    if _installed is not None:
        return True
    if importlib.util.find_spec("psutil") is None:
        raise ModuleNotFoundError(
            "psutil is not installed: megatron-core's checkpoint writer hangs without it (pip install psutil)"
        )
    _patch_torch()
    _patch_megatron()
    _installed = _CudaMeansCpu()
    _installed.__enter__()
    return True
