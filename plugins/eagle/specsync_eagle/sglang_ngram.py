"""Where SGLang drafts for NGRAM: on the host, from a corpus that each rank keeps. Read from 0.5.16 to 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from specsync_core import BroadcastPoint, Call, no_tensors
from specsync_eagle.sglang_drafts import KNOWN, SPECULATIVE

_DRAFTING = ("self", "batch")
"""Parameters of both functions that draft."""


def points() -> Sequence[BroadcastPoint]:
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
    _prepare(tree.custom_mask.device, batch.seq_lens.dtype, worker.draft_token_num)
    links = tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling
    return tree.draft_token, worker.tree_mask_batch[len(batch.reqs)], tree.positions, *links


@cache
def _prepare(device: Any, lengths: Any, nodes: int) -> None:
    """On every rank, before one waits for another: only peers need the kernel, and it must not fail on them alone."""
    from specsync_eagle.tree_mask import prepare

    if device.type == "cuda":
        prepare(device, lengths, nodes)


def _spread_tree(call: Call) -> None:
    """Write the agreed tree into the attention mask, which the engine made on the host from this rank's own.

    The mask has a row per node, each of the request's length and then the tree's row; on CPU it is the tree itself. All
    is done on the device: a copy from the host could wait for the broadcast before it, and the verify waits for this
    host.
    """
    from specsync_eagle.tree_mask import spread_tree_

    worker, batch = _worker_and_batch(call)
    mask, tree_M = batch.spec_info.custom_mask, worker.tree_mask_batch[len(batch.reqs)]
    if mask.numel() != tree_M.numel():
        spread_tree_(mask, tree_M, batch.seq_lens, worker.draft_token_num)


def _worker_and_batch(call: Call) -> tuple[Any, Any]:
    return call.argument("self", _DRAFTING), call.argument("batch", _DRAFTING)


def _wait_for_corpus(call: Call) -> None:
    """Wait for the loader's thread: the corpus takes part in drafting as soon as the thread ends, on each rank apart.

    Every rank gets the request at the same point of its loop, so afterwards all draft with the corpus from there on.
    """
    pending = getattr(call.args[0], "_pending_load", None)
    if pending is not None:
        pending[1].join()
