"""Experts on NUMA nodes: each layer's are spread over all nodes in equal shares, and the pool
computes them where they lie.

Shares are runs of experts, so that each is one piece of memory; which experts are much used has
nothing to do with their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from strata.experts.store import ExpertLayer, ExpertStore
from strata.memory.numa import prefer_node
from strata.native import CpuPool


def shares(layer: ExpertLayer, nodes: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """(node, its experts' memory) of a layer, in order; sizes differ by an expert at most."""
    for i, node in enumerate(nodes):
        first, stop = (layer.n_experts * k // len(nodes) for k in (i, i + 1))
        if stop > first:
            yield node, layer.blobs[first:stop]


def place_on_nodes(layer: ExpertLayer, nodes: Sequence[int]) -> None:
    """Ask for pages of the nodes, before the experts are written."""
    if len(nodes) > 1:
        for node, memory in shares(layer, nodes):
            prefer_node(memory, node)


def tell_pool(pool: CpuPool, store: ExpertStore) -> None:
    """Say which experts lie on which node; nothing on machines with one, or for experts on disk."""
    if len(pool.nodes) > 1:
        for layer in store.layers:
            if isinstance(layer, ExpertLayer):
                for node, memory in shares(layer, pool.nodes):
                    pool.set_node(memory, node)
