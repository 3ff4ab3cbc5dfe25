"""DSpark: a semi-autoregressive block draft with a Markov head. This module holds the hooks; no torch here."""

from __future__ import annotations

from specsync_core import Algorithm, Speculator, SpeculatorContext, hookimpl


@hookimpl
def specsync_algorithm() -> Algorithm:
    """DSpark's reference decision functions."""
    return Algorithm(
        name="dspark",
        summary="block draft with a Markov head, verify lengths planned by confidence, chain rejection sampling",
        draft_kind="block",
        bind=_bind,
    )


def _bind(context: SpeculatorContext) -> Speculator:
    from specsync_dspark.speculator import DSparkSpeculator

    return DSparkSpeculator(context)
