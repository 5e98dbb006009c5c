"""What errors say where some weights have been updated in backward, and the step cannot be finished."""

from __future__ import annotations

WAY_OUT = (
    "load a checkpoint before training on, or keep the half step with rollback(accept=True); with skip='atomic' a "
    "window can be rolled back"
)


def zeroed_after_updates(updated: str) -> str:
    """What ``zero_grad()`` says of a weight that backward has updated."""
    return (
        f"zero_grad() after backward: {updated} has already been updated inside it; call step() first, or give "
        "clip_grad_norm or accumulation_steps so that updates wait for step(); the backward of another model's loss, "
        "such as a generator's through its discriminator, belongs inside optimizer.paused()"
    )


def rolled_back_after_updates(count: int, of: int, first: str) -> str:
    """What stays an error after ``rollback()``: ``count`` weights of ``of`` were updated before it."""
    return (
        f"rolled back after backward had updated {count} of {of} weights (the first is {first}), which cannot be "
        f"taken back; {WAY_OUT}"
    )


def failed_after_updates(count: int, of: int, first: str) -> str:
    """What stays an error after a backward that raised between two updates."""
    return f"the last backward failed after it had updated {count} of {of} weights (the first is {first}); {WAY_OUT}"


def failed_after_sending(count: int, of: int, first: str) -> str:
    """What stays an error after a backward that raised when other ranks had this one's part of some gradients."""
    return (
        f"the last backward failed after it had sent the gradients of {count} of {of} weights (the first is {first}), "
        f"which other ranks may have stepped; {WAY_OUT}"
    )


def refused_after_adding(name: str, updated: bool) -> str:
    """What stays an error after a backward that raised before it reached an owned weight.

    Args:
        name: a parameter whose ``.grad`` it had reached.
        updated: a backward before it has updated weights.
    """
    way_out = WAY_OUT if updated else "call zero_grad() to discard the window"
    return f"{name}: a backward that was refused had added to its .grad; {way_out}"


def scaled_updates(updated: str | None) -> str:
    """What an error says of GradScaler with weights that are stepped in backward.

    Args:
        updated: one that was updated since the last step.
    """
    error = (
        "GradScaler needs every update to wait for step(), which unscales first; attach with skip='atomic', "
        "clip_grad_norm= or accumulation_steps="
    )
    if updated is None:
        return error
    return f"{error}. {updated} has been updated with a scaled gradient; {WAY_OUT}"
