"""DFlash: a block-diffusion draft, one forward per block. This module holds the hooks; no torch here."""

from __future__ import annotations

from specsync_core import Algorithm, Speculator, SpeculatorContext, hookimpl


@hookimpl
def specsync_algorithm() -> Algorithm:
    """DFlash's reference decision functions."""
    return Algorithm(
        name="dflash",
        summary="one-forward block draft, greedy or chosen by a selector, target-only rejection sampling",
        draft_kind="block",
        bind=_bind,
    )


def _bind(context: SpeculatorContext) -> Speculator:
    from specsync_dflash.speculator import DFlashSpeculator

    return DFlashSpeculator(context)
