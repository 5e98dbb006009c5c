"""What of Megatron's training step cannot be captured as a CUDA graph: the one list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core import package_info, parallel_state, rerun_state_machine
from megatron.core.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.rerun_state_machine import RerunMode
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from forge_megatron.megatron.conversion import unwrap
from forge_megatron.megatron.optimizer import ForgeChainedOptimizer, ForgeMegatronOptimizer

# Switches of Megatron's configs that make a step ask the device, with what to do.
_FLAGS = {
    "num_moe_experts": "the host reads how many tokens each expert has; run eagerly",
    "mtp_num_layers": "not captured yet; run eagerly",
    "check_for_nan_in_grad": "the host reads every gradient; turn it off, a norm that is not finite skips the step",
    "check_for_large_grads": "the host reads every gradient; turn it off",
    "overlap_grad_reduce": "there is one rank; turn it off",
    "timers": "they wait for the device; set config.timers to None",
}
# Versions whose finalize_model_grads asks whether there are any.
_READ_TOKENS = ("0.16.", "0.17.", "0.18.")


def generators() -> list[torch.Generator]:
    """Those that Megatron's RNG tracker lets a graph draw from."""
    return [state for state in random.get_all_rng_states().values() if isinstance(state, torch.Generator)]


def expect_capturable(optimizer: ForgeChainedOptimizer, model_chunks: Sequence[nn.Module]) -> nn.Module:
    """The one model chunk, in Megatron's DDP.

    Raises:
        NotImplementedError: a line for each thing that cannot be captured, by name with its value and the way out.
    """
    found = [f"{name}={value!r}: {why}" for name, value, why in _obstacles(optimizer, model_chunks)]
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise NotImplementedError(f"this training step cannot be captured as a CUDA graph:\n{lines}")
    return model_chunks[0]


def _obstacles(optimizer, model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, object, str]]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    yield from _of_ranks()
    if len(model_chunks) != 1:
        yield "model_chunks", len(model_chunks), "give the one chunk of a model without pipeline stages"
    if len(chained) != 1 or not isinstance(chained[0], ForgeMegatronOptimizer):
        kinds = ", ".join(type(each).__name__ for each in chained)
        yield "optimizer", kinds, "give the one of get_forge_optimizer(), which steps all parameters"
        return
    yield from _of_configs(chained[0], model_chunks)
    yield from _of_optimizer(chained[0])
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    # None: a loop of its own.
    mode = RerunMode.DISABLED if machine is None else machine.get_mode()
    if mode is not RerunMode.DISABLED:
        yield "rerun_mode", mode.value, "a step that is run again is not the one that was captured; set it to disabled"
    model = unwrap(model_chunks[0])
    yield from _of_random_numbers(model.config)
    if next(model.parameters()).is_cuda:
        yield from _of_device(model.config)


def _of_ranks() -> Iterator[tuple[str, object, str]]:
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
    }
    yield from ((name, size, "collectives are not captured; run eagerly") for name, size in sizes.items() if size > 1)


def _of_configs(pair: ForgeMegatronOptimizer, model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, object, str]]:
    chunk = model_chunks[0]
    configs = [unwrap(chunk).config, pair.config, getattr(chunk, "ddp_config", None)]
    if not hasattr(chunk, "zero_grad_buffer"):
        yield "model_chunks", type(chunk).__name__, "wrap the model in Megatron's DistributedDataParallel"
    for name, why in _FLAGS.items():
        value = next((found for config in configs if (found := getattr(config, name, None))), None)
        if value:
            yield name, value, why
    threshold = getattr(pair.config, "grad_norm_skip_threshold", float("inf"))
    if threshold != float("inf"):
        yield "grad_norm_skip_threshold", threshold, "the host compares each norm; leave it out"


def _of_optimizer(pair: ForgeMegatronOptimizer) -> Iterator[tuple[str, object, str]]:
    if getattr(pair.dense, "grad_scaler", None) is not None:
        yield "loss_scale", type(pair.dense.grad_scaler).__name__, "the host reads the overflow; train in bf16 without"
    if isinstance(pair.dense, DistributedOptimizer):
        yield "use_distributed_optimizer", True, "there is one rank; turn it off"
    dense = pair.layout.dense()
    if isinstance(pair.dense, Float16OptimizerWithFloat16Params):
        narrow = next((p for p in dense if p.main_grad.dtype is not torch.float32), None)
        if narrow is not None:
            yield "grad_reduce_in_fp32", False, "Megatron's optimizer copies 16-bit gradients to step; set it to True"
    grouped = next((p for p in dense if getattr(p, "grad_norm_group", None) is not None), None)
    if grouped is not None:
        yield "grad_norm_group", grouped.grad_norm_group, f"{pair.layout.names[grouped]} is clipped by another norm"


def _of_random_numbers(config: TransformerConfig) -> Iterator[tuple[str, object, str]]:
    dropout = max(config.hidden_dropout, config.attention_dropout)
    if dropout > 0 and config.recompute_granularity is not None:
        yield "recompute_granularity", config.recompute_granularity, f"with dropout={dropout} it draws masks anew"


def _of_device(config: TransformerConfig) -> Iterator[tuple[str, object, str]]:
    """What asks the device, and has nothing to ask on a CPU."""
    if not random.is_graph_safe_cuda_rng_tracker(random.get_cuda_rng_tracker()):
        why = "Megatron's RNG tracker has its states on the host; pass it to model_parallel_cuda_manual_seed()"
        yield "use_cudagraphable_rng", False, why
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic_mode", True, "torch's deterministic index_put looks for its largest index; turn it off"
    if config.calculate_per_token_loss and package_info.__version__.startswith(_READ_TOKENS):
        version = package_info.__version__
        yield "calculate_per_token_loss", True, f"megatron-core {version} reads the number of tokens; take 0.19"
