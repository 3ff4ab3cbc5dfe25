"""``group``: the group's own broadcast, one call per tensor. The published fix's shape; always works."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsync_core.groups import Group
from specsync_core.payload import Packet
from specsync_core.transports.base import stage

ALL_TAKE = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    )
)
"""dtypes that gloo and NCCL broadcast (torch 2.13); the bytes of the others travel, int16 and float8 among them."""


class GroupTransport:
    """One collective per tensor, in place where the tensor is contiguous.

    On gloo, ranks whose calls do not match are not detected here: gloo ends a process that receives more
    than it expects, and silently fills part of a larger buffer. ``grouped`` detects both.

    Graph: capturable where the group's broadcast is; scratch is made by `prepare`.
    """

    name = "group"

    def __init__(self, group: Group) -> None:
        self._group = group

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        packet.scratch[self.name] = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors
        ]

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        for tensor, scratch in zip(tensors, packet.scratch[self.name], strict=True):
            if tensor.is_contiguous():
                self._broadcast(tensor)
            else:
                scratch.copy_(tensor)
                self._broadcast(scratch)
                tensor.copy_(scratch)

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        scratch: list[Tensor] = packet.scratch[self.name]
        is_root = self._group.rank_in_group == 0
        for tensor in stage(tensors, scratch) if is_root else scratch:
            self._broadcast(tensor)
        return tensors if is_root else scratch

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(takeable(tensor), src=0)


def takeable(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that broadcasts take."""
    return tensor if tensor.dtype in ALL_TAKE else tensor.reshape(-1).view(torch.uint8)
