"""One packed, labelled buffer per call: how ``grouped`` works on host groups.

A frame begins with a header that says which site, which call and which payload it carries, so that ranks
whose calls do not match find out instead of corrupting each other. Frames travel over the sockets of one machine
(`local_wire`), else by the group's broadcast. There every frame of a site has the same size on every rank, whatever
one call's payload: gloo ends a process that receives more than it expects (``EnforceNotMet`` in its I/O thread) and
silently fills part of a larger buffer (measured, torch 2.13).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsync_core.errors import PayloadError
from specsync_core.groups import Group
from specsync_core.local_wire import LocalWire, wire_of
from specsync_core.payload import Packet
from specsync_core.transports.base import copy_all_

HEADER_BYTES = 256
CALL = struct.Struct("<q")
"""The header's first field, the call's number. The rest of the header is the label."""
MEMCMP = ctypes.CDLL(None).memcmp
MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
ALIGNMENT = 16
"""Tensors start at multiples of this, so that a slice can be viewed as any dtype."""


class _Frame:
    """The buffer of one site, shared by all of its signatures: uint8, a power of two long."""

    def __init__(self, nbytes: int = 2 * HEADER_BYTES) -> None:
        self.calls = 0
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        self.buffer = torch.zeros(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        whole = (ctypes.c_ubyte * self.buffer.numel()).from_address(self.buffer.data_ptr())
        self.memory = memoryview(whole).cast("B")
        """The same bytes. Valid as long as ``buffer`` is."""


@dataclass
class _Layout:
    """Where one signature's tensors lie in its site's frame."""

    frame: _Frame
    buffer: Tensor
    """The buffer that the views are of; the frame may have grown since."""
    label: bytes
    """The header behind the call's number."""
    views: list[Tensor]
    spans: list[tuple[int, int]]
    """Of each view: where it begins, and its bytes."""
    on_host: bool
    """Whether the tensors are host tensors, as well as the frame."""
    end: int
    """Bytes of the frame that this signature fills."""

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Fill the frame. Bytes, not tensors: a dispatch costs more than the copy."""
        if not self.are_plain(tensors):
            copy_all_(self.views, tensors)
            return
        for (address, nbytes), tensor in zip(self.spans, tensors, strict=True):
            ctypes.memmove(address, tensor.data_ptr(), nbytes)

    def equals(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors are bit for bit what the frame holds. False where only a dispatch could tell."""
        return self.are_plain(tensors) and not any(
            MEMCMP(address, tensor.data_ptr(), nbytes)
            for (address, nbytes), tensor in zip(self.spans, tensors, strict=True)
        )

    def are_plain(self, tensors: Sequence[Tensor]) -> bool:
        """Whether their bytes lie on the host one after the other, as they are."""
        return self.on_host and all(
            tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() for tensor in tensors
        )


class FramedTransport:
    """All tensors of a call in one broadcast of one buffer. Not capturable: host groups only."""

    name = "grouped"

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_root = group.rank_in_group == 0
        self._frames: dict[str, _Frame] = {}
        self._wire: LocalWire | None = None

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        if not self._frames:  # the ranks are here together
            self._wire = wire_of(self._group.cpu_group)
        packet.scratch[self.name] = self._lay_out(packet, tensors)

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        copy_all_(tensors, self.fetch(packet, tensors))

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        layout: _Layout = packet.scratch[self.name]
        frame = layout.frame
        if layout.buffer is not frame.buffer:
            layout = packet.scratch[self.name] = self._lay_out(packet, tensors)
        frame.calls += 1
        memory = frame.memory
        if self._is_root:
            CALL.pack_into(memory, 0, frame.calls)
            memory[CALL.size : HEADER_BYTES] = layout.label
            layout.put(tensors)
        size = layout.end
        if self._wire is not None:
            size = self._wire.broadcast(memory[: layout.end])
        else:
            self._group.broadcast(frame.buffer, src=0)
        if self._is_root:
            return tensors
        self._check_header(layout, packet, size)
        # Equal as a rule: then nothing is left to compare or to overwrite.
        return tensors if layout.equals(tensors) else layout.views

    def _check_header(self, layout: _Layout, packet: Packet, size: int) -> None:
        frame = layout.frame
        (calls,) = CALL.unpack_from(frame.memory)
        label = frame.memory[CALL.size : HEADER_BYTES]
        if calls == frame.calls and label == layout.label and size == layout.end:  # labels may be cut off
            return
        theirs = bytes(label).rstrip(b"\0").decode(errors="replace") or "something that is not a specsync frame"
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
        label = _label(packet).encode()[: HEADER_BYTES - CALL.size].ljust(HEADER_BYTES - CALL.size, b"\0")
        spans = [(view.data_ptr(), view.nbytes) for view in views]
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        return _Layout(frame, frame.buffer, label, views, spans, on_host, end)

    def _frame(self, slug: str, nbytes: int) -> _Frame:
        frame = self._frames.setdefault(slug, _Frame())
        if nbytes > frame.buffer.numel():
            frame.grow(nbytes)
        return frame


def _label(packet: Packet) -> str:
    return f"{packet.name} with {packet.label}"
