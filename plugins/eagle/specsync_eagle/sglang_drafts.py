"""Where SGLang drafts for EAGLE, MTP and STANDALONE: each step's top-k, then the tree. Read from 0.5.16 to 0.5.23.

The tree alone would make ranks agree: nothing committed derives from a step but through the tree, and what a step
leaves in the draft's KV cache is written again when the verified tokens extend it. Yet ranks that feed different
tokens into a vocabulary-parallel embedding draft from a mixture of both, which nobody then accepts (SG #35079 has the
loop as the first to differ). So every step is synchronised before the next step's input is formed from it, and the
tree after that, for the paths that have no step to hook: multi-layer MTP, whose chain is drafted layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specsync_core import BroadcastPoint, Call, Scope

SPECULATIVE = "sglang.srt.speculative"
KNOWN = ">=0.5.16,<0.5.24"
STEP_SITE, TREE_SITE = "eagle-draft", "eagle-draft-tree"

_SELECT = ("i", "topk_p", "topk_index", "hidden_states", "scores", "topk")
_DRAFT = ("self", "forward_batch")
_ARGMAX = ("next_token_logits", "positions", "draft_tokens", "draft_token_column")
_LOOP = f"{SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.draft_forward"


def points() -> Sequence[BroadcastPoint]:
    """The points of every known version."""
    return [*_steps(), *_tree()]


def _steps() -> Sequence[BroadcastPoint]:
    """Each step once, eager or in the draft graph.

    The loop takes its first step's top-k from the batch. Later ones reach the function that selects among them; with
    a top-k of 1 on a GPU they do not, and come out of one kernel. Workers with a loop of their own (frozen KV) call
    that function for every step.
    """
    loop = Scope(target=_LOOP, value_of=lambda _: "loop", signature=_DRAFT)
    first = BroadcastPoint(
        target=_LOOP,
        when="before",
        sites=(STEP_SITE,),
        site_of=lambda call: _unless_empty(_of_batch(call)),
        tensors_of=_of_batch,
        versions=KNOWN,
        signature=_DRAFT,
        capture="engine-communicator",
    )
    selected = replace(
        first,
        target=f"{SPECULATIVE}.spec_utils.select_top_k_tokens",
        site_of=_site_of_selection,
        tensors_of=_of_selection,
        signature=_SELECT,
        within=(loop,),
    )
    chained = replace(
        first,
        target="sglang.kernels.ops.speculative.topk1.draft_topk1_postprocess",
        when="after",
        site_of=lambda call: _unless_empty(call.result),
        tensors_of=lambda call: call.result,
        signature=_ARGMAX,
    )
    return [first, selected, chained]


def _unless_empty(tensors: Sequence[Any]) -> str | None:
    return STEP_SITE if tensors[1].numel() else None


def _of_batch(call: Call) -> Sequence[Any]:
    drafted = call.argument("forward_batch", _DRAFT).spec_info
    return drafted.topk_p, drafted.topk_index


def _of_selection(call: Call) -> Sequence[Any]:
    return call.argument("topk_p", _SELECT), call.argument("topk_index", _SELECT)


def _site_of_selection(call: Call) -> str | None:
    already_synced = call.scope is not None and call.argument("i", _SELECT) == 0
    return None if already_synced else _unless_empty(_of_selection(call))


def _tree() -> Sequence[BroadcastPoint]:
    """The tree's parents, scores and tokens, before masks, positions and links are built from them."""
    known = (
        *("bonus_tokens", "parent_list", "top_scores_index", "draft_tokens", "seq_lens", "seq_lens_sum"),
        *("topk", "spec_steps", "num_verify_tokens", "tree_mask_mode", "tree_mask_buf"),
    )
    point = BroadcastPoint(
        target=f"{SPECULATIVE}.eagle_utils.build_tree_kernel_efficient",
        when="before",
        sites=(TREE_SITE,),
        site_of=lambda call: TREE_SITE if call.argument("draft_tokens", known).numel() else None,
        tensors_of=lambda call: [
            call.argument(name, known) for name in ("draft_tokens", "top_scores_index", "parent_list")
        ],
        versions="==0.5.16",
        signature=(*known, "position_buf"),
        proof="draft",
    )
    return [point, replace(point, versions=">=0.5.17,<0.5.24", signature=(*known, "fill_prefix_mask"))]
