"""SGLang: entry point ``specsync`` of the group ``sglang.srt.plugins``.

The engine calls `register` in every process, before there are groups or a model. All that it hooks is the function
that creates the draft worker: no process without speculation is touched any further. When that function is called,
the ranks have met, the algorithm is known and its modules are imported; then `Adapter` hooks what this algorithm
decides, and no more.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as version_of
from importlib.util import find_spec
from typing import Any

from specsync_core.collectives import store_of
from specsync_core.diagnostics.faults import FaultInjector
from specsync_core.diagnostics.metrics import Metrics
from specsync_core.diagnostics.session import Session, open_session, read_faults
from specsync_core.engines.hooks import Hook, active_points, build_hooks
from specsync_core.engines.known import SGLANG
from specsync_core.engines.proof import Firings, conclude, report
from specsync_core.engines.start import OWN_START, Candidates, agree_to_start, find_points, is_strict
from specsync_core.engines.targets import check_target, is_imported
from specsync_core.errors import EngineError
from specsync_core.facts import EngineFacts
from specsync_core.groups import EngineGroup, ParallelGroups, select_group
from specsync_core.hookspecs import BroadcastPoint
from specsync_core.manager import load_registry, plugin_manager
from specsync_core.plan import Plan, resolve_plan
from specsync_core.settings import Setting, hand_over, read_environment, share_policy
from specsync_core.sync import SpecTpSync, say_uncontrolled

logger = logging.getLogger("specsync")

WORKER_FACTORIES = (
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo.create_worker",
)
"""Of built-in algorithms and of those that other plugins register."""
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry"
POLICY_VARIABLE = "SGLANG_SPEC_TP_SYNC"
ENGINE_SYNC = "sglang.srt.speculative.spec_tp_sync"
"""The engine's own synchronisation, from 0.5.19 on."""
ENGINE_DRAFT = "dspark-draft"
"""The engine's one name for sites 2 to 6; every other site has the name that it has here."""
PROOF_STEPS = 4
"""Decode steps after which each rank proves that its hooks fired."""

_adapter: Adapter | None = None


def register() -> None:
    """Hook the creation of the draft worker. SGLang calls this in each of its processes; more calls do nothing.

    SGLang logs and ignores a plugin that raises, and a rank would run unsynchronised. So where the hook cannot be
    placed, the process ends, unless ``SPECSYNC_STRICT=0``.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    share_policy()
    if any(hook is _create_worker for _, hook, _ in HookRegistry._hooks.get(WORKER_FACTORIES[0], ())):
        return
    problems = [problem for path in WORKER_FACTORIES if (problem := check_target(path, ("self", "server_args")))]
    if problems:
        _refuse(f"sglang {engine_version()} does not create draft workers as known: {'; '.join(problems)}")
        return
    for path in WORKER_FACTORIES:
        HookRegistry.register(path, _create_worker, HookType.AROUND)


def _refuse(problem: str) -> None:
    if is_strict():
        sys.exit(f"EngineError: specsync: {problem}.\n  Set SPECSYNC_STRICT=0 to run without specsync.")
    logger.warning("%s. SPECSYNC_STRICT=0, so the engine runs without specsync.", problem)


def engine_version() -> str:
    """Return the version that SGLang's distribution states."""
    return version_of("sglang")


def _create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND the factory: called first, so that the worker's modules are there to be hooked."""
    global _adapter
    worker_class = original(algorithm, server_args)
    if _adapter is None:
        _adapter = Adapter(algorithm.name.lower(), server_args.model_path, worker_class)
        _adapter.start()
    return worker_class


def current() -> Adapter | None:
    """Return this process's adapter, once a draft worker was created."""
    return _adapter


class Adapter:
    """One process of SGLang, which is one tensor-parallel rank.

    Args:
        algorithm: the engine's name of the algorithm, lower case.
        model: name or path as the engine was given it.
        worker_class: the engine's draft worker; its ``forward_batch_generation`` is one step. None proves nothing.
    """

    def __init__(self, algorithm: str, model: str | None, worker_class: type | None = None) -> None:
        self.groups = engine_groups()
        self.facts = EngineFacts(
            platform=platform_name(),
            model=model,
            dp_attention=self.groups.dp_attention,
            engine="sglang",
            version=engine_version(),
            algorithm=algorithm,
        )
        self.group = select_group(self.groups)
        self.firings = Firings()
        self.points: list[BroadcastPoint] = []
        """The points that are hooked."""
        self.sync: SpecTpSync | None = None
        self.session: Session | None = None
        """Recorder, watchdog and faults, as the environment asks for them."""
        self._injector: FaultInjector | None = None
        self._absent: list[BroadcastPoint] = []
        """Points of modules that the engine had not imported when the hooks were placed."""
        self._off: list[BroadcastPoint] = []
        """Points whose sites are all off."""
        self._worker_class = worker_class
        self._decode_steps = 0
        self._plan: Plan | None = None

    def start(self) -> None:
        """Resolve the plan, settle with the other ranks what can be hooked, hook it, and check that all is applied.

        Raises:
            EngineError: on every rank alike, when any rank cannot synchronise what the plan asks for.
            PlanMismatchError: on every rank alike, when ranks hold different plans.
        """
        alone = self.groups.tp.world_size == 1
        store = None if alone else store_of(self.groups.tp.cpu_group)
        strict = is_strict()

        def exchange(topic: str, payload: Any) -> list[Any]:
            assert store is not None
            return store.exchange(topic, payload, 30.0 if self._plan is None else self._plan.timeout_s)

        if store is not None:
            store.enter(OWN_START)
        candidates = agree_to_start(self._look, strict, None if alone else exchange)
        if self._plan is not None:
            tell_engine(self._plan, self.facts.algorithm)
            if alone:
                say_uncontrolled(self._plan)
        if alone or self._plan is None:
            return
        self.session = open_session(self.groups, self._plan, injector=self._injector)
        self.sync = self.session.sync
        self.points = active_points(candidates.points, self.sync)
        hooks = list(build_hooks(self.points, self.sync, self.firings, (HOOK_REGISTRY,)))
        self.firings.waive(self._off)
        if self._worker_class is not None and self.points:
            hooks += self._step_hooks(self._worker_class)
        unapplied = exchange("hooks applied", apply_hooks(hooks))
        self._settle_unapplied(unapplied, hooks, strict)
        self._fix_what_cannot_change(candidates.points)
        self._log_start(candidates)

    def _fix_what_cannot_change(self, points: Sequence[BroadcastPoint]) -> None:
        """Tell live control which sites are the engine's own, whose policy it has read at its start."""
        if self.sync is None or self.sync.control is None:
            return
        own = {site for point in points if point.when == "engine" for site in point.sites}
        lost = {site for point in points for site in point.sites} - {
            site for point in self.points for site in point.sites
        }
        self.sync.control.fix(lost, "it is not hooked here")
        self.sync.control.fix(own, f"SGLang {self.facts.version} broadcasts there itself, by its policy at the start")

    def _settle_unapplied(self, unapplied: Sequence[Sequence[str]], hooks: Sequence[Hook], strict: bool) -> None:
        """Stop, or go on without the targets that some rank could not hook: then no rank may synchronise there.

        Args:
            unapplied: by group rank, the targets that the engine's registry did not reach.
        """
        lines = [f"  group rank {rank}: {', '.join(paths)}" for rank, paths in enumerate(unapplied) if paths]
        problem = "hooks could not be applied; the engine's log says why:\n" + "\n".join(lines)
        if lines and strict:
            raise EngineError(problem)
        if lines:
            logger.warning("SPECSYNC_STRICT=0, so the start goes on: %s", problem)
        lost = {path for paths in unapplied for path in paths}
        inert = {
            point.target for point in self.points if {point.target, *(scope.target for scope in point.within)} & lost
        }
        for hook in hooks:
            if hook.target in inert:
                hook.mute()
                self.firings.forget(hook.target)
        self.points = [point for point in self.points if point.target not in inert]

    def _look(self) -> Candidates:
        """Resolve the plan and find the points whose modules are there; the plan is read on a lone rank, too."""
        manager = plugin_manager()
        registry = load_registry(manager)
        self._plan = resolve_plan(registry, facts=self.facts, manager=manager)
        self._injector = read_faults(registry, self.group)
        candidates = find_points(manager, self.facts, SGLANG.versions)
        if self.groups.tp.world_size == 1:
            return Candidates(())
        self._absent = [point for point in candidates.points if point.only_if_imported and not is_imported(point)]
        points = [point for point in candidates.points if point not in self._absent]
        may_be_on = self._plan.may_be_on
        wanted = [point for point in points if point.when == "engine" or any(map(may_be_on, point.sites))]
        self._off = [point for point in points if point not in wanted]
        return Candidates(tuple(wanted), candidates.problems)

    def _step_hooks(self, worker_class: type) -> list[Hook]:
        """BEFORE each step: the steps that came before it have fired what they fire. AROUND it, where it is watched."""
        assert self.sync is not None
        metrics = Metrics(self.sync)

        def before(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
            assert self.sync is not None
            self.sync.next_step()
            if self.session is not None:
                self.session.check_state(lambda: state_of(batch))
            metrics.update()
            if self._decode_steps <= PROOF_STEPS and batch.forward_mode.is_decode():
                if self._decode_steps == PROOF_STEPS:
                    self.prove()
                self._decode_steps += 1

        path = f"{worker_class.__module__}.{worker_class.__qualname__}.forward_batch_generation"
        watch = [] if self.session is None else self.session.step_hooks(path)
        return [Hook(path, "before", before), *(Hook(path, "around", around) for around in watch)]

    def prove(self) -> None:
        """Compare with the other ranks of the broadcast group which hooks fired.

        Raises:
            EngineError: on every rank of the group alike, when a decision was made and never synchronised on a rank.
        """
        group = self.group
        assert self._plan is not None
        self.firings.late += [point.target for point in self._absent if is_imported(point)]
        evidence: Sequence[dict[str, object]] = [self.firings.as_json()]
        if group.world_size > 1:
            evidence = store_of(group.cpu_group).exchange("hooks fired", evidence[0], self._plan.timeout_s)
        problems = conclude(evidence, PROOF_STEPS, self.firings.decisions)
        if problems and is_strict():
            raise EngineError("hooks were applied and did not fire:\n  " + "\n  ".join(problems))
        if problems:
            logger.warning("hooks were applied and did not fire:\n  %s", "\n  ".join(problems))
        if group.rank_in_group == 0:
            logger.info("%s", report(evidence, PROOF_STEPS, self.points))

    def _log_start(self, candidates: Candidates) -> None:
        if self.groups.tp.rank_in_group != 0:
            return
        own = sorted({site for point in self.points for site in point.sites})
        assert self._plan is not None
        synced, audited = ([site for site in own if self._plan.mode(site) == mode] for mode in ("sync", "audit"))
        engines = sorted({site for point in candidates.points if point.when == "engine" for site in point.sites})
        logger.info(
            "sglang %s, %s: specsync synchronises %s%s; the engine %s.",
            self.facts.version,
            self.facts.algorithm,
            ", ".join(synced) or "nothing",
            f", compares {', '.join(audited)}" if audited else "",
            ", ".join(engines) or "nothing",
        )


def state_of(batch: Any) -> dict[str, Any]:
    """What a batch is made of, as this rank derived it, for checks between ranks. May wait for the device."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    found = {"state-request-ids": [request.rid for request in batch.reqs]}
    return found | {"state-seq-lens": batch.seq_lens if lengths is None else lengths}


def engine_groups() -> ParallelGroups:
    """Return the engine's groups; under DP attention the attention group is the one to broadcast in."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    with_dp = bool(is_dp_attention_enabled())
    attention = EngineGroup(parallel.attn_tp_group) if with_dp else None
    return ParallelGroups(tp=EngineGroup(parallel.tp_group), attn_tp=attention, dp_attention=with_dp)


def platform_name() -> str:
    """Return the platform in the registry's words: what SGLang itself branches on."""
    from sglang.srt import utils

    checks = {"rocm": "is_hip", "cuda": "is_cuda", "npu": "is_npu", "xpu": "is_xpu", "cpu": "is_cpu"}
    found = (name for name, check in checks.items() if hasattr(utils, check) and getattr(utils, check)())
    return next(found, "cpu")


def tell_engine(plan: Plan, algorithm: str | None) -> None:
    """Set the engine's own variable to what the plan says of the sites that the engine broadcasts itself.

    The engine reads it when the worker is made, knows fewer words than the policy grammar has, and stops at others.
    A site in mode audit stays on: the engine can only broadcast. What the operator wrote there in the engine's own
    words stays as it is: a preset can mean less to a release that has less to broadcast.
    """
    if find_spec(ENGINE_SYNC) is None or _engine_understands(read_environment().sites):
        return
    from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

    drafts = {site.slug for site in plan.registry.words[ENGINE_DRAFT].sites}
    wanted, audited = [], []
    for site in SpecTpSyncSite:
        names = drafts if site.slug == ENGINE_DRAFT else {site.slug}
        modes = {plan.mode(name) for name in names & set(plan.sites)}
        if "audit" in modes and site.slug.startswith(f"{algorithm}-"):
            audited.append(site.slug)
        if modes - {"off"}:
            wanted.append(site.slug)
    if audited:
        logger.warning(
            "mode audit is none of this engine's modes: it broadcasts at %s all the same, and only there.",
            ", ".join(audited),
        )
    hand_over(POLICY_VARIABLE, "all" if len(wanted) == len(SpecTpSyncSite) else ",".join(wanted) or "off")


def _engine_understands(policy: Setting[str] | None) -> bool:
    """Whether the policy is the engine's variable, and the engine knows its words."""
    from sglang.srt.speculative.spec_tp_sync import parse_spec_tp_sync

    if policy is None or policy.origin != POLICY_VARIABLE:
        return False
    try:
        parse_spec_tp_sync(policy.value)
    except ValueError:
        return False
    return True


def apply_hooks(hooks: Sequence[Hook]) -> list[str]:
    """Apply hooks through the engine's registry, and return the targets that were not reached.

    The registry applies a target once. Where another plugin has hooked it already, ours wrap what is there now.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    kinds = {"before": HookType.BEFORE, "after": HookType.AFTER, "around": HookType.AROUND}
    targets = {hook.target for hook in hooks}
    earlier = {target: HookRegistry._hooks.pop(target) for target in targets if target in HookRegistry._patched}
    HookRegistry._patched.difference_update(earlier)
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, kinds[hook.kind])
    HookRegistry.apply_hooks()
    unapplied = sorted(targets - HookRegistry._patched)
    for target, older in earlier.items():
        HookRegistry._hooks[target] = [*older, *HookRegistry._hooks[target]]
    return unapplied
