"""Where SGLang decides for EAGLE and its kin. Facts about its code, read from 0.5.16 to 0.5.23; no torch here.

EAGLE, NEXTN and MTP (multi-layer, frozen KV), STANDALONE and NGRAM all verify in one function. There the engine
broadcasts what it sampled, and from 0.5.18 on also what it chose greedily on ROCm, but neither greedy verdicts
elsewhere nor simulated acceptance, which is drawn after that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from specsync_core import BroadcastPoint, Call, EngineFacts, no_tensors
from specsync_eagle import sglang_drafts
from specsync_eagle.sglang_drafts import KNOWN, SPECULATIVE

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
        found += _ngram()
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


_DRAFTING = ("self", "batch")
"""Parameters of both functions that draft."""


def _ngram() -> Sequence[BroadcastPoint]:
    """The drafts: on the device, where no host waits for another; on the host, where a grammar's mask comes from them.

    Every rank asks the same of the batch, which is replicated.
    """
    drafts = BroadcastPoint(
        target=f"{SPECULATIVE}.ngram_worker.NGRAMWorker._prepare_draft_tokens",
        when="after",
        sites=("eagle-ngram-draft",),
        site_of=_drafts_on_host,
        tensors_of=_host_tensors,
        versions=KNOWN,
        signature=_DRAFTING,
        only_if_imported=True,
        proof="draft",
    )
    tree = replace(
        drafts,
        target=f"{SPECULATIVE}.ngram_worker.NGRAMWorker._prepare_for_speculative_decoding",
        sites=("eagle-ngram-tree",),
        site_of=_tree_on_device,
        tensors_of=_tree,
        derive=_spread_tree,
    )
    corpus = BroadcastPoint(
        target=f"{SPECULATIVE}.external_corpus_manager.ExternalCorpusManager.add",
        when="after",
        sites=("eagle-ngram-corpus",),
        site_of=lambda _: "eagle-ngram-corpus",
        tensors_of=no_tensors,
        versions=KNOWN,
        signature=("self", "recv_req"),
        wait_for=_wait_for_corpus,
    )
    return [drafts, tree, corpus]


def _drafts_on_host(call: Call) -> str | None:
    return "eagle-ngram-draft" if call.argument("batch", _DRAFTING).has_grammar else None


def _tree_on_device(call: Call) -> str | None:
    batch = call.argument("batch", _DRAFTING)
    # Not a prefill, nor an idle batch: nothing was drafted there.
    return "eagle-ngram-tree" if batch.forward_mode.is_target_verify() and not batch.has_grammar else None


def _host_tensors(call: Call) -> Sequence[Any]:
    """The drafts and their tree mask: NumPy arrays, of which the tensors share the memory."""
    import torch

    return [torch.from_numpy(array).view(-1) for array in call.result]


def _tree(call: Call) -> Sequence[Any]:
    """The drafts, and what was derived from them but for the attention mask, in the registry's order."""
    worker, batch = _worker_and_batch(call)
    tree = batch.spec_info
    links = tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling
    return tree.draft_token, worker.tree_mask_batch[len(batch.reqs)], tree.positions, *links


def _spread_tree(call: Call) -> None:
    """Write the agreed tree into the attention mask, which the engine made on the host from this rank's own.

    The mask has a row per node, each of the request's length and then the tree's row; on CPU it is the tree itself. All
    is worked out on the device, in few launches: a copy from the host could wait for the broadcast before it, and the
    verify waits for this host.
    """
    worker, batch = _worker_and_batch(call)
    requests, nodes = len(batch.reqs), worker.draft_token_num
    mask, tree_M = batch.spec_info.custom_mask, worker.tree_mask_batch[requests]
    if mask.numel() == tree_M.numel():
        return
    # Node i's place for node j: nodes * (the lengths before) + nodes^2 * b + (length + nodes) * i + length + j. Without
    # lengths that is the places in order.
    fixed_BM, per_length_M = _places(1 << (requests - 1).bit_length(), nodes, mask.device)
    length_B = batch.seq_lens.long()
    place_BM = fixed_BM[:requests].add(length_B.cumsum(0)[:, None], alpha=nodes)
    place_BM.addcmul_(length_B[:, None], per_length_M)
    mask.index_copy_(0, place_BM.view(-1), tree_M)


@lru_cache(maxsize=16)
def _places(requests: int, nodes: int, device: Any) -> tuple[Any, Any]:
    """What of the places in a mask does not depend on lengths, and what a request's length counts for."""
    import torch

    fixed_BM = torch.arange(requests * nodes * nodes, device=device).view(requests, nodes * nodes)
    return fixed_BM, fixed_BM[0] // nodes + 1 - nodes


def _worker_and_batch(call: Call) -> tuple[Any, Any]:
    return call.argument("self", _DRAFTING), call.argument("batch", _DRAFTING)


def _wait_for_corpus(call: Call) -> None:
    """Wait for the loader's thread: the corpus takes part in drafting as soon as the thread ends, on each rank apart.

    Every rank gets the request at the same point of its loop, so afterwards all draft with the corpus from there on.
    """
    pending = getattr(call.args[0], "_pending_load", None)
    if pending is not None:
        pending[1].join()
