"""Every rule, captured, beside its reference, which stores its gradients; fp32 states in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.hidden import with_adamw
from launch.bench import references
from launch.bench.arm import PARITY_BOUND, Arm, Settings, Several
from launch.bench.peers import APOLLO, GALORE

#: Newton-Schulz runs in bf16 in both: two orders of a gradient's sum put some of its input's entries on two sides of
#: a rounding of 2^-8, 1.2e-2 of a step. A decay that is left out, a wrong momentum or scale is above 4e-2.
NEWTON_SCHULZ_BOUND = 3e-2


#: Elements of the largest matrix of which GaLore's reference takes an SVD: those of the parity check. It would take
#: hours of a large model's; the timed steps are those between two refreshes, 200 steps apart, of both.
MOST_FOR_SVD = 1 << 20


@dataclass(frozen=True)
class Case:
    """One rule.

    Attributes:
        reference: ``reference(copy, lr=..., **both) -> optimizer``, of one fp32 parameter, or of a list of groups.
        rate: its learning rate, as a multiple of AdamW's.
        both: hyperparameters of both; ``ours``, ``theirs``: what only one of them asks for.
        matrices: for hidden matrices; AdamW steps the rest.
        bound: of the parity check.
        package: what the reference needs.
    """

    reference: Callable
    rate: float = 1.0
    both: Mapping = field(default_factory=dict)
    ours: Mapping = field(default_factory=dict)
    theirs: Mapping = field(default_factory=dict)
    matrices: bool = False
    bound: float | None = PARITY_BOUND
    package: str | None = None


def _package(name: str) -> Callable:
    def make(params, **hyperparameters):
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(params, foreach=False, **hyperparameters)

    return make


def _galore(params, **hyperparameters):
    from galore_torch import GaLoreAdamW

    optimizer = GaLoreAdamW([{"params": params, **GALORE}], no_deprecation_warning=True, **hyperparameters)
    for p in params:
        if p.numel() > MOST_FOR_SVD:
            optimizer.state[p].update(step=1, projector=_between_refreshes(p))
    return optimizer


def _between_refreshes(p: torch.Tensor):
    """The package's projector of a matrix, as the SVD of an update before has left it: orthonormal vectors."""
    from galore_torch.galore_projector import GaLoreProjector

    projector = GaLoreProjector(**GALORE)
    vectors = torch.linalg.qr(torch.randn(min(p.shape), GALORE["rank"], device=p.device)).Q
    projector.ortho_matrix = vectors.t() if p.shape[0] >= p.shape[1] else vectors
    return projector


def _apollo(params, options: Mapping = MappingProxyType(APOLLO), **hyperparameters):
    from apollo_torch import APOLLOAdamW

    return APOLLOAdamW([{"params": params, **options}], **hyperparameters)


_FUSED = {"fused": True}
_ONE_BY_ONE = {"foreach": False}
_MINI = {**APOLLO, "rank": 1, "scale": 128.0, "scale_type": "tensor"}
_OPTIM = "pytorch_optimizer"

CASES: dict[str, Case] = {
    "sgd": Case(torch.optim.SGD, 100.0, {"weight_decay": 0.01}, theirs=_FUSED),
    "momentum": Case(torch.optim.SGD, 10.0, {"momentum": 0.9, "weight_decay": 0.01}, theirs=_FUSED),
    "adagrad": Case(torch.optim.Adagrad, 10.0, {"weight_decay": 0.01}, theirs=_ONE_BY_ONE),
    "rmsprop": Case(torch.optim.RMSprop, 1.0, {"weight_decay": 0.01}, theirs=_ONE_BY_ONE),
    "adam": Case(torch.optim.Adam, 1.0, {"weight_decay": 0.01}, theirs=_FUSED),
    "adamw": Case(torch.optim.AdamW, 1.0, {"weight_decay": 0.01}, theirs=_FUSED),
    "adamax": Case(torch.optim.Adamax, 1.0, {"weight_decay": 0.01}, theirs=_ONE_BY_ONE),
    "nadam": Case(torch.optim.NAdam, 1.0, {"weight_decay": 0.01}, theirs=_ONE_BY_ONE),
    "radam": Case(torch.optim.RAdam, 1.0, {"weight_decay": 0.01}, theirs=_ONE_BY_ONE),
    "lion": Case(_package("Lion"), 0.1, {"weight_decay": 1.0}, package=_OPTIM),
    "lamb": Case(references.Lamb, 10.0, {"weight_decay": 0.01}),
    "muon": Case(torch.optim.Muon, 10.0, {"weight_decay": 0.1}, matrices=True, bound=NEWTON_SCHULZ_BOUND),
    "scion": Case(_package("SCION"), 10.0, matrices=True, bound=NEWTON_SCHULZ_BOUND, package=_OPTIM),
    "adam_mini": Case(references.AdamMini, 1.0, {"weight_decay": 0.1}),
    "adafactor": Case(torch.optim.Adafactor, 10.0, theirs=_ONE_BY_ONE),
    "adalomo": Case(references.AdaLomo, 10.0),
    "sm3": Case(_package("SM3"), 10.0, package=_OPTIM),
    "lars": Case(_package("LARS"), 1000.0, {"weight_decay": 0.01}, package=_OPTIM),
    # Ours finds its projection from the factors and draws other random numbers: the distance is reported.
    "galore": Case(_galore, 1.0, ours={"rank": 128}, matrices=True, bound=None, package="galore-torch"),
    "apollo": Case(_apollo, 1.0, ours={"rank": 256}, matrices=True, bound=None, package="apollo-torch"),
    "apollo_mini": Case(partial(_apollo, options=_MINI), 1.0, matrices=True, bound=None, package="apollo-torch"),
}


def _hidden(model: nn.Module, settings: Settings) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices that a rule of matrices steps, and the rest, as forge.attach's ``adamw=`` divides them."""
    groups = with_adamw(model, [{"params": list(model.named_parameters())}], settings.adamw)
    hidden = [p for group in groups if "rule" not in group for _, p in group["params"]]
    return hidden, [p for group in groups if "rule" in group for _, p in group["params"]]


def _attach(name: str, case: Case, state_format: str | None, model: nn.Module, settings: Settings):
    rest = {"adamw": settings.adamw} if case.matrices else {}
    hyperparameters = {"lr": case.rate * settings.lr, **case.both, **case.ours}
    return forge.attach(model, name, state_format=state_format, **rest, **hyperparameters)


def _reference(case: Case, model: nn.Module, settings: Settings):
    hidden = set(_hidden(model, settings)[0]) if case.matrices else set(model.parameters())
    of_the_rule = {name for name, p in model.named_parameters() if p in hidden}
    hyperparameters = {"lr": case.rate * settings.lr, **case.both, **case.theirs}

    def make(name: str, copy: nn.Parameter):
        if name in of_the_rule:
            return case.reference([copy], **hyperparameters)
        return torch.optim.AdamW([copy], **settings.adamw, fused=True)

    return references.Fp32States(model.named_parameters(), make)


def muon_stored(model: nn.Module, settings: Settings, **how):
    """torch's Muon as it comes: momentum in the weight's dtype, every gradient in memory at ``step()``."""
    hidden, rest = _hidden(model, settings)
    case = CASES["muon"]
    muon = torch.optim.Muon(hidden, lr=case.rate * settings.lr, **case.both)
    return Several(muon, torch.optim.AdamW(rest, **settings.adamw, fused=True, **how))


def lion_stored(model: nn.Module, settings: Settings):
    """The package's Lion as it comes: momentum in the weight's dtype, all parameters at once, gradients in memory."""
    case = CASES["lion"]
    from pytorch_optimizer import Lion

    return Lion(model.parameters(), lr=case.rate * settings.lr, foreach=True, **case.both)


def _refreshing(name: str) -> Arm:
    """Every step finds its projections anew: what the one step in 200 takes that does so."""
    case = CASES[name]
    case = replace(case, ours={**case.ours, "update_proj_gap": 1})
    reference = f"{name}-reference"
    how = {"bound": None, "approximate": True, "stepwise": True}
    return Arm(partial(_attach, name, case, "fp32"), judge=reference, against=f"forge-{name}", **how)


def arms() -> dict[str, Arm]:
    """``RULE-reference`` and ``forge-RULE`` of each rule.

    Muon's and Lion's also with the momentum in the weight's dtype, Lion's with it in 8 bits.
    """
    made: dict[str, Arm] = {}
    for name, case in CASES.items():
        reference = f"{name}-reference"
        made[reference] = Arm(partial(_reference, case), judge=None, against=reference, package=case.package)
        made[f"forge-{name}"] = Arm(
            partial(_attach, name, case, "fp32"),
            judge=reference,
            bound=case.bound,
            approximate=case.bound is None,
            stepwise=True,
            against=reference,
            captured=True,
        )
    for name in ("galore", "apollo"):
        made[f"forge-{name}-refresh"] = _refreshing(name)
    lion = {"judge": "lion-reference", "stepwise": True, "against": "lion-stored"}
    made["lion-stored"] = Arm(lion_stored, package=_OPTIM, **lion)
    made["forge-lion-bf16"] = Arm(partial(_attach, "lion", CASES["lion"], None), captured=True, **lion)
    for state_format in ("int8", "fp8"):
        attach = partial(_attach, "lion", CASES["lion"], state_format)
        made[f"forge-lion-{state_format}"] = Arm(attach, bound=None, captured=True, **lion)
    muon = partial(_attach, "muon", CASES["muon"], None)
    for end, how in (("", {}), ("-captured", {"capturable": True})):
        both = {"judge": "muon-reference", "bound": NEWTON_SCHULZ_BOUND, "captured": bool(how)}
        both["against"] = f"muon-stored{end}"
        made[f"muon-stored{end}"] = Arm(partial(muon_stored, **how), **both)
        made[f"muon-fused{end}"] = Arm(muon, **both)
    return made
