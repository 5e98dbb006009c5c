"""What CP1 guards, broken one at a time; see gate_breaks.py."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch


def context():
    from forge_megatron.megatron import context

    return context


def ring():
    from forge_megatron.megatron import ring

    return ring


def no_sum_over_context_ranks():
    from forge_megatron.coordinator.ranks import Ranks

    return patch.object(Ranks, "all_reduce", lambda *_: iter(()))


def positions_of_neighbouring_chunks():
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def neighbours(embedding, dim, group):
        return embedding.chunk(group.size(), dim)[group.rank()]

    return patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", neighbours)


def keys_in_the_order_of_ranks():
    return patch.object(context(), "_in_order", lambda by_rank: by_rank.flatten(0, 1))


def gradients_of_keys_stay_on_their_rank():
    gather = context().gather_from_sequence_parallel_region
    return patch.object(
        context(), "gather_from_sequence_parallel_region", partial(gather, tensor_parallel_output_grad=False)
    )


def keys_stay_on_their_rank():
    wait = ring()._Hop.wait

    def in_vain(hop):
        wait(hop)
        return hop._sent

    return patch.object(ring()._Hop, "wait", in_vain)


def backward_of_each_blocks_own_softmax():
    whole = ring().blocks.backward

    def alone(dout, query, key, value, out, lse, **settings):
        own = ring().blocks.forward(query, key, value, **settings)
        return whole(dout, query, key, value, *own, **settings)

    return patch.object(ring().blocks, "backward", alone)


def each_rank_divides_by_its_own_tokens():
    from launch import step

    alone = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    return patch.object(step, "parallel_state", alone)


BREAKS = {
    no_sum_over_context_ranks: "ΔW, a2a, in backward",
    positions_of_neighbouring_chunks: "loss gap, a2a, in backward",
    keys_in_the_order_of_ranks: "loss gap, all_gather, in backward",
    gradients_of_keys_stay_on_their_rank: "ΔW, all_gather, tied, clipped",
    keys_stay_on_their_rank: "loss gap, p2p, in backward",
    backward_of_each_blocks_own_softmax: "ΔW, p2p, tied, clipped",
    each_rank_divides_by_its_own_tokens: "Δstate, a2a, in backward",
}
