"""Hugging Face's Trainer in fp16, whose loss scale the CPU has not."""

import itertools
import math

import pytest
from transformers import Trainer

from forge_megatron.integrations.transformers import attach
from tests.cpu.test_huggingface import arguments, llama, logged, texts


def train(folder, *, ours: bool, infinite: int, **changes) -> Trainer:
    """Trains on one GPU; the loss of one micro-batch, counted from 1, is infinite."""
    given = arguments(folder, use_cpu=False, fp16=True, **changes)
    # More GPUs than one would be wrapped in DataParallel.
    given._n_gpu = 1
    trainer = Trainer(model=llama(), args=given, train_dataset=texts(24))
    if ours:
        attach(trainer)
    calls, compute = itertools.count(1), trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: (
        compute(*args, **kwargs) * (math.inf if next(calls) == infinite else 1.0)
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
        {"max_grad_norm": 0.0},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
    ids=["accumulated_clipped", "unclipped", "checkpointed"],
)
def test_a_trainer_in_fp16_with_one_overflow(tmp_path, changes):
    """One step is skipped by both, weights, states and schedule; the scale is halved, and all others are taken."""
    ours, theirs = (train(tmp_path, ours=is_ours, infinite=5, **changes) for is_ours in (True, False))
    scalers = [trainer.accelerator.scaler for trainer in (ours, theirs)]
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**16
    optimizer, steps = ours.optimizer.optimizer, ours.state.global_step
    skipped = optimizer.skipped_steps
    assert 1 <= skipped <= 3
    assert all(state["step"] == steps - skipped for state in optimizer.state.values())
    assert ours.lr_scheduler.last_epoch == theirs.lr_scheduler.last_epoch == steps - skipped
    taken = [math.isfinite(norm) for norm in logged(theirs, "grad_norm")]
    assert [math.isfinite(norm) for norm in logged(ours, "grad_norm")] == taken
    assert taken.count(False) == skipped
    for key, rtol in (("loss", 1e-3), ("grad_norm", 1e-2), ("learning_rate", 1e-6)):
        found = zip(logged(ours, key), logged(theirs, key), strict=True)
        assert all(abs(a - b) <= rtol * abs(b) for a, b in found if math.isfinite(b)), key
    # Both round gradients to fp16 once, in another place; AdamW's first steps are as large as lr whatever they are.
    for (name, p), other in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert p.isfinite().all(), name
        assert (p - other[1]).norm() <= 2e-2 * other[1].norm(), name
    assert sum(row.fused for row in optimizer.coverage) == 16
    assert all(p.grad is None for p in ours.model.parameters())
