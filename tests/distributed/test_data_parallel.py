"""Gradients that are partial over data-parallel ranks: DistributedDataParallel and torch.optim.AdamW are the oracle."""

import copy
import gc
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forge_megatron as forge
from tests.distributed.ranks import Workers, has_its_error, run, wait_for_error_of
from tests.distributed.twins import SMALL, Model, Twins, expect_equal_replicas, ids, loss, weights

workers = Workers()


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    return workers.results(request.param)


@workers
def in_backward():
    for buckets in (None, SMALL):
        Twins(Model(), buckets=buckets).train().expect_equal()


@workers
def clipped_and_accumulated():
    for buckets in (None, SMALL):
        for options in ({"clip": 0.1}, {"micro_batches": 3}, {"clip": 0.1, "micro_batches": 2, "multiplier": 0.5}):
            Twins(Model(), buckets=buckets, **options).train(3).expect_equal()


@workers
def tied_and_checkpointed():
    for tied, checkpointed in ((True, None), (False, False), (True, True)):
        Twins(Model(tied, checkpointed), buckets=SMALL).train().expect_equal()


@workers
def called_twice():  # field log row 29
    def both(model, number):
        return (model(ids(number)) - model(ids(number + 50))).square().mean()

    Twins(Model(), buckets=SMALL).train(3, both).expect_equal()


@workers
def used_on_some_ranks_only():  # field log rows 141, 142
    """The other ranks' part of its gradient is zero; one that no rank uses is not stepped at all."""

    def skipping(model, number):
        blocks = model.module.blocks if isinstance(model, DistributedDataParallel) else model.blocks
        first, last = blocks[0], blocks[2]
        skip = number == 1 and dist.get_rank() == 1
        handles = [last.register_forward_hook(lambda *_: torch.zeros(()))]
        if skip or number == 3:
            handles.append(first.register_forward_hook(lambda *_: torch.zeros(())))
        value = loss(model, number)
        for handle in handles:
            handle.remove()
        return value

    for options in ({}, {"clip": 0.1}, {"sharding": "states"}):
        Twins(Model(blocks=3), unused=True, buckets=SMALL, **options).train(5, skipping).expect_equal()


@workers
def rank_without_tokens():  # uneven inputs: an empty batch is a part that is zero
    def loss_of_some(model, number):
        batch = ids(number)[: 0 if dist.get_rank() == 0 and number == 1 else None]
        return model(batch).square().sum()

    Twins(Model(), buckets=SMALL).train(3, loss_of_some).expect_equal(2e-6)


@workers
def bucket_sizes():  # field log row 144
    """Bits do not depend on it, except where a weight is cut: a GEMM of fewer rows may add in another order."""
    outcomes = []
    for nbytes, count in ((1100, 2), (1500, 3), (1 << 20, 3), (200, 2)):
        for options in ({}, {"clip_grad_norm": 0.1}, {"sharding": "states"}):
            model = Model()
            buckets = forge.Buckets(nbytes=nbytes, count=count, deterministic=True)
            optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, buckets=buckets, **options)
            for number in range(3):
                loss(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append((str(options), weights(model)))
    for name in ("{}", "{'clip_grad_norm': 0.1}", "{'sharding': 'states'}"):
        first, *others, cut = (after for options, after in outcomes if options == name)
        assert all(all(map(torch.equal, first, other)) for other in others), name
        torch.testing.assert_close(cut, first, rtol=0, atol=1e-6)


@workers
def half_precision_on_the_wire():
    twins = Twins(Model().bfloat16(), lr=1e-3, recipe="fp32-master", buckets=SMALL)
    for _ in range(3):
        twins.step()
    expect_equal_replicas(twins.model)
    for ours, theirs in zip(twins.model.parameters(), twins.reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * 3e-3)
    summed = Twins(Model(), buckets=forge.Buckets(wire_dtype=torch.bfloat16))
    summed.step()
    expect_equal_replicas(summed.model)
    torch.testing.assert_close(summed.optimizer.grad_norm, summed.norm, rtol=2**-8, atol=0)


@workers
def sharded_states():
    for options in ({}, {"clip": 0.1}, {"micro_batches": 2}, {"buckets": SMALL}, {"clip": 0.1, "buckets": SMALL}):
        Twins(Model(tied=True), sharding="states", **options).train(3).expect_equal()


@workers
def odd_shapes_sharded():  # field log rows 66 and 124
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.vocabulary = nn.Embedding(257, 8)
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
            self.head = nn.Linear(8, 7)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.row = nn.Parameter(torch.randn(1, 8))

        def forward(self, ids):
            h = self.vocabulary(ids) * self.scale + self.row
            for norm in self.norms:
                h = norm(h)
            return self.head(h)

    def cubes(model, number):
        return model(ids(number)).pow(3).mean()

    twins = Twins(Odd(), sharding="states", buckets=SMALL).train(3, cubes)
    twins.expect_equal()
    held = sum(s.numel() for state in twins.optimizer.state.values() for k, s in state.items() if k != "step")
    assert held == sum(2 * twins.optimizer.held(p).numel() for p in twins.model.parameters())
    whole = twins.optimizer.state_dict(full=True)
    single = copy.deepcopy(twins.reference)
    resumed = torch.optim.AdamW(single.parameters(), lr=1e-2)
    resumed.load_state_dict(whole)  # field log row 122: what any number of ranks loads
    for p, q in zip(single.parameters(), twins.reference.parameters(), strict=True):
        torch.testing.assert_close(resumed.state[p]["exp_avg"], twins.oracle.state[q]["exp_avg"], rtol=0, atol=1e-6)
    again = forge.attach(Odd(), lr=1e-2, sharding="states", process_group=dist.group.WORLD)
    again.load_state_dict(whole)
    own = twins.optimizer.state_dict()
    for index, state in again.state_dict()["state"].items():
        assert all(torch.equal(state[key], own["state"][index][key]) for key in state)
    again.load_state_dict(own)
    own["forge"]["shard"]["of"] += 1
    with pytest.raises(ValueError, match=r"rank \d of \d, and this is rank"):
        again.load_state_dict(own)


@workers
def coverage_bytes():
    """The table before training is what the rank holds after it."""
    for options in ({}, {"sharding": "states"}, {"clip_grad_norm": 1.0}, {"skip": "atomic"}):
        model = Model()
        optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, buckets=SMALL, **options)
        coverage = optimizer.coverage
        loss(model, 0).backward()
        optimizer.step()
        held = sum(s.nbytes for state in optimizer.state.values() for k, s in state.items() if k != "step")
        assert coverage.state_bytes == held
        kept = coverage.bucket_bytes - optimizer._sums.pipeline.nbytes
        gradient = sum(p.nbytes for p in model.parameters())
        if optimizer._plan.waits:
            assert gradient / dist.get_world_size() <= kept < 2 * gradient / dist.get_world_size()
        else:
            assert kept == 0
        assert optimizer._sums.pipeline.nbytes <= SMALL.count * (SMALL.nbytes + 2048)  # each piece is padded
        optimizer.zero_grad()


@workers
def inside_ddp():  # field log row 145
    twins = Twins(Model(), wrap=True, buckets=SMALL)
    theirs = set(twins.called._module_parameters)
    assert theirs == {p for p in twins.model.parameters() if p not in twins.optimizer.owned}
    twins.train().expect_equal()
    Twins(Model(), wrap=True, clip=0.1).train(3).expect_equal()
    model = Model()
    optimizer = forge.attach(model.blocks, lr=1e-2, process_group=dist.group.WORLD)
    with pytest.raises(NotImplementedError, match=r"weight: DistributedDataParallel would reduce it a second time"):
        DistributedDataParallel(model)(ids(0))
    optimizer.detach()
    sharded = Model()
    optimizer = forge.attach(sharded, lr=1e-2, process_group=dist.group.WORLD, sharding="states")
    with pytest.raises(NotImplementedError, match=r"sharding='states' inside DistributedDataParallel"):
        DistributedDataParallel(sharded)(ids(0))


@workers
def no_sync():  # field log row 17
    """Accumulated micro-batches but the last are not reduced; where the last is not either, that is an error."""
    twins = Twins(Model(), wrap=True, micro_batches=3)
    twins.deferred = twins.called.no_sync
    twins.train(2).expect_equal()
    before = weights(twins.model)
    with twins.called.no_sync():
        loss(twins.called, 7).backward()
    with pytest.raises(RuntimeError, match=r"\.(weight|bias): step\(\), but the last backward was inside no_sync"):
        twins.optimizer.step()
    twins.optimizer.zero_grad()
    immediate = Model()
    optimizer = forge.attach(immediate, lr=1e-2, process_group=dist.group.WORLD)
    wrapped = DistributedDataParallel(immediate)
    with wrapped.no_sync(), pytest.raises(RuntimeError, match=r"no_sync\(\) where backward steps the weights"):
        wrapped(ids(0))
    assert all(map(torch.equal, before, weights(twins.model)))
    loss(wrapped, 0).backward()
    optimizer.step()
    expect_equal_replicas(immediate)


@workers
def other_initial_weights():
    """As DistributedDataParallel: every rank starts from the first rank's parameters and buffers."""
    model = Model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(dist.get_rank())
    optimizer = forge.attach(model, lr=1e-2, recipe="fp32-master", process_group=dist.group.WORLD)
    expect_equal_replicas(model)
    assert torch.equal(model.blocks[0][1].weight, Model().blocks[0][1].weight)
    loss(model, 0).backward()
    optimizer.step()
    expect_equal_replicas(model)


@workers
def ranks_that_differ():
    """Refused on every rank, by name, before anything has changed."""
    rank = dist.get_rank()
    clip = 1.0 if rank == 1 else None
    with pytest.raises(ValueError, match=r"options: different on the ranks \(rank 0: .*clip_grad_norm=None.*rank 1"):
        forge.attach(Model(), lr=1e-2, process_group=dist.group.WORLD, clip_grad_norm=clip)
    with pytest.raises(ValueError, match=r"shapes and dtypes|number of parameters"):
        forge.attach(Model(blocks=1 + (rank == 0)), lr=1e-2, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"seed: different on the ranks \(rank 0: 0; rank 1: 1"):
        forge.attach(Model(), lr=1e-2, process_group=dist.group.WORLD, seed=rank)
    model = Model()
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, waiting=True)
    before = weights(model)
    for group, lr in ((optimizer.param_groups[0], 1e-2 * (1 + rank)),):
        group["lr"] = lr
    loss(model, 0).backward()
    with pytest.raises(ValueError, match=r"step\(\): hyperparameters: different on the ranks"):
        optimizer.step()
    assert all(map(torch.equal, before, weights(model)))
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 1e-2
    loss(model, 0).backward()
    with pytest.raises(
        ValueError, match=r"step\(\): gradient_multiplier: different on the ranks \(rank 0: 1.0; rank 1"
    ):
        optimizer.step(gradient_multiplier=1.0 + rank)
    optimizer.zero_grad()
    loss(model, 0).backward()
    optimizer.step()
    expect_equal_replicas(model)


@workers
def each_weight_clipped_by_its_own_norm():
    """Also a weight that is cut over buckets, and over ranks; a gradient that is not finite skips all of them."""
    for options in ({}, {"buckets": SMALL}, {"sharding": "states", "buckets": SMALL}, {"micro_batches": 2}):
        twins = Twins(Model(tied=True), clip=0.02, each=True, **options).train(3)
        twins.expect_equal()
    optimizer = forge.attach(
        model := Model(), lr=1e-2, process_group=dist.group.WORLD, clip_grad_norm=0.02, clip="weight", skip="atomic"
    )
    before = weights(model)
    (loss(model, 0) * (torch.inf if dist.get_rank() == 1 else 1.0)).backward()
    optimizer.step()
    assert all(map(torch.equal, weights(model), before))
    assert optimizer.skipped_steps == 1


@workers
def not_built():
    def refused(model, match, **options):
        with pytest.raises(NotImplementedError, match=match):
            forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, **options)

    scalar = Model()
    scalar.temperature = nn.Parameter(torch.ones(()))
    refused(scalar, "temperature: lamb of a 0-dim parameter with sharding='states'", rule="lamb", sharding="states")


@workers
def other_formats():
    """Replicas are bit-equal where states have 8 bits and weights are rounded stochastically."""
    for dtype, options in (
        (torch.float32, {"state_format": "int8", "buckets": SMALL}),
        (torch.bfloat16, {"recipe": "int8"}),
        (torch.bfloat16, {"recipe": "sr-store"}),
    ):
        model = Model().to(dtype)
        single = copy.deepcopy(model)
        optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, **options)
        options.pop("buckets", None)
        alone = forge.attach(single, lr=1e-2, **options)
        for number in range(2):
            # The same batch on every rank: the mean over the ranks is this rank's own gradient, but for the wire.
            for trained, stepper in ((model, optimizer), (single, alone)):
                torch.manual_seed(number)
                batch = torch.randint(21, (3, 5))
                nn.functional.cross_entropy(trained(batch).flatten(0, 1).float(), batch.flatten()).backward()
                stepper.step()
                stepper.zero_grad()
        expect_equal_replicas(model)
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if dtype is torch.float32 else 4e-3)


@workers
def ranks_that_have_made_other_groups():
    """torch names a group that only its members make by the number of groups that a rank has."""
    for _ in range(1 + dist.get_rank()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    Twins(Model(), buckets=forge.Buckets(timeout=10)).train(2).expect_equal()


@workers
def copies():  # field log row 82
    model = Model()
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD)
    twin = copy.deepcopy(model)
    assert model.head.weight in optimizer.owned
    assert type(twin.head) is nn.Linear
    loss(twin, 0).backward()
    assert twin.head.weight.grad is not None


@pytest.mark.parametrize("name", [function.__name__ for function in workers.functions])
def test_on_two_and_three_ranks(results, name):
    results[name]


def _a_rank_stops():
    """Rank 1 ends after one step; the others must not wait for ever, nor change anything."""
    model = Model()
    buckets = forge.Buckets(nbytes=640, timeout=3)
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, buckets=buckets)
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        wait_for_error_of(0, 2)
        return None
    before, start = weights(model), time.monotonic()
    try:
        loss(model, 1).backward()
        optimizer.step()
    except RuntimeError as error:
        has_its_error()
        return str(error), time.monotonic() - start, all(map(torch.equal, before, weights(model)))
    raise AssertionError("no error")


def test_a_rank_that_stops_is_named_and_nothing_hangs():  # field log row 138
    first, second, third = run(3, _a_rank_stops)
    assert second is None
    for told, seconds, unchanged in (first, third):
        assert re.search(r"took part within 3 s; without a sign: rank 1\.", told), told
        assert seconds < 10
        assert unchanged


def _saved_alone():
    model = Model()
    buckets = forge.Buckets(timeout=2)
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, sharding="states", buckets=buckets)
    if dist.get_rank() == 0:
        assert optimizer.state_dict()["forge"]["shard"] == {"rank": 0, "of": 2}
        with pytest.raises(RuntimeError, match=r"state_dict\(full=True\): not every rank .* without a sign: rank 1"):
            optimizer.state_dict(full=True)
        has_its_error()
    else:
        wait_for_error_of(0)
    gc.collect()


def test_a_whole_state_dict_asked_for_on_one_rank_only_is_an_error():  # field log row 126
    run(2, _saved_alone)
