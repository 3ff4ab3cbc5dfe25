"""Run the engine's own decision functions on gloo ranks; print what every rank decided, as JSON.

    python decisions.py          in an engine's environment

Each run is one algorithm, one policy and one layout of ranks, in processes of their own. The policies: ``absent``
leaves the plugin out (``SGLANG_PLUGINS``), ``off`` loads it with every site off, ``all`` turns every site on.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import torch
from case import Case
from ranks import fork_ranks

ALGORITHMS = ("dspark", "dflash", "eagle", "ngram")
POLICIES = {
    "absent": {"SGLANG_PLUGINS": "no-such-plugin"},
    "off": {"SPECSYNC_SITES": "off"},
    "all": {"SPECSYNC_SITES": "all"},
}
LAYOUTS = {(2, 1): ALGORITHMS, (4, 2): ALGORITHMS, (2, 2): ("dspark", "dflash")}
"""Ranks and attention groups, and the algorithms to run there: attention groups of one rank have gates to agree on."""
IMPORTED = (
    "sglang.srt.layers.sampler",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2",
    "sglang.srt.speculative.dflash_worker_v2",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.ngram_worker",
    "sglang.srt.models.dspark",
    "sglang.srt.models.deepseek_v4_dspark",
    "sglang.srt.models.dflash",
    "specsync_core.sync",
)
"""Imported once, before the ranks are forked."""


def run_rank(rank: int, algorithm: str) -> dict[str, object]:
    scenarios = importlib.import_module("scenarios_synced" if has_fix() else "scenarios_unsynced")
    case = Case(rank)
    getattr(scenarios, algorithm)(case)
    return {"values": case.values, "sites": site_calls(), "policy": os.environ.get("SGLANG_SPEC_TP_SYNC")}


def has_fix() -> bool:
    return importlib.util.find_spec("sglang.srt.speculative.spec_tp_sync") is not None


def site_calls() -> dict[str, int]:
    """How often each site was synchronised by specsync on this rank."""
    adapter = sys.modules.get("specsync_core.engines.sglang")
    current = adapter.current() if adapter else None
    if current is None or current.sync is None:
        return {}
    return {slug: stats.calls for slug, stats in current.sync.stats().items() if stats.calls}


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for module in IMPORTED:
        importlib.import_module(module)
    runs = []
    chosen = sys.argv[1:] or ALGORITHMS
    for algorithm in chosen:
        for world_size, groups in (layout for layout, algorithms in LAYOUTS.items() if algorithm in algorithms):
            for policy, environ in POLICIES.items():
                started = time.monotonic()
                ranks = fork_ranks(lambda rank, name=algorithm: run_rank(rank, name), world_size, groups, environ)
                runs.append(
                    {
                        "algorithm": algorithm,
                        "policy": policy,
                        "ranks": world_size,
                        "attention_groups": groups,
                        "seconds": round(time.monotonic() - started, 1),
                        "by_rank": ranks,
                    }
                )
    print(json.dumps({"engine": f"sglang {version('sglang')}", "runs": runs}))


if __name__ == "__main__":
    main()
