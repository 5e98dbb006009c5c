"""What ``launch.cpu`` changes, in a process of its own: it changes torch for good."""

import multiprocessing
import traceback
from multiprocessing.connection import Connection

import torch

from tests.distributed.ranks import start_method


def execute(code: str, told: Connection) -> None:
    try:
        exec(code, {})
        told.send("")
    except BaseException:
        told.send(traceback.format_exc())


def run(code: str) -> None:
    context = multiprocessing.get_context(start_method("gloo"))
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=execute, args=(code, there))
    process.start()
    assert here.poll(120)
    assert here.recv() == ""
    process.join()


def test_cuda_means_the_cpu():
    run(
        """
import torch
from launch import cpu
assert cpu.enable("cpu") and cpu.enable("cpu")
for made in (
    torch.zeros(2, device="cuda"),
    torch.tensor([1.0], device="cuda:1"),
    torch.empty_like(torch.ones(1), device=torch.device("cuda")),
    torch.ones(2).cuda(),
    torch.ones(2).to("cuda"),
    torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
    torch.arange(3, device=torch.cuda.current_device()),
    torch.tensor([1.0], pin_memory=True),
):
    assert made.device.type == "cpu", made
assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
assert torch.zeros(1).type(torch.float64).dtype == torch.float64
assert torch.zeros(2, device="meta").device.type == "meta"
torch.cuda.synchronize(); torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
"""
    )


def test_the_random_states_are_megatrons():
    """Tensor-parallel ranks draw other numbers inside a fork and the same outside, and a fork goes on where it left."""
    run(
        """
import torch
from launch import cpu
cpu.enable("cpu")
from megatron.core.tensor_parallel import random
def draw(rank):
    random.model_parallel_cuda_manual_seed(7, tp_rank=rank, ep_rank=0, etp_rank=0)
    tracker = random.get_cuda_rng_tracker()
    outside = torch.rand(3)
    with tracker.fork():
        first = torch.rand(3)
    between = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    return outside, first, between, second
a, b = draw(0), draw(1)
assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2]) and not torch.equal(a[1], b[1])
assert not torch.equal(a[1], a[3])
generator = torch.Generator().manual_seed(7 + 2718)
assert torch.equal(a[1], torch.rand(3, generator=generator)) and torch.equal(a[3], torch.rand(3, generator=generator))
try:
    with random.get_cuda_rng_tracker().fork("never added"): pass
except KeyError as error: assert "never added" in str(error)
else: raise AssertionError
"""
    )


def test_recomputation_draws_the_same_dropout():
    run(
        """
import torch
from launch import cpu
cpu.enable("cpu")
from megatron.core.tensor_parallel import random
random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
seen = []
def block(x):
    with random.get_cuda_rng_tracker().fork():
        y = torch.nn.functional.dropout(x, 0.5)
    seen.append(y.detach().clone())
    return y * x
x = torch.ones(64, requires_grad=True)
random.checkpoint(block, False, x).sum().backward()
assert len(seen) == 2 and torch.equal(*seen) and 0 < seen[0].count_nonzero() < 64
"""
    )


def test_on_a_gpu_it_changes_nothing():
    run(
        """
import torch
before = (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.manual_seed)
from launch import cpu
assert cpu.enable("cuda") is False
assert before == (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.manual_seed)
assert torch.zeros(1).type() == "torch.FloatTensor"
"""
    )
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_psutil_is_asked_for_by_name():
    run(
        """
import importlib.util
from launch import cpu
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "psutil" else real(name, *rest)
try: cpu.enable("cpu")
except ModuleNotFoundError as error: assert "psutil" in str(error)
else: raise AssertionError
"""
    )
