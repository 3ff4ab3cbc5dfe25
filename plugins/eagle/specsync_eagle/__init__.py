"""EAGLE and MTP: a draft tree, verified in one target forward. This module holds the hooks; no torch here."""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import Algorithm, BroadcastPoint, EngineFacts, Speculator, SpeculatorContext, hookimpl
from specsync_eagle import sglang, vllm


@hookimpl
def specsync_algorithm() -> Algorithm:
    """EAGLE's reference decision functions."""
    return Algorithm(
        name="eagle",
        summary="draft tree by cumulative top-k scores, verified greedily or by coins in one target forward",
        draft_kind="causal",
        bind=_bind,
    )


@hookimpl
def specsync_broadcast_points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """Where SGLang and vLLM decide; on ROCm without SGLang's verify, which the `eagle-rocm` plugin has."""
    verify = sglang.verify_points(engine) if engine.platform != "rocm" else ()
    return (*verify, *sglang.points(engine), *vllm.points(engine))


def _bind(context: SpeculatorContext) -> Speculator:
    from specsync_eagle.speculator import EagleSpeculator

    return EagleSpeculator(context)
