"""EAGLE and MTP: a draft tree, verified in one target forward. This module holds the hooks; no torch here."""

from __future__ import annotations

from specsync_core import Algorithm, Speculator, SpeculatorContext, hookimpl


@hookimpl
def specsync_algorithm() -> Algorithm:
    """EAGLE's reference decision functions."""
    return Algorithm(
        name="eagle",
        summary="draft tree by cumulative top-k scores, verified greedily or by coins in one target forward",
        draft_kind="causal",
        bind=_bind,
    )


def _bind(context: SpeculatorContext) -> Speculator:
    from specsync_eagle.speculator import EagleSpeculator

    return EagleSpeculator(context)
