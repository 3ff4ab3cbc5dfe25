"""Medusa: several heads draft at once, a tree of their candidates is verified in one target forward.

This module holds the hooks. specsync imports it at start-up in every process, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from specsync_core import Algorithm, BroadcastPoint, EngineFacts, Facts, Speculator, SpeculatorContext, hookimpl
from specsync_medusa import vllm

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@hookimpl
def specsync_sites() -> Traversable:
    """The registry of Medusa's sites, to merge with the others."""
    return files(__name__) / "sites.toml"


@hookimpl
def specsync_algorithm() -> Algorithm:
    """Medusa's reference decision functions, for the demo engine."""
    return Algorithm(
        name="medusa",
        summary="candidate tree of several draft heads, typical acceptance",
        draft_kind="block",
        bind=_bind,
    )


@hookimpl
def specsync_broadcast_points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """Where vLLM decides; none for other engines."""
    return vllm.points(engine)


@hookimpl
def specsync_policy(facts: Facts) -> str | None:
    """In vLLM the block is agreed on at ``medusa-block``, and so not a second time at the built-in site."""
    return vllm.policy(facts)


def _bind(context: SpeculatorContext) -> Speculator:
    from specsync_medusa.speculator import MedusaSpeculator

    return MedusaSpeculator(context)
