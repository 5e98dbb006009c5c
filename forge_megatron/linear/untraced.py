"""Functions that ``torch.compile`` leaves alone, at no cost where nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._dynamo import eval_frame


def untraced(function: Callable) -> Callable:
    """Marks ``function``: the compiler runs it as it is, and with it all that it calls.

    ``torch.compiler.disable`` does the same by a wrapper that switches the compiler off and on around every call, for
    longer than a small layer takes; and it imports the compiler.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = None
    function._torchdynamo_disable_recursive = True
    return function
