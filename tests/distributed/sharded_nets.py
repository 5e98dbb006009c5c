"""A small language model sharded by ``fully_shard``, and the same under ``torch.optim``."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import forge_megatron as forge

# No extent is a multiple of 2 or 4 but the width: rows are padded, and some ranks of 4 have none of the head's bias.
VOCAB, WIDTH, INNER, TOKENS = 11, 8, 13, 6
# eps is a tenth of a typical gradient: Adam then does not blow up the rounding of a gradient near zero to a whole lr.
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, twice: bool = False, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.twice = twice
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) * self.scale.sum()
        for block in self.blocks:
            h = block(h)
        if self.twice:
            h = self.blocks[0](h)
        return self.head(h) * 1.0


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def shard(net: Net, mesh=None, **options) -> Net:
    """Every block by itself, and the rest together, as FSDP2's users do."""
    mesh = mesh or init_device_mesh(device(), (dist.get_world_size(),))
    if not net.scale.is_meta:
        net.to(device())
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def loss_of(net: Net, step: int, ranks: range | None = None) -> Tensor:
    """The mean loss over the sequences of ``ranks``; default: of this rank."""
    ranks = range(dist.get_rank(), dist.get_rank() + 1) if ranks is None else ranks
    rows = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        rows.append(torch.randint(VOCAB, (2, TOKENS + 1), generator=generator))
    tokens = torch.cat(rows).to(device())
    return F.cross_entropy(net(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def torch_adamw(net: Net, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), **{**ADAMW, **options})


def attach(net: Net, **options) -> forge.ForgeOptimizer:
    return forge.attach(net, "adamw", **{**ADAMW, **options})


def train(net, optimizer, *, first=0, steps=3, clip=None, micro_batches=1, ranks=None) -> list[float]:
    """Some steps. Returns the norms that ``clip`` clipped."""
    norms = []
    for step in range(first, first + steps):
        for micro_batch in range(micro_batches):
            (loss_of(net, 10 * step + micro_batch, ranks) / micro_batches).backward()
        if clip is not None:
            norms.append(float(whole(nn.utils.clip_grad_norm_(net.parameters(), clip))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def contents(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole weights and states by name; a collective."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a backward that was refused left what it had gathered
    found = {name: whole(p) for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name} {key}"] = whole(value)
    return found


def expect_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], ulps: float = 4.0) -> None:
    """Equal to ``ulps`` roundings of fp32 relative to each tensor's largest element; 0: bit-equal."""
    for name, expected in theirs.items():
        bound = ulps * torch.finfo(torch.float32).eps * expected.abs().max().item()
        torch.testing.assert_close(
            ours[name].float(), expected.float(), rtol=0, atol=bound, msg=lambda m, name=name: f"{name}: {m}"
        )
