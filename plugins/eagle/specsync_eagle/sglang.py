"""Where SGLang decides for EAGLE and its kin. Facts about its code, read from 0.5.16 to 0.5.23; no torch here.

EAGLE, NEXTN and MTP (multi-layer, frozen KV), STANDALONE and NGRAM all verify in one function. There the engine
broadcasts what it sampled, and from 0.5.18 on also what it chose greedily on ROCm, but neither greedy verdicts
elsewhere nor simulated acceptance, which is drawn after that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specsync_core import BroadcastPoint, Call, EngineFacts
from specsync_eagle import sglang_drafts, sglang_ngram
from specsync_eagle.sglang_drafts import SPECULATIVE

VERIFY = f"{SPECULATIVE}.eagle_utils.eagle_sample"
"""The verify of EAGLE, STANDALONE, multi-layer EAGLE, frozen-KV MTP and NGRAM, simulated acceptance included."""
GREEDY_SITE, SAMPLE_SITE, SIMULATED_SITE = "eagle-verify-greedy", "eagle-verify-sample", "eagle-accept-simulated"
Capture = Literal["never", "any-communicator", "engine-communicator"]

TREES = frozenset({"eagle", "eagle3", "nextn", "mtp", "frozen_kv_mtp", "standalone"})
"""Algorithms that draft a tree, by the engine's names in lower case."""
FAMILY = TREES | {"ngram", "uno"}


@dataclass(frozen=True)
class Verify:
    """`VERIFY` as some versions of SGLang have it."""

    versions: str
    signature: tuple[str, ...]
    broadcasts_greedy_on_rocm: bool
    """On ROCm the engine broadcasts greedy verdicts by itself."""


_MASKED = ("verify_input", "batch", "logits_output", "grammar_mask")
VERIFIES = (
    Verify("==0.5.16", ("verify_input", "batch", "logits_output", "vocab_mask"), False),
    Verify("==0.5.17", _MASKED, False),
    Verify(">=0.5.18,<0.5.20", _MASKED, True),
    Verify(">=0.5.20,<0.5.22", (*_MASKED, "uno_target_max_top_k"), True),
    Verify(">=0.5.22,<0.5.24", (*_MASKED, "uno_target_max_top_k", "watermark_state", "watermark_full_mask"), True),
)


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of every known version but those of the verify; none for another engine or another algorithm."""
    algorithm = engine.algorithm
    if engine.engine != "sglang" or algorithm not in (None, *FAMILY):
        return ()
    found = [*_target()]
    if algorithm is None or algorithm in TREES:
        found += sglang_drafts.points()
    if algorithm in (None, "ngram"):
        found += sglang_ngram.points()
    return found


def verify_points(engine: EngineFacts, *, capture: Capture = "never") -> Sequence[BroadcastPoint]:
    """The verify's points of every known version; none for another engine or another algorithm."""
    if engine.engine != "sglang" or engine.algorithm not in (None, *FAMILY):
        return ()
    hooked = [
        BroadcastPoint(
            target=VERIFY,
            when="after",
            sites=(GREEDY_SITE, SIMULATED_SITE),
            site_of=_verdict(engine.platform, verify),
            tensors_of=_tensors_of,
            versions=verify.versions,
            signature=verify.signature,
            capture=capture,
            proof="accept",
        )
        for verify in VERIFIES
    ]
    return [*hooked, *(replace(point, when="engine", sites=(SAMPLE_SITE,), proof=None) for point in hooked)]


def _verdict(platform: str | None, verify: Verify) -> Callable[[Call], str | None]:
    def site_of(call: Call) -> str | None:
        """The site of the path that was taken; the sampling site stands for all that the engine broadcasts itself."""
        predict = call.result[0]
        if predict.numel() == 0:  # an idle batch, whose accept_index has one dimension
            return None
        if _is_simulating():
            return SIMULATED_SITE
        if platform == "rocm" and verify.broadcasts_greedy_on_rocm:
            return SAMPLE_SITE
        is_greedy = call.argument("batch", verify.signature).sampling_info.is_all_greedy
        return GREEDY_SITE if is_greedy or platform in ("cpu", "npu", "rocm", "xpu") else SAMPLE_SITE

    return site_of


def _is_simulating() -> bool:
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    return bool(SIMULATE_ACC_LEN > 0)


def _tensors_of(call: Call) -> Sequence[Any]:
    """The registry's order. The engine returns the accepted length with the bonus counted; it agrees all the same."""
    predict, accept_lens, accept_index = call.result
    return predict, accept_index, accept_lens


def _target() -> Sequence[BroadcastPoint]:
    known = (
        *("self", "logits_output", "sampling_info", "return_logprob"),
        *("top_logprobs_nums", "token_ids_logprobs", "positions"),
    )
    point = BroadcastPoint(
        target="sglang.srt.layers.sampler.Sampler.forward",
        when="after",
        sites=("eagle-target",),
        site_of=lambda call: "eagle-target" if call.result.numel() else None,
        tensors_of=lambda call: (call.result,),
        versions=">=0.5.16,<0.5.22",
        signature=known,
        proof="target",
    )
    return [point, replace(point, versions=">=0.5.22,<0.5.24", signature=(*known, "logprob_logits"))]
