"""vLLM's own decisions, whatever the algorithm: verdicts, seeds, gates, and host-side drafts. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import BroadcastPoint, EngineFacts, hookimpl
from specsync_vllm import drafts, runners


@hookimpl
def specsync_broadcast_points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """Where vLLM's model runners decide, and the drafts of n-grams, suffixes, draft models and Medusa."""
    return (*runners.points(engine), *drafts.points(engine))
