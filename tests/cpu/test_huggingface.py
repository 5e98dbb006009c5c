"""Hugging Face's Trainer and Accelerate train as they do with torch.optim.AdamW, by one line."""

import copy
import itertools
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import forge_megatron as forge
from forge_megatron.integrations.accelerate import connect
from forge_megatron.integrations.transformers import attach
from tests.cpu.training import batch, expect_bit_equal, mlp, snapshot

VOCABULARY, LENGTH = 61, 12


def llama() -> nn.Module:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
        )
    )


def gpt2() -> nn.Module:
    set_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **dropouts)
    )


def texts(count: int) -> list[dict]:
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder, **changes) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "optim": "adamw_torch",
            **changes,
        },
    )


def train(
    model, folder, samples: int = 12, *, ours: bool, resume: str | None = None, options=None, **changes
) -> Trainer:
    trainer = Trainer(model=model, args=arguments(folder, **changes), train_dataset=texts(samples))
    if ours:
        attach(trainer, **(options or {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def expect_same_run(ours: Trainer, theirs: Trainer, atol: float = 2e-5) -> None:
    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(logged(ours, key)) == len(logged(theirs, key)) > 0
        torch.testing.assert_close(logged(ours, key), logged(theirs, key), rtol=1e-4, atol=1e-5, msg=key)
    for (name, p), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0, atol=atol, msg=name)


# Every linear of Llama's is fused; GPT-2's are transformers' own Conv1D, which are stepped from .grad.
both_kinds = pytest.mark.parametrize("make", [llama, gpt2])


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (llama, {}),
        (gpt2, {"max_grad_norm": 0.0}),
        # 11 samples in batches of 2, three batches a step: the last window has fewer, and the last batch one sample.
        (llama, {"gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_grad_norm": 0.5}),
        (llama, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        (gpt2, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        (llama, {"lr_scheduler_type": "cosine", "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    ],
    ids=["clipped", "immediate", "accumulated", "checkpointed", "reentrant", "cosine_smoothed"],
)
def test_a_trainer_trains_as_with_torchs_adamw(tmp_path, make, changes):  # field log rows 13, 23
    ours = train(make(), tmp_path, 11, ours=True, **changes)
    theirs = train(make(), tmp_path, 11, ours=False, **changes)
    expect_same_run(ours, theirs)
    optimizer = ours.optimizer.optimizer
    # GPT-2's embeddings are fused.
    assert sum(row.fused for row in optimizer.coverage) == (16 if make is llama else 2)
    assert optimizer._plan.waits == (changes.get("max_grad_norm", 1.0) > 0)


@both_kinds
def test_twenty_micro_batches_in_windows_of_eight(tmp_path, make):  # field log row 13
    """Three steps; the last window's four are weighed by their tokens, as the Trainer does."""
    changes = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 1}
    ours, theirs = (train(make(), tmp_path, 20, ours=is_ours, **changes) for is_ours in (True, False))
    assert ours.state.global_step == 3
    assert all(state["step"] == 3 for state in ours.optimizer.optimizer.state.values())
    expect_same_run(ours, theirs)


@both_kinds
def test_a_smoothed_loss_does_not_scale_with_the_number_of_micro_batches(tmp_path, make):  # field log row 23
    runs = [
        train(make(), tmp_path, 8, ours=True, label_smoothing_factor=0.1, **changes)
        for changes in (
            {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
            {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 1},
        )
    ]
    one, eight = (logged(run, "grad_norm")[0] for run in runs)
    assert abs(eight - one) <= 1e-5 * one


def test_a_trainer_in_bf16(tmp_path):
    """Autocast: the gradients of both are rounded to bf16 once, in another place; one step of AdamW is lr."""
    ours = train(llama(), tmp_path, 8, ours=True, bf16=True)
    theirs = train(llama(), tmp_path, 8, ours=False, bf16=True)
    torch.testing.assert_close(logged(ours, "loss"), logged(theirs, "loss"), rtol=0, atol=2e-2)


def test_a_trainer_resumes(tmp_path):
    """Six steps equal three and, from the checkpoint in a new Trainer, three more, bit for bit."""
    changes = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = train(llama(), tmp_path / "whole", 24, ours=True, **changes)
    resumed = train(llama(), tmp_path / "again", 24, ours=True, resume=str(tmp_path / "whole/checkpoint-3"), **changes)
    assert resumed.state.global_step == whole.state.global_step == 6
    assert logged(resumed, "loss")[-3:] == logged(whole, "loss")[-3:]
    expect_bit_equal(
        snapshot(whole.model, whole.optimizer.optimizer), snapshot(resumed.model, resumed.optimizer.optimizer)
    )


def test_a_trainers_nan_loss_is_skipped_whole(tmp_path):  # field log row 88
    """The scheduler of the Trainer does not move with a skipped step."""
    trainer = Trainer(model=llama(), args=arguments(tmp_path, lr_scheduler_type="linear"), train_dataset=texts(12))
    optimizer = attach(trainer, skip="atomic")
    calls = itertools.count(1)
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs) * (math.nan if next(calls) == 3 else 1.0)
    trainer.train()
    assert optimizer.skipped_steps == 1
    assert trainer.lr_scheduler.last_epoch == 5
    assert all(state["step"] == 5 for state in optimizer.state.values())
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@both_kinds
def test_a_window_of_another_length_is_noticed(tmp_path, make):  # field log row 25
    trainer = Trainer(model=make(), args=arguments(tmp_path, gradient_accumulation_steps=4), train_dataset=texts(16))
    attach(trainer, accumulation_steps=3)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(RuntimeError, match=r"backward number 4 since the last step\(\), with accumulation_steps=3"):
        trainer.train()
    expect_bit_equal(before, [p.detach() for p in trainer.model.parameters()])


def test_a_trainer_without_the_line_is_refused(tmp_path):
    """It would clip what lies in .grad and leave out the owned weights."""
    model = llama()
    optimizer = forge.attach(model, lr=1e-2, waiting=True)
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=texts(4), optimizers=(optimizer, None))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"torch\.nn\.utils clips \.grad.*attach\(clip_grad_norm="):
        trainer.train()
    expect_bit_equal(before, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"optim": "adafactor"}, "optim="),
        ({"optim": "sgd"}, "use optim='adamw_torch'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: .*give per_device_train_batch_size"),
    ],
)
def test_what_a_trainer_cannot_be_given(tmp_path, changes, match):
    trainer = Trainer(model=llama(), args=arguments(tmp_path, **changes), train_dataset=texts(4))
    with pytest.raises(NotImplementedError, match=match):
        attach(trainer)
    assert type(trainer.model.lm_head) is nn.Linear


def test_a_trainer_that_would_drop_the_optimizer_or_has_its_own_groups_is_refused(tmp_path):
    """train() of the first makes a model and another optimizer anew; the second has a group for each layer."""

    class Layerwise(Trainer):
        def create_optimizer(self, *args, **kwargs):
            raise AssertionError("not called")

    fresh = Trainer(model_init=llama, args=arguments(tmp_path), train_dataset=texts(4))
    layerwise = Layerwise(model=llama(), args=arguments(tmp_path), train_dataset=texts(4))
    for trainer, match in (
        (fresh, "model_init=.*give it model="),
        (layerwise, r"Layerwise has a create_optimizer\(\)"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            attach(trainer)
        assert type(trainer.model.lm_head) is nn.Linear
        assert trainer.optimizer is None


class TestAccelerate:
    @staticmethod
    def run(ours: bool, *, scaler=None, steps: int = 7, window: int = 2, overflow: int | None = None):
        model = mlp(6, 8, 4)
        twin = copy.deepcopy(model)
        plugin = GradientAccumulationPlugin(num_steps=window, sync_with_dataloader=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        accelerator.scaler = scaler
        if ours:
            accelerator = connect(accelerator)
            optimizer = forge.attach(model, lr=1e-2, waiting=True, accumulation_steps=None)
        else:
            optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
            model = twin
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 1 / (1 + updates))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        norms, skipped = [], []
        for index in range(steps):
            with accelerator.accumulate(model):
                loss = model(batch(5, 6, seed=index)).square().mean()
                accelerator.backward(loss * (math.inf if index == overflow else 1.0))
                if accelerator.sync_gradients and scaler is None:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.05))
                elif accelerator.sync_gradients and ours:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), math.inf))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
        return model, norms, skipped, scheduler.scheduler.last_epoch

    def test_trains_as_with_torchs_adamw(self):
        """Seven micro-batches in windows of two, clipped by the accelerator; the seventh waits."""
        model, norms, skipped, epoch = self.run(True)
        twin, their_norms, _, their_epoch = self.run(False)
        torch.testing.assert_close(norms, their_norms, rtol=1e-5, atol=0)
        assert epoch == their_epoch
        assert skipped == [False] * 3
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    def test_a_loss_scale(self):
        """The second window overflows: skipped by both, the scale is halved, and the scheduler does not move."""
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
        model, norms, skipped, epoch = self.run(True, scaler=scalers[0], overflow=2)
        twin, _, their_skipped, their_epoch = self.run(False, scaler=scalers[1], overflow=2)
        assert skipped == their_skipped == [False, True, False]
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
        assert epoch == their_epoch
        assert [bool(norm.isfinite()) for norm in norms] == [True, False, True]
        assert norms[0] < 1
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    def test_what_would_leave_out_a_weight_is_refused(self):
        accelerator = connect(Accelerator(cpu=True))
        model = mlp(6, 8, 4)
        model, optimizer = accelerator.prepare(model, forge.attach(model, lr=1e-2, waiting=True))
        accelerator.backward(model(batch(5, 6)).square().mean())
        before = snapshot(model, optimizer.optimizer)
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_ of some .*\(2\.weight is left out\)"):
            accelerator.clip_grad_norm_(model[0].parameters(), 1.0)
        with pytest.raises(NotImplementedError, match="clip_grad_value_"):
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        with pytest.raises(NotImplementedError, match="norm_type=1"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
        expect_bit_equal(before, snapshot(model, optimizer.optimizer))

    def test_clipping_in_immediate_mode_is_refused_and_measuring_is_not(self):
        accelerator = connect(Accelerator(cpu=True))
        model = mlp(6, 8, 4)
        twin = copy.deepcopy(model)
        model, optimizer = accelerator.prepare(model, forge.attach(model, lr=1e-2))
        accelerator.backward(model(batch(5, 6)).square().mean())
        twin(batch(5, 6)).square().mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in twin.parameters()])
        torch.testing.assert_close(accelerator.clip_grad_norm_(model.parameters(), math.inf), norm, rtol=1e-5, atol=0)
        with pytest.raises(RuntimeError, match="attach with clip_grad_norm= or waiting=True"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def test_other_optimizers_are_left_alone(self):
        accelerator = connect(Accelerator(cpu=True))
        model = mlp(6, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        accelerator.backward(model(batch(5, 6)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(total, torch.tensor(0.1), rtol=1e-4, atol=0)
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
