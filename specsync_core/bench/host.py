"""The rows that are measured on CPUs: gloo, and what beats it. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from specsync_core.bench.timing import host_us
from specsync_core.groups import TorchGroup
from specsync_core.payload import Packet, describe
from specsync_core.transports.group import GroupTransport
from specsync_core.transports.grouped import GroupedTransport

BATCHES = (1, 16, 64)


def measure(rank: int, world_size: int, quick: bool) -> dict[str, dict[int, float]]:
    """Microseconds by row's key and batch size."""
    rows: dict[str, dict[int, float]] = {}
    group = TorchGroup()
    for batch in BATCHES[1:2] if quick else BATCHES:
        for count in (1, 3):
            own = tuple(torch.arange(batch) + rank for _ in range(count))
            cases: dict[str, Callable[[], object]] = {
                f"gloo {count}": lambda own=own: [dist.broadcast(tensor, 0) for tensor in own]  # type: ignore[misc]
            }
            for transport in (GroupTransport(group), GroupedTransport(group)):
                packet = Packet("bench", describe(own), sum(tensor.nbytes for tensor in own))
                transport.prepare(packet, own)
                cases[f"gloo {transport.name} {count}"] = (
                    lambda t=transport, p=packet, o=own: t.overwrite_(p, o)  # type: ignore[misc]
                )
            for key, call in cases.items():
                rows.setdefault(key, {})[batch] = host_us(call, dist.barrier, repeats=20 if quick else 100, rounds=5)
    return rows
