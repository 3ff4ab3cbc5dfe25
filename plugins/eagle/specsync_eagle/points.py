"""Where SGLang decides a tree's verdict. Facts about its code, read from its wheels; no torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specsync_core import BroadcastPoint, Call, EngineFacts

TARGET = "sglang.srt.speculative.eagle_utils.eagle_sample"
"""The verify of EAGLE, STANDALONE, multi-layer EAGLE, frozen-KV MTP and NGRAM, simulated acceptance included."""

GREEDY_SITE, SAMPLE_SITE = "eagle-verify-greedy", "eagle-verify-sample"


@dataclass(frozen=True)
class EagleSample:
    """`TARGET` as one version of SGLang has it."""

    version: str
    signature: tuple[str, ...]
    greedy_platforms: frozenset[str]
    """Where every verify takes the greedy path, whatever its requests ask for."""
    rejection_sampling_on_rocm: bool
    """Whether ROCm takes the sampling path after all when the draft worker hands over its probabilities."""


KNOWN = (
    EagleSample(
        version="0.5.17",
        signature=("verify_input", "batch", "logits_output", "grammar_mask"),
        greedy_platforms=frozenset({"cpu", "npu", "rocm", "xpu"}),
        rejection_sampling_on_rocm=False,
    ),
    EagleSample(
        version="0.5.23",
        signature=(
            "verify_input",
            "batch",
            "logits_output",
            "grammar_mask",
            "uno_target_max_top_k",
            "watermark_state",
            "watermark_full_mask",
        ),
        greedy_platforms=frozenset({"cpu", "rocm", "xpu"}),
        rejection_sampling_on_rocm=True,
    ),
)


def verify_points(
    engine: EngineFacts, *, capture: Literal["never", "any-communicator", "engine-communicator"] = "never"
) -> Sequence[BroadcastPoint]:
    """The point of the engine's version; of every known version where the engine's is none of them.

    An adapter then refuses the engine, and can name the versions that are known.
    """
    if engine.engine != "sglang":
        return ()
    known = [facts for facts in KNOWN if facts.version == engine.version] or KNOWN
    return tuple(
        BroadcastPoint(
            target=TARGET,
            when="after",
            sites=(GREEDY_SITE, SAMPLE_SITE),
            site_of=_site_of(facts, engine.platform),
            tensors_of=_tensors_of,
            versions=f"=={facts.version}",
            signature=facts.signature,
            capture=capture,
        )
        for facts in known
    )


def _site_of(facts: EagleSample, platform: str | None) -> Callable[[Call], str | None]:
    def site_of(call: Call) -> str | None:
        predict, _, _ = call.result
        if predict.numel() == 0:  # an idle batch, whose accept_index has one dimension
            return None
        if _argument(call, facts, "batch").sampling_info.is_all_greedy:
            return GREEDY_SITE
        if platform not in facts.greedy_platforms:
            return SAMPLE_SITE
        if platform == "rocm" and facts.rejection_sampling_on_rocm:
            draft_probs = getattr(_argument(call, facts, "verify_input"), "draft_probs", None)
            return GREEDY_SITE if draft_probs is None else SAMPLE_SITE
        return GREEDY_SITE

    return site_of


def _tensors_of(call: Call) -> Sequence[Any]:
    """The registry's order. The engine returns the accepted length with the bonus counted; it agrees all the same."""
    predict, accept_lens, accept_index = call.result
    return predict, accept_index, accept_lens


def _argument(call: Call, facts: EagleSample, name: str) -> Any:
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[facts.signature.index(name)]
