"""The optimizer that Megatron's training loop drives: Megatron's own for its parameters, FORGE's for the owned.

:class:`ForgeMegatronOptimizer` pairs the two, the dense weights' and the experts' each, and takes part in Megatron's
protocol: one gradient norm over both, one clip coefficient, one decision to skip, one checkpoint.
:class:`ForgeChainedOptimizer` is Megatron's chain, which hands the total norm on.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from forge_megatron.megatron import checkpoint
from forge_megatron.megatron.dense import Dense, dense_held
from forge_megatron.megatron.norms import grad_norm
from forge_megatron.megatron.replicas import expect_equal_replicas
from forge_megatron.megatron.resharded import of_each
from forge_megatron.optimizer import ForgeOptimizer


class ForgeMegatronOptimizer(MegatronOptimizer):
    """Megatron's optimizer ``dense`` with the owned weights' FORGE optimizer beside it.

    Args:
        dense: Megatron's optimizer (FP32, Float16 or Distributed) for the parameters that FORGE does not step;
            may be a stub.
        forge: steps the owned weights.
        layout: which optimizer steps which parameter, in the order a run without FORGE has them.
        waits: every update is made at ``step()``.
        tp_group: the tensor-parallel ranks of these weights.
        shard_group: the ranks that hold the same weights and share one copy of their states.
    """

    def __init__(
        self,
        dense: MegatronOptimizer,
        forge: ForgeOptimizer,
        layout: checkpoint.Layout,
        *,
        waits: bool,
        tp_group: dist.ProcessGroup,
        shard_group: dist.ProcessGroup,
    ):
        super().__init__(dense.optimizer, dense.config, dense.init_state_fn)
        self.dense = dense
        self.forge = forge
        self.layout = layout
        self.waits = waits
        self.is_stub_optimizer = False
        self.grad_stats_parallel_group = dense.get_grad_stats_parallel_group()
        self.tp_group = tp_group
        self.expert_tp_group = getattr(dense, "expert_tp_group", None)
        self._gradient_scale: Tensor | float = 1.0
        self._coefficient: Tensor | float = 1.0
        self._norms: Tensor | None = None
        self._replicas_checked = False
        owned = [p for group in forge.param_groups for p in group["params"]]
        # DistributedOptimizer's statistics are summed over the ranks of a copy too, which all have these norms.
        counts = shard_group.rank() == 0 or not isinstance(dense, DistributedOptimizer)
        self._counted = torch.tensor(
            [
                index
                for index, p in enumerate(owned)
                if counts
                and param_is_not_shared(p)
                and tensor_parallel.param_is_not_tensor_parallel_duplicate(p, self.tp_group)
            ],
            dtype=torch.long,
            device=owned[0].device,
        )
        scaler = getattr(dense, "grad_scaler", None)
        if scaler is not None:
            self._unscale_dense = dense._unscale_main_grads_and_check_for_nan
            dense._unscale_main_grads_and_check_for_nan = self._unscale_and_check_for_nan

    # ---- what finalize_model_grads and the chain tell it

    def set_gradient_scale(self, factor: Tensor | float) -> None:
        """Megatron scaled the gradients that it holds (``1 / tokens``); the owned ones follow at ``step()``.

        Raises:
            RuntimeError: the weights have been stepped in backward, without the factor.
        """
        if not self.waits:
            raise RuntimeError(
                f"gradients are scaled by {factor} after backward, when owned weights have already been "
                "stepped; set calculate_per_token_loss before the optimizer is built, or pass --forge-update step"
            )
        self._gradient_scale = factor.float().reshape(()) if isinstance(factor, Tensor) else factor

    def set_total_norm(self, norm: float) -> None:
        """The global norm over all optimizers of the chain; gives the clip coefficient (Megatron's formula)."""
        clip = self.config.clip_grad
        self._coefficient = min(clip / (norm + 1.0e-6), 1.0) if clip > 0.0 else 1.0

    # ---- a step whose norm stays on the device, see forge_megatron.megatron.capture

    @torch.no_grad()
    def step_on_device(self) -> Tensor:
        """A step of the owned weights, for which the host reads nothing; :meth:`step_dense` makes the rest of it.

        Returns:
            The gradient norm of all parameters before clipping, 0-dim fp64. Where updates wait and it is not finite no
            owned weight is changed.
        """
        self.prepare_grads()
        norm, clip = self._norm_on_device(), self.config.clip_grad
        if clip > 0.0:
            self._coefficient = torch.clamp(clip / (norm + 1.0e-6), max=1.0).float()
            gradients = [p.grad for p in self.get_parameters() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, self._coefficient)
        if self.waits:
            multiplier = torch.ones_like(norm, dtype=torch.float32) * self._gradient_scale * self._coefficient
            self.forge.step(gradient_multiplier=torch.where(norm.isfinite(), multiplier, torch.nan))
        self._forget()
        return norm

    @torch.no_grad()
    def step_dense(self) -> bool:
        """Megatron's own optimizer steps its parameters, whose gradients :meth:`step_on_device` has clipped."""
        # They are in its buffers, and a replay sets no .grad.
        self.dense.prepare_grads()
        return self.dense.step_with_ready_grads()

    def _norm_on_device(self) -> Tensor:
        of_dense = getattr(self.dense, "get_grads_for_grad_norm", None) or self.dense.get_main_grads_for_grad_norm
        gradients = of_dense() + self._owned_for_norm()
        return grad_norm(gradients, self.get_grad_stats_parallel_group(), self._norms.device)

    def get_grad_norm(self) -> float:
        """Megatron's, with one wait for the device."""
        return self._norm_on_device().item()

    # ---- Megatron's protocol

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose ``.grad`` Megatron may scale: an owned weight is clipped in its update."""
        return self.dense.get_parameters()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.dense.param_groups, *self.forge.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.dense.zero_grad(set_to_none)
        self.forge.zero_grad(set_to_none)
        self._forget()

    def get_loss_scale(self) -> Tensor:
        return self.dense.get_loss_scale()

    def reload_model_params(self, state_dict=None) -> None:
        """After weights were changed from outside: the fp32 masters follow."""
        self.dense.reload_model_params(state_dict=state_dict)
        for parameter, state in self.forge.state.items():
            if "master" in state:
                state["master"].copy_(self.forge.held(parameter.detach()))

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        if self.waits:
            self._norms = self.forge.norms_sq().sqrt()
        else:
            # Backward has stepped them: nothing is left that this could change but the window, which it closes.
            self.forge.step()
            self._norms = self.forge.last_norms_sq.sqrt()
        inverse_scale = 1.0 / self.get_loss_scale() if self._has_loss_scale() else None
        found_inf = self.dense.prepare_grads()
        if inverse_scale is not None:
            self._gradient_scale = self._gradient_scale * inverse_scale.reshape(())
        self._norms = self._norms * self._gradient_scale
        if not self._replicas_checked and not found_inf:
            dense = self.dense_held()
            stepped = {self.layout.names[p]: (p, dense.stepped(p)) for p in dense.parameters}
            expect_equal_replicas(stepped, self.tp_group)
            self._replicas_checked = True
        return found_inf

    def _has_loss_scale(self) -> bool:
        return getattr(self.dense, "grad_scaler", None) is not None

    def _unscale_and_check_for_nan(self) -> bool:
        """Megatron's check with the owned gradients in it, so that the loss scale backs off for them too."""
        found = self._unscale_dense()
        overflow = (~torch.isfinite(self._norms)).any().float().reshape(1)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.get_grad_stats_parallel_group())
        return found or bool(overflow.item() > 0)

    def _owned_for_norm(self) -> list[Tensor]:
        """One vector: the norm of each owned weight's gradient, on one of the ranks that all have it."""
        return [self._norms[self._counted]] if self._counted.numel() else []

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """megatron-core 0.16's name of :meth:`get_grads_for_grad_norm`."""
        return self.dense.get_main_grads_for_grad_norm() + self._owned_for_norm()

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """Tensors whose joint norm is the gradient norm; owned weights never have a norm group of their own."""
        owned = self._owned_for_norm() if grad_norm_group is None else []
        return self.dense.get_grads_for_grad_norm(grad_norm_group) + owned

    def count_zeros(self) -> float:
        raise NotImplementedError("log_num_zeros_in_grad: the gradients of owned weights are not stored; turn it off")

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        success = self.dense.step_with_ready_grads()
        if self.waits:
            self.forge.step(gradient_multiplier=self._gradient_scale * self._coefficient)
        self._forget()
        return success

    def discard(self) -> None:
        """Drops the factors of a step that is skipped; nothing has been changed."""
        self.forge.zero_grad()
        self._forget()

    def _forget(self) -> None:
        self._gradient_scale = self._coefficient = 1.0
        self._norms = None

    def step(self) -> tuple[bool, float | None, None]:
        """Steps both; a chain of this one optimizer, which is what Megatron's loop always builds."""
        return ForgeChainedOptimizer([self]).step()

    def offload_to_cpu(self) -> None:
        raise NotImplementedError("offload_to_cpu: owned weights and their states stay on their device")

    restore_from_cpu = offload_to_cpu

    # ---- checkpoints, in the format of a run without FORGE

    def dense_held(self) -> Dense:
        """What Megatron's optimizer holds now."""
        return dense_held(self.dense, self.layout.dense(), self.layout.groups)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Raises ``NotImplementedError`` under ``use_distributed_optimizer``.

        Args:
            is_loading: Megatron's, for a template to load into; owned weights have their states from the start.
        """
        if isinstance(self.dense, DistributedOptimizer):
            self.save_parameter_state()
        return checkpoint.state_dict(self)

    def save_parameter_state(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "use_distributed_optimizer: of the checkpoint formats only --ckpt-format torch_dist is built, which any "
            "number of data-parallel ranks reads"
        )

    load_parameter_state = save_parameter_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        checkpoint.load_state_dict(self, state_dict)

    def sharded_state_dict(
        self, model_sharded_state_dict, is_loading: bool = False, metadata: dict | None = None, **_: Any
    ) -> dict[str, Any]:
        return checkpoint.sharded_state_dict(self, model_sharded_state_dict, is_loading)


class ForgeChainedOptimizer(ChainedOptimizer):
    """Megatron's chain; the total norm reaches the owned weights, and a norm that is not finite skips the step.

    Megatron without a loss scaler would write the NaN into every weight. A step that is skipped here changes
    no weight, state or step count, and Megatron's loop counts it among the skipped iterations.
    Where weights were stepped in backward nothing is left to skip: a coordinate whose gradient was not finite
    kept its weight and state there, and Megatron's own parameters fare as without FORGE.
    """

    def __init__(self, chained_optimizers: list[MegatronOptimizer]):
        super().__init__(chained_optimizers)
        self._forges = [o for o in chained_optimizers if isinstance(o, ForgeMegatronOptimizer)]
        self._total_norm = math.nan

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        # Each has a scaler of its own, and the loss was multiplied by the first's scale. One that has backed off for
        # gradients which the others do not see would be unscaled by another number from then on.
        scalers = [found for o in self.chained_optimizers if (found := _grad_scaler(o)) is not None]
        common = scalers[0].state_dict() if scalers else {}
        for scaler in scalers[1:]:
            scaler.load_state_dict(common)
        found_inf = super().prepare_grads()
        if len(scalers) > 1:
            for scaler in scalers:
                scaler.load_state_dict(common)
                scaler.update(found_inf)
        if found_inf:
            for optimizer in self._forges:
                optimizer.discard()
        return found_inf

    @torch.no_grad()
    def get_grad_norm(self):
        norm = super().get_grad_norm()
        self._total_norm = float(norm)
        for optimizer in self._forges:
            optimizer.set_total_norm(self._total_norm)
        return norm

    def count_zeros(self) -> float:
        return self._forges[0].count_zeros()

    def state_dict(self, is_loading: bool = False) -> Any:
        """megatron.training asks every optimizer for a template in this way; Megatron's own chain does not take it."""
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if len(self._forges) == len(self.chained_optimizers):
            state_dict = of_each(self._forges, state_dict)
        super().load_state_dict(state_dict)

    def _synchronize_steps(self) -> None:
        """Of fused optimizers' groups; an optimizer all of whose parameters are FORGE's has none."""
        ChainedOptimizer([o for o in self.chained_optimizers if o.optimizer is not None])._synchronize_steps()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        if not math.isfinite(self._total_norm) and all(optimizer.waits for optimizer in self._forges):
            for optimizer in self._forges:
                optimizer.discard()
            return False
        return super().step_with_ready_grads()


def _grad_scaler(optimizer: MegatronOptimizer) -> MegatronGradScaler | None:
    owner = optimizer.dense if isinstance(optimizer, ForgeMegatronOptimizer) else optimizer
    return getattr(owner, "grad_scaler", None)
