"""A session: the recorder, watchdog and faults of one rank, as the environment asks for them, around its `SpecTpSync`.

session = open_session(groups)      # SPECSYNC_DUMP_DIR, SPECSYNC_FAULTS and their like
sync = session.sync
with session.waiting("tp all-reduce", "layer 3"):
    ...
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsync_core.collectives import GroupStore, store_of
from specsync_core.diagnostics.facts import library_versions
from specsync_core.diagnostics.fault_grammar import parse_faults
from specsync_core.diagnostics.faults import FaultInjector, check_ranks
from specsync_core.diagnostics.recorder import Recorder
from specsync_core.diagnostics.recording import RecordingError, recording_path
from specsync_core.diagnostics.runs import prune
from specsync_core.diagnostics.watchdog import Watchdog
from specsync_core.errors import SpecSyncError
from specsync_core.groups import Group, ParallelGroups, select_group
from specsync_core.plan import Plan
from specsync_core.registry import Registry
from specsync_core.settings import Environment, read_environment
from specsync_core.sync import SpecTpSync, Tap, plan_of_the_environment

logger = logging.getLogger("specsync")

MOST_RUNS = 16
"""Runs whose files are kept in one directory; older ones are removed, unless a process of theirs lives."""


@dataclass
class Session:
    """What watches one rank. Everything in it is None, and free, where nothing was asked for."""

    sync: SpecTpSync
    recorder: Recorder | None = None
    injector: FaultInjector | None = None
    watchdog: Watchdog | None = None
    check_every: int = 0
    """Steps between checks of an engine's derived state; 0 checks none. The same on every rank."""

    def check_state(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Compare derived state in every so many steps; all ranks call this once a step, at the same place.

        Args:
            read: gives values by check site, e.g. ``{"state-request-ids": [...]}``; called only when it is time.
        """
        if self.check_every and self.sync.step % self.check_every == 0:
            for site, value in read().items():
                self.sync.check(site, value)

    @property
    def is_recording(self) -> bool:
        return self.recorder is not None

    def waiting(self, what: str, detail: str = "") -> AbstractContextManager[None]:
        """Mark a wait or a stretch of work of the engine's own: a collective, a step. See `Recorder.waiting`."""
        return nullcontext() if self.recorder is None else self.recorder.waiting(what, detail)

    def step_hooks(self, target: str) -> list[Callable[..., Any]]:
        """Functions that an engine's adapter puts around its step: one that marks it, and none where nothing records.

        Args:
            target: the step's function, dotted; its last two names are recorded.
        """
        if self.recorder is None:
            return []
        detail = ".".join(target.split(".")[-2:])

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.waiting("engine step", detail):
                return original(*args, **kwargs)

        return [around]

    def close(self, outcome: str = "finished") -> None:
        """End the watchdog, write that this rank ended in an orderly way, and name the faults that never struck."""
        if self.injector is not None:
            self.injector.close()
        if self.watchdog is not None:
            self.watchdog.close()
        if self.recorder is not None:
            self.recorder.close(outcome)


def open_session(groups: ParallelGroups, plan: Plan | None = None, *, injector: FaultInjector | None = None) -> Session:
    """Make a `SpecTpSync` that is watched as the environment says; every rank of the group together.

    Args:
        plan: None resolves one from the environment.
        injector: faults that were read before; None reads ``SPECSYNC_FAULTS``.

    Raises:
        PolicyError: the environment is wrong, or faults are not allowed.
        PlanMismatchError, GroupError: as `SpecTpSync`.
        TransportError: a rank did not come.
    """
    if plan is None:
        plan = plan_of_the_environment(groups, handshake=True)
    if groups.tp.world_size == 1:
        return Session(SpecTpSync(groups, plan))
    group = select_group(groups)
    try:
        environment = read_environment()
        injector = injector or read_faults(plan.registry, group, environment)
    except SpecSyncError as error:  # the peers wait in a meeting
        store_of(groups.tp.cpu_group).fail(error)
        raise
    if injector is not None:
        atexit.register(injector.close)  # engines end without closing what is theirs
    if group.world_size == 1:
        return Session(SpecTpSync(groups, plan, taps=[] if injector is None else [injector]), injector=injector)
    store = store_of(group.cpu_group)
    folder, check_every = _agree(store, environment, plan.timeout_s)
    recorder = None if folder is None else _open_recorder(folder, group, plan, environment)
    taps: list[Tap] = [tap for tap in (injector, recorder) if tap is not None]
    session = Session(SpecTpSync(groups, plan, taps=taps), recorder, injector, check_every=check_every)
    if recorder is not None:
        session.watchdog = Watchdog(recorder, environment.watchdog_s, stats=_stats_of(session.sync), tell=store.alarm)
        store.listen(session.watchdog.ask)
    return session


def read_faults(registry: Registry, group: Group, environment: Environment | None = None) -> FaultInjector | None:
    """Return what commits the faults of ``SPECSYNC_FAULTS``, if there are any.

    Raises:
        PolicyError: they are wrong, not allowed, or for a rank outside the group.
    """
    environment = environment or read_environment()
    if environment.faults is None:
        return None
    faults = parse_faults(environment.faults, registry, "SPECSYNC_FAULTS")
    check_ranks(faults, group.world_size)
    return FaultInjector(faults, group.rank_in_group, allowed=environment.allow_faults) if faults else None


def _agree(store: GroupStore, environment: Environment, timeout_s: float) -> tuple[Path | None, int]:
    """Name this run's folder alike on all ranks, and how often they check; group rank 0's word counts.

    Every rank takes part, whatever its own environment says.
    """
    name = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    own = {"name": name, "records": environment.dump_dir is not None, "check_every": environment.check_every}
    own |= {"faults": environment.faults or ""}
    shown = store.exchange("diagnostics", own, timeout_s)
    check_every = int(shown[0]["check_every"])
    if store.rank == 0:
        _say_what_differs(shown)
    without = [str(rank) for rank, each in enumerate(shown) if not each["records"]]
    if environment.dump_dir is None:
        return None, check_every
    if without:
        logger.warning("specsync: group rank %s has no SPECSYNC_DUMP_DIR and records nothing.", ", ".join(without))
    if store.rank == min(rank for rank, each in enumerate(shown) if each["records"]):
        prune(environment.dump_dir, MOST_RUNS - 1)
    return environment.dump_dir / str(shown[0]["name"]), check_every


def _say_what_differs(shown: Sequence[Mapping[str, Any]]) -> None:
    """Warn of what only some ranks were given, and would be believed to be in force."""
    heard = {"check_every": ("SPECSYNC_CHECK_EVERY", "group rank 0's counts")}
    heard |= {"faults": ("SPECSYNC_FAULTS", "each rank commits those of its own environment alone")}
    for key, (variable, rule) in heard.items():
        values = [each[key] for each in shown]
        if len(set(values)) > 1:
            held = ", ".join(f"{value!r} on group rank {rank}" for rank, value in enumerate(values))
            logger.warning("specsync: %s differs between ranks (%s): %s.", variable, held, rule)


def _open_recorder(folder: Path, group: Group, plan: Plan, environment: Environment) -> Recorder | None:
    """A recorder, or where it cannot be made a warning: the engine is not to stop for want of a diagnosis."""
    plugins = {plugin.name: f"{plugin.distribution} {plugin.version}" for plugin in plan.plugins}
    try:
        recorder = Recorder(
            recording_path(folder, group.rank_in_group),
            group_rank=group.rank_in_group,
            world_size=group.world_size,
            ranks=getattr(group, "ranks", range(group.world_size)),
            plan_digest=plan.digest,
            sites=plan.registry.sites,
            values=environment.record_values,
            prompts=environment.record_prompts,
            run_id=folder.name,
            modes={slug: planned.mode.value for slug, planned in plan.sites.items()},
            versions=library_versions(plugins),
        )
    except RecordingError as error:
        logger.warning("specsync: nothing is recorded on group rank %d: %s", group.rank_in_group, error)
        return None
    logger.info(
        "specsync: group rank %d records into %s; `kill -USR1 %d` writes a dump, `specsync doctor %s` reads.",
        group.rank_in_group, folder, os.getpid(), folder,
    )  # fmt: skip
    return recorder


def _stats_of(sync: SpecTpSync) -> Any:
    def stats() -> Mapping[str, Any]:
        return {slug: each.as_dict() for slug, each in sync.stats(wait=False).items() if each.calls}

    return stats
