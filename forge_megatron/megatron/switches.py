"""What each Megatron switch that touches a weight gradient does to FORGE: the one table.

The check at start-up, the choice between updating in backward and waiting for ``step()``, and README's
table all read it. ``supported``: the update stays in backward. ``waits``: factors are kept, the update
is made at ``step()``, exactly. ``refused``: an error names the switch before anything is changed.
Nothing here imports megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

SUPPORTED, WAITS, REFUSED = "supported", "waits", "refused"


@dataclass(frozen=True)
class Facts:
    """What is known when training starts.

    Attributes:
        configs: Megatron's config objects that hold the switches (TransformerConfig, OptimizerConfig,
            DistributedDataParallelConfig), in the order of look-up.
        num_microbatches: backward passes between two optimizer steps.
        microbatches_change: Megatron's schedule of them if there is one (``--rampup-batch-size``), by its class.
        sums_end_here: every owned weight's gradient is complete on its rank with the last micro-batch's backward: no
            other rank has a part of it, and no pipeline orders them.
        data_parallel_size: ranks that hold the same shard of a dense weight, context ranks not counted.
        rerun_mode: ``RerunStateMachine``'s mode, ``"disabled"`` where there is none.
        fully_sharded: the model is, or will be, Megatron's ``TorchFullyShardedDataParallel``.
    """

    configs: tuple[object, ...]
    num_microbatches: int = 1
    microbatches_change: str | None = None
    sums_end_here: bool = False
    data_parallel_size: int = 1
    rerun_mode: str = "disabled"
    fully_sharded: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """The first config's value that is not None."""
        for config in self.configs:
            value = getattr(config, name, None)
            if value is not None:
                return value
        return default

    def any(self, name: str) -> bool:
        """True if the flag is set in any config; ``overlap_param_gather`` lives in two of them."""
        return any(bool(getattr(config, name, None)) for config in self.configs)


@dataclass(frozen=True)
class Switch:
    """One row.

    Attributes:
        name: Megatron's own name of the option.
        verdict: ``supported``, ``waits`` or ``refused``.
        why: what happens, or the way out of a refusal.
        test: the test that shows it, as ``file::name``.
        value: the value that is on, or None where the switch is off.
    """

    name: str
    verdict: str
    why: str
    test: str
    value: Callable[[Facts], Any]


def _flag(name: str) -> Callable[[Facts], Any]:
    return lambda facts: True if facts.any(name) else None


def _above(name: str, limit: float = 1) -> Callable[[Facts], Any]:
    def value(facts: Facts) -> Any:
        found = facts.get(name, limit)
        return found if found > limit else None

    return value


def _other_than(name: str, *harmless: object) -> Callable[[Facts], Any]:
    def value(facts: Facts) -> Any:
        found = facts.get(name)
        return None if found is None or str(found) in map(str, harmless) else found

    return value


_REFUSED = "tests/cpu/test_megatron_switches.py::test_refused_by_name"
_TRAINS = "tests/distributed/test_megatron_training.py::test_trains_like_megatron"

_PIPELINE = "tests/distributed/test_megatron_pipeline.py::test_a_pipeline_trains_as_one_process_does"
_EXPERTS = "tests/distributed/test_megatron_experts.py::test_trains_like_megatron"

_CAPTURE = "`capture_train_step()` is the way to a graph"

_DISTRIBUTED = "tests/distributed/test_megatron_distributed_optimizer.py"

# A row is three lines, so that the table can be read as one.
# fmt: off
SWITCHES: tuple[Switch, ...] = (
    Switch(
        "clip_grad", WAITS, "exact global norm over TP, replicated parameters counted once; 0 turns it off",
        _TRAINS, _above("clip_grad", 0),
    ),
    Switch(
        "num_microbatches", WAITS, "the factors of all micro-batches are one longer token axis; without data and "
        "context parallelism and a pipeline, and where nothing else waits, the last of them is added to the others' "
        "sum in registers and stepped in its backward",
        _TRAINS,
        lambda facts: facts.num_microbatches if facts.num_microbatches > 1 and not facts.sums_end_here else None,
    ),
    Switch(
        "rampup_batch_size", WAITS, "or a schedule by steps: a window of each length is summed whole",
        "tests/distributed/test_megatron_training.py::test_a_batch_that_ramps_up",
        lambda facts: facts.microbatches_change,
    ),
    Switch(
        "calculate_per_token_loss", WAITS, "1 / tokens is known after the last backward and applied at step()",
        _TRAINS, _flag("calculate_per_token_loss"),
    ),
    Switch(
        "fp16", WAITS, "loss scaling: unscaled at step(); an overflow anywhere skips the whole step",
        "tests/distributed/test_megatron_precision.py::test_loss_scale_overflow_skips_the_whole_step",
        _flag("fp16"),
    ),
    Switch(
        "loss_scale", WAITS, "a constant scale under bf16, unscaled at step()",
        "tests/distributed/test_megatron_precision.py::test_constant_loss_scale",
        lambda facts: facts.get("loss_scale"),
    ),
    Switch(
        "grad_norm_skip_threshold", WAITS, "a step that Megatron skips changes no weight",
        "tests/distributed/test_megatron_optimizer.py::test_skip_threshold_changes_nothing",
        lambda facts: (
            facts.get("grad_norm_skip_threshold")
            if facts.get("grad_norm_skip_threshold", float("inf")) != float("inf")
            else None
        ),
    ),
    Switch(
        "rerun_mode", WAITS, "forward and backward may run again before step(); the factors are dropped and kept anew",
        "tests/distributed/test_megatron_optimizer.py::test_rerun_before_step",
        lambda facts: facts.rerun_mode if facts.rerun_mode != "disabled" else None,
    ),
    Switch(
        "tensor_model_parallel_size", SUPPORTED, "each rank steps its shard, whose gradient is complete",
        "tests/distributed/test_megatron_layers.py::test_pair_equals_dense", _above("tensor_model_parallel_size"),
    ),
    Switch(
        "sequence_parallel", SUPPORTED, "X is gathered before the update; dY is whole",
        "tests/distributed/test_megatron_layers.py::test_pair_equals_dense", _flag("sequence_parallel"),
    ),
    Switch(
        "pipeline_model_parallel_size", SUPPORTED, "each stage steps its weights, and a tied pair is Megatron's; "
        "several micro-batches wait", _PIPELINE, _above("pipeline_model_parallel_size"),
    ),
    Switch(
        "virtual_pipeline_model_parallel_size", SUPPORTED, "one optimizer for all chunks of a stage",
        _PIPELINE, _above("virtual_pipeline_model_parallel_size"),
    ),
    Switch(
        "gradient_accumulation_fusion", SUPPORTED, "an owned weight has no main_grad to accumulate into",
        "tests/distributed/test_megatron_layers.py::test_accumulation_fusion_is_not_asked",
        _flag("gradient_accumulation_fusion"),
    ),
    Switch(
        "overlap_grad_reduce", SUPPORTED, "concerns only the parameters that stay in DDP's buffers",
        _TRAINS, _flag("overlap_grad_reduce"),
    ),
    Switch(
        "recompute_granularity", SUPPORTED, "full and selective: one update, after the recomputation",
        _TRAINS, _other_than("recompute_granularity"),
    ),
    Switch(
        "mtp_num_layers", SUPPORTED, "the head is used once more a depth: one update from the sum",
        "tests/distributed/test_megatron_training.py::test_multi_token_prediction", _above("mtp_num_layers", 0),
    ),
    Switch(
        "num_moe_experts", SUPPORTED, "experts of SequentialMLP, and of FORGE's spec with moe_grouped_gemm, are "
        "stepped in backward; GroupedMLP, TEGroupedMLP and routers stay",
        "tests/distributed/test_megatron_training.py::test_sequential_experts_are_stepped_in_backward",
        _above("num_moe_experts", 0),
    ),
    Switch(
        "expert_model_parallel_size", SUPPORTED, "experts are stepped in backward, or summed over exactly the ranks "
        "that hold them, over which the distributed optimizer shards their states",
        _EXPERTS, _above("expert_model_parallel_size"),
    ),
    Switch(
        "LoRA", SUPPORTED, "a frozen base is left alone: no state, no weight-gradient GEMM",
        "tests/distributed/test_megatron_convert.py::test_adapters_on_a_frozen_base", lambda facts: None,
    ),
    Switch(
        "data_parallel_size", SUPPORTED, "gradients are summed in rotating buckets while backward goes on; each bucket "
        "is stepped on arrival", "tests/distributed/test_megatron_data_parallel.py::test_trains_like_megatron",
        lambda facts: facts.data_parallel_size if facts.data_parallel_size > 1 else None,
    ),
    Switch(
        "context_parallel_size", SUPPORTED, "gradients are summed over context ranks in the same buckets; without "
        "Transformer Engine the spec has attention for cp_comm_type a2a, all_gather and p2p",
        "tests/distributed/test_megatron_context.py::test_trains_like_megatron", _above("context_parallel_size"),
    ),
    Switch(
        "gtp_weight_remat_size", REFUSED, "weights are sharded once more; set it to 1",
        _REFUSED, _above("gtp_weight_remat_size"),
    ),
    Switch(
        "use_distributed_optimizer", SUPPORTED, "a data-parallel rank has its rows of the states and masters of owned "
        "weights; what FORGE does not step is in Megatron's DistributedOptimizer",
        f"{_DISTRIBUTED}::test_trains_like_megatron",
        _flag("use_distributed_optimizer"),
    ),
    Switch(
        "overlap_param_gather", SUPPORTED, "concerns only the parameters in DDP's buffers; owned weights are gathered "
        "when backward, or step(), returns", f"{_DISTRIBUTED}::test_trains_like_megatron",
        _flag("overlap_param_gather"),
    ),
    Switch(
        "overlap_param_gather_with_optimizer_step", REFUSED, "splits the optimizer by model chunk; turn it off",
        _REFUSED, _flag("overlap_param_gather_with_optimizer_step"),
    ),
    Switch(
        "num_distributed_optimizer_instances", SUPPORTED, "each instance has all owned states, sharded over its "
        "ranks: a gradient is reduce-scattered in it and summed over the instances, the weight is gathered in it",
        "tests/distributed/test_megatron_instances.py::test_trains_like_megatron",
        _above("num_distributed_optimizer_instances"),
    ),
    Switch(
        "use_layer_wise_distributed_optimizer", REFUSED, "deals whole layers to ranks; turn it off",
        _REFUSED, _flag("use_layer_wise_distributed_optimizer"),
    ),
    Switch(
        "use_megatron_fsdp", REFUSED, "sharded weights; turn it off", _REFUSED, _flag("use_megatron_fsdp"),
    ),
    Switch(
        "use_torch_fsdp2", SUPPORTED, "every parameter is stepped where its reduced shard arrives, norms and biases as "
        "Megatron's optimizer would; several micro-batches wait; tensor and pipeline parallelism, experts and "
        "--ckpt-format torch_dist beside it are refused",
        "tests/distributed/test_megatron_fully_sharded.py::test_trains_like_megatron",
        lambda facts: True if facts.fully_sharded else None,
    ),
    Switch(
        "save_wgrads_interval", REFUSED, "no weight gradient is stored that could be saved; turn it off",
        _REFUSED, _above("save_wgrads_interval", 0),
    ),
    Switch(
        "delay_wgrad_compute", REFUSED, "the update is made in backward and nothing is left to delay; turn it off",
        _REFUSED, _flag("delay_wgrad_compute"),
    ),
    Switch(
        "defer_embedding_wgrad_compute", REFUSED, "it adds to a main_grad that an owned head does not have; "
        "turn it off", _REFUSED, _flag("defer_embedding_wgrad_compute"),
    ),
    Switch(
        "overlap_moe_expert_parallel_comm", REFUSED, "splits backward into scheduled pieces; turn it off",
        _REFUSED, _flag("overlap_moe_expert_parallel_comm"),
    ),
    Switch("fp8", REFUSED, "fp8 GEMMs need scales that the update does not keep yet; train in bf16",
           _REFUSED, _other_than("fp8")),
    Switch("fp4", REFUSED, "train in bf16", _REFUSED, _other_than("fp4")),
    Switch("cpu_offloading", REFUSED, "Transformer Engine moves what backward reads; turn it off",
           _REFUSED, _flag("cpu_offloading")),
    Switch("fine_grained_activation_offloading", REFUSED, "turn it off",
           _REFUSED, _flag("fine_grained_activation_offloading")),
    Switch("optimizer_cpu_offload", REFUSED, "states live on the weight's device; turn it off",
           _REFUSED, _flag("optimizer_cpu_offload")),
    Switch("cuda_graph_impl", REFUSED, "a replayed backward would not follow the schedule; set it to none; "
           f"{_CAPTURE}", _REFUSED, _other_than("cuda_graph_impl", "none")),
    Switch("enable_cuda_graph", REFUSED, f"turn it off; {_CAPTURE}", _REFUSED, _flag("enable_cuda_graph")),
    Switch("external_cuda_graph", REFUSED, f"turn it off; {_CAPTURE}", _REFUSED, _flag("external_cuda_graph")),
    Switch("optimizer_cuda_graph", REFUSED, f"turn it off; {_CAPTURE}", _REFUSED, _flag("optimizer_cuda_graph")),
    Switch("use_precision_aware_optimizer", REFUSED, "choose the state's format with --forge-recipe",
           _REFUSED, _flag("use_precision_aware_optimizer")),
    Switch("log_num_zeros_in_grad", REFUSED, "no gradient is stored to count zeros in; turn it off",
           _REFUSED, _flag("log_num_zeros_in_grad")),
    Switch("qk_clip", REFUSED, "rewrites weights behind the optimizer; turn it off", _REFUSED, _flag("qk_clip")),
    Switch("optimizer", REFUSED, "use adam, sgd or lion, which are the rules adamw (or adam), sgd and lion; or choose "
           "FORGE's with --forge-rule", _REFUSED, _other_than("optimizer", "adam", "sgd", "lion")),
    Switch(
        "decoupled_weight_decay", SUPPORTED, "--optimizer adam is the rule adamw with it, and adam (L2) without",
        "tests/distributed/test_megatron_rules.py::test_megatrons_own_optimizers",
        lambda facts: False if facts.get("decoupled_weight_decay") is False else None,
    ),
)
# fmt: on


def _saves_torch_dist(facts: Facts) -> str | None:
    kept = facts.get("save") or facts.get("load")
    return "torch_dist" if kept and facts.get("ckpt_format") == "torch_dist" else None


# What is refused beside use_torch_fsdp2 alone, by Megatron itself or because nobody has shown it to be exact.
_NOT_FULLY_SHARDED: tuple[tuple[str, str, Callable[[Facts], Any]], ...] = (
    ("tensor_model_parallel_size", "set it to 1", _above("tensor_model_parallel_size")),
    ("pipeline_model_parallel_size", "set it to 1", _above("pipeline_model_parallel_size")),
    (
        "num_moe_experts",
        "a rank may have no tokens for an expert, whose reduction then differs",
        _above("num_moe_experts", 0),
    ),
    ("mtp_num_layers", "the embedding is gathered once more a depth; turn it off", _above("mtp_num_layers", 0)),
    ("use_distributed_optimizer", "FSDP2 shards the states already; turn it off", _flag("use_distributed_optimizer")),
    ("gradient_accumulation_fusion", "a shard has no main_grad; turn it off", _flag("gradient_accumulation_fusion")),
    ("fp16", "train in bf16", _flag("fp16")),
    ("init_model_with_meta_device", "turn it off", _flag("init_model_with_meta_device")),
    # megatron.training then leaves out the optimizer's load_state_dict(), and with it every step count.
    ("ckpt_format", "a resumed run would count its steps anew; use --ckpt-format torch_dcp", _saves_torch_dist),
)


def switched_on(verdict: str, facts: Facts) -> list[tuple[Switch, Any]]:
    """The switches of one verdict that are on, with their values."""
    found = ((switch, switch.value(facts)) for switch in SWITCHES if switch.verdict == verdict)
    return [(switch, value) for switch, value in found if value is not None]


def check(facts: Facts) -> None:
    """Refuses what is not built, before anything is changed.

    Raises:
        NotImplementedError: one line for each refused switch that is on: its value and the way out.
    """
    refused = [f"{switch.name}={value!r}: {switch.why}" for switch, value in switched_on(REFUSED, facts)]
    if facts.fully_sharded:
        found = ((name, why, value(facts)) for name, why, value in _NOT_FULLY_SHARDED)
        refused += [f"{name}={on!r} with use_torch_fsdp2: {why}" for name, why, on in found if on is not None]
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise NotImplementedError(f"FORGE does not train with these Megatron switches yet:\n{lines}")


def reasons_to_wait(facts: Facts) -> list[str]:
    """Why updates are made at ``step()`` and not in backward, as ``name=value``; empty: in backward."""
    return [f"{switch.name}={value!r}" for switch, value in switched_on(WAITS, facts)]


def markdown(switches: Iterable[Switch] = SWITCHES) -> str:
    """README's table."""
    rows = [f"| `{s.name}` | {s.verdict} | {s.why} | `{s.test}` |" for s in switches]
    return "\n".join(["| switch | | what happens | test |", "|---|---|---|---|", *rows])
