"""Waiting for the collectives of a CPU group, so that a rank's failure ends the wait on every rank."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from specsync_core.group_store import AbsentRankError, GroupStore, store_of
from specsync_core.local_wire import wire_of

__all__ = ["AbsentRankError", "GroupStore", "gather_bytes", "store_of", "wait"]

SLICE = timedelta(milliseconds=250)


def wait(work: Any, cpu_group: dist.ProcessGroup, what: str) -> None:
    """Wait for a gloo collective, as long as its process group's own time-out allows.

    Raises:
        TransportError: it failed or timed out, with what every peer is doing, the missing ones first.
        SpecSyncError: a peer gave up; the error that it raised.
    """
    store = store_of(cpu_group)
    store.enter(what)
    has_ended = False
    try:
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                store.glance()
                if has_ended:
                    store.give_up(what, native_words(error), error)
                # Only the slice is over, or the collective: then the next turn raises again, or it did end well.
                has_ended = work.is_completed()
    except BaseException as error:
        store.abandon(what, error)
        raise
    finally:
        store.leave()


def native_words(error: RuntimeError) -> str:
    """What a native library says: its first sentence, without the source file that it stands in."""
    line = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).splitlines()[0])
    sentence, stop, _ = line.partition(". ")
    return sentence + stop.strip()


def gather_bytes(cpu_group: dist.ProcessGroup, data: bytes, what: str) -> list[bytes]:
    """Return every rank's bytes, by group rank. All ranks bring equally many.

    Args:
        what: the act that the bytes belong to, for messages.

    Raises:
        TransportError: as `wait`.
    """
    store = store_of(cpu_group)
    store.glance()
    store.place = what
    if (gather := getattr(cpu_group, "gather_bytes", None)) is not None:  # a group of a test
        return gather(data, what)  # type: ignore[no-any-return]
    if (wire := wire_of(cpu_group)) is not None:
        return wire.gather(data, "gather")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    frames = [torch.empty_like(own) for _ in range(store.world_size)]
    wait(dist.all_gather(frames, own, group=cpu_group, async_op=True), cpu_group, "gather")
    return [bytes(frame.tolist()) for frame in frames]
