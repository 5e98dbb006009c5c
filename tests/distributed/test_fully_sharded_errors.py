"""What cannot be exact on sharded weights is refused by name, before a weight has changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Workers
from sharded_nets import Net, attach, contents, expect_equal, loss_of, shard, torch_adamw, train, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from forge_megatron import ForgeOptimizer

pytestmark = pytest.mark.timeout(600)

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


@workers
def _attach():
    net = shard(Net())
    for options in ({"sharding": "states"}, {"process_group": dist.group.WORLD}):
        with pytest.raises(ValueError, match="with weights that fully_shard has sharded"):
            attach(net, **options)
    with pytest.raises(ValueError, match="sharding='full' with weights that are not sharded"):
        attach(Net(), sharding="full")
    attach(net, sharding="full")

    partly = Net()
    fully_shard(partly.blocks[0])
    with pytest.raises(NotImplementedError, match=r"^scale is not sharded while others are"):
        attach(partly)
    for name, p in partly.named_parameters():
        p.requires_grad_("blocks.0" in name)
    optimizer = attach(partly)
    partly.head.weight.requires_grad_(True)
    with pytest.raises(NotImplementedError, match=r"^head.weight is not sharded while others are"):
        loss_of(partly, 0).backward()

    with pytest.raises(NotImplementedError, match=r"^parameter 0 is a DTensor that no fully_shard call manages"):
        ForgeOptimizer(shard(Net()).parameters(), lr=1e-3)
    tensor_parallel = parallelize_module(Net(), mesh(), {"head": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"^head.weight is a DTensor that no fully_shard call manages"):
        attach(tensor_parallel)
    del optimizer


def test_attach_refuses_by_name(results):  # rows 110, 117 and 148
    results["_attach"]


@workers
def _second_backward():
    net = shard(Net())
    optimizer = attach(net)
    loss_of(net, 0).backward()
    after_one = contents(net, optimizer)
    with pytest.raises(RuntimeError, match=r"backward number 2 since the last step\(\), with accumulation_steps=1"):
        loss_of(net, 1).backward()
    with pytest.raises(RuntimeError, match="has already been updated inside it; call step"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"a backward is pending; call step\(\) before you save"):
        optimizer.state_dict()
    expect_equal(contents(net, optimizer), after_one, ulps=0)
    optimizer.step()


def test_a_second_backward_before_step(results):
    results["_second_backward"]


@workers
def _too_many_micro_batches():
    net = shard(Net())
    optimizer = attach(net, accumulation_steps=2)
    before = contents(net, optimizer)
    for micro_batch in range(2):
        loss_of(net, micro_batch).backward()
    with pytest.raises(RuntimeError, match="backward number 3 since the last step"):
        loss_of(net, 2).backward()
    expect_equal(contents(net, optimizer), before, ulps=0)


def test_more_micro_batches_than_announced(results):
    results["_too_many_micro_batches"]


@workers
def _windows():
    """zero_grad() between forward and backward, a discarded window, and two graphs of one window."""
    net, twin = shard(Net()), shard(Net())
    optimizer, oracle = attach(net, accumulation_steps=None), torch_adamw(twin)
    for model, stepper in ((net, optimizer), (twin, oracle)):
        loss_of(model, 7).backward()
        stepper.zero_grad()
        loss = loss_of(model, 0)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        for step in (1, 2):
            loss_of(model, step).backward()
        stepper.step()
        stepper.zero_grad()
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)
    net, twin = shard(Net()), shard(Net())
    optimizer, oracle = attach(net), torch_adamw(twin)
    for model, stepper in ((net, optimizer), (twin, oracle)):
        losses = [loss_of(model, step) for step in (0, 1)]
        stepper.zero_grad()
        for loss in losses:
            loss.backward()
        stepper.step()
        stepper.zero_grad()
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)


def test_windows(results):
    results["_windows"]


@workers
def _stale_forward():
    net = shard(Net())
    optimizer = attach(net)
    early = loss_of(net, 1)
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = contents(net, optimizer)
    with pytest.raises(RuntimeError, match="was updated after the forward that this backward belongs to"):
        early.backward()
    expect_equal(contents(net, optimizer), before, ulps=0)
    net = shard(Net())
    optimizer = attach(net)
    loss = loss_of(net, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="was updated after the forward"):
        loss.backward()


def test_a_backward_through_a_forward_from_before_the_update(results):
    results["_stale_forward"]


@workers
def _gradients_only():
    net, twin = shard(Net()), shard(Net())
    optimizer, oracle = attach(net), torch_adamw(twin)
    before = contents(net, optimizer)
    loss_of(net, 5)
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(net.blocks[0](hidden).square().sum(), hidden)
    assert gradient.abs().sum() > 0
    net.eval()
    with torch.no_grad():
        loss_of(net, 5)
    optimizer.step()
    expect_equal(contents(net, optimizer), before, ulps=0)
    net.train()
    train(net, optimizer)
    train(twin, oracle)
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)


def test_autograd_grad_and_evaluation_change_nothing(results):
    results["_gradients_only"]


@workers
def _evaluation_before_step():
    """A forward between backward and step() must not leave gathered weights that the next one would use."""
    for options in ({}, {"clip_grad_norm": 1e9}):
        net, twin = shard(Net()), shard(Net())
        optimizer, oracle = attach(net, **options), torch_adamw(twin)
        for step in range(3):
            loss_of(net, step).backward()
            with torch.no_grad():
                loss_of(net, 5)
            optimizer.step()
            optimizer.zero_grad()
        train_without_tens(twin, oracle)
        expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=16 if options else 0)


def train_without_tens(net, optimizer):
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_evaluation_between_backward_and_step(results):
    results["_evaluation_before_step"]


class Failing(Net):
    def forward(self, tokens):
        h = self.embedding(tokens) * self.scale.sum()
        h = self.blocks[0](h)
        h.register_hook(_fail)
        return self.head(self.blocks[1](h))


def _fail(grad):
    raise ValueError("a failing backward")


@workers
def _failed_backward():
    net = shard(Failing())
    optimizer = attach(net)
    with pytest.raises(ValueError, match="a failing backward"):
        loss_of(net, 0).backward()
    told = r"failed after it had updated 6 of 16 weights \(the first is blocks.1\S+\); load a checkpoint"
    with pytest.raises(RuntimeError, match=told):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=told):
        optimizer.step()


def test_a_backward_that_failed_after_some_updates(results):
    results["_failed_backward"]


@workers
def _late_hyperparameters():
    net = shard(Net())
    optimizer = attach(net)
    loss_of(net, 0).backward()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match=r"a hyperparameter \(lr, weight_decay ...\) changed after backward"):
        optimizer.step()


def test_a_hyperparameter_that_changes_after_updates(results):
    results["_late_hyperparameters"]


@workers
def _detached():
    net, twin = shard(Net()), shard(Net())
    optimizer, oracle = attach(net), torch_adamw(twin)
    train(net, optimizer)
    optimizer.detach()
    train(net, optimizer, first=3)
    train(twin, oracle, steps=6)
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)


def test_after_detach_step_reads_grad(results):
    results["_detached"]


@workers
def _attach_before_fully_shard():
    net = Net()
    optimizer = attach(net)
    shard(net)
    with pytest.raises(RuntimeError, match=r"^embedding.weight: the module's weight is another tensor than at attach"):
        loss_of(net, 0)
    optimizer.step()
    for module in (*net.blocks, net):
        module.reshard()
    expect_equal({name: whole(p) for name, p in net.named_parameters()}, dict(Net().named_parameters()), ulps=0)


def test_attach_before_fully_shard(results):
    results["_attach_before_fully_shard"]


@workers
def _rolled_back():
    net, twin = shard(Net()), shard(Net())
    optimizer, oracle = attach(net, skip="atomic"), torch_adamw(twin)
    loss_of(net, 50).backward()
    optimizer.rollback()
    train(net, optimizer)
    train(twin, oracle)
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=16)
    net = shard(Net())
    optimizer = attach(net)
    loss_of(net, 0).backward()
    assert not optimizer.rollback()
    with pytest.raises(RuntimeError, match=r"rolled back after backward had updated 16 of 16 weights"):
        optimizer.step()
    assert optimizer.rollback(accept=True)
    train(net, optimizer)


def test_rollback(results):
    results["_rolled_back"]


@workers
def _loss_scaling():
    """An overflow on one rank skips the step on all; in immediate mode a scaler is refused."""
    net = shard(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = attach(net)
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler needs every update to wait .* has been updated with a scaled"):
        scaler.step(optimizer)
    net, twin = shard(Net()), shard(Net())
    optimizer, oracle = attach(net, skip="atomic"), torch_adamw(twin)
    for step in range(3):
        loss = loss_of(net, step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            loss_of(twin, step).backward()
            oracle.step()
            oracle.zero_grad()
    assert scaler.get_scale() == 512.0
    assert optimizer.skipped_steps == 1
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=16)


def test_loss_scaling_and_atomic_skips(results):
    results["_loss_scaling"]


@workers
def _replaced_parameters():
    net = shard(Net())
    optimizer = attach(net)
    train(net, optimizer, steps=1)
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"^\S+: the module's parameter is another tensor than at attach"):
        loss_of(net, 1)


def test_parameters_that_were_replaced(results):
    results["_replaced_parameters"]
