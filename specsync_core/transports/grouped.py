"""``grouped``: all tensors of a call in one collective, whatever the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from specsync_core.groups import Group, TorchGroup
from specsync_core.payload import Packet
from specsync_core.transports.base import Transport, copy_all_
from specsync_core.transports.framed import FramedTransport
from specsync_core.transports.group import GroupTransport


class CoalescedTransport(GroupTransport):
    """All broadcasts of a call in one NCCL group call of the process group.

    Graph: capturable; the wait joins the current stream and reads nothing on the host.
    """

    name = "grouped"

    def __init__(self, group: TorchGroup) -> None:
        super().__init__(group)
        self._process_group = group.process_group

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        staged = [
            tensor if tensor.is_contiguous() else scratch.copy_(tensor)
            for tensor, scratch in zip(tensors, packet.scratch[self.name], strict=True)
        ]
        self._broadcast_all(staged)
        copy_all_(tensors, staged)

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        scratch: list[Tensor] = packet.scratch[self.name]
        copy_all_(scratch, tensors)
        self._broadcast_all(scratch)
        return scratch

    def _broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        with dist.distributed_c10d._coalescing_manager(self._process_group, device=tensors[0].device):
            for tensor in tensors:
                self._broadcast(tensor)


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


class GroupedTransport:
    """One collective per call: frames on host tensors, an NCCL group call or a packed buffer on devices."""

    name = "grouped"

    def __init__(self, group: Group) -> None:
        self._host = FramedTransport(group)
        on_nccl = isinstance(group, TorchGroup) and not group.is_gloo
        self._device: Transport = CoalescedTransport(group) if on_nccl else PackedTransport(group)  # type: ignore[arg-type]

    def _lane(self, tensors: Sequence[Tensor]) -> Transport:
        return self._host if tensors[0].device.type == "cpu" else self._device

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        self._lane(tensors).prepare(packet, tensors)

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        self._lane(tensors).overwrite_(packet, tensors)

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._lane(tensors).fetch(packet, tensors)
