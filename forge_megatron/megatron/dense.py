"""What Megatron's own optimizer holds of the parameters that FORGE does not step, one whole parameter at a time.

Its FP32 and Float16 optimizers hold every parameter on every rank. Its DistributedOptimizer cuts its buffers between
data-parallel ranks wherever that may fall inside a parameter; a checkpoint has whole ones, so that they are put
together here, and cut again on loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from forge_megatron.megatron.rule import dense_states


def dense_held(optimizer: MegatronOptimizer, parameters: Sequence[Tensor], groups: list[dict[str, Any]]) -> Dense:
    """Reads Megatron's optimizer.

    Args:
        optimizer: Megatron's, for the parameters that FORGE does not step.
        parameters: those, the same on every data-parallel rank.
        groups: the param groups of a run without FORGE, in which they are.
    """
    kind = DistributedDense if isinstance(optimizer, DistributedOptimizer) else Dense
    return kind(optimizer, parameters, groups)


class Dense:
    """Of FP32Optimizer and Float16OptimizerWithFloat16Params: all is on this rank.

    Attributes:
        keeps_copies: a run without FORGE steps fp32 copies of 16-bit parameters.
    """

    def __init__(self, optimizer: MegatronOptimizer, parameters: Sequence[Tensor], groups: list[dict[str, Any]]):
        self.optimizer = optimizer
        self.parameters = list(parameters)
        self.keeps_copies = self._keeps_copies(groups)
        self._unstepped = dense_states(optimizer.config)

    def _keeps_copies(self, groups: list[dict[str, Any]]) -> bool:
        return isinstance(self.optimizer, Float16OptimizerWithFloat16Params)

    @property
    def torch_groups(self) -> list[dict[str, Any]]:
        inner = self.optimizer.optimizer
        return [] if inner is None else inner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        inner = self.optimizer.optimizer
        return {} if inner is None else inner.defaults

    def counted(self) -> dict[str, Any]:
        """``{"step": ...}`` of the fused optimizers that count in the group."""
        return next(({"step": group["step"]} for group in self.torch_groups if "step" in group), {})

    def stepped(self, parameter: Tensor) -> Tensor | None:
        """What torch's optimizer steps for a parameter: itself, its fp32 copy, or this rank's part; None: no part."""
        main = getattr(parameter, "main_param", None)
        return parameter if main is None else main

    def group(self, parameter: Tensor) -> dict[str, Any]:
        """The param group that it is stepped in."""
        stepped = self.stepped(parameter)
        return next(group for group in self.torch_groups if any(stepped is p for p in group["params"]))

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """Its states, whole; before the first step torch has none, which a checkpoint could not be loaded without."""
        stepped = self.stepped(parameter)
        held = self.optimizer.optimizer.state.get(stepped)
        return dict(held or {name: torch.zeros_like(stepped) for name in self._unstepped})

    def copy(self, parameter: Tensor) -> Tensor:
        """The fp32 copy of a 16-bit parameter."""
        return self.stepped(parameter)

    def make_states(self) -> None:
        """The states that there are before the first step, as a template to load into."""
        inner, init = self.optimizer.optimizer, self.optimizer.init_state_fn
        if inner is not None and init is not None:
            init(inner, self.optimizer.config)

    # ---- in

    def load(
        self,
        entries: Mapping[Tensor, dict],
        hyperparameters: Mapping[Tensor, dict],
        copies: Mapping[Tensor, Any],
        saved: dict[str, Any],
    ) -> None:
        """Restores what :meth:`state`, :meth:`group` and :meth:`copy` gave.

        Args:
            entries: the states of each parameter, whole, with their ``step``.
            hyperparameters: of its group.
            copies: fp32 copies; empty where the optimizer keeps none.
            saved: the whole state dict, for the loss scale.
        """
        if self.optimizer.optimizer is None:
            return
        dense = self._torch_state_dict(entries, hyperparameters)
        if self.keeps_copies:
            of_stepped = {id(self.stepped(p)): copies.get(p) for p in self.parameters if p.dtype.itemsize == 2}
            kept = [[of_stepped[id(p)] for p in g["params"] if id(p) in of_stepped] for g in self.torch_groups]
            dense = {**saved, "optimizer": dense, "fp32_from_fp16_params": kept}
        self.optimizer.load_state_dict(dense)

    def _torch_state_dict(self, entries: Mapping[Tensor, dict], hyperparameters: Mapping[Tensor, dict]) -> dict:
        inner = self.optimizer.optimizer
        parameter_of = {id(self.stepped(p)): p for p in self.parameters}
        group_of = {id(self.group(p)): p for p in self.parameters}
        in_groups = not any("step" in state for state in inner.state.values())
        state, groups = {}, []
        for group in inner.param_groups:
            keys = hyperparameters[group_of[id(group)]] if id(group) in group_of else _without_members(group)
            ids = range(len(state), len(state) + len(group["params"]))
            for position, stepped in zip(ids, group["params"], strict=True):
                parameter = parameter_of[id(stepped)]
                entry = {name: self._part(parameter, value) for name, value in entries[parameter].items()}
                step = entry.pop("step")
                if not ("step" in keys and in_groups):
                    entry["step"] = deepcopy(step)
                state[position] = entry
            groups.append({**keys, "params": list(ids)})
        return {"state": state, "param_groups": groups}

    def _part(self, parameter: Tensor, value: Any) -> Any:
        """What of a whole state is in :meth:`stepped`."""
        return value


class DistributedDense(Dense):
    """Of DistributedOptimizer: whole parameters are put together from the ranks' parts, by collectives."""

    def __init__(self, optimizer: MegatronOptimizer, parameters: Sequence[Tensor], groups: list[dict[str, Any]]):
        super().__init__(optimizer, parameters, groups)
        # A rank may have no part of a parameter, and its group there no member.
        by_keys = {_identifiers(group): index for index, group in enumerate(self.torch_groups)}
        dense = {id(p) for p in parameters}
        self._index = {p: by_keys[_identifiers(group)] for group in groups for p in group["params"] if id(p) in dense}
        self._wholes: dict[Tensor, dict[str, Tensor]] | None = None
        self._is_template = False

    def _keeps_copies(self, groups: list[dict[str, Any]]) -> bool:
        # Also where FORGE steps all of them, as of experts: a checkpoint has their masters among the copies.
        return any(p.dtype.itemsize == 2 for group in groups for p in group["params"])

    def counted(self) -> dict[str, Any]:
        steps = [group["step"] for group in self.torch_groups if "step" in group]
        return {"step": max(steps)} if steps else {}

    def stepped(self, parameter: Tensor) -> Tensor | None:
        place = self.optimizer.model_param_group_index_map.get(parameter)
        return None if place is None else self.torch_groups[place[0]]["params"][place[1]]

    def group(self, parameter: Tensor) -> dict[str, Any]:
        group = self.torch_groups[self._index[parameter]]
        # Fused optimizers count no steps in a group that is empty on this rank.
        group.update(self.counted())
        return group

    def state(self, parameter: Tensor) -> dict[str, Any]:
        return {name: value for name, value in self._whole(parameter).items() if name != "param"}

    def copy(self, parameter: Tensor) -> Tensor:
        return self._whole(parameter)["param"]

    def make_states(self) -> None:
        self._is_template = True

    def _whole(self, parameter: Tensor) -> dict[str, Tensor]:
        if self._wholes is None:
            steps = self._steps()
            self._wholes = {}
            for p, step in zip(self.parameters, steps, strict=True):
                self._wholes[p] = {name: self._gathered(p, name) for name in ("param", *self._unstepped)}
                if step > 0:
                    self._wholes[p]["step"] = torch.tensor(step)
        return self._wholes[parameter]

    def _steps(self) -> list[float]:
        """Of each parameter; a rank without a part of it does not know it."""
        if self._is_template or not self.parameters:
            return [0.0] * len(self.parameters)
        mine = []
        for p in self.parameters:
            stepped = self.stepped(p)
            state = {} if stepped is None else self.optimizer.optimizer.state.get(stepped, {})
            mine.append(float(state.get("step", self.counted().get("step", 0.0))))
        steps = torch.tensor(mine, device=self.parameters[0].device)
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=self.optimizer.data_parallel_group)
        return steps.tolist()

    def _gathered(self, parameter: Tensor, name: str) -> Tensor:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if self._is_template:
            return whole.view(parameter.shape)
        stepped = self.stepped(parameter)
        if stepped is not None:
            held = stepped if name == "param" else self.optimizer.optimizer.state.get(stepped, {}).get(name)
            if held is not None:
                self._part(parameter, whole).copy_(held.detach())
        # The sum of bits that one rank has and zeros, so that -0.0 stays what it is.
        dist.all_reduce(whole.view(torch.int32), group=self.optimizer.data_parallel_group)
        return whole.view(parameter.shape)

    def _part(self, parameter: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.numel() != parameter.numel() or value.dim() == 0:
            return value
        held = self.optimizer._get_model_param_range_map(parameter)["param"]
        return value.reshape(-1)[held.start : held.end]

    def load(
        self,
        entries: Mapping[Tensor, dict],
        hyperparameters: Mapping[Tensor, dict],
        copies: Mapping[Tensor, Any],
        saved: dict[str, Any],
    ) -> None:
        if self.optimizer.optimizer is None:
            return
        self.optimizer.optimizer.load_state_dict(self._torch_state_dict(entries, hyperparameters))
        for p in self.parameters:
            stepped = self.stepped(p)
            if stepped is not None and p.dtype.itemsize == 2:
                stepped.data.copy_(self._part(p, copies[p]))
        if self.optimizer.grad_scaler is not None and "grad_scaler" in saved:
            self.optimizer.grad_scaler.load_state_dict(saved["grad_scaler"])


def _without_members(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _identifiers(group: Mapping[str, Any]) -> tuple:
    return tuple(group.get(key) for key in param_group_identifier_keys)
