"""DFlash: a block-diffusion draft, one forward per block. This module holds the hooks; no torch here."""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import Algorithm, BroadcastPoint, EngineFacts, Speculator, SpeculatorContext, hookimpl
from specsync_dflash import sglang, vllm


@hookimpl
def specsync_algorithm() -> Algorithm:
    """DFlash's reference decision functions."""
    return Algorithm(
        name="dflash",
        summary="one-forward block draft, greedy or chosen by a selector, target-only rejection sampling",
        draft_kind="block",
        bind=_bind,
    )


@hookimpl
def specsync_broadcast_points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """Where SGLang and vLLM decide; none for other engines."""
    return (*sglang.points(engine), *vllm.points(engine))


def _bind(context: SpeculatorContext) -> Speculator:
    from specsync_dflash.speculator import DFlashSpeculator

    return DFlashSpeculator(context)
