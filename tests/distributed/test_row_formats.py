"""8-bit states and stochastic rounding of rows that ranks and buckets cut, against the whole weight on one process."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ranks import Workers
from torch import nn

import forge_megatron as forge
from forge_megatron.formats import Fp8Weight, in_memory

pytestmark = pytest.mark.timeout(600)

workers = Workers()


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    return workers.results(request.param)


class Constants(nn.Module):
    """Its gradients are multiples of a scale; rows that ranks and buckets cut, and vectors."""

    def __init__(self, shapes=((7, 130), (200,), (5,), (3, 2, 70), ())):
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList(torch.randn(shape).bfloat16() for shape in shapes)
        # A block and a bit, and a single column, whose scale is larger than its code.
        self.linear, self.narrow = (nn.Linear(columns, 10, dtype=torch.bfloat16) for columns in (70, 1))

    def forward(self, scale):
        of_each = [
            (w * (scale * torch.linspace(0.5, 2.0, w.numel()).bfloat16().view(w.shape))).sum() for w in self.weights
        ]
        linears = [m(torch.full((1, m.in_features), 0.5, dtype=torch.bfloat16)) for m in (self.linear, self.narrow)]
        return sum(of_each) + sum(linears).sum() * scale


#: A bucket holds less than a row; and sums, of which one rank has all, are exact.
SUMMED, ROW = forge.Buckets(average=False), forge.Buckets(average=False, nbytes=200)


def trained(options, further, steps=range(3), **shapes):
    net = Constants(**shapes)
    optimizer = forge.attach(net, **{"lr": 1e-2, "seed": 3, **options, **further})
    take(net, optimizer, steps)
    return net, optimizer


def take(net, optimizer, steps):
    share = 0.0 if optimizer._plan.process_group is not None and dist.get_rank() else 1.0
    for number in steps:
        net(torch.tensor(share * (0.5 + number), dtype=torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()


@workers
def blocks_and_roundings_of_rows():  # field log rows 107 and 108
    """Rows on ranks and in buckets have the codes, the scales and the random bits of the whole weight."""
    group = {"process_group": dist.group.WORLD, "buckets": SUMMED}
    small, states = {"buckets": ROW}, {"sharding": "states"}
    for recipe in ("sr-store", "int8", "fp8", {"state_format": "int8", "weight_store": "stochastic"}):
        options = {"recipe": recipe} if isinstance(recipe, str) else recipe
        alone, single = trained(options, {})
        expected = single.state_dict()["state"]
        for further in (small, states, {**states, **small}, {**states, "clip_grad_norm": 1e9}):
            net, optimizer = trained(options, {**group, **further})
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                assert torch.equal(p, q), (recipe, further, p.shape)
            whole = optimizer.state_dict(full="sharding" in further)["state"]
            for index, entry in expected.items():
                for name, value in entry.items():
                    assert value.shape == whole[index][name].shape, (recipe, further, name)
                    same = value.float() == whole[index][name].float()
                    assert same.all(), (recipe, further, index, name)


def expect_same_weights(one, other, case):
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert type(ours) is type(theirs)
        assert all(map(torch.equal, in_memory(ours), in_memory(theirs))), (case, ours.shape)


@workers
def weights_as_codes():
    """On replicas and by rows: codes, scales and states of one process, resumed bit for bit, on one process too."""
    group, states = {"process_group": dist.group.WORLD, "buckets": SUMMED}, {"sharding": "states"}
    clipped = {"clip_grad_norm": 1e9}
    of_int8 = {"weight_store": "fp8", "state_format": "int8"}
    for recipe, everything in (
        ({"recipe": "fp8-weight"}, ({}, {"buckets": ROW}, clipped)),
        (of_int8, ({"buckets": ROW},)),
    ):
        alone, single = trained(recipe, {}, range(4))
        assert isinstance(alone.linear.weight, Fp8Weight)
        expected = single.state_dict()["state"]
        for further in everything:
            for sharding in ({}, states):
                case, options = (recipe, further, sharding), {**group, **further, **sharding}
                net, optimizer = trained(recipe, options, range(2))
                saved, by_rows = io.BytesIO(), bool(sharding)
                both = optimizer.state_dict(), optimizer.state_dict(full=by_rows)
                torch.save((net.state_dict(), *both), saved)
                take(net, optimizer, range(2, 4))
                saved.seek(0)
                weights, own, whole = torch.load(saved)
                resumed = {"own": (own, options)}
                resumed |= {"whole": (whole, options), "on one process": (whole, {})} if by_rows else {}
                models = {"straight": (net, optimizer)}
                for name, (states_of, elsewhere) in resumed.items():
                    models[name] = trained(recipe, elsewhere, ())
                    models[name][0].load_state_dict(weights)
                    models[name][1].load_state_dict(states_of)
                    take(*models[name], range(2, 4))
                for name, (model, stepper) in models.items():
                    expect_same_weights(model, alone, (case, name))
                    found = stepper.state_dict(full=by_rows and name != "on one process")["state"]
                    for index, entry in expected.items():
                        for key, value in entry.items():
                            assert torch.equal(value, found[index][key]), (case, name, key)
                assert f"weight as e4m3 codes of {10 * 70 + 10 * 2 * 2:,} bytes" in str(optimizer.coverage)
    # A rank that begins elsewhere gets the first rank's codes.
    other = Constants()
    with torch.no_grad():
        other.linear.weight.mul_(1 + dist.get_rank())
    forge.attach(other, lr=1e-2, recipe="fp8-weight", **group)
    codes = [torch.empty_like(in_memory(other.linear.weight)[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(codes, in_memory(other.linear.weight)[0])
    assert all(torch.equal(codes[0], theirs) for theirs in codes)


@workers
def weights_as_codes_under_rules_of_whole_matrices():
    """Replicas have the codes of one process; of rows a norm is summed in another order, and a code may be the next."""
    group, adamw = {"process_group": dist.group.WORLD, "buckets": SUMMED}, {"adamw": {"lr": 1e-2}}
    for rule, further in (("muon", adamw), ("lamb", {}), ("adafactor", {}), ("scion", adamw)):
        options = {"rule": rule, "recipe": "fp8-weight", "lr": 0.1, **further}
        alone, _ = trained(options, {}, shapes=((5,),))
        assert not torch.equal(alone.linear.weight.dequantize(), Constants(((5,),)).linear.weight)
        replica, _ = trained(options, group, shapes=((5,),))
        expect_same_weights(replica, alone, rule)
        rows, _ = trained(options, {**group, "sharding": "states"}, shapes=((5,),))
        found = {"rows": rows.linear.weight.dequantize(), "alone": alone.linear.weight.dequantize()}
        everyone = [torch.empty_like(found["rows"]) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, found["rows"])
        assert all(torch.equal(everyone[0], other) for other in everyone)
        assert (found["rows"] != found["alone"]).float().mean() < 0.01, rule


@workers
def what_ranks_gather_of_codes():
    """A byte a coordinate and two a block: of a rank's rows nothing is dequantised on the way to the others."""
    torch.manual_seed(0)
    rows = 96 * dist.get_world_size()
    net = nn.Linear(640, rows, bias=False, dtype=torch.bfloat16)
    options = {"process_group": dist.group.WORLD, "sharding": "states"}
    optimizer = forge.attach(net, lr=1e-2, recipe="fp8-weight", **options)
    gathered, ranks = [], optimizer._sums.ranks
    ranks.all_gather = lambda buffer, send=ranks.all_gather: (gathered.append(buffer.nbytes), send(buffer))[1]
    net(torch.ones(2, 640, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert gathered == [rows * (640 + 10 * 2)]


@workers
def a_checkpoint_of_rows_with_scales():
    """Whole, or this rank's own; resumed bit for bit, on other ranks, on one, and in another format."""
    group = {"process_group": dist.group.WORLD, "sharding": "states", "buckets": SUMMED}
    for recipe in ("int8", "fp8"):
        net, optimizer = trained({"recipe": recipe}, group, range(2))
        weights, own, whole = net.state_dict(), optimizer.state_dict(), optimizer.state_dict(full=True)
        weights, own, whole = copy.deepcopy((weights, own, whole))
        take(net, optimizer, range(2, 4))
        for saved, further in ((own, group), (whole, group), (whole, {})):
            again, resumed = trained({"recipe": recipe}, further, ())
            again.load_state_dict(weights)
            resumed.load_state_dict(saved)
            take(again, resumed, range(2, 4))
            assert all(map(torch.equal, again.parameters(), net.parameters())), (recipe, further)
        _, plain = trained({"recipe": "bf16-state"}, group, ())
        with pytest.warns(UserWarning, match="to bf16"):
            plain.load_state_dict(whole, convert=True)
        _, back = trained({"recipe": recipe}, group, ())
        with pytest.warns(UserWarning, match=f"from bfloat16 to {recipe}"):
            back.load_state_dict(plain.state_dict(full=True), convert=True)
        for entry, before in zip(back.state_dict()["state"].values(), own["state"].values(), strict=True):
            assert entry["exp_avg"].dtype is before["exp_avg"].dtype
            assert entry["exp_avg"].shape == before["exp_avg"].shape


@pytest.mark.parametrize("name", [function.__name__ for function in workers.functions])
def test_rows_have_the_formats_of_the_whole(results, name):
    results[name]
