"""Start the adapter in an engine that is not as known, on two gloo ranks; print what each rank said, as JSON.

python refusals.py           in an engine's environment
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import torch
from case import create_worker
from ranks import fork_ranks

IMPORTED = ("sglang.srt.speculative.eagle_worker_v2", "sglang.srt.plugins", "specsync_core.sync")


def as_known(rank: int) -> None:
    """The engine is what it should be."""


def signature_changed_on_rank_1(rank: int) -> None:
    from sglang.srt.speculative import eagle_utils

    if rank == 1:
        eagle_utils.eagle_sample = lambda verify_input, batch: None


def target_absent_everywhere(rank: int) -> None:
    from sglang.srt.speculative import eagle_utils

    del eagle_utils.build_tree_kernel_efficient


def version_unknown(rank: int) -> None:
    from specsync_core.engines import sglang

    sglang.engine_version = lambda: "0.5.99"


def policy_wrong_on_rank_1(rank: int) -> None:
    if rank == 1:
        os.environ["SPECSYNC_SITES"] = "all,-eagle-targe"


def environment_wrong_on_rank_1(rank: int) -> None:
    if rank == 1:
        os.environ["SPECSYNC_TIMEOUT_S"] = "soon"


def policies_differ(rank: int) -> None:
    os.environ["SPECSYNC_SITES"] = "all,-eagle-target" if rank else "all"


def hook_cannot_be_applied(rank: int) -> None:
    """A class with fixed attributes on rank 1: the registry logs that and goes on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry._apply_target

    def fail(target, hooks):
        if target.endswith("eagle_sample"):
            raise TypeError("cannot set an attribute")
        return apply(target, hooks)

    if rank == 1:
        HookRegistry._apply_target = fail


CASES: tuple[Callable[[int], None], ...] = (
    as_known,
    signature_changed_on_rank_1,
    target_absent_everywhere,
    version_unknown,
    policy_wrong_on_rank_1,
    environment_wrong_on_rank_1,
    policies_differ,
    hook_cannot_be_applied,
)


def run_rank(rank: int, change: Callable[[int], None]) -> dict[str, object]:
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("specsync").addHandler(handler)
    logging.getLogger("specsync").propagate = False
    change(rank)
    try:
        create_worker("EAGLE")
        said = None
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    from specsync_core.engines import sglang

    adapter = sglang.current()
    hooked = [] if said or adapter is None else [point.target.rsplit(".", 1)[1] for point in adapter.points]
    return {"said": said, "warned": log.getvalue(), "hooked": hooked}


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    for module in IMPORTED:
        importlib.import_module(module)
    answers = {}
    for change in CASES:
        for strict in ("1", "0"):
            environ = {"SPECSYNC_STRICT": strict, "SPECSYNC_TIMEOUT_S": "20"}
            answers[f"{change.__name__}, strict {strict}"] = fork_ranks(
                lambda rank, change=change: run_rank(rank, change), 2, 1, environ
            )
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
