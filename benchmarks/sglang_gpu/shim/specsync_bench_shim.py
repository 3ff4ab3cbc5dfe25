"""TEST ONLY. Wide dummy weights, a rank that goes astray, and every rank's counters in a file.

``SHIM_WEIGHTS``: range of the dummy weights. ``SHIM_FAULT_STEP``: the step at which group rank 1 goes astray (0:
never): with DSPARK it draws once more than its peer, else its logits are skewed from then on, and with NGRAM its drafts
are others, too. ``SHIM_STATS``: a folder in which each rank leaves at each prefill how long its steps took, and
what specsync counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

WORKERS = {
    "DSPARK": "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2",
    "DFLASH": "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2",
    "NGRAM": "sglang.srt.speculative.ngram_worker.NGRAMWorker",
    "EAGLE": "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2",
}
SHORTEST_STRETCH = 20
"""Requests of one round may arrive in two prefills; the few steps between them say nothing."""
FEW_TOKENS = 1000
"""All below it are in every vocabulary."""
SKEW = 1.5
"""Standard deviations of the logits."""
_steps = 0
_astray = False
_noise: Any = None
"""``[V]``: what rank 1 adds to its logits, in their standard deviations; captured graphs read it."""
_host_ns: dict[str, list[int]] = {}
_begun_ns: list[int] = []
"""When each step since the last prefill began."""
_stretches: list[dict[str, float]] = []
"""Of the steps between two prefills: how many, and microseconds from one's begin to the next's."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    avoid_compiling()
    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", wide_weights, HookType.BEFORE
    )
    algorithm = os.environ["SHIM_ALGORITHM"]
    worker = WORKERS[algorithm]
    step = f"{worker}.forward_batch_generation"
    if int(os.environ.get("SHIM_FAULT_STEP", "0")):
        HookRegistry.register(step, draw_once_more if algorithm == "DSPARK" else go_astray, HookType.BEFORE)
        if algorithm != "DSPARK":
            HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor.forward", skew, HookType.AFTER)
        if algorithm == "NGRAM":
            HookRegistry.register(f"{worker}._prepare_draft_tokens", draft_otherwise, HookType.AFTER)
    if os.environ.get("SHIM_STATS"):
        time_points()
        HookRegistry.register(step, note_step, HookType.BEFORE)
        HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", write_stats, HookType.AFTER)


def avoid_compiling() -> None:
    """Take the kernels that come compiled: flashinfer would build its own for minutes, in every variant alike."""
    from importlib import import_module

    for module, name, value in (
        ("sglang.kernels.ops.speculative.dspark.dspark_accept", "_flashinfer_softmax", None),
        ("sgl_kernel.elementwise", "_has_flashinfer", False),
        ("sgl_kernel.sampling", "_has_flashinfer", False),
    ):
        setattr(import_module(module), name, value)


def wide_weights(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    wide = float(os.environ.get("SHIM_WEIGHTS", "0.3"))
    kwargs.setdefault("low", -wide)
    kwargs.setdefault("high", wide)
    return args, kwargs


def time_points() -> None:
    """Host time of each site's calls; two clock readings a call, where one call takes tens of microseconds."""
    from specsync_core.point import Point

    plain = Point.__call__

    def timed(point: Any, *tensors: Any, **named: Any) -> Any:
        begin = time.perf_counter_ns()
        result = plain(point, *tensors, **named)
        spent = _host_ns.setdefault(point._site.slug, [])
        spent.append(time.perf_counter_ns() - begin)
        return result

    Point.__call__ = timed


def is_fault_step() -> bool:
    """Whether group rank 1 begins the step of the fault; counts the steps."""
    global _steps
    _steps += 1
    return _steps == int(os.environ["SHIM_FAULT_STEP"]) and is_rank_1()


def is_rank_1() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().tp_group.rank_in_group == 1)


def draw_once_more(*args: Any, **kwargs: Any) -> None:
    """One value more from the default generator, which moves every later draw of this rank, in graphs too."""
    import torch

    if is_fault_step():
        torch.rand(1, device="cuda")


def go_astray(*args: Any, **kwargs: Any) -> None:
    global _astray
    import torch

    if is_fault_step():
        _astray = True
        _noise.copy_(SKEW * torch.randn(_noise.shape, generator=torch.Generator().manual_seed(99)))


def skew(result: Any, *args: Any, **kwargs: Any) -> None:
    """Change rank 1's logits, once they are gathered: what an inexact kernel does, before anything is decided."""
    global _noise
    import torch

    logits = result.next_token_logits
    if logits is None or not is_rank_1():
        return
    if _noise is None:
        with torch.inference_mode(False):  # it is written outside a forward, too
            _noise = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
    logits.add_((_noise * logits.std()).to(logits.dtype))


def draft_otherwise(result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """Other tokens behind the root on rank 1, each of them a child of the root: another corpus would do that."""
    import numpy

    if _astray:
        tokens, mask = result
        nodes = worker.draft_token_num
        tokens.reshape(-1, nodes)[:, 1:] = (tokens.reshape(-1, nodes)[:, 1:] + 1) % FEW_TOKENS
        star = numpy.eye(nodes, dtype=bool)
        star[:, 0] = True
        mask.reshape(-1, nodes, nodes)[:] = star


def note_step(*args: Any, **kwargs: Any) -> None:
    _begun_ns.append(time.perf_counter_ns())


def close_stretch() -> None:
    took = sorted(late - early for early, late in pairwise(_begun_ns))
    _begun_ns.clear()
    if len(took) >= SHORTEST_STRETCH:
        _stretches.append(
            {"steps": len(took), "median_us": took[len(took) // 2] / 1000, "mean_us": sum(took) / len(took) / 1000}
        )


def summary(spent: list[int]) -> dict[str, float]:
    ordered = sorted(spent)
    places = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    return {"calls": len(ordered)} | {name: ordered[int(len(ordered) * at)] / 1000 for name, at in places.items()}


def write_stats(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    close_stretch()
    rank = get_parallel().tp_group.rank_in_group
    found = {"rank": rank, "stretches": _stretches, **specsync_stats()}
    (Path(os.environ["SHIM_STATS"]) / f"rank-{rank}.json").write_text(json.dumps(found))


def specsync_stats() -> dict[str, Any]:
    adapter = sys.modules.get("specsync_core.engines.sglang")
    current = adapter.current() if adapter else None
    if current is None or current.sync is None:
        return {}
    return {
        "host_us": {slug: summary(spent) for slug, spent in _host_ns.items()},
        "transports": {name: choice.transport.name for name, choice in current.sync.transports.items()},
        "fired": current.firings.counts,
        "sites": {slug: stats.as_dict() for slug, stats in current.sync.stats().items() if stats.calls},
    }
