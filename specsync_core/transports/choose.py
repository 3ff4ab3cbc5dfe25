"""Choose a transport for a group: the requested one, or under ``auto`` the best that passes its self-test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specsync_core.errors import SpecSyncError, TransportError
from specsync_core.groups import Group, TorchGroup
from specsync_core.payload import Packet, describe
from specsync_core.transports.base import Transport
from specsync_core.transports.group import GroupTransport
from specsync_core.transports.grouped import GroupedTransport

TRANSPORTS: dict[str, Callable[[Group], Transport]] = {"grouped": GroupedTransport, "group": GroupTransport}
"""By name, the best first."""

Exchange = Callable[[str, Any], list[Any]]
"""Give a topic and a payload, get every rank's payload by group rank."""


@dataclass(frozen=True)
class Choice:
    """A transport, and why it was taken."""

    transport: Transport
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    """Names that were tried first, each with what went wrong on which group rank."""


def choose_transport(requested: str, group: Group, exchange: Exchange | None) -> Choice:
    """Return the transport of this name, or for ``auto`` the first that passes its self-test on every rank.

    Args:
        exchange: brings the ranks' self-test results together, so that all choose the same; None takes
            the best without a test.

    Raises:
        TransportError: no transport works; raised on every rank, with each one's reason.
    """
    if requested != "auto":
        return Choice(TRANSPORTS[requested](group), "as requested")
    device = device_of(group)
    if exchange is None or device is None:
        return Choice(GroupedTransport(group), "not self-tested: the ranks cannot meet, or the group names no device")
    rejected: list[tuple[str, str]] = []
    for name, build in TRANSPORTS.items():
        transport = build(group)
        results = exchange(f"self-test/{name}", self_test(transport, group, device))
        failures = [f"group rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
        if not failures:
            return Choice(transport, f"the first to pass its self-test on {group.world_size} ranks", tuple(rejected))
        rejected.append((name, "; ".join(failures)))
    raise TransportError("no transport passes its self-test: " + "; ".join(f"{name}: {why}" for name, why in rejected))


def device_of(group: Group) -> torch.device | None:
    """Return where a group's broadcasts live, or None when the group does not say."""
    if isinstance(group, TorchGroup):
        return torch.device("cpu") if group.is_gloo else torch.device("cuda", torch.cuda.current_device())
    device = getattr(group, "device", None)
    return device if isinstance(device, torch.device) else None


def self_test(transport: Transport, group: Group, device: torch.device) -> str | None:
    """Move known values that differ per rank; return what went wrong, or None. Never raises."""
    try:
        own = _pattern(group.rank_in_group, device)
        packet = Packet("specsync-self-test", describe(own), sum(tensor.nbytes for tensor in own))
        transport.prepare(packet, own)
        for _ in range(2):
            transport.overwrite_(packet, own)
            wrong = [
                describe([tensor])
                for tensor, right in zip(own, _pattern(0, device), strict=True)
                if not tensor.equal(right)
            ]
            if wrong:
                return f"wrong values in {', '.join(wrong)}"
            own = _pattern(group.rank_in_group, device)
        return None
    except (SpecSyncError, RuntimeError) as error:
        return str(error).splitlines()[0]


def _pattern(rank: int, device: torch.device) -> Sequence[Tensor]:
    """int64 above 2**32, an odd count of bools, floats that are not round, and nothing at all."""
    count = torch.arange(5, device=device)
    return (count * (2**40 + rank) + rank, (count + rank) % 2 == 0, (count + rank) / 3, count[:0])
