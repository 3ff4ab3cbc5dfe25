"""vLLM: entry point ``specsync`` of the group ``vllm.general_plugins``.

The engine calls `register` in every process, maybe more than once, before there are groups or a model. All that is
replaced then is ``WorkerWrapperBase.init_device``, where it is imported already, else when the engine imports it. In a
worker, after its device, its groups and its model runner are there, `Adapter` hooks what this runner and this method
of speculation decide. Without speculation, or with one tensor-parallel rank, nothing else is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from types import ModuleType
from typing import Any

from specsync_core.engines.known import VLLM
from specsync_core.engines.late_import import when_imported
from specsync_core.errors import EngineError
from specsync_core.settings import read_environment

logger = logging.getLogger("vllm.specsync")
"""Below the engine's own logger, whose level and format it shares: workers show nothing else of level INFO."""

WORKERS = "vllm.v1.worker.worker_base"
MARK = "_specsync_hooked"
PROOF_STEPS = 4
"""Steps with drafts to verify, after which each rank proves that its hooks fired."""

_adapter: Any = None


def register() -> None:
    """Hook the start of workers. vLLM calls this in each of its processes; more calls do nothing."""
    when_imported(WORKERS, _hook_workers)


def _hook_workers(module: ModuleType) -> None:
    wrapper = getattr(module, "WorkerWrapperBase", None)
    original = getattr(wrapper, "init_device", None)
    if original is None:
        problem = f"vllm {engine_version()} starts workers in another way: no {WORKERS}.WorkerWrapperBase.init_device"
        if read_environment().strict:
            raise EngineError(f"{problem}.\n  Set SPECSYNC_STRICT=0 to run without specsync.")
        logger.warning("%s. SPECSYNC_STRICT=0, so the engine runs without specsync.", problem)
    elif not hasattr(original, MARK):
        wrapper.init_device = _started(original)  # type: ignore[union-attr]


def _started(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(wrapper, *args, **kwargs)
        _start(wrapper.vllm_config, wrapper.worker.model_runner)
        return result

    setattr(init_device, MARK, True)
    return init_device


def _start(vllm_config: Any, runner: Any) -> None:
    global _adapter
    if vllm_config.speculative_config is None or _adapter is not None:
        return
    from specsync_core.engines.vllm_adapter import Adapter

    adapter = Adapter(vllm_config, runner)
    adapter.start()
    _adapter = adapter


def current() -> Any:
    """Return this process's `Adapter`, once a worker with speculation has started; else None."""
    return _adapter


def engine_version() -> str:
    """Return the version that vLLM's distribution states, without a local label such as ``+cu130``."""
    for distribution in VLLM.distributions:
        try:
            return version_of(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise EngineError(f"vLLM is imported, but none of the distributions {', '.join(VLLM.distributions)} is installed.")
