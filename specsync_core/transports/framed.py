"""One packed, labelled buffer per call: how ``grouped`` works on host groups.

A frame begins with a header that says which site, which call and which payload it carries, so that ranks
whose calls do not match find out instead of corrupting each other. Every frame of a site has the same
size on every rank, whatever one call's payload: gloo ends a process that receives more than it expects
(``EnforceNotMet`` in its I/O thread) and silently fills part of a larger buffer (measured, torch 2.13).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsync_core.errors import PayloadError
from specsync_core.groups import Group
from specsync_core.payload import Packet
from specsync_core.transports.base import copy_all_

HEADER_BYTES = 256
CALL_BYTES = 8
"""The header's first field, the call's number: int64. The rest of the header is the label."""
ALIGNMENT = 16
"""Tensors start at multiples of this, so that a slice can be viewed as any dtype."""


@dataclass
class _Frame:
    """The buffer of one site, shared by all of its signatures."""

    buffer: Tensor
    """uint8, a power of two long."""
    calls: int = 0


@dataclass
class _Layout:
    """Where one signature's tensors lie in its site's frame."""

    frame: _Frame
    buffer: Tensor
    """The buffer that the views are of; the frame may have grown since."""
    label: Tensor
    views: list[Tensor]


class FramedTransport:
    """All tensors of a call in one broadcast of one buffer. Not capturable: host groups only."""

    name = "grouped"

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_root = group.rank_in_group == 0
        self._frames: dict[str, _Frame] = {}

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        packet.scratch[self.name] = self._lay_out(packet, tensors)

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        copy_all_(tensors, self.fetch(packet, tensors))

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        layout: _Layout = packet.scratch[self.name]
        frame = layout.frame
        if layout.buffer is not frame.buffer:
            layout = packet.scratch[self.name] = self._lay_out(packet, tensors)
        frame.calls += 1
        if self._is_root:
            frame.buffer[:CALL_BYTES].view(torch.int64).fill_(frame.calls)
            frame.buffer[CALL_BYTES:HEADER_BYTES].copy_(layout.label)
            copy_all_(layout.views, tensors)
        self._group.broadcast(frame.buffer, src=0)
        if self._is_root:
            return tensors
        self._check_header(layout, packet)
        return layout.views

    def _check_header(self, layout: _Layout, packet: Packet) -> None:
        frame = layout.frame
        calls = int(frame.buffer[:CALL_BYTES].view(torch.int64).item())
        label = frame.buffer[CALL_BYTES:HEADER_BYTES]
        if calls == frame.calls and torch.equal(label, layout.label):
            return
        theirs = (
            bytes(label.tolist()).rstrip(b"\0").decode(errors="replace") or "something that is not a specsync frame"
        )
        raise PayloadError(
            f"{packet.name}: the ranks' calls do not match: group rank 0 is at call {calls} of {theirs},"
            f" group rank {self._group.rank_in_group} at call {frame.calls} of {_label(packet)}."
            " A rank skipped a call, called another site, or passes another batch: compare what the two ranks"
            " decided before this call."
        )

    def _lay_out(self, packet: Packet, tensors: Sequence[Tensor]) -> _Layout:
        offsets, end = [], HEADER_BYTES
        for tensor in tensors:
            offsets.append(end)
            end = -(-(end + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
        frame = self._frame(packet.name, end)
        views = [
            frame.buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        label = _label(packet).encode()[: HEADER_BYTES - CALL_BYTES]
        padded = struct.pack(f"{HEADER_BYTES - CALL_BYTES}s", label)
        return _Layout(frame, frame.buffer, torch.frombuffer(bytearray(padded), dtype=torch.uint8), views)

    def _frame(self, slug: str, nbytes: int) -> _Frame:
        frame = self._frames.setdefault(slug, _Frame(torch.zeros(2 * HEADER_BYTES, dtype=torch.uint8)))
        if nbytes > frame.buffer.numel():
            frame.buffer = torch.zeros(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        return frame


def _label(packet: Packet) -> str:
    return f"{packet.name} with {packet.label}"
