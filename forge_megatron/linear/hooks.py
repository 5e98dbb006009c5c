"""A user's hook on the gradient of an owned weight.

While one is registered the weight's linears form its gradient, from their next forward on. A forward whose backward is
still to come has kept no way to form it: there the registration is refused, as torch adds the hook to its dictionary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor


def has_gradient_hook(weight: Tensor) -> bool:
    """Somebody wants to see or change the gradient of ``weight``, which must then be formed."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


class _Hooks(OrderedDict):
    """What torch keeps the hooks of one weight in.

    Args:
        expect_none_open: raises where a hook would come too late.
    """

    def __init__(self, expect_none_open: Callable[[], None]):
        super().__init__()
        self._expect_none_open = expect_none_open

    def __setitem__(self, key, hook) -> None:
        self._expect_none_open()
        super().__setitem__(key, hook)

    def __reduce__(self):
        return OrderedDict, (list(self.items()),)


def watch_registrations(
    weight: Tensor, expect_none_open: Callable[[], None], expect_nothing_kept: Callable[[], None]
) -> None:
    """From now on every registration asks first; what is registered already stays so.

    Args:
        expect_none_open: is asked before a hook on the gradient.
        expect_nothing_kept: before a hook on ``.grad``, as torch has it when it has added to it.
    """
    if not weight._backward_hooks:
        weight._backward_hooks = _Hooks(expect_none_open)
    if not weight._post_accumulate_grad_hooks:
        weight._post_accumulate_grad_hooks = _Hooks(expect_nothing_kept)
