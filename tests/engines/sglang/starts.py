"""Start the adapter in an engine as it is, on gloo ranks, under several policies; print what every rank found, as JSON.

python starts.py           in an engine's environment
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import torch
from case import CREATED, create_worker
from ranks import fork_ranks

IMPORTED = (
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2",
    "sglang.srt.plugins",
    "specsync_core.sync",
)


def start(algorithm: str) -> dict[str, Any]:
    """What is hooked and imported once this algorithm's worker was created, and what the engine itself then syncs."""
    before = imported_models()
    create_worker(algorithm)
    from specsync_core.settings import read_environment

    adapter = current()
    return {
        "patched": patched(),
        "hooked": sorted({point.target.rsplit(".", 1)[1] for point in adapter.points}),
        "models imported": sorted(imported_models() - before),
        "engine": engines_own_sites(),
        "ours": read_environment().sites and read_environment().sites.value,
    }


def load_only(rank: int) -> dict[str, Any]:
    """An engine without speculation: its plugins are loaded, and no worker is created."""
    from sglang.srt.plugins import load_plugins

    before = set(sys.modules)
    load_plugins()
    new = {name for name in set(sys.modules) - before if name.startswith("sglang.")}
    return {"patched": patched(), "imported": sorted(new), "adapter": current() is not None}


def eagle(rank: int) -> dict[str, Any]:
    return start("EAGLE")


def dspark(rank: int) -> dict[str, Any]:
    return start("DSPARK")


def minimax(rank: int) -> dict[str, Any]:
    """With what the engine's own override for this model does between loading plugins and creating the worker."""
    from sglang.srt.environ import envs
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if hasattr(envs, "SGLANG_SPEC_TP_SYNC") and not envs.SGLANG_SPEC_TP_SYNC.is_set():
        envs.SGLANG_SPEC_TP_SYNC.set("rng")
    CREATED.model_path = "/models/MiniMax-M3.1"
    return start("DSPARK")


def fires_on_rank_0_only(rank: int) -> dict[str, Any]:
    """After the first steps: on rank 1 no hook ever fired."""
    create_worker("EAGLE")
    adapter = current()
    if rank == 0:
        for target in adapter.firings.counts:
            adapter.firings.counts[target] = 4
    try:
        adapter.prove()
        return {"said": None}
    except Exception as error:
        return {"said": f"{type(error).__name__}: {error}"}


def refused(rank: int) -> dict[str, Any]:
    try:
        create_worker("EAGLE")
        return {"said": None}
    except Exception as error:
        return {"said": f"{type(error).__name__}: {error}"}


def current() -> Any:
    return sys.modules["specsync_core.engines.sglang"].current()


def patched() -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(HookRegistry._patched)


def imported_models() -> set[str]:
    return {name for name in sys.modules if name.startswith("sglang.srt.models.")}


def engines_own_sites() -> list[str] | None:
    """The sites that the engine's own synchronisation reads from its variable; None where it has none."""
    if find_spec("sglang.srt.speculative.spec_tp_sync") is None:
        return None
    from sglang.srt.layers.dp_attention import get_dp_tp_group
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync

    return sorted(site.slug for site in SpecTpSync(get_dp_tp_group())._sites)


CASES: dict[str, tuple[Callable[[int], Any], int, dict[str, str]]] = {
    "no speculation": (load_only, 2, {}),
    "eagle, all": (eagle, 2, {"SPECSYNC_SITES": "all"}),
    "eagle, off": (eagle, 2, {"SPECSYNC_SITES": "off"}),
    "eagle, no verify": (eagle, 2, {"SPECSYNC_SITES": "all,-eagle-verify-greedy,-eagle-accept-simulated"}),
    "eagle, one rank": (eagle, 1, {"SPECSYNC_SITES": "eagle:audit"}),
    "dspark, published rng": (dspark, 2, {"SGLANG_SPEC_TP_SYNC": "rng"}),
    "dspark, ours": (dspark, 2, {"SPECSYNC_SITES": "all,-dspark-plan,-dspark-draft-greedy,eagle:audit"}),
    "dspark, one rank": (dspark, 1, {"SPECSYNC_SITES": "dspark:audit"}),
    "minimax": (minimax, 2, {}),
    "minimax, all": (minimax, 2, {"SPECSYNC_SITES": "all"}),
    "a typo on one rank": (refused, 1, {"SPECSYNC_SITES": "all,-eagle-targe"}),
    "a hook that never fires": (fires_on_rank_0_only, 2, {}),
    "a hook that never fires, not strict": (fires_on_rank_0_only, 2, {"SPECSYNC_STRICT": "0"}),
}


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for module in IMPORTED:
        importlib.import_module(module)
    answers = {}
    for name, (function, ranks, environ) in CASES.items():
        answers[name] = fork_ranks(function, ranks, 1, environ | {"SPECSYNC_TIMEOUT_S": "20"})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
