"""One vLLM worker: what its model runner decides is hooked, settled with the other ranks, and proven to fire."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from specsync_core.collectives import GroupStore, store_of
from specsync_core.diagnostics.faults import FaultInjector
from specsync_core.diagnostics.metrics import Metrics
from specsync_core.diagnostics.session import Session, open_session, read_faults
from specsync_core.engines.hooks import Hook, active_points, build_hooks
from specsync_core.engines.known import VLLM
from specsync_core.engines.patch import apply_hooks
from specsync_core.engines.proof import Firings, conclude, report
from specsync_core.engines.start import OWN_START, Candidates, agree_to_start, find_points
from specsync_core.engines.targets import is_imported
from specsync_core.engines.vllm import PROOF_STEPS, engine_version
from specsync_core.errors import EngineError, SpecSyncError
from specsync_core.facts import EngineFacts
from specsync_core.groups import EngineGroup, ParallelGroups
from specsync_core.hookspecs import BroadcastPoint
from specsync_core.manager import load_registry, plugin_manager
from specsync_core.plan import Plan, resolve_plan
from specsync_core.settings import read_environment
from specsync_core.sync import SpecTpSync, say_uncontrolled

logger = logging.getLogger("vllm.specsync")

V2_MODULES = "vllm.v1.worker.gpu."
"""What the V2 runner is made of; everything else that is hooked belongs to the V1 runner."""

LIMITS = (
    "Agreement is not a correct distribution: all ranks follow group rank 0, right or wrong (vLLM #55005)."
    " The number of KV-cache blocks is the engine's own, the smallest of all ranks."
)
"""Said once, on the line that says what is protected."""


class Adapter:
    """One process of vLLM, which is one tensor-parallel rank.

    Args:
        vllm_config: the engine's configuration, with speculation.
        runner: the worker's model runner, of either kind.
    """

    def __init__(self, vllm_config: Any, runner: Any) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        group = EngineGroup(get_tp_group())
        self.groups = ParallelGroups(tp=group)
        self.facts = EngineFacts(
            platform=platform_name(),
            model=vllm_config.model_config.model,
            dp_attention=False,  # with data parallelism each replica has a tensor-parallel group of its own
            engine="vllm",
            version=engine_version(),
            algorithm=vllm_config.speculative_config.method,
        )
        self.is_v2 = any(f"{base.__module__}.".startswith(V2_MODULES) for base in type(runner).__mro__)
        self.firings = Firings()
        self.points: list[BroadcastPoint] = []
        """The points that are hooked."""
        self.sync: SpecTpSync | None = None
        self.session: Session | None = None
        """Recorder, watchdog and faults, as the environment asks for them."""
        self._injector: FaultInjector | None = None
        self._runner = runner
        self._decides = bool(get_pp_group().is_last_rank)
        self._margin = (vllm_config.speculative_config.num_speculative_tokens or 0) + 2
        self._absent: list[BroadcastPoint] = []
        self._off: list[BroadcastPoint] = []
        """Points whose sites are all off."""
        self._plan: Plan | None = None
        self._store: GroupStore | None = store_of(group.cpu_group) if group.world_size > 1 else None
        self._metrics: Metrics | None = None
        self._proof_steps = 0

    # --- start --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Resolve the plan, settle with the other ranks what can be hooked, hook it, and check that all is applied.

        Raises:
            EngineError: on every rank alike, when any rank cannot synchronise what the plan asks for.
            PlanMismatchError: on every rank alike, when ranks hold different plans.
        """
        exchange = None if self._store is None else self._exchange
        if self._store is not None:
            self._store.enter(OWN_START)
        candidates = agree_to_start(self._look, read_environment().strict, exchange)
        if self._store is None and self._plan is not None:
            say_uncontrolled(self._plan)
        if self._store is None or self._plan is None or not self._decides:
            return
        self.session = open_session(self.groups, self._plan, injector=self._injector)
        self.sync = self.session.sync
        self.points = active_points(candidates.points, self.sync)
        if self.points:
            hooks = [*build_hooks(self.points, self.sync, self.firings), *self._step_hooks()]
            self.firings.waive(self._off)
            unapplied = apply_hooks(hooks, self.fail)
            theirs = self._exchange("hooks applied", unapplied)
            if problems := [f"  group rank {rank}: {', '.join(paths)}" for rank, paths in enumerate(theirs) if paths]:
                raise EngineError("hooks could not be applied:\n" + "\n".join(problems))
            self._metrics = Metrics(self.sync)
        self._log_start()

    def _exchange(self, topic: str, payload: Any) -> list[Any]:
        assert self._store is not None
        return self._store.exchange(topic, payload, 30.0 if self._plan is None else self._plan.timeout_s)

    def _look(self) -> Candidates:
        """Resolve the plan and find this runner's points; the plan is read on a lone rank, too."""
        manager = plugin_manager()
        self._plan = resolve_plan(load_registry(manager), facts=self.facts, manager=manager)
        self._injector = read_faults(self._plan.registry, self.groups.tp)
        if self._store is None or not self._decides:
            return Candidates(())
        candidates = find_points(manager, self.facts, VLLM.versions)
        runners = [point for point in candidates.points if point.target.startswith(V2_MODULES) == self.is_v2]
        ours = [point for point in runners if any(map(self._plan.may_be_on, point.sites))]
        self._off = [point for point in runners if point not in ours and is_imported(point)]
        # The runner is made, and has imported what it runs. Nothing is imported for a look at its signature.
        self._absent = [point for point in ours if not is_imported(point)]
        return Candidates(tuple(point for point in ours if point not in self._absent), candidates.problems)

    def _log_start(self) -> None:
        if self.groups.tp.rank_in_group != 0:
            return
        assert self._plan is not None
        assert self.sync is not None
        synced = self.sync.enabled
        slugs = sorted({site for point in self.points for site in point.sites if synced(site)})
        shown = [slug if (mode := self._plan.mode(slug)) == "sync" else f"{slug} ({mode})" for slug in slugs]
        logger.info(
            "specsync: vllm %s, %s runner, %s, %d ranks: %s. %s",
            self.facts.version,
            "V2" if self.is_v2 else "V1",
            self.facts.algorithm,
            self.groups.tp.world_size,
            f"keeps {', '.join(shown)} in agreement" if shown else "every site is off, nothing is in agreement",
            LIMITS,
        )

    # --- while it runs --------------------------------------------------------------------------------

    def fail(self, target: str, error: Exception) -> None:
        """Tell the peers that a hooked function raised here: else they wait in the broadcast behind it for ever."""
        assert self._store is not None
        if isinstance(error, SpecSyncError):  # what raised it has told them, and says more
            self._store.fail(error)
            return
        rank = self.groups.tp.rank_in_group
        self._store.fail(EngineError(f"group rank {rank}: {target} raised {type(error).__name__}: {error}"))

    def _step_hooks(self) -> list[Hook]:
        """BEFORE each step: the steps that came before it have fired what they fire. AROUND it, where it is watched."""

        def before(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
            assert self.sync is not None
            assert self._metrics is not None
            if kwargs.get("dummy_run") or not scheduler_output.total_num_scheduled_tokens:
                return
            self.sync.next_step()
            if self.session is not None:
                self.session.check_state(lambda: state_of(runner))
            self._metrics.update()
            if self._proof_steps < PROOF_STEPS and self._verifies(scheduler_output):
                self._proof_steps += 1
                if self._proof_steps == PROOF_STEPS:
                    self.prove()

        module = f"{V2_MODULES}model_runner" if self.is_v2 else "vllm.v1.worker.gpu_model_runner"
        path = f"{module}.GPUModelRunner.execute_model"
        watch = [] if self.session is None else self.session.step_hooks(path)
        return [Hook(path, "before", before), *(Hook(path, "around", around) for around in watch)]

    def _verifies(self, scheduler_output: Any) -> bool:
        """Whether drafts are verified in this step that a drafter made: its gate is closed for very long sequences."""
        if not scheduler_output.scheduled_spec_decode_tokens:
            return False
        limit = getattr(self._runner, "effective_drafter_max_model_len", None)
        lengths = scheduler_output.scheduled_cached_reqs.num_computed_tokens
        return limit is None or max(lengths, default=0) + 2 * self._margin <= limit

    def prove(self) -> None:
        """Compare with the other ranks which hooks fired.

        Raises:
            EngineError: on every rank alike, when a decision was made and never synchronised on a rank.
        """
        self.firings.late += [point.target for point in self._absent if is_imported(point)]
        evidence: Sequence[dict[str, object]] = self._exchange("hooks fired", self.firings.as_json())
        problems = conclude(evidence, PROOF_STEPS, self.firings.decisions)
        if problems and read_environment().strict:
            raise EngineError("hooks were applied and did not fire:\n  " + "\n  ".join(problems))
        if problems:
            logger.warning("hooks were applied and did not fire:\n  %s", "\n  ".join(problems))
        if self.groups.tp.rank_in_group == 0:
            logger.info("specsync: %s", report(evidence, PROOF_STEPS, self.points))


def state_of(runner: Any) -> dict[str, Any]:
    """What the V1 runner's batch is made of, as this rank derived it: for checks between ranks.

    The V2 runner keeps lengths on the device; its request ids alone are compared.
    """
    batch = getattr(runner, "input_batch", None)
    if batch is None:
        return {"state-request-ids": sorted(getattr(runner.req_states, "req_id_to_index", {}))}
    count = batch.num_reqs
    return {
        "state-request-ids": list(batch.req_ids),
        "state-seq-lens": batch.num_tokens_no_spec[:count],
    }


def platform_name() -> str:
    """Return the platform in the registry's words: what vLLM itself branches on."""
    from vllm.platforms import current_platform

    checks = {"rocm": "is_rocm", "cuda": "is_cuda", "xpu": "is_xpu", "cpu": "is_cpu"}
    return next((name for name, check in checks.items() if getattr(current_platform, check)()), "cpu")
