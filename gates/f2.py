"""F2: what a fully sharded forward gathers is what the last step left, on every rank and replica.

Catches a gather that ran before the step that it must see, a gathered copy that outlived a step, and replicas of a
shard that part.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading


def measure(case: Case) -> list[Reading]:
    import torch

    from gates.sharded import Arm, sharded, steps, tokens_of

    arms = {
        "on arrival": Arm(),
        "kept after forward": Arm(reshard=False, evaluate=True),
        "waiting": Arm(micro_batches=2, reshard=False, evaluate=True),
    }
    if case.degrees.dp % 2 == 0:
        arms["replicated shards"] = Arm(replicas=2)
    readings = []
    for how, arm in arms.items():
        model, optimizer = sharded(case, arm)
        parameters = dict(model.named_parameters())
        between, behind = [], []
        for step, _ in enumerate(steps(case, arm, model, optimizer)):
            shards = {name: p.detach().full_tensor() for name, p in parameters.items()}
            gathered = _gathered(model, tokens_of(case, step, 0, 0))
            behind += [(gathered[name] - whole).abs().max() for name, whole in shards.items()]
            between += [_spread(whole) for whole in gathered.values()]
        readings += [
            Reading(f"drift of gathered weights between ranks, {how}", torch.stack(between).max().item(), 0.0),
            Reading(f"gathered weights less the shards, {how}", torch.stack(behind).max().item(), 0.0),
        ]
    return readings


def _gathered(model, tokens):
    """Copies of the weights that a forward multiplies with; it leaves nothing gathered."""
    import torch

    found = {}

    def copy(module, _):
        for name, p in module.named_parameters(recurse=False):
            found[module, name] = p.detach().clone()

    handles = [module.register_forward_pre_hook(copy) for module in model.modules()]
    with torch.no_grad():
        model(tokens[:, :-1])
    for handle in handles:
        handle.remove()
    for block in (*model.blocks, model):
        block.reshard()
    prefixes = {module: f"{prefix}." if prefix else "" for prefix, module in model.named_modules()}
    return {prefixes[module] + name: copied for (module, name), copied in found.items()}


def _spread(tensor):
    """Largest difference of ``tensor`` from any rank's; NaN stays."""
    import torch
    import torch.distributed as dist

    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return (torch.stack(copies) - tensor).abs().max()


GATE = Gate(
    id="F2",
    compares="the weights that a fully sharded forward gathers, on every rank, against the stepped shards",
    axis="dp",
    least=2,
    shardings=("full",),
    sp=(False,),
    dtypes=("fp32",),
    measure=measure,
)
