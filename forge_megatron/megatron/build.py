"""From a Megatron model to a Megatron optimizer, in the two places where Megatron builds them.

Order: :func:`prepare` on the built model, then Float16Module and DDP, then :func:`get_forge_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunMode
from torch import Tensor, nn

from forge_megatron import rules
from forge_megatron.coordinator import find_shards
from forge_megatron.formats import RECIPES, weight_store
from forge_megatron.megatron import domains, fully_sharded
from forge_megatron.megatron.checkpoint import Layout
from forge_megatron.megatron.codes import store_as_codes, stores_codes
from forge_megatron.megatron.conversion import Conversion, conversion_of, convert, global_names, unwrap
from forge_megatron.megatron.ddp import observe
from forge_megatron.megatron.domains import Domain
from forge_megatron.megatron.head import fuse, models_with_head
from forge_megatron.megatron.layers import ForgeColumnParallelLinear, ForgeRowParallelLinear
from forge_megatron.megatron.matrices import expect_matrices, groups_of
from forge_megatron.megatron.optimizer import ForgeChainedOptimizer, ForgeMegatronOptimizer
from forge_megatron.megatron.origins import origins
from forge_megatron.megatron.rule import hyperparameters, megatrons
from forge_megatron.megatron.stages import expect_experts_on_every_stage, expect_weights_on_every_stage
from forge_megatron.megatron.switches import Facts, check, reasons_to_wait
from forge_megatron.megatron.wholes import wholes
from forge_megatron.optimizer import ForgeOptimizer
from forge_megatron.rules import Rule

# Whose weights may be stored as codes.
_LINEARS = (ForgeColumnParallelLinear, ForgeRowParallelLinear)
_UPDATES = ("auto", "backward", "step")


@dataclass(frozen=True)
class ForgeOptions:
    """The ``--forge-*`` arguments.

    Attributes:
        rule: the rule of the owned weights; None: what Megatron's ``--optimizer`` means.
        hyperparameters: the rule's, over those that Megatron's config gives.
        recipe: state format and weight store of the owned weights; None: the parameter's dtype, nearest.
        update: ``"backward"``, ``"step"`` (wait), or ``"auto"``: in backward unless a switch waits.
        backend: ``"auto"``, or one of :data:`~forge_megatron.kernels.backend.BACKENDS` by name.
        seed: of stochastic rounding; the same on every rank.
        accumulation_dtype: of a 16-bit weight's sum of micro-batches, where it takes less than their factors: fp32, or
            bf16, as Megatron's own are without ``grad_reduce_in_fp32``.
    """

    rule: str | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    update: str = "auto"
    backend: str = "auto"
    seed: int = 0
    accumulation_dtype: torch.dtype = torch.float32

    def __post_init__(self):
        if self.update not in _UPDATES:
            raise ValueError(f"update={self.update!r} is unknown; use one of {', '.join(_UPDATES)}")


def prepare(model_chunks: Iterable[nn.Module], *further_configs: object, fused_head: bool = False) -> list[Conversion]:
    """Swaps the linears' classes and keeps the owned weights out of the gradient buffers to come.

    Call it on the built model, before Float16Module, DDP and the optimizer. Changes nothing if it raises, and nothing
    under ``use_torch_fsdp2``, where FSDP2 owns the weights.

    Args:
        model_chunks: the model, one chunk a virtual pipeline stage.
        further_configs: DistributedDataParallelConfig (or TorchFullyShardedDataParallelConfig), OptimizerConfig and
            Megatron's arguments, where they are known already.
        fused_head: the loss forms the logits by blocks of the vocabulary, so that neither they nor the head's
            gradient exist whole; a model that is called without labels returns its logits as always.

    Raises:
        NotImplementedError: a switch that is not built, by name.
        ValueError: there is no weight that FORGE could step.
    """
    model_chunks = list(model_chunks)
    facts = _facts(model_chunks, *further_configs)
    check(facts)
    if facts.fully_sharded:
        if fused_head:
            raise NotImplementedError(
                "fused_head with use_torch_fsdp2 reads the weight of an output layer that is not called; leave it out"
            )
        return []
    heads = models_with_head(model_chunks) if fused_head else []
    conversions = [convert(chunk) for chunk in model_chunks]
    reasons = {reason for conversion in conversions for reason in conversion.kept.values()}
    owned, device = _owned(conversions), next(model_chunks[0].parameters()).device
    experts = sum(map(domains.is_expert, owned))
    expect_weights_on_every_stage(
        len(owned) - experts,
        f"FORGE found no weight that it can step ({'; '.join(sorted(reasons))}); "
        "with Transformer Engine, build the model from forge_megatron.megatron.spec",
        device,
    )
    expect_experts_on_every_stage(experts, device)
    for model in heads:
        fuse(model)
    for conversion in conversions:
        conversion.exclude()
    return conversions


def get_forge_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: dict | None = None,
    *,
    options: ForgeOptions | None = None,
    num_microbatches: int | None = None,
    rerun_mode: RerunMode = RerunMode.DISABLED,
    **megatron_arguments: Any,
) -> ForgeChainedOptimizer:
    """``megatron.core.optimizer.get_megatron_optimizer`` with the owned weights stepped by FORGE.

    Args:
        config: Megatron's optimizer config; its optimizer and hyperparameters are the rule's unless ``options`` say
            otherwise.
        model_chunks: the chunks that :func:`prepare` saw, wrapped by DDP or not, or by TorchFullyShardedDataParallel.
        config_overrides: as Megatron's.
        options: rule, recipe, time of update, backend.
        num_microbatches: a step; default: Megatron's calculator.
        rerun_mode: of Megatron's rerun state machine.
        megatron_arguments: further arguments of ``get_megatron_optimizer``.

    Returns:
        A ``ChainedOptimizer`` for Megatron's training loop.

    Raises:
        RuntimeError: :func:`prepare` was not called before DDP was built.
        NotImplementedError: a switch that is not built, by name.
        TypeError: a hyperparameter that the rule does not have.
        ValueError: an unknown rule; ``update="backward"`` beside a switch that waits, by name.
    """
    options = options or ForgeOptions()
    conversions = [conversion_of(chunk) for chunk in model_chunks]
    if any(conversion is None for conversion in conversions) and not fully_sharded.wraps(model_chunks):
        raise RuntimeError("call forge_megatron.megatron.prepare(model_chunks) before DDP is built")
    ddp_configs = [chunk.ddp_config for chunk in model_chunks if hasattr(chunk, "ddp_config")]
    facts = _facts(model_chunks, config, *ddp_configs, num_microbatches=num_microbatches, rerun_mode=rerun_mode)
    check(facts)
    waits = _choose_update(options.update, reasons_to_wait(facts))
    if facts.fully_sharded:
        fully_sharded.expect_steppable(model_chunks, _rule(config, options), options)
        taken = fully_sharded.trained(model_chunks)
    else:
        taken = _owned(conversions)
        expect_matrices(_rule(config, options), taken)

    for weight in taken:
        weight.requires_grad_(False)
    try:
        theirs = megatron_optimizer.get_megatron_optimizer(config, model_chunks, config_overrides, **megatron_arguments)
    finally:
        # Earlier, Megatron's optimizer would track the weights a second time.
        for weight in taken:
            weight.requires_grad_(True)
    paired, alone = domains.split(theirs, config, model_chunks, taken)
    groups, names = _groups(config, model_chunks, config_overrides)
    optimizers = []
    for domain, beside in paired:
        owned = domain.of(taken)
        members = [group for group in groups if group["is_expert_parallel"] == domain.is_expert]
        layout = Layout(members, names, frozenset(map(id, owned)), domain.named_group)
        if facts.fully_sharded:
            forge = _sharded_forge(config, options, layout, model_chunks, waits, facts)
        else:
            forge = _forge(config, options, layout, owned, model_chunks, waits, domain, facts)
        groups_of_ranks = {"tp_group": domain.tensor_group, "shard_group": domain.shard_group}
        optimizers.append(ForgeMegatronOptimizer(beside, forge, layout, waits=waits, **groups_of_ranks))
    for chunk in model_chunks:
        (fully_sharded.observe if facts.fully_sharded else observe)(chunk, optimizers)
    return ForgeChainedOptimizer([*optimizers, *alone])


def _choose_update(update: str, reasons: list[str]) -> bool:
    if update == "backward" and reasons:
        raise ValueError(
            f"update='backward' cannot be exact with {', '.join(reasons)}; turn these off, or use update='auto'"
        )
    return update == "step" or bool(reasons)


def _facts(
    model_chunks: Sequence[nn.Module],
    *configs: object,
    num_microbatches: int | None = None,
    rerun_mode: RerunMode = RerunMode.DISABLED,
) -> Facts:
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    constant = num_microbatches_calculator.ConstantNumMicroBatchesCalculator
    if num_microbatches is None:
        # None: a loop of its own.
        num_microbatches = 1 if calculator is None else calculator.get()
    sharded = fully_sharded.wraps(model_chunks) or fully_sharded.asked_for(configs)
    return Facts(
        configs=(unwrap(model_chunks[0]).config, *configs),
        num_microbatches=num_microbatches,
        microbatches_change=None if isinstance(calculator, constant | None) else type(calculator).__name__,
        sums_end_here=not sharded and domains.sums_end_here(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        rerun_mode=RerunMode(rerun_mode).value,
        fully_sharded=sharded,
    )


def _owned(conversions: Iterable[Conversion]) -> list[Tensor]:
    return [weight for conversion in conversions for weight in conversion.owned.values()]


def _groups(
    config: OptimizerConfig, model_chunks: Sequence[nn.Module], config_overrides: dict | None
) -> tuple[list[dict[str, Any]], dict[Tensor, str]]:
    """Megatron's own grouping (decay, learning rate and its multipliers) over all parameters, and their names."""
    if config_overrides is None and "get_standard_config_overrides" in vars(megatron_optimizer):
        config_overrides = megatron_optimizer.get_standard_config_overrides(config)
    groups = megatron_optimizer._get_param_groups(list(model_chunks), config, config_overrides)
    names = {}
    for model in map(unwrap, model_chunks):
        known = global_names(model)
        names.update((p, known[name]) for name, p in model.named_parameters())
    return groups, names


def _is_stochastic(recipe: str | None) -> bool:
    return recipe in RECIPES and weight_store(RECIPES[recipe][1]).stochastic


def _rule(config: OptimizerConfig, options: ForgeOptions) -> Rule:
    return megatrons(config) if options.rule is None else rules.get(options.rule)


def _forge(
    config: OptimizerConfig,
    options: ForgeOptions,
    layout: Layout,
    owned: Sequence[Tensor],
    model_chunks: Sequence[nn.Module],
    waits: bool,
    domain: Domain,
    facts: Facts,
) -> ForgeOptimizer:
    buckets = domain.buckets(facts)
    rule = _rule(config, options)
    model = unwrap(model_chunks[0]).config
    groups: list[dict[str, Any]] = []
    places = None if rule.regime == "fused" else wholes(model_chunks, owned, domain.tensor_group)
    for group in layout.groups:
        members = [(layout.names[p], p) for p in group["params"] if layout.owns(p)]
        if members:
            named = {} if options.rule is None else {"rule": rule.name}
            groups += groups_of(rule, options.hyperparameters, config, model, {**group, **named}, members, places)
    forge = ForgeOptimizer(
        groups,
        rule.name,
        **hyperparameters(config, rule, options.hyperparameters),
        recipe=options.recipe,
        backend=options.backend,
        seed=options.seed,
        origins=origins(model_chunks, owned) if _is_stochastic(options.recipe) else None,
        wholes=places,
        waiting=waits,
        accumulation_steps=None if waits else facts.num_microbatches,
        accumulation_dtype=options.accumulation_dtype,
        gradient_scale=domains.scale(facts),
        buckets=buckets,
        **domain.sharding(facts),
        process_group=None if buckets is None else domain.data_group,
    )
    if stores_codes(options.recipe) and store_as_codes(model_chunks, owned, _LINEARS):
        forge.register()
    for weight in owned:
        # As in every later window, so that a run that is resumed adds up in the same order.
        owned_weight = forge.own(weight, layout.names[weight])
        owned_weight.last_window = facts.num_microbatches
        if facts.microbatches_change:
            # The length of the window before is in no checkpoint of Megatron's.
            owned_weight.scheduled = num_microbatches_calculator.get_num_microbatches
    forge.synchronize()
    return forge


def _sharded_forge(
    config: OptimizerConfig,
    options: ForgeOptions,
    layout: Layout,
    model_chunks: Sequence[nn.Module],
    waits: bool,
    facts: Facts,
) -> ForgeOptimizer:
    """Of all parameters, which FSDP2 has sharded."""
    rule = _rule(config, options)
    names = {p: layout.names.get(p, name) for chunk in model_chunks for name, p in chunk.named_parameters()}
    forge = ForgeOptimizer(
        [part for group in layout.groups for part in fully_sharded.groups_of(config, options, rule, group, names)],
        rule.name,
        **hyperparameters(config, rule, options.hyperparameters),
        recipe=options.recipe,
        backend=options.backend,
        seed=options.seed,
        waiting=waits,
        accumulation_steps=None if waits else facts.num_microbatches,
        shards=[group for chunk in model_chunks for group in find_shards(chunk, names)],
    )
    forge.watch()
    forge.synchronize()
    return forge
