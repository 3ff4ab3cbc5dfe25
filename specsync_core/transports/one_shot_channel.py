"""The memory that the ranks of a group share for ``one-shot``, and what its failure record means to people."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsync_core.errors import GroupError, PayloadError, SpecSyncError, TransportError
from specsync_core.groups import Group
from specsync_core.transports import one_shot_protocol as protocol
from specsync_core.transports.one_shot_protocol import Failure, Header


@dataclass
class Channel:
    """One rank's end of a group's shared memory."""

    rank: int
    world: int
    inbox: Tensor
    """uint8 ``[INBOX_BYTES]``, symmetric memory that every rank of the group can store into."""
    inboxes: tuple[int, ...]
    """The address of every rank's inbox, by group rank, as this rank sees it."""
    state: Tensor
    """int64 ``[1]`` on the device: the sequence."""
    record: Tensor
    """int64 ``[RECORD_WORDS]`` in pinned host memory: the first failure, and the engine's step."""
    halting: torch.cuda.Stream | None = None
    """The stream that a halt travels on. Made beforehand: the first stream of a process waits for a busy device."""
    keep: Any = None
    """What must live as long as the inbox."""
    known: dict[int, str] = field(default_factory=dict)
    """Headers of the calls that this rank has prepared, by word, for messages."""

    def failure(self) -> Failure | None:
        """Return the group's failure, if this rank knows of one. Waits for nothing."""
        code, own, theirs = (word & (1 << 64) - 1 for word in self.record[:3].tolist())
        return Failure.from_words(code, own, theirs) if code else None

    def halt(self) -> None:
        """Let a kernel of this rank that waits for a peer give up within microseconds, and every later call raise.

        From any thread. The line travels on a stream of its own, past what this rank's other streams wait for.
        """
        code = protocol.HALTED | self.rank << 8
        line = self.record[protocol.RECORD_HALT : protocol.RECORD_HALT + 2].fill_(code)
        if not self.record[protocol.RECORD_CODE]:
            self.record[protocol.RECORD_CODE] = code
        broken = self.inbox[protocol.BROKEN : protocol.LINE_BYTES].view(torch.int64)
        # With the device: leaving the stream alone makes a context on device 0 for a thread that was on none.
        with torch.cuda.device_of(self.inbox), torch.cuda.stream(self.halting):  # type: ignore[no-untyped-call]
            broken.copy_(line, non_blocking=True)

    def error(self) -> SpecSyncError:
        """Return the exception for the failure that is on record."""
        failure = self.failure()
        assert failure is not None
        return explain(failure, self.rank, self.known)


def explain(failure: Failure, rank: int, known: Mapping[int, str]) -> SpecSyncError:
    """Say in words what a failure record says, on any rank of the group."""
    who = f"group rank {failure.group_rank}" + (" (this rank)" if failure.group_rank == rank else "")
    own, theirs = (_name(header, known) for header in (failure.own, failure.theirs))
    if failure.kind == protocol.MISMATCH:
        return PayloadError(
            f"one-shot: the ranks' calls do not match: {who} came to chunk {failure.sequence} with {own}, where group"
            f" rank 0 sent {theirs}. Its tensors were left as they are, and the group has stopped."
            " A rank skipped a call, called another site, or passes another batch: compare what the two ranks decided"
            " before this call."
        )
    if failure.kind == protocol.HALTED:
        return TransportError("one-shot: a rank of the group has ended or gave up; the group has stopped.")
    if failure.kind == protocol.NO_ROOT:
        return TransportError(
            f"one-shot: {who} waited in vain for chunk {failure.sequence} from group rank 0, at {own}. The group has"
            " stopped. Is the process of group rank 0 alive, and does it come to this call?"
        )
    return TransportError(
        f"one-shot: {who} could not send chunk {failure.sequence} of {own}: group rank {failure.theirs.site} is"
        f" {protocol.SLOTS} chunks behind and took none in time. The group has stopped. Is its process alive, and does"
        " it come to this call?"
    )


def _name(header: Header, known: Mapping[int, str]) -> str:
    if header.word in known:
        return known[header.word]
    same_site = (text.split(" with ")[0] for word, text in known.items() if Header.from_word(word).site == header.site)
    site = next(same_site, f"a site unknown to this rank (crc32 {header.site:08x})")
    return f"{site} with {header.nbytes} bytes"


def obstacle(group: Group, device: torch.device) -> str | None:
    """Return what keeps this rank from ``one-shot``, or None. Local: asks no other rank."""
    if device.type != "cuda":
        return "it needs CUDA tensors"
    if torch.version.hip is not None:
        return "its kernel is written for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device)[0] < 7:
        return "it needs a GPU of compute capability 7.0 or newer"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if process_group_of(group) is None:
        return f"{type(group).__name__} has no process group to share memory in"
    if group.world_size > protocol.MAX_WORLD:
        return f"the group has {group.world_size} ranks; it takes up to {protocol.MAX_WORLD}"
    return None


def node_id() -> str:
    """What ranks of one machine have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def process_group_of(group: Group) -> Any:
    """The device process group behind a `TorchGroup` or an engine's coordinator."""
    return getattr(group, "process_group", None) or getattr(group, "device_group", None)


def open_channel(group: Group, device: torch.device) -> Channel:
    """Share memory among the ranks of a group; every rank calls it together.

    Raises:
        GroupError: the group names no process group.
        RuntimeError: the GPUs have no access to each other's memory.
    """
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    process_group = process_group_of(group)
    if process_group is None:
        raise GroupError(f"one-shot: {type(group).__name__} has no process group to share memory in.")
    inbox = symmetric.empty(protocol.INBOX_BYTES, dtype=torch.uint8, device=device)
    inbox.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(inbox, process_group.group_name)
    offset = inbox.data_ptr() - handle.buffer_ptrs[handle.rank]
    channel = Channel(
        rank=group.rank_in_group,
        world=group.world_size,
        inbox=inbox,
        inboxes=tuple(base + offset for base in handle.buffer_ptrs),
        state=torch.zeros(1, dtype=torch.int64, device=device),
        record=torch.zeros(protocol.RECORD_WORDS, dtype=torch.int64).pin_memory(),
        halting=torch.cuda.Stream(device, priority=-1),  # type: ignore[no-untyped-call] # few take these: a queue of its own
        keep=handle,
    )
    torch.cuda.synchronize(device)
    dist.barrier(group=group.cpu_group)  # no rank stores before every inbox is empty
    return channel
