"""``grouped``: all tensors of a call in one collective, whatever the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from specsync_core.groups import Group
from specsync_core.payload import Packet
from specsync_core.transports.base import Transport, copy_all_, stage
from specsync_core.transports.communicators import (
    Communicator,
    OwnCommunicator,
    engine_communicator,
    has_own_bindings,
)
from specsync_core.transports.framed import FramedTransport
from specsync_core.transports.group import GroupTransport, takeable
from specsync_core.transports.one_shot_channel import process_group_of


class _Together(GroupTransport):
    """All tensors of a call in one launch, each in its own place."""

    name = "grouped"

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        staged = stage(tensors, packet.scratch[self.name])
        self._broadcast_all(staged)
        copy_all_(tensors, staged)

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        scratch: list[Tensor] = packet.scratch[self.name]
        if self._group.rank_in_group:
            self._broadcast_all(scratch)
            return scratch
        self._broadcast_all(stage(tensors, scratch))
        return tensors

    def _broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        raise NotImplementedError


class DirectTransport(_Together):
    """One NCCL group call of a communicator, on the current stream: no other stream, no event.

    Graph: capturable.
    """

    def __init__(self, group: Group, communicator: Communicator) -> None:
        super().__init__(group)
        self._communicator = communicator

    def _broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream(tensors[0].device)
        self._communicator.start()
        try:
            for tensor in tensors:
                self._communicator.broadcast(tensor, stream)
        finally:
            self._communicator.end()


class CoalescedTransport(_Together):
    """All broadcasts of a call in one NCCL group call of a process group.

    Graph: capturable; reads nothing on the host. Since torch 2.8 a call that waits runs on the current stream.
    """

    def __init__(self, group: Group, process_group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._process_group = process_group
        self._root = dist.get_process_group_ranks(process_group)[0]

    def _broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) == 1:
            self._broadcast(tensors[0])
            return
        with dist._coalescing_manager(self._process_group, device=tensors[0].device):  # type: ignore[attr-defined]
            for tensor in tensors:
                self._broadcast(tensor)

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(takeable(tensor), src=self._root, group=self._process_group)


class PackedTransport:
    """All tensors of a call in one device buffer, for engine coordinators that know only ``broadcast``.

    Graph: capturable where the coordinator's broadcast is.
    """

    name = "grouped"

    def __init__(self, group: Group) -> None:
        self._group = group

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        aligned = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]
        buffer = torch.zeros(max(sum(aligned), 16), dtype=torch.uint8, device=tensors[0].device)
        views, start = [], 0
        for tensor, size in zip(tensors, aligned, strict=True):
            views.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += size
        packet.scratch[self.name] = (buffer, views)

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        copy_all_(tensors, self.fetch(packet, tensors))

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        buffer, views = packet.scratch[self.name]
        if self._group.rank_in_group == 0:
            copy_all_(views, tensors)
        self._group.broadcast(buffer, src=0)
        return views  # type: ignore[no-any-return]


def device_lane(group: Group) -> Transport:
    """How tensors of a group's device travel together: the engine's communicator, the process group's coalescing, a
    communicator of our own, or one packed buffer through the group's own broadcast."""
    if (communicator := engine_communicator(group)) is not None:
        return DirectTransport(group, communicator)
    process_group = process_group_of(group)
    if process_group is not None and dist.get_backend(process_group) == "nccl":
        return CoalescedTransport(group, process_group)
    if torch.cuda.is_available() and torch.version.hip is None and process_group is None and has_own_bindings():
        return DirectTransport(group, OwnCommunicator(group))
    return PackedTransport(group)


class GroupedTransport:
    """One collective per call: frames on host tensors, an NCCL group call or a packed buffer on devices."""

    name = "grouped"

    def __init__(self, group: Group) -> None:
        self._host = FramedTransport(group)
        self._device = device_lane(group)

    def _lane(self, tensors: Sequence[Tensor]) -> Transport:
        return self._host if tensors[0].device.type == "cpu" else self._device

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        self._lane(tensors).prepare(packet, tensors)

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        self._lane(tensors).overwrite_(packet, tensors)

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._lane(tensors).fetch(packet, tensors)
