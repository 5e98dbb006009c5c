"""Process groups of one's own, which the members make together and nobody else needs to hear of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Of each default group: how many groups its members have made for a purpose.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter] = WeakKeyDictionary()


def own_group(members: Sequence[int], purpose: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A new group of ``members``, in this order; each of them calls it equally often for one purpose.

    ``new_group(use_local_synchronization=True)`` would name it by the number of groups that this rank has, and members
    that differ in it would wait for each other under two names.

    Args:
        members: global ranks; this one is among them.
        purpose: a part of the name.
        backend: as ``new_group``'s.
        timeout: of its collectives.
    """
    default = dist.group.WORLD
    counts = _made.setdefault(default, Counter())
    key = purpose, tuple(members)
    name = f"forge/{purpose}/{'.'.join(map(str, members))}/{counts[key]}"
    counts[key] += 1
    group, _ = distributed_c10d._new_process_group_helper(
        len(members),
        list(members).index(dist.get_rank()),
        list(members),
        dist.Backend(backend),
        distributed_c10d._get_default_store(),
        name,
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=f"forge {purpose}",
    )
    distributed_c10d._world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
    return group
