"""Rules that read more than their own coordinate, 20 steps from ``.grad``, against torch.optim, packages and fp64."""

import functools
import math
import sys

import oracles
import oracles_staged
import pytest
import pytorch_optimizer
import torch

from forge_megatron.optimizer import ForgeOptimizer
from forge_megatron.rules import get, rule

STEPS = 20
MATRICES = ((17, 31), (31, 17))
WITH_VECTOR = (*MATRICES, (24,))

muon = torch.optim.Muon
adafactor = torch.optim.Adafactor
lamb = functools.partial(pytorch_optimizer.Lamb, foreach=False, weight_decouple=False, adam_debias=True)
scion = functools.partial(pytorch_optimizer.SCION, foreach=False)
sm3 = functools.partial(pytorch_optimizer.SM3, foreach=False)
lars = functools.partial(pytorch_optimizer.LARS, foreach=False)

# (rule, oracle, what both are given, what ours and what the oracle is given besides, shapes)
PACKAGES = [
    # Entries enough that one rounding of fp32 between the two inputs of Newton-Schulz is seen in bf16.
    ("muon", muon, {"lr": 0.02}, {}, {}, ((64, 96), (96, 64))),
    ("muon", muon, {"lr": 0.01, "nesterov": False, "ns_steps": 3, "weight_decay": 0.5}, {}, {}, MATRICES),
    ("muon", muon, {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.5}, {}, {}, MATRICES),
    ("muon", muon, {"lr": 0.01, "ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 9}, {}, {}, MATRICES),
    ("adafactor", adafactor, {"lr": 0.01}, {}, {}, (*WITH_VECTOR, (3, 4, 5))),
    ("adafactor", adafactor, {"lr": 0.01, "d": 2.0, "beta2_decay": -0.5, "weight_decay": 0.1}, {}, {}, WITH_VECTOR),
    ("adafactor", adafactor, {"lr": 1.0, "eps": (1e-6, 0.01), "maximize": True}, {}, {}, WITH_VECTOR),
    # Above a mean square, a variance and the weights' size.
    ("adafactor", adafactor, {"lr": 0.01, "eps": (0.5, 2.0)}, {}, {}, (*WITH_VECTOR, (3, 4, 5))),
    # The package clamps the weight's norm to 10, and has no bias correction that is the paper's.
    ("lamb", lamb, {"lr": 0.01, "weight_decay": 0.1}, {"bias_correction": False}, {}, ((5, 7), (24,))),
    ("lars", lars, {"lr": 0.1}, {}, {}, WITH_VECTOR),
    ("lars", lars, {"lr": 0.1, "weight_decay": 0.1, "nesterov": True, "dampening": 0.2}, {}, {}, WITH_VECTOR),
    ("lars", lars, {"lr": 0.1, "momentum": 0.0, "maximize": True}, {}, {}, WITH_VECTOR),
    ("sm3", sm3, {"lr": 0.1}, {}, {}, (*WITH_VECTOR, (3, 4, 5))),
    ("sm3", sm3, {"lr": 0.1, "momentum": 0.9, "beta": 0.9}, {}, {}, WITH_VECTOR),
    ("sm3", sm3, {"lr": 0.1, "eps": 0.5}, {}, {}, WITH_VECTOR),
    (
        "scion",
        scion,
        {"lr": 0.01, "scale": 3.0, "weight_decay": 0.1},
        {"norm_type": "sign"},
        {"norm_type": 4},
        MATRICES,
    ),
    (
        "scion",
        scion,
        {"lr": 0.01, "momentum": 0.3, "constraint": True, "scale": 3.0},
        {"norm_type": "rms"},
        {},
        ((24,),),
    ),
]

FP64 = [
    ("lamb", oracles_staged.Lamb64, {"lr": 0.01}, WITH_VECTOR),
    ("adalomo", oracles_staged.AdaLomo64, {"lr": 0.1}, WITH_VECTOR),
    ("adalomo", oracles_staged.AdaLomo64, {"lr": 0.1, "weight_decay": 0.1, "clip_threshold": 0.5}, WITH_VECTOR),
    ("adalomo", oracles_staged.AdaLomo64, {"lr": 0.1, "eps1": 0.5, "eps2": 2.0}, (*WITH_VECTOR, (3, 4, 5))),
    ("adam_mini", oracles_staged.AdamMini64, {"lr": 0.01}, WITH_VECTOR),
    ("adam_mini", oracles_staged.AdamMini64, {"lr": 0.01, "block_rows": 4}, ((12, 5), (24,))),
    ("adam_mini", oracles_staged.AdamMini64, {"lr": 0.01, "block_rows": None, "weight_decay": 0.0}, WITH_VECTOR),
]

#: A step of one length, whatever the gradient's.
UNIT = """
from forge_megatron.rules import Rule, Stages, register
from forge_megatron.rules.stages import STEP_DECAYED, STORE_GRADIENT


def direct(u, statistics, h, whole):
    return u.div_(*whole.norms(u))


STAGES = Stages(STORE_GRADIENT, STEP_DECAYED, direct=direct)

register(
    Rule(
        name="unit",
        regime="deferred",
        states=(),
        defaults={},
        scalars=lambda group, step: (1.0, float(group["lr"])),
        stages_for=lambda group: STAGES,
    )
)
"""


#: The same, by what it measures.
MEASURED_UNIT = """
from forge_megatron.rules import Rule, Stage, Stages, register
from forge_megatron.rules import torch_language as tl
from forge_megatron.rules.stages import STORE_GRADIENT, Measure, over_all


def settle(numbers, statistics, h, layer):
    return (), (numbers[0] * layer.shape.numel(),)


def update(g, w, states, h):
    return w - h[0] * g / tl.sqrt(h[1]), states


MEASURE = Measure(lambda g, w, h: (g * g,), over_all(1), settle)
STAGES = Stages(STORE_GRADIENT, Stage("unit", (), 1, update), measures=(MEASURE,))

register(
    Rule(
        name="unit",
        regime="deferred",
        states=(),
        defaults={},
        scalars=lambda group, step: (float(group["lr"]),),
        stages_for=lambda group: STAGES,
    )
)
"""


def ids(cases):
    return [f"{index}-{case[0]}" for index, case in enumerate(cases)]


def weights(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(shapes):
    """For each step and weight; the scale changes along the run, which with one scale would cancel from ratios."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        yield [torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 2) for shape in shapes]


def train(optimizer, params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    optimizer.zero_grad()


def expect_states(ours: dict, theirs: dict):
    """Every state that both name, in whatever shape."""
    shared = [name for name in ours if name in theirs and name != "step"]
    for name in shared:
        oracles.assert_rounding(ours[name].flatten(), torch.as_tensor(theirs[name]).flatten(), 4)
    return shared


@pytest.mark.parametrize(("name", "oracle", "both", "ours", "theirs", "shapes"), PACKAGES, ids=ids(PACKAGES))
def test_twenty_steps_equal_the_reference_implementation(name, oracle, both, ours, theirs, shapes):
    params, twins = weights(shapes), weights(shapes)
    optimizer, reference = ForgeOptimizer(params, name, **both, **ours), oracle(twins, **both, **theirs)
    for grads in gradients(shapes):
        train(optimizer, params, grads)
        train(reference, twins, grads)
    for p, twin in zip(params, twins, strict=True):
        oracles.assert_rounding(p.detach(), twin.detach(), 8)
        shared = expect_states(optimizer.state[p], reference.state[twin])
        assert shared or set(optimizer.state[p]) == {"step"}


@pytest.mark.parametrize(("name", "oracle", "hyperparameters", "shapes"), FP64, ids=ids(FP64))
def test_twenty_steps_equal_fp64(name, oracle, hyperparameters, shapes):
    params = weights(shapes)
    optimizer, exact = ForgeOptimizer(params, name, **hyperparameters), oracle(**hyperparameters)
    wanted, states = [p.detach().double() for p in params], [{} for _ in params]
    for t, grads in enumerate(gradients(shapes), start=1):
        train(optimizer, params, grads)
        for index, g in enumerate(grads):
            wanted[index] = exact.step(wanted[index], states[index], g.double(), t)
    for p, w, state in zip(params, wanted, states, strict=True):
        oracles.assert_rounding(p.detach(), w, 8)
        assert expect_states(optimizer.state[p], state) == list(state)


@pytest.mark.parametrize("source", [UNIT, MEASURED_UNIT], ids=["matrix stage", "measure"])
def test_a_rule_in_stages_is_one_short_file(source, tmp_path, monkeypatch):
    (tmp_path / "unit.py").write_text(source)
    assert len(source.splitlines()) < 30
    monkeypatch.setattr("forge_megatron.rules.deferred.__path__", [str(tmp_path)])
    monkeypatch.setattr(rule, "_registry", dict(rule._registry))
    sys.modules.pop("forge_megatron.rules.deferred.unit", None)
    params = weights(WITH_VECTOR)
    optimizer = ForgeOptimizer(params, "unit", lr=0.5)
    wanted = [p.detach().double() for p in params]
    for grads in gradients(WITH_VECTOR):
        train(optimizer, params, grads)
        wanted = [w - 0.5 * g.double() / g.double().norm() for w, g in zip(wanted, grads, strict=True)]
    for p, w in zip(params, wanted, strict=True):
        oracles.assert_rounding(p.detach(), w, 8)


@pytest.mark.parametrize("shape", [*MATRICES, (6, 4, 3, 2)])
def test_scions_spectral_step_equals_the_packages_up_to_a_rounding_of_bf16(shape):
    """Both iterate in bf16, with products in another order, so an entry of the factor may round the other way."""
    (p,), (twin,) = weights([shape]), weights([shape])
    optimizer, reference = ForgeOptimizer([p], "scion", lr=0.01, scale=2.0), scion([twin], lr=0.01, scale=2.0)
    for grads in gradients([shape]):
        train(optimizer, [p], grads)
        train(reference, [twin], grads)
    largest = 0.01 * 2.0 * 1.5 * (shape[0] / shape[1]) ** 0.5 / math.prod(shape[2:])
    torch.testing.assert_close(p, twin, rtol=0, atol=STEPS * largest * torch.finfo(torch.bfloat16).eps)
    expect_states(optimizer.state[p], reference.state[twin])


PROJECTED = [
    ("galore", oracles_staged.Galore64, {"rank": 4, "proj": "svd"}, {}),
    ("galore", oracles_staged.Galore64, {"rank": 4, "scale": 0.5}, {"scale": 0.5}),
    ("galore", oracles_staged.Galore64, {"rank": 99, "correct_bias": False}, {"correct_bias": False}),
    ("apollo", oracles_staged.Apollo64, {"rank": 4}, {}),
    ("apollo", oracles_staged.Apollo64, {"rank": 4, "proj": "svd", "scale": 4.0}, {"scale": 4.0}),
    ("apollo_mini", oracles_staged.Apollo64, {}, {"scale": 128.0, "scale_type": "tensor"}),
]


@pytest.mark.parametrize(("name", "oracle", "ours", "theirs"), PROJECTED, ids=ids(PROJECTED))
def test_low_rank_steps_equal_fp64_on_the_projections_that_they_chose(name, oracle, ours, theirs):
    params = weights(WITH_VECTOR)
    both = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = ForgeOptimizer(params, name, update_proj_gap=7, **both, **ours)
    wanted, states = [p.detach().double() for p in params], [{} for _ in params]
    for t, grads in enumerate(gradients(WITH_VECTOR), start=1):
        train(optimizer, params, grads)
        for index, (p, g) in enumerate(zip(params, grads, strict=True)):
            projection = optimizer.state[p].get("projection")
            exact = oracle(**both, **theirs, projection=None if projection is None else projection.double())
            wanted[index] = exact.step(wanted[index], states[index], g.double(), t)
    for p, w, state in zip(params, wanted, states, strict=True):
        oracles.assert_rounding(p.detach(), w, 16)
        assert expect_states(optimizer.state[p], state) == list(state)


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize(("proj", "bound"), [("svd", 1e-5), ("range_finder", 1e-3)])
def test_a_projection_spans_the_leading_singular_vectors(shape, proj, bound):
    generator = torch.Generator().manual_seed(3)
    vectors, _, covectors = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    g = vectors @ torch.diag(0.5 ** torch.arange(17.0)) @ covectors
    (p,) = weights([shape])
    optimizer = ForgeOptimizer([p], "galore", lr=0.01, rank=3, proj=proj)
    train(optimizer, [p], [g])
    basis = optimizer.state[p]["projection"]
    ours, exact = (basis, covectors[:3]) if shape[0] >= shape[1] else (basis.t(), vectors[:, :3].t())
    # Vector by vector, up to the sign: the states lie in this basis.
    torch.testing.assert_close((ours @ exact.t()).abs(), torch.eye(3), rtol=0, atol=bound)


def test_random_projections_differ_between_weights_and_refreshes_and_not_between_runs():
    def projections():
        params = weights([(8, 5), (8, 5)])
        optimizer = ForgeOptimizer(params, "apollo", lr=0.01, rank=2, update_proj_gap=2)
        drawn = []
        for _ in range(3):
            train(optimizer, params, [torch.ones(8, 5)] * 2)
            drawn.append([optimizer.state[p]["projection"].clone() for p in params])
        return drawn

    first, again = projections(), projections()
    assert torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[1][0], first[2][0])
    assert not torch.equal(first[0][0], first[0][1])
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("row_split", "parts"),
    [
        (4, [[r, r + 1, r + 2, r + 3] for r in range(0, 24, 4)]),
        ((8, 8, 4, 4), [range(8), range(8, 16), range(16, 20), range(20, 24)]),
        # Two query groups, each with 4 rows of queries before 4 of keys and 4 of values.
        ((4, 4, 4), [[*range(4), *range(12, 16)], [*range(4, 8), *range(16, 20)], [*range(8, 12), *range(20, 24)]]),
    ],
)
def test_the_matrices_in_a_fused_weight_are_stepped_like_separate_ones(row_split, parts):
    parts = [list(part) for part in parts]
    (p,) = weights([(24, 10)])
    twins = [torch.nn.Parameter(p.detach()[part].clone()) for part in parts]
    optimizer, reference = ForgeOptimizer([p], "muon", lr=0.01, row_split=row_split), muon(twins, lr=0.01)
    for (g,) in gradients([(24, 10)]):
        train(optimizer, [p], [g])
        train(reference, twins, [g[part] for part in parts])
    for twin, part in zip(twins, parts, strict=True):
        # A stack of matrices is multiplied in another order than one: bf16 may round the other way.
        atol = STEPS * 0.01 * 1.5 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(p.detach()[part], twin.detach(), rtol=0, atol=atol)


def test_muon_without_a_split_mixes_what_a_fused_weight_holds():
    """What the split is for: one orthogonalisation over queries, keys and values is another update."""
    (p,), (whole,) = weights([(24, 10)]), weights([(24, 10)])
    split, plain = ForgeOptimizer([p], "muon", lr=0.01, row_split=(8, 8, 8)), ForgeOptimizer([whole], "muon", lr=0.01)
    for optimizer, q in ((split, p), (plain, whole)):
        train(optimizer, [q], next(gradients([(24, 10)])))
    assert (p - whole).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "hyperparameters", "message"),
    [
        ("muon", {"ns_steps": 100}, "ns_steps=100"),
        ("muon", {"ns_steps": 2.0}, r"ns_steps=2\.0"),
        ("muon", {"momentum": -0.1}, r"momentum=-0\.1"),
        ("muon", {"momentum": "0.9"}, "momentum='0.9'"),
        ("muon", {"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms'"),
        ("muon", {"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1\.0, 2\.0\)"),
        ("muon", {"ns_coefficients": 2.0}, r"ns_coefficients=2\.0"),
        ("muon", {"ns_coefficients": "abc"}, "ns_coefficients='abc'"),
        ("muon", {"ns_coefficients": (1.0, math.nan, 2.0)}, r"ns_coefficients\[1\]=nan"),
        ("muon", {"row_split": (4, 0)}, r"row_split=\(4, 0\)"),
        ("muon", {"row_split": 4.0}, r"row_split=4\.0"),
        ("scion", {"momentum": 0.0}, r"momentum=0\.0"),
        ("scion", {"momentum": None}, "momentum=None"),
        ("scion", {"scale": "3"}, "scale='3'"),
        ("scion", {"norm_type": 2}, "norm_type=2"),
        ("scion", {"constraint": True, "weight_decay": 0.1}, r"weight_decay=0\.1 with constraint=True"),
        ("adafactor", {"beta2_decay": 0.1}, "beta2_decay"),
        ("adafactor", {"d": 0.5}, r"d=0\.5"),
        ("adafactor", {"beta2_decay": None}, "beta2_decay=None"),
        ("adafactor", {"eps": 1e-3}, r"eps=0\.001"),
        ("adafactor", {"eps": ("1", 1e-3)}, r"eps\[0\]='1'"),
        ("adafactor", {"eps": (None, -1.0)}, r"eps\[1\]=-1\.0"),
        ("adalomo", {"decay_rate": 0.8}, r"decay_rate=0\.8"),
        ("adalomo", {"decay_rate": "x"}, "decay_rate='x'"),
        ("sm3", {"beta": 1.0}, r"beta=1\.0"),
        ("lars", {"trust_coefficient": -1.0}, "trust_coefficient"),
        ("adam_mini", {"block_rows": 0}, "block_rows=0"),
        ("galore", {"rank": 0}, "rank=0"),
        ("galore", {"rank": True}, "rank=True"),
        ("galore", {"proj": "random"}, "proj='random'"),
        ("apollo", {"scale_type": "row"}, "scale_type='row'"),
        ("apollo_mini", {"update_proj_gap": 1.5}, r"update_proj_gap=1\.5"),
    ],
)
def test_a_refused_value_is_named(name, hyperparameters, message):
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        get(name).resolve({"lr": 0.01, **hyperparameters})


@pytest.mark.parametrize(
    ("name", "hyperparameters", "shape", "message"),
    [
        ("muon", {}, (5,), r"head\.bias: muon steps matrices.*adamw=dict\(lr=\.\.\.\)"),
        # Field log row 115.
        ("muon", {"row_split": (2048, 256, 256)}, (4608, 8), r"head\.bias: muon: row_split.*4608 rows"),
        ("scion", {"norm_type": "spectral"}, (5,), r"head\.bias: scion: norm_type='spectral'"),
        ("adam_mini", {"block_rows": 4}, (6, 2), r"head\.bias: adam_mini: block_rows=4"),
        ("galore", {}, (2, 3, 4), r"head\.bias: galore projects matrices.*rule=\"adamw\""),
    ],
)
def test_a_shape_that_a_rule_cannot_step_is_refused_by_the_parameters_name(name, hyperparameters, shape, message):
    with pytest.raises(ValueError, match=message):
        ForgeOptimizer([("head.bias", torch.nn.Parameter(torch.zeros(shape)))], name, lr=0.01, **hyperparameters)
