"""Choose a transport for a group: the requested one, or under ``auto`` the best that passes its self-test.

The ranks choose together. Each step (is there an obstacle, can it be built, does it pass its self-test) ends with an
exchange of what every rank found, so that no rank is left alone in a collective and all take the same transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specsync_core.errors import SpecSyncError, TransportError
from specsync_core.groups import Group, TorchGroup
from specsync_core.payload import Packet, describe
from specsync_core.transports import one_shot_channel
from specsync_core.transports.base import Transport
from specsync_core.transports.group import GroupTransport
from specsync_core.transports.grouped_counting import grouped_for
from specsync_core.transports.one_shot import OneShotTransport

TRANSPORTS: dict[str, Callable[[Group], Transport]] = {
    "one-shot": OneShotTransport,
    "grouped": grouped_for,
    "group": GroupTransport,
}
"""By name, the best first."""

logger = logging.getLogger("specsync")

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
    """Choose, and log on group rank 0 what was taken, why, and why not the others; see `choose`."""
    choice = choose(requested, group, exchange)
    if group.rank_in_group == 0:
        others = "".join(f" Not {name}: {why}." for name, why in choice.rejected)
        logger.info("transport %s for %s: %s.%s", choice.transport.name, requested, choice.reason, others)
    return choice


def choose(requested: str, group: Group, exchange: Exchange | None) -> Choice:
    """Return the transport of this name, or for ``auto`` the first that passes its self-test on every rank.

    Args:
        exchange: brings the ranks' findings together, so that all choose the same; None takes the best that
            needs no meeting, without a test.

    Raises:
        TransportError: no transport works, or the requested one does not; on every rank, with each one's reason.
    """
    if requested in ("group", "grouped"):
        return Choice(TRANSPORTS[requested](group), "as requested")
    device = device_of(group)
    if exchange is None or device is None:
        if requested != "auto":
            raise TransportError(f"{requested}: the ranks cannot meet to test it, or the group names no device.")
        return Choice(grouped_for(group), "not self-tested: the ranks cannot meet, or the group names no device")
    rejected: list[tuple[str, str]] = []
    names = TRANSPORTS if requested == "auto" else (requested,)
    for name in names:
        transport, failure = _attempt(name, group, device, exchange)
        if transport is not None and failure is None:
            reason = "as requested"
            if requested == "auto":
                reason = f"the first to pass its self-test on {group.world_size} ranks"
            return Choice(transport, reason, tuple(rejected))
        rejected.append((name, str(failure)))
    raise TransportError("no transport passes its self-test: " + "; ".join(f"{name}: {why}" for name, why in rejected))


def _attempt(name: str, group: Group, device: torch.device, exchange: Exchange) -> tuple[Transport | None, str | None]:
    """Build and test one transport with all ranks; return it, and what went wrong on which rank."""
    if name == "one-shot" and (failure := _one_shot_obstacle(group, device, exchange)) is not None:
        return None, failure
    built: list[Transport] = []

    def build() -> str | None:
        built.append(TRANSPORTS[name](group))
        return None

    failure = _together(exchange, f"build/{name}", guarded(build))
    if failure is not None:
        return None, failure
    return built[0], _together(exchange, f"self-test/{name}", self_test(built[0], group, device))


def _one_shot_obstacle(group: Group, device: torch.device, exchange: Exchange) -> str | None:
    failure = _together(exchange, "obstacle/one-shot", one_shot_channel.obstacle(group, device))
    if failure is not None:
        return failure
    nodes = exchange("node/one-shot", one_shot_channel.node_id())
    away = [f"group rank {rank}" for rank, node in enumerate(nodes) if node != nodes[0]]
    return f"{', '.join(away)}: not on the machine of group rank 0" if away else None


def _together(exchange: Exchange, topic: str, finding: str | None) -> str | None:
    """Bring every rank's finding together; None when no rank found anything. Alike findings are named once."""
    findings = exchange(topic, finding)
    if None not in findings and len(set(findings)) == 1:
        return f"every rank: {findings[0]}"
    failures = [f"group rank {rank}: {found}" for rank, found in enumerate(findings) if found is not None]
    return "; ".join(failures) or None


def device_of(group: Group) -> torch.device | None:
    """Return where a group's broadcasts live, or None when the group does not say."""
    if isinstance(group, TorchGroup):
        return torch.device("cpu") if group.is_gloo else torch.device("cuda", torch.cuda.current_device())
    device = getattr(group, "device", None)
    return device if isinstance(device, torch.device) else None


def self_test(transport: Transport, group: Group, device: torch.device) -> str | None:
    """Move known values that differ per rank, eagerly and in a replayed graph; return what went wrong. Never raises."""
    return guarded(lambda: _test_eagerly(transport, group, device) or _test_captured(transport, group, device))


def guarded(test: Callable[[], str | None]) -> str | None:
    """Run a test that may raise; return what went wrong in one line, or None."""
    try:
        return test()
    except (SpecSyncError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]


def _test_eagerly(transport: Transport, group: Group, device: torch.device) -> str | None:
    own = _pattern(group.rank_in_group, device)
    packet = Packet("specsync-self-test", describe(own), sum(tensor.nbytes for tensor in own))
    transport.prepare(packet, own)
    for _ in range(2):
        transport.overwrite_(packet, own)
        if (wrong := _wrong(own, device)) is not None:
            return wrong
        own = _pattern(group.rank_in_group, device)
    return None


def _test_captured(transport: Transport, group: Group, device: torch.device) -> str | None:
    """Capture one call and replay it twice on inputs that changed."""
    if device.type != "cuda":
        return None
    own = _pattern(group.rank_in_group, device)
    packet = Packet("specsync-self-test", describe(own), sum(tensor.nbytes for tensor in own))
    transport.prepare(packet, own)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        transport.overwrite_(packet, own)  # communicators come into being here: inside capture they would abort
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        transport.overwrite_(packet, own)
    for _ in range(2):
        for tensor, fresh in zip(own, _pattern(group.rank_in_group, device), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        if (wrong := _wrong(own, device)) is not None:
            return f"replayed from a graph: {wrong}"
    return None


def _wrong(tensors: Sequence[Tensor], device: torch.device) -> str | None:
    pairs = zip(tensors, _pattern(0, device), strict=True)
    wrong = [describe([mine]) for mine, right in pairs if not mine.equal(right)]
    return f"wrong values in {', '.join(wrong)}" if wrong else None


def _pattern(rank: int, device: torch.device) -> Sequence[Tensor]:
    """int64 above 2**32, an odd count of bools, floats that are not round, and nothing at all."""
    count = torch.arange(5, device=device)
    return (count * (2**40 + rank) + rank, (count + rank) % 2 == 0, (count + rank) / 3, count[:0])
