"""DSpark: a semi-autoregressive block draft with a Markov head. This module holds the hooks; no torch here."""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import Algorithm, BroadcastPoint, EngineFacts, Facts, Speculator, SpeculatorContext, hookimpl
from specsync_dspark import sglang, vllm


@hookimpl
def specsync_algorithm() -> Algorithm:
    """DSpark's reference decision functions."""
    return Algorithm(
        name="dspark",
        summary="block draft with a Markov head, verify lengths planned by confidence, chain rejection sampling",
        draft_kind="block",
        bind=_bind,
    )


@hookimpl
def specsync_broadcast_points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """Where SGLang and vLLM decide; none for other engines."""
    return (*sglang.points(engine), *vllm.points(engine))


@hookimpl
def specsync_policy(facts: Facts) -> str | None:
    """A narrower default where a model's logits cannot differ between ranks."""
    return sglang.policy(facts)


def _bind(context: SpeculatorContext) -> Speculator:
    from specsync_dspark.speculator import DSparkSpeculator

    return DSparkSpeculator(context)
