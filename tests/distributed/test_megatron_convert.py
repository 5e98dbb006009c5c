"""Which weights FORGE takes of a built model, what it leaves, and the layer specs."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from megatron_harness import Case, Run, Workers, build_model, gap, owned_state, transformer_config

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

FORGE = Case(layers=4, clip=0.0)
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _forge(case: Case) -> Case:
    return case.with_forge()


@workers
def _taken() -> dict:
    from forge_megatron.megatron import convert

    found = {}
    for tied in (False, True):
        model = build_model(Case(tied=tied))
        parameters = list(model.parameters())
        conversion = convert(model)
        found[tied] = {
            "owned": set(conversion.owned),
            "kept": conversion.kept,
            "names": {name for name, _ in model.named_parameters()},
            "same": all(a is b for a, b in zip(parameters, model.parameters(), strict=True)),
            "again": convert(model) is conversion,
        }
    return found


def test_every_tensor_parallel_linear_and_the_embedding_are_taken(results):
    linears = {f"decoder.layers.{layer}.{linear}.weight" for layer in range(2) for linear in LINEARS}
    for found in results["_taken"]:
        embedding = "embedding.word_embeddings.weight"
        assert found[False]["owned"] == linears | {"output_layer.weight", embedding}
        assert found[True]["owned"] == linears | {embedding}
        for one in found.values():
            assert set(one["kept"]) == one["names"] - one["owned"]
            assert set(one["kept"].values()) == {"not the weight of a tensor-parallel linear or embedding"}
            assert one["same"]
            assert one["again"]


@workers
def _reasons() -> dict:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from forge_megatron.megatron import convert

    class Own(ColumnParallelLinear):
        def _forward_impl(self, *positional, **keywords):
            return super()._forward_impl(*positional, **keywords) * 1.0

    model = build_model(Case(layers=4))
    layers = model.decoder.layers
    layers[0].mlp.linear_fc1.__class__ = Own
    layers[1].mlp.linear_fc1.weight.allreduce = False
    layers[2].mlp.linear_fc1.weight.grad_norm_group = "mtp"
    layers[3].mlp.linear_fc1.weight.register_hook(lambda grad: grad)
    return convert(model).kept


def test_a_weight_that_is_left_has_a_reason(results):
    for kept in results["_reasons"]:
        said = [kept[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in range(4)]
        assert "Own is not a linear or an embedding that FORGE knows" in said[0]
        assert "data-parallel group" in said[1]
        assert "mtp" in said[2]
        assert "hook" in said[3]


def _freeze(model) -> None:
    model.decoder.layers[1].requires_grad_(False)


@contextmanager
def _counted():
    from forge_megatron import kernels

    original, names = kernels.wgrad_step, []

    def counting(slot, *positional, **keywords):
        names.append(slot.name)
        return original(slot, *positional, **keywords)

    kernels.wgrad_step = counting
    try:
        yield names
    finally:
        kernels.wgrad_step = original


@workers
def _frozen_layer() -> dict:
    theirs = Run(FORGE, edit=_freeze)
    ours = Run(_forge(FORGE), edit=_freeze)
    start = ours.weights()
    with _counted() as launched:
        found = {"theirs": theirs.train(), "ours": ours.train()}
    states = owned_state(ours)
    optimizer = ours.optimizer.chained_optimizers[0]
    return found | {
        "start": start,
        "launched": launched,
        "states": set(states),
        "dense": {optimizer.layout.names[p] for p in optimizer.layout.dense()},
    }


def test_a_frozen_layer_is_left_alone(results):
    """Field rows 41 and 43: it trains, the frozen weights keep their bits, have no state and no update."""
    for found in results["_frozen_layer"]:
        assert gap(found["theirs"]["losses"], found["ours"]["losses"]) <= 2e-6
        assert found["ours"]["norms"] == pytest.approx(found["theirs"]["norms"], rel=1e-5)
        frozen = {name for name in found["start"] if name.startswith("decoder.layers.1.")}
        assert frozen
        for name in frozen:
            assert torch.equal(found["start"][name], found["ours"]["weights"][name])
        assert not frozen & (found["states"] | found["dense"] | set(found["launched"]))
        assert len(found["launched"]) == 5 * len(found["states"])


RANK = 4


def _adapt(model) -> None:
    """Rank-4 adapters beside every fc1 of a frozen model, built from Megatron's own linears."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    model.requires_grad_(False)

    class Adapted(torch.nn.Module):
        def __init__(self, base, config):
            super().__init__()
            common = {"config": config, "bias": False, "init_method": torch.nn.init.normal_}
            self.base = base
            self.down = ColumnParallelLinear(base.input_size, RANK, gather_output=True, **common)
            self.up = ColumnParallelLinear(RANK, base.output_size, gather_output=False, **common)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, x):
            y, bias = self.base(x)
            return y + self.up(self.down(x)[0])[0], bias

        def backward_dw(self):
            pass

    torch.manual_seed(17)
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1 = Adapted(layer.mlp.linear_fc1, model.config)


@workers
def _adapters() -> dict:
    found = {}
    for kind, case in (("theirs", FORGE), ("ours", _forge(FORGE))):
        session = Run(case, edit=_adapt)
        weights = [session.weights()]
        losses = []
        for _ in range(2):
            losses += session.train(1)["losses"]
            weights.append(session.weights())
        found[kind] = {"losses": losses, "weights": weights}
        found["rate"] = session.optimizer.param_groups[0]["lr"]
    return found


def test_adapters_on_a_frozen_base(results):
    """Field row 42: with B at 0, A only decays in the first step; both move in the second."""
    for found in results["_adapters"]:
        start, first, second = found["ours"]["weights"]
        down = [name for name in start if "down" in name]
        up = [name for name in start if "up.weight" in name]
        assert len(down) == len(up) == 4
        for name in down:
            torch.testing.assert_close(first[name], start[name] * (1 - 0.1 * 5e-3), rtol=1e-6, atol=0)
            assert not torch.allclose(second[name], first[name] * (1 - 0.1 * 1e-2), rtol=1e-5)
        assert all(first[name].abs().max() > 0 for name in up)
        base = set(start) - set(down) - set(up)
        assert all(torch.equal(start[name], second[name]) for name in base)
        assert gap(found["theirs"]["losses"], found["ours"]["losses"]) <= 2e-6
        for name in [*down, *up]:
            torch.testing.assert_close(second[name], found["theirs"]["weights"][2][name], rtol=0, atol=1e-5)


@workers
def _nothing_to_own() -> dict:
    from forge_megatron.megatron import prepare

    model = build_model(Case())
    model.requires_grad_(False)
    try:
        prepare([model])
    except ValueError as error:
        return {"error": str(error)}
    return {}


def test_a_model_without_such_weights_is_refused(results):
    for found in results["_nothing_to_own"]:
        assert "found no weight that it can step" in found["error"]


@workers
def _specs() -> dict:
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import build_module

    from forge_megatron.megatron import ForgeColumnParallelLinear, ForgeRowParallelLinear
    from forge_megatron.megatron.spec import ForgeSpecProvider, get_gpt_layer_forge_spec

    found = {}
    for norm in ("LayerNorm", "RMSNorm"):
        config = transformer_config(Case(model={"normalization": norm, "qk_layernorm": True}))
        layer = build_module(get_gpt_layer_forge_spec(config), config=config, layer_number=1)
        modules = dict(layer.named_modules())
        found[norm] = {
            "classes": {name: type(modules[name]) for name in LINEARS},
            "norms": [not isinstance(n, IdentityOp) for n in (layer.input_layernorm, layer.pre_mlp_layernorm)],
        }
    experts = {"num_moe_experts": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False}
    config = transformer_config(Case(model=experts))
    layer = build_module(get_gpt_layer_forge_spec(config), config=config, layer_number=1)
    found["experts"] = [(type(e.linear_fc1), type(e.linear_fc2)) for e in layer.mlp.experts.local_experts]
    changed = copy.copy(config)
    changed.moe_layer_freq = [1, 0]
    with pytest.raises(NotImplementedError, match="moe_layer_freq"):
        get_gpt_layer_forge_spec(changed)
    together = copy.copy(config)
    together.moe_grouped_gemm = True
    layer = build_module(get_gpt_layer_forge_spec(together), config=together, layer_number=1)
    found["experts in one tensor"] = type(layer.mlp.experts)
    for name, value in (("add_bias_linear", True), ("fp8", "e4m3")):
        refused = copy.copy(together)
        setattr(refused, name, value)
        with pytest.raises(NotImplementedError, match=f"{name}=.* experts in one tensor"):
            build_module(get_gpt_layer_forge_spec(refused), config=refused, layer_number=1)
    provider = ForgeSpecProvider()
    found["provider"] = (provider.column_parallel_linear(), provider.row_parallel_linear())
    found["forge"] = (ForgeColumnParallelLinear, ForgeRowParallelLinear)
    try:
        get_gpt_layer_forge_spec(config, use_transformer_engine=True)
    except ModuleNotFoundError as error:
        found["missing"] = str(error)
    return found


def test_specs_hold_forges_linears(results):
    from forge_megatron.megatron.experts import GroupedExperts

    for found in results["_specs"]:
        column, row = found["forge"]
        assert found["experts in one tensor"] is GroupedExperts
        for norm in ("LayerNorm", "RMSNorm"):
            assert found[norm]["classes"] == dict(zip(LINEARS, (column, row, column, row), strict=True))
            assert found[norm]["norms"] == [True, True]
        assert found["provider"] == (column, row)
        assert found["experts"] == [(column, row)] * 2
        assert "transformer_engine" in found["missing"]


@workers
def _transformer_engine_layout() -> dict:
    """Stand-ins for the three classes of Transformer Engine: the layout and the checkpoint keys, not its kernels."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.spec_utils import build_module

    from forge_megatron.megatron.attention import ForgeDotProductAttention
    from forge_megatron.megatron.spec import get_gpt_layer_forge_spec
    from launch.norm import ParallelLayerNorm

    class Norm(ParallelLayerNorm):
        pass

    class Attention(ForgeDotProductAttention):
        pass

    config = transformer_config(Case())
    names = {"HAVE_TE": True, "TENorm": Norm, "TEDotProductAttention": Attention}
    kept = {name: getattr(transformer_engine, name) for name in names}
    for name, value in names.items():
        setattr(transformer_engine, name, value)
    try:
        spec = get_gpt_layer_forge_spec(config, use_transformer_engine=True)
    finally:
        for name, value in kept.items():
            setattr(transformer_engine, name, value)
    layer = build_module(spec, config=config, layer_number=1)
    keys = layer.sharded_state_dict("l.", metadata={"dp_cp_group": torch.distributed.group.WORLD})
    return {
        "norms": (type(layer.input_layernorm).__name__, type(layer.pre_mlp_layernorm).__name__),
        "attention": type(layer.self_attention.core_attention).__name__,
        "fc1": type(layer.mlp.linear_fc1).__name__,
        "keys": {tensor.key for tensor in keys.values()},
    }


def test_with_transformer_engine_norm_and_linear_are_apart_and_keys_are_fused(results):
    for found in results["_transformer_engine_layout"]:
        assert found["norms"] == ("Norm", "Norm")
        assert found["attention"] == "Attention"
        assert found["fc1"] == "ForgeColumnParallelLinear"
        assert "l.self_attention.linear_qkv.layer_norm_weight" in found["keys"]
        assert "l.mlp.linear_fc1.layer_norm_weight" in found["keys"]
        assert not any("layernorm" in key for key in found["keys"])


@workers
def _spec_trains() -> tuple:
    """A model from the rewritten spec is the converted model."""
    import megatron_harness as harness

    from forge_megatron.megatron import spec

    converted = Run(_forge(FORGE)).train()
    original = harness.layer_spec
    harness.layer_spec = lambda config: spec.rewrite(original(config), spec._LINEARS)
    try:
        return converted, Run(_forge(FORGE)).train()
    finally:
        harness.layer_spec = original


def test_a_spec_and_a_conversion_train_alike(results):
    for converted, built in results["_spec_trains"]:
        assert converted["losses"] == built["losses"]


@workers
def _attention_over_context_ranks() -> list[str]:
    """A stand-in for Transformer Engine's class, with it and without it, on a GPU and not, in bf16 and fp32."""
    from megatron.core.extensions import transformer_engine

    from forge_megatron.megatron.spec import get_gpt_layer_forge_spec

    class Attention:
        pass

    chosen = []
    for size, installed, gpu, dtype in (
        (2, True, True, torch.bfloat16),
        (2, False, True, torch.bfloat16),
        (2, True, False, torch.bfloat16),
        (2, True, True, torch.float32),
        (1, True, True, torch.bfloat16),
    ):
        config = transformer_config(Case())
        config.context_parallel_size, config.params_dtype = size, dtype
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer_engine, "HAVE_TE", installed)
            patch.setattr(transformer_engine, "TEDotProductAttention", Attention)
            patch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
            spec = get_gpt_layer_forge_spec(config)
        chosen.append(spec.submodules.self_attention.submodules.core_attention.__name__)
    return chosen


def test_context_ranks_take_transformer_engines_attention_where_it_is_installed(results):
    ours = "ForgeDotProductAttention"
    for chosen in results["_attention_over_context_ranks"]:
        assert chosen == ["Attention", ours, ours, ours, "DotProductAttention"]
