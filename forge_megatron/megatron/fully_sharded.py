"""``--use-torch-fsdp2``: Megatron's ``TorchFullyShardedDataParallel``, which calls ``fully_shard`` on each layer.

FSDP2 then owns the weights: it gathers them for each use and reduces their gradients, so that no linear steps its own.
Each sharded parameter, norms and biases too, is stepped where its reduced shard arrives
(:mod:`forge_megatron.coordinator.fully_sharded`), and Megatron's optimizer has no parameter left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor, nn

from forge_megatron.formats import RECIPES
from forge_megatron.megatron.conversion import conversion_of, global_names, unwrap
from forge_megatron.megatron.head import ForgeGPTModel
from forge_megatron.megatron.rule import hyperparameters, megatrons
from forge_megatron.rules import Rule

if TYPE_CHECKING:
    from forge_megatron.megatron.build import ForgeOptions
    from forge_megatron.megatron.optimizer import ForgeMegatronOptimizer


def wraps(model_chunks: Sequence[nn.Module]) -> bool:
    """Whether FSDP2 has sharded the model."""
    return any(isinstance(chunk, TorchFullyShardedDataParallel) for chunk in model_chunks)


def asked_for(configs: Sequence[object]) -> bool:
    """Whether it will, as far as Megatron's configs or arguments say."""
    return any(
        isinstance(config, TorchFullyShardedDataParallelConfig) or getattr(config, "use_torch_fsdp2", False)
        for config in configs
    )


def expect_steppable(model_chunks: Sequence[nn.Module], rule: Rule, options: ForgeOptions) -> None:
    """Refuses what shards of FSDP2 are not stepped with; nothing has changed.

    Args:
        model_chunks: wrapped by FSDP2.
        rule: of the weights of linears and embeddings.
        options: the ``--forge-*`` arguments.

    Raises:
        NotImplementedError: one line for each, with its value and the way out.
    """
    refused = []
    states, store = RECIPES.get(options.recipe, ("", ""))
    if rule.regime != "fused":
        refused.append(f"--forge-rule {rule.name} reads whole matrices; choose one of regime 1, or use forge.attach")
    if store == "fp8" or states in ("int8", "fp8"):
        refused.append(f"--forge-recipe {options.recipe} stores codes; choose bf16-state or fp32-master")
    if options.accumulation_dtype is not torch.float32:
        refused.append(f"--forge-accumulation-dtype {options.accumulation_dtype}: shards are summed in fp32")
    for chunk in model_chunks:
        model = unwrap(chunk)
        if isinstance(model, ForgeGPTModel):
            refused.append("fused_head reads the weight of an output layer that is not called; leave it out")
        if getattr(model, "share_embeddings_and_output_weights", False):
            refused.append("share_embeddings_and_output_weights: a shard is read where it is not gathered; untie them")
        apart = [name for name, p in model.named_parameters() if getattr(p, "grad_norm_group", None) is not None]
        refused += [f"{name} is clipped by a norm of its own (grad_norm_group); take the mark off" for name in apart]
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise NotImplementedError(f"FORGE does not train with these under use_torch_fsdp2 yet:\n{lines}")


def trained(model_chunks: Sequence[nn.Module]) -> list[Tensor]:
    """The parameters that FORGE steps: all that are trained, those too that ``prepare`` has kept out of DDP's buffers.

    FSDP2 has put shards in the place of the parameters that it saw.
    """
    found = []
    for model in map(unwrap, model_chunks):
        conversion, names = conversion_of(model), global_names(model)
        owned = {} if conversion is None else conversion.owned
        found += [p for name, p in model.named_parameters() if p.requires_grad or names[name] in owned]
    return found


def groups_of(
    config: OptimizerConfig, options: ForgeOptions, rule: Rule, group: dict[str, Any], names: Mapping[Tensor, str]
) -> list[dict[str, Any]]:
    """``group`` cut into matrices, and vectors, which are stepped as Megatron's own optimizer would step them.

    Args:
        config: of Megatron's optimizer.
        options: the ``--forge-*`` arguments, which are of matrices.
        rule: of matrices.
        group: Megatron's.
        names: of the parameters in it.
    """
    members = [(names[p], p) for p in group["params"]]
    groups = []
    if matrices := [pair for pair in members if pair[1].dim() > 1]:
        named = {} if options.rule is None else {"rule": rule.name}
        groups.append({**group, **named, "params": matrices})
    if vectors := [pair for pair in members if pair[1].dim() <= 1]:
        theirs = megatrons(config)
        master = {"recipe": "fp32-master"} if any(p.dtype.itemsize == 2 for _, p in vectors) else {}
        further = {**hyperparameters(config, theirs, {}), **master, "rule": theirs.name}
        groups.append({**group, **further, "params": vectors})
    return groups


def observe(chunk: TorchFullyShardedDataParallel, optimizers: Sequence[ForgeMegatronOptimizer]) -> None:
    """Passes the per-token scale on, which FSDP2's wrapper leaves out. FSDP2 has averaged over its ranks already."""
    ranks = chunk.process_group.size()

    def scale_gradients(scaling_factor) -> None:
        for optimizer in optimizers:
            optimizer.set_gradient_scale(scaling_factor * ranks)

    def finish_grad_sync(force_all_reduce: bool | None = False) -> None:
        """FSDP2 reduces in backward. Megatron-core 0.16 passes an argument that its wrapper does not take."""

    chunk.scale_gradients = scale_gradients
    chunk.finish_grad_sync = finish_grad_sync
