"""Live control of one `SpecTpSync`: answers requests on group rank 0, and changes the plan on every rank."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from specsync_core.collectives import GroupStore
from specsync_core.control.change import ORIGIN, Change, some_sites, whole_policy
from specsync_core.control.listener import Listener
from specsync_core.control.pledges import Pledges, Proposal
from specsync_core.control.protocol import Request
from specsync_core.control.reports import Reports
from specsync_core.errors import ControlError, PlanMismatchError
from specsync_core.policy import normalise

if TYPE_CHECKING:
    from specsync_core.plan import Plan
    from specsync_core.sync import SpecTpSync

HISTORY = 16
"""Changes that `status` lists."""

logger = logging.getLogger("specsync")

_created: WeakKeyDictionary[GroupStore, int] = WeakKeyDictionary()


class LiveControl:
    """One rank's live control; every rank of the tensor-parallel group has one, and group rank 0's listens.

    Args:
        sync: whose sites are changed.
        store: of the tensor-parallel group.

    Raises:
        ControlError: on every rank alike, when group rank 0 cannot open the socket.
    """

    def __init__(self, sync: SpecTpSync, store: GroupStore) -> None:
        self._sync = sync
        self._rank = store.rank
        self._world_size = store.world_size
        self._fixed: dict[str, str] = {}
        self._forbidden: str | None = None
        self._changing = threading.Lock()
        self._reporting = threading.Lock()
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        """The last changes, the newest last: ``step``, ``digest``, ``generation``, ``modes``, and the ``request``."""
        number = _created[store] = _created.get(store, 0) + 1
        topic = f"control-{number}"
        timeout_s = sync.plan.timeout_s
        self._pledges = Pledges(store, topic, lambda: sync.step, self._find_refusal, self._apply, timeout_s)
        self._reports = Reports(store, topic, self._report)
        self._listener: Listener | None = None
        self.path = str(sync.plan.control.value).replace("{pid}", str(os.getpid()))
        if (problem := store.exchange("control socket", self._listen(), timeout_s)[0]) is not None:
            raise ControlError(problem)
        if self._rank == 0:
            logger.info("live control is on: specsync ctl --socket %s", self.path)
        store.watch(self._look)

    def _listen(self) -> str | None:
        if self._rank == 0:
            try:
                self._listener = Listener(self.path, self._answer)
            except ControlError as error:
                return str(error)
        return None

    def fix(self, slugs: Iterable[str], reason: str) -> None:
        """Keep sites as they are: in this engine a change would not reach them. Alike on every rank."""
        self._fixed.update(dict.fromkeys(slugs, reason))

    def forbid(self, reason: str) -> None:
        """Refuse every change from now on; one rank that forbids is enough."""
        self._forbidden = reason

    def begin_step(self, step: int) -> None:
        """Called by `SpecTpSync.next_step`; see `Pledges.begin_step`."""
        self._pledges.begin_step(step)
        self._reports.begin_step()

    def close(self) -> None:
        """Stop listening; what is under way comes to its end."""
        if self._listener is not None:
            self._listener.close()

    def _look(self) -> float:
        return min(self._pledges.look(), self._reports.look())

    # --- every rank -----------------------------------------------------------------------------------

    def _find_refusal(self) -> str | None:
        if self._forbidden is not None:
            return self._forbidden
        if captured := self._sync.foreign_captures:
            return (
                f"CUDA graphs of the engine hold {', '.join(captured)}, and would go on under the old plan."
                " Start the engine without CUDA graphs to change sites while it runs, or restart it with another"
                " SPECSYNC_SITES."
            )
        return None

    def _apply(self, proposal: Proposal, step: int) -> dict[str, Any]:
        """Change the plan; a rank that cannot any more ends the group, for its peers have changed."""
        sync = self._sync
        modes = {slug: mode for slug, mode in proposal.modes.items() if mode in ("sync", "audit", "off")}
        sync.change_modes(modes, f"{ORIGIN} at step {step}")  # type: ignore[arg-type]
        refusal = self._find_refusal()
        if refusal is None and sync.plan.digest != proposal.digest:
            refusal = f"it leads to plan {sync.plan.digest[:12]} here, to {proposal.digest[:12]} on group rank 0"
        if refusal is not None:
            raise PlanMismatchError(f"group rank {self._rank} could not follow the change at step {step}: {refusal}")
        made: dict[str, Any] = {"step": step, "digest": sync.plan.digest, "generation": sync.plan_generation}
        self.history.append({**made, "modes": modes, "request": proposal.request})
        if self._rank == 0:
            logger.warning(
                "%s: sites changed at step %d by '%s' (%d changed, plan %s).",
                *(ORIGIN, step, proposal.request, len(modes), sync.plan.digest[:12]),
            )
        return made

    def _report(self) -> dict[str, Any]:
        return {slug: stats.as_dict() for slug, stats in self._sync.stats(wait=False).items() if stats.calls}

    # --- group rank 0's listener ----------------------------------------------------------------------

    def _answer(self, request: Request) -> dict[str, Any]:
        if request.command == "status":
            return self._status()
        if request.command == "stats":
            return self._stats(request.wait_s)
        self._pledges.check_free()
        plan = self._sync.plan
        if request.command == "sites":
            return self._change(request, plan, whole_policy(request.policy, plan, self._fixed))
        return self._change(request, plan, some_sites(request.policy, request.mode, plan, self._fixed))

    def _status(self) -> dict[str, Any]:
        plan = self._sync.plan
        return {
            "pid": os.getpid(),
            "group_ranks": self._world_size,
            "step": self._sync.step,
            "digest": plan.digest,
            "generation": self._sync.plan_generation,
            "pending_step": self._pledges.target,
            "refuses": self._find_refusal(),
            "sites": {slug: planned.mode.value for slug, planned in plan.sites.items()},
            "origins": {slug: planned.mode.origin for slug, planned in plan.sites.items()},
            "fixed": [slug for slug in plan.sites if plan[slug].site.kind == "consensus" or slug in self._fixed],
            "history": list(self.history),
        }

    def _stats(self, wait_s: float) -> dict[str, Any]:
        if not self._reporting.acquire(blocking=False):
            raise ControlError("another client is being told. Try again.")
        try:
            reports = self._reports.collect(wait_s)
        finally:
            self._reporting.release()
        return {"step": self._sync.step, "group_ranks": {str(rank): report for rank, report in enumerate(reports)}}

    def _change(self, request: Request, before: Plan, change: Change) -> dict[str, Any]:
        changes = _shown(change, before)
        answer = {"pid": os.getpid(), "kept": dict(change.kept), "changes": changes, "was": before.digest}
        if not change.modes:
            return {**answer, "applied": None, "digest": before.digest, "generation": self._sync.plan_generation}
        if not self._changing.acquire(blocking=False):
            raise ControlError("another client is changing sites. Try again.")
        try:
            if self._sync.plan is not before:
                raise ControlError("the plan has just changed. Look at `specsync ctl status`, and try again.")
            digest = before.with_modes(change.modes, ORIGIN).digest
            made = self._pledges.propose(change.modes, digest, _written(request), request.wait_s)
        finally:
            self._changing.release()
        if isinstance(made, int):
            return {**answer, "applied": None, "pending_step": made, "digest": digest}
        if len({(each["step"], each["digest"]) for each in made}) > 1:
            raise ControlError(f"the ranks did not change alike: {made}. End the engine's processes.")
        return {**answer, "applied": made[0]["step"], "group_ranks": len(made), **made[0]}


def _written(request: Request) -> str:
    """The request as it was typed, in one line without control characters."""
    return " ".join(filter(None, (request.command, normalise(request.policy), request.mode.strip().lower())))


def _shown(change: Change, before: Plan) -> dict[str, list[str]]:
    return {slug: [before.mode(slug), mode] for slug, mode in change.modes.items()}
