"""EAGLE on ROCm, where every verify is greedy: a plugin of its own, active on HIP only. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import BroadcastPoint, EngineFacts, hookimpl


@hookimpl
def specsync_broadcast_points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The greedy verify's broadcast point; none off HIP."""
    return ()
