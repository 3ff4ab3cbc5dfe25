"""How the ranks settle on the step at which a plan changes: without a collective, and without a thread that waits.

Group rank 0 leaves a proposal in the store of the CPU group. The store's thread of every rank finds it and arms; when
all have, group rank 0 says go, and each pledges a step that it will not pass before it knows every pledge. The latest
pledge is the step of the change. Nobody can be past it, so all change there, however far apart they run.

A step costs a lock while nothing is proposed, and waits only where a rank reaches its own pledge before the others'
pledges have come, which are a few milliseconds apart. A rank that cannot change refuses when it arms, and the
proposal is withdrawn everywhere. A rank that dies after it armed ends the wait of the others: with an error, on all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specsync_core.bounded_store import POLL_S
from specsync_core.collectives import GroupStore
from specsync_core.errors import ControlError, SpecSyncError, TransportError, UnsettledError

ARM_S = 5.0
"""How long a rank may take to arm: it looks for proposals every half second."""
FAST_S = 0.01
"""Time between two looks while a change is under way."""
LEAD = 2
"""Steps between a pledge and the step that is pledged, so that pledges cross before anyone has to wait."""


@dataclass(frozen=True)
class Proposal:
    """A change that group rank 0 proposes."""

    number: int
    modes: Mapping[str, str]
    digest: str
    """Of the plan that it leads to."""
    request: str
    """What the operator asked for, for logs."""


class Pledges:
    """One rank's part in every change.

    Args:
        topic: tells these notes from others in the same store; the same on every rank.
        step_now: the step that the engine is in.
        find_refusal: why this rank cannot change now, or None; called by the store's thread.
        apply: change the plan; called in `begin_step`, on every rank at the same step. Returns what the ranks compare.
        timeout_s: how long a rank waits for the pledges of others before all raise.
    """

    def __init__(
        self,
        store: GroupStore,
        topic: str,
        step_now: Callable[[], int],
        find_refusal: Callable[[], str | None],
        apply: Callable[[Proposal, int], Any],
        timeout_s: float,
    ) -> None:
        self._store = store
        self._topic = topic
        self._step_now = step_now
        self._find_refusal = find_refusal
        self._apply = apply
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._handled = 0
        self._armed: Proposal | None = None
        self._pledge: int | None = None
        self._target: int | None = None
        self._settled = threading.Event()

    @property
    def target(self) -> int | None:
        """The step of a change that is settled and not made yet."""
        return self._target

    def check_free(self) -> None:
        """Raises ControlError while a change is under way."""
        if self._armed is not None:
            raise ControlError("another change is under way, or waits for the engine's next step. Try again later.")

    # --- the engine's thread --------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Make the change that is due at this step.

        Raises:
            TransportError: a rank did not pledge in time, or gave up.
        """
        with self._lock:  # a pledge is made under it: none can appear for a step that has begun
            pledge = self._pledge
        if pledge is None or step < pledge:
            return
        self._wait_for_pledges()
        assert self._armed is not None
        if self._target is not None and step >= self._target:
            self._make(self._armed, step)

    def _make(self, proposal: Proposal, step: int) -> None:
        try:
            result = self._apply(proposal, step)
        except BaseException as error:
            failure = error if isinstance(error, SpecSyncError) else TransportError(f"{type(error).__name__}: {error}")
            self._store.fail(failure)  # the peers have changed, or will
            raise
        with self._lock:
            self._armed = self._pledge = self._target = None
            self._settled.clear()
        self._post(proposal.number, "made", result)

    def _wait_for_pledges(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._settled.wait(0.1):
            self._store.glance()
            if time.monotonic() > deadline:
                assert self._armed is not None
                missing = [
                    rank for rank, pledge in enumerate(self._read(self._armed.number, "pledge")) if pledge is None
                ]
                error = TransportError(
                    f"the ranks could not settle on a step for a change of sites: group rank {self._store.rank} heard"
                    f" nothing from {_ranks(missing)} for {self._timeout_s:g} s. {self._store.roll_call()}"
                )
                self._store.fail(error)
                raise error

    # --- the store's thread ---------------------------------------------------------------------------

    def look(self) -> float:
        """Take the next part in a change, if there is one; return in how many seconds to look again."""
        if self._pledge is not None:
            self._settle()
        elif self._armed is not None:
            self._hear_verdict(self._armed)
        else:
            self._hear_proposal()
        return FAST_S if self._armed is not None and self._target is None else POLL_S

    def _hear_proposal(self) -> None:
        fields = self._store.read(f"{self._topic}/now")
        if fields is None or fields["number"] <= self._handled:
            return
        proposal = Proposal(**fields)
        self._handled = proposal.number
        self._armed = proposal
        self._post(proposal.number, "armed", {"refusal": self._find_refusal()})

    def _hear_verdict(self, proposal: Proposal) -> None:
        verdict = self._store.read(f"{self._topic}/{proposal.number}/verdict")
        if verdict == "go":
            with self._lock:
                self._pledge = self._step_now() + LEAD
            self._post(proposal.number, "pledge", self._pledge)
        elif verdict is not None or self._store.read(f"{self._topic}/now")["number"] != proposal.number:
            self._armed = None

    def _settle(self) -> None:
        if self._armed is None or self._target is not None:
            return
        pledges = self._read(self._armed.number, "pledge")
        if all(pledge is not None for pledge in pledges):
            self._target = max(pledges)
            self._settled.set()

    def _post(self, number: int, what: str, payload: Any) -> None:
        self._store.post(f"{self._topic}/{number}/{what}/{self._store.rank}", payload)

    def _read(self, number: int, what: str) -> list[Any]:
        ranks = range(self._store.world_size)
        return [self._store.read(f"{self._topic}/{number}/{what}/{rank}") for rank in ranks]

    # --- group rank 0's listener ----------------------------------------------------------------------

    def propose(self, modes: Mapping[str, str], digest: str, request: str, wait_s: float) -> list[Any] | int:
        """Propose a change, and follow it to its end.

        Returns:
            What ``apply`` returned, by group rank; or, when the engine did not come to it within ``wait_s``, the step
            at which the change will be made.

        Raises:
            ControlError: a rank refuses or does not answer; nothing changes.
            UnsettledError: a rank did not report in time; the change may have been made, or may still be.
            TransportError: the store does not answer.
        """
        self.check_free()
        number = self._handled + 1
        self._forget(number - 2)  # a slow rank may still read the last one
        self._store.post(f"{self._topic}/now", asdict(Proposal(number, dict(modes), digest, request)))
        armed = self._collect(number, "armed", ARM_S)
        problem = self._problem(armed)
        self._store.post(f"{self._topic}/{number}/verdict", "go" if problem is None else "withdrawn")
        if problem is not None:
            raise ControlError(f"{problem}\n  Nothing was changed.")
        made = self._collect(number, "made", wait_s)
        if None not in made:
            return made
        if self._target is None:
            raise UnsettledError(
                f"{_ranks(_missing(made))} did not report within {wait_s:g} s that the change was made."
                f" {self._store.roll_call()}".rstrip()
            )
        return self._target

    def _problem(self, armed: Sequence[Any]) -> str | None:
        if missing := _missing(armed):
            return f"{_ranks(missing)} did not answer within {ARM_S:g} s. {self._store.roll_call()}"
        refusals = {rank: answer["refusal"] for rank, answer in enumerate(armed) if answer["refusal"] is not None}
        if not refusals:
            return None
        if len(set(refusals.values())) == 1 and len(refusals) == len(armed):
            return f"every rank refuses: {refusals[0]}"
        return "\n".join(f"{_ranks([rank])} refuses: {reason}" for rank, reason in refusals.items())

    def _collect(self, number: int, what: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._read(number, what)
            if None not in found or time.monotonic() > deadline:
                return found
            time.sleep(FAST_S)

    def _forget(self, number: int) -> None:
        if number < 1:
            return
        self._store.remove(f"{self._topic}/{number}/verdict")
        for what in ("armed", "pledge", "made"):
            for rank in range(self._store.world_size):
                self._store.remove(f"{self._topic}/{number}/{what}/{rank}")


def _missing(notes: Sequence[Any]) -> list[int]:
    return [rank for rank, note in enumerate(notes) if note is None]


def _ranks(ranks: Sequence[int]) -> str:
    return f"group rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
