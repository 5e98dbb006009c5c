"""What the user's ``fully_shard`` calls made of a model, and what of it cannot be stepped."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from forge_megatron.coordinator.alike import expect_alike
from forge_megatron.coordinator.parts import Part
from forge_megatron.kernels import is_sharded, local


@dataclass(eq=False)
class ShardGroup:
    """The parameters that one ``fully_shard`` call gathers and reduces together.

    Attributes:
        modules: the modules that it was called with.
        padded: each sharded parameter, and how many elements of the reduced buffer are its shard's with padding.
        records: FSDP2's, in the same order.
        updates: how often any of them was stepped.
    """

    modules: tuple[nn.Module, ...]
    padded: Mapping[Tensor, int]
    records: Sequence[Any]
    updates: int = field(default=0)

    def expect_not_replaced(self, labels: Mapping[Tensor, str]) -> None:
        """Raises if FSDP2 gathers another tensor than the one that the optimizer holds.

        Raises:
            RuntimeError: names the parameter.
        """
        for p, record in zip(self.padded, self.records, strict=True):
            if record.sharded_param is not p and p in labels:
                raise RuntimeError(
                    f"{labels[p]}: the module's parameter is another tensor than at attach, which nobody would step; "
                    "load_state_dict(assign=True) or move the model first, then attach"
                )


def find_shards(model: nn.Module, names: Mapping[Tensor, str]) -> list[ShardGroup]:
    """The groups of ``model``, none for a model without DTensors.

    Args:
        model: after its ``fully_shard`` calls.
        names: what errors call each parameter.

    Raises:
        NotImplementedError: a DTensor that no ``fully_shard`` call manages, parameters offloaded to the CPU, or a
            trainable parameter left out, whose gradient would stay this rank's own.
    """
    if not any(is_sharded(p) for p in names):
        return []
    from torch.distributed.fsdp import FSDPModule

    found = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module):
                found[group] = ShardGroup(
                    tuple(group.modules),
                    {it.sharded_param: it.padded_sharded_param_size.numel() for it in group.fsdp_params},
                    tuple(group.fsdp_params),
                )
    groups = list(found.values())
    managed = {p for group in groups for p in group.padded}
    for p, name in names.items():
        expect_managed(name, p, managed)
        if p in managed:
            _expect_sharded_on_its_device(name, p)
    return groups


def compare_over_ranks(what: str, groups: Iterable[ShardGroup], facts: dict[str, object]) -> None:
    """A collective of all ranks that have shards of the same parameters, or replicas of shards.

    Args:
        what: the ranks do.
        groups: from :func:`find_shards`.
        facts: what must be equal on all of them.

    Raises:
        ValueError: names the first that is not.
    """
    meshes = {p.device_mesh: None for group in groups for p in group.padded}
    over = {mesh.get_group(dim): None for mesh in meshes for dim in range(mesh.ndim) if mesh.size(dim) > 1}
    for ranks in over:
        everywhere: list = [None] * ranks.size()
        dist.all_gather_object(everywhere, facts, group=ranks)
        expect_alike(what, everywhere, dist.get_process_group_ranks(ranks))


def expect_reduced(groups: Iterable[ShardGroup], labels: Mapping[Tensor, str]) -> None:
    """Raises where FSDP2 keeps a gradient that it was told not to reduce yet.

    Raises:
        RuntimeError: names the parameter.
    """
    for group in groups:
        for p, record in zip(group.padded, group.records, strict=True):
            whole = getattr(record, "_unsharded_param", None)
            kept = record.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
            if kept and p in labels:
                raise RuntimeError(
                    f"{labels[p]}: step(), but FSDP2 has not reduced its gradient; run the last micro-batch with "
                    "set_requires_gradient_sync(True)"
                )


def forget_backward(groups: Iterable[ShardGroup]) -> None:
    """Drops what a backward has left in FSDP2: gradients that are not reduced, and after an exception its end.

    torch queues the end once a backward, and after an exception never again: the next one would neither reduce the
    outermost module's gradients nor wait for the others'. Without gradients it is no collective.
    """
    for group in groups:
        for record in group.records:
            record.unsharded_accumulated_grad = None
            if hasattr(record, "_unsharded_param"):
                record.unsharded_param.grad = None
    for state in (module._get_fsdp_state() for group in groups for module in group.modules):
        if state._state_ctx.post_backward_final_callback_queued:
            state._root_post_backward_final_callback()


def _parameter_groups(module: nn.Module) -> list:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    # torch 2.11 has at most one a module.
    return [state._fsdp_param_group] if groups is None and state._fsdp_param_group else list(groups or ())


def _expect_sharded_on_its_device(name: str, p: Tensor) -> None:
    if all(placement.is_replicate() for placement in p.placements):
        raise NotImplementedError(f"{name} is replicated by replicate(), which is not built yet; use fully_shard")
    if not p.is_meta and local(p).device.type != p.device_mesh.device_type:
        raise NotImplementedError(
            f"{name} is offloaded to the CPU (CPUOffloadPolicy), which is not built yet; leave offload_policy out"
        )


def expect_managed(name: str, p: Tensor, managed: Collection[Tensor]) -> None:
    """Raises for a parameter whose gradient nobody reduces over the ranks.

    Args:
        name: what the error calls it.
        p: a parameter.
        managed: the parameters that ``fully_shard`` gathers and reduces.
    """
    if p in managed:
        return
    if is_sharded(p):
        raise NotImplementedError(
            f"{name} is a DTensor that no fully_shard call manages (tensor parallelism, replicate()), which is not "
            "built yet; use fully_shard and attach(model, ...), or tensor parallelism with --use-forge"
        )
    if managed and p.requires_grad and dist.get_world_size() > 1:
        raise NotImplementedError(
            f"{name} is not sharded while others are, so that nothing reduces its gradient over the ranks; call "
            "fully_shard on the module that holds it (mostly the model itself), or freeze it"
        )


def wholes_of(params: Iterable[Tensor]) -> dict[Tensor, Part]:
    """Of the DTensors among ``params`` that are cut along one dimension: the weights of which ranks have shards."""
    found = {}
    for p in params:
        cut = [] if not is_sharded(p) else [d for d, where in enumerate(p.placements) if not where.is_replicate()]
        if len(cut) == 1 and p.placements[cut[0]].is_shard():
            mesh, (mesh_dim,) = p.device_mesh, cut
            dim, size = p.placements[mesh_dim].dim, mesh.size(mesh_dim)
            share = -(-p.shape[dim] // size)
            ends = [min(rank * share, p.shape[dim]) for rank in range(size + 1)]
            stretches = tuple((stretch,) for stretch in itertools.pairwise(ends))
            found[p] = Part(p.shape, dim, stretches, mesh.get_local_rank(mesh_dim), mesh.get_group(mesh_dim))
    return found


class NormsOverRanks:
    """Σ g² of whole parameters, from those of the shards that this rank holds.

    Args:
        params: in the order of the norms.
    """

    def __init__(self, params: Sequence[Tensor]):
        self._parts: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for index, p in enumerate(params):
            if groups := _sharded_over(p):
                self._parts.setdefault(groups, []).append(index)

    def __call__(self, norms_sq: Tensor) -> Tensor:
        """Sums over the ranks that hold other shards; replicas are counted once. A collective.

        Args:
            norms_sq: ``[parameters]``, fp32.
        """
        norms_sq = norms_sq.clone()
        for groups, indices in self._parts.items():
            part = norms_sq[indices].double()
            for group in groups:
                dist.all_reduce(part, group=group)
            norms_sq[indices] = part.float()
        return norms_sq


def _sharded_over(p: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not is_sharded(p):
        return ()
    mesh = p.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(p.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
