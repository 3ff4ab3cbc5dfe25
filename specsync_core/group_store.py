"""Meeting through a group's store, so that ranks fail together, and know which of them is missing.

A rank that gives up writes its reason to the store of its CPU group; a thread of every peer looks there, so a
peer that waits raises with that reason instead of waiting for its own time-out. A rank whose collective failed
calls the roll: every peer that lives answers with where it is, so the one that is missing is known by name.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakMethod

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from specsync_core import errors
from specsync_core.bounded_store import POLL_S, BoundedStore, StoreLostError
from specsync_core.errors import SpecSyncError, TransportError
from specsync_core.liveness import HAS_ENDED, ending_of, name_of, own_identity

END_GRACE_S = 3.0
"""How long a peer may have ended before that is a failure: what it sent last is still taken, as at a shutdown."""
STOPPED_S = 5.0
"""How long a peer may be stopped before this rank's log says so. It may go on: no failure."""
ROLL_CALL_S = 2.0
"""How long a peer may take to answer; it looks for roll calls every half second."""

logger = logging.getLogger("specsync")


class AbsentRankError(TransportError):
    """A rank did not come to a meeting in time."""


class GroupStore:
    """The key-value store behind a gloo group, as a meeting place that needs no collective.

    Unlike a collective it tells *which* rank is absent, and it still works when a collective is stuck.
    Obtain it with `store_of`, so that everything in this process counts its meetings together.
    """

    def __init__(self, cpu_group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(cpu_group)
        self.ranks: list[int] = dist.get_process_group_ranks(cpu_group)
        """Global ranks, by group rank."""
        self.opening = threading.Lock()
        """Held by the thread that opens this rank's sockets to its peers."""
        self.world_size = len(self.ranks)
        self.place: str | None = None
        """The site call that this rank is in, or was in last, for messages."""
        self._waits: tuple[str, float] | None = None
        self._meetings: dict[str, int] = {}
        self._failure: dict[str, str] | None = None
        self._answered = 0
        self._alarms = 0
        self._on_alarm: Callable[[str], object] | None = None
        self._watchers: list[WeakMethod[Callable[[], float]]] = []
        self._ended: dict[int, float] = {}
        """Since when a peer's process is seen to have ended."""
        self._stopped: dict[int, float] = {}
        """Since when one is seen to be stopped; infinite once that was said."""
        self._to_stop: list[WeakMethod[Callable[[], object]]] = []
        self._identities: dict[int, dict[str, Any]] = {self.rank: own_identity()}
        self._store = BoundedStore(PrefixStore("specsync", cpu_group.get_group_store()), self._look_for_news)
        self._try_to_set(f"who/{self.rank}", self._identities[self.rank])

    # --- meetings ---------------------------------------------------------------------------------

    def exchange(self, topic: str, payload: Any, timeout_s: float) -> list[Any]:
        """Give ``payload`` (anything JSON can hold) and return every rank's, by group rank.

        Raises:
            AbsentRankError: a rank did not come within ``timeout_s``; raised on every rank, the late
                one included, naming the absent ranks and what is known of them.
            TransportError: the store does not answer.
            SpecSyncError: a peer had given up before; the error that it raised.
        """
        self.enter(f"the meeting '{topic}'")
        try:
            return self._exchange(topic, payload, timeout_s)
        except StoreLostError as error:
            raise TransportError(f"{topic}: {self.roll_call(error)}") from error
        finally:
            self.leave()

    def _exchange(self, topic: str, payload: Any, timeout_s: float) -> list[Any]:
        meeting = self._meetings[topic] = self._meetings.get(topic, 0) + 1
        key = f"{topic}/{meeting}"
        self._store.set(f"{key}/{self.rank}", json.dumps(payload))
        absent = self._collect(key, timeout_s)
        # A second phase, so that a rank that comes after the others gave up learns that they did.
        self._store.set(f"{key}/verdict/{self.rank}", json.dumps(absent))
        undecided = [] if absent else self._collect(f"{key}/verdict", timeout_s)
        missed = sorted({*absent, *undecided, *self._missed_by_others(f"{key}/verdict", absent or undecided)})
        if missed:
            raise AbsentRankError(
                f"{topic}: group rank{'s' if len(missed) > 1 else ''} {', '.join(map(str, missed))} of"
                f" {self.world_size} did not arrive within {timeout_s:g} s (this is group rank {self.rank})."
                f" {self.roll_call()} Do all ranks load specsync, and call the same sites with the same tensors?"
                " SPECSYNC_TIMEOUT_S sets the time-out."
            )
        shown = [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.world_size)]
        # Who came to this meeting has left the one before: nobody reads that any more.
        self._forget(f"{topic}/{meeting - 1}")
        return shown

    def _forget(self, key: str) -> None:
        """Remove this rank's part of a meeting, so that the store stays small however long the ranks run."""
        for part in (f"{key}/{self.rank}", f"{key}/verdict/{self.rank}"):
            if not key.endswith("/0"):
                self._store.delete(part)

    def _collect(self, key: str, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        waiting = list(range(self.world_size))
        pause_s = 0.0005
        while waiting := [rank for rank in waiting if not self._store.check(f"{key}/{rank}")]:
            self.raise_failure()
            if time.monotonic() > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.02)
        return waiting

    def _missed_by_others(self, key: str, give_up: list[int]) -> set[int]:
        missed: set[int] = set()
        for rank in range(self.world_size):
            if rank not in give_up and self._store.check(f"{key}/{rank}"):
                missed.update(json.loads(self._store.get(f"{key}/{rank}")))
        return missed

    # --- notes: what ranks leave for each other without meeting -----------------------------------

    def post(self, key: str, payload: Any) -> None:
        """Leave anything JSON can hold under a key, for every rank to read. Raises StoreLostError."""
        self._store.set(f"note/{key}", json.dumps(payload))

    def read(self, key: str) -> Any:
        """Return what was posted under a key; None while nothing was. Raises StoreLostError."""
        return json.loads(self._store.get(f"note/{key}")) if self._store.check(f"note/{key}") else None

    def remove(self, key: str) -> None:
        """Take a note back. Raises StoreLostError."""
        self._store.delete(f"note/{key}")

    def watch(self, look: Callable[[], float]) -> None:
        """Let the store's thread call a bound method, held weakly; it returns after how many seconds to call again."""
        self._watchers.append(WeakMethod(look))

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, error: SpecSyncError) -> None:
        """Tell the peers that this rank gives up, and why. The first failure stays."""
        record = {"kind": type(error).__name__, "reason": f"group rank {self.rank} gave up: {error}"}
        if self._failure is None:
            self._failure = record
            with suppress(StoreLostError, RuntimeError):
                if self._store.lost is None and not self._store.check("failure"):
                    self._store.set("failure", json.dumps(record))

    def abandon(self, what: str, error: BaseException) -> None:
        """`fail` with whatever ends an act of this rank, an interrupt too: the peers wait for it, or will."""
        if not isinstance(error, SpecSyncError):
            error = TransportError(f"{what}: {type(error).__name__}: {error}")
        self.fail(error)

    def give_up(self, what: str, why: str, cause: BaseException | None = None) -> NoReturn:
        """A wait of this rank has failed: raise what a peer gave up for, else call the roll, tell the peers, and raise.

        Args:
            what: it waited in.
            why: as far as it can see.
        """
        self.raise_failure()
        place = f" of {self.place}" if self.place else ""
        failure = TransportError(
            f"{what}{place} on group rank {self.rank} of {self.world_size}: {why}\n  {self.roll_call()}"
        )
        self.fail(failure)
        raise failure from cause

    def when_failed(self, stop: Callable[[], object]) -> None:
        """Let the store's thread call a bound method, held weakly, once any rank of the group has failed."""
        self._to_stop.append(WeakMethod(stop))

    def _notice_ends(self) -> None:
        """A peer whose process has ended, or is stopped, comes to no call: say so, however long one waits for it."""
        now = time.monotonic()
        for rank, identity in list(self._identities.items()):  # a roll call on another thread may add to them
            if rank == self.rank or self._failure is not None:
                continue
            ending = ending_of(identity)
            peer = f"group rank {rank} ({name_of(identity)}) {ending}"
            if ending != HAS_ENDED:
                self._ended.pop(rank, None)
            elif now - self._ended.setdefault(rank, now) >= END_GRACE_S:
                self.fail(TransportError(peer))
            if ending in (None, HAS_ENDED):
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) >= STOPPED_S:
                self._stopped[rank] = math.inf
                own = f"group rank {self.rank} {self._whereabouts()}"
                logger.warning("%s; %s. `kill -CONT %d` lets it go on.", peer, own, identity["pid"])

    def _stop_waits(self) -> None:
        while self._failure is not None and self._to_stop:
            if (stop := self._to_stop.pop()()) is not None:
                stop()

    def raise_failure(self) -> None:
        """Raise when any rank of the group has given up: the error that it raised, with its group rank."""
        with suppress(StoreLostError):
            self._read_failure()
        self.glance()

    def glance(self) -> None:
        """`raise_failure`, by what the store's thread knows already: cheap enough for every call of a hot path."""
        if self._failure is not None:
            kind = getattr(errors, self._failure["kind"], TransportError)
            raise kind(f"{self._failure['reason']}\n  The group no longer agrees: end its processes.")

    def _read_failure(self) -> None:
        if self._failure is None and self._store.check("failure"):
            self._failure = json.loads(self._store.get("failure"))

    def alarm(self, text: str) -> None:
        """Tell every peer that listens, wherever it is, within half a second or so. Not a failure: ranks go on."""
        with suppress(StoreLostError):
            number = self._store.add("alarms", 1)
            self._store.set(f"alarm/{number}", json.dumps({"rank": self.rank, "text": text}))

    def listen(self, heard: Callable[[str], object] | None) -> None:
        """Call ``heard`` on the store's thread with what peers tell from now on; it must return at once."""
        with suppress(StoreLostError):
            self._alarms = self._store.add("alarms", 0)
            self._on_alarm = heard

    def _hear(self) -> None:
        while self._on_alarm is not None and self._store.check(f"alarm/{self._alarms + 1}"):
            self._alarms += 1
            told = json.loads(self._store.get(f"alarm/{self._alarms}"))
            if told["rank"] != self.rank:
                self._on_alarm(told["text"])

    # --- who is where -----------------------------------------------------------------------------

    def enter(self, what: str) -> None:
        """Say what this rank begins to wait in."""
        self._waits = what, time.monotonic()

    def leave(self) -> None:
        """Say that the wait is over."""
        self._waits = None

    def roll_call(self, lost: StoreLostError | None = None) -> str:
        """Ask every peer where it is, and return that in words: first who has ended, is stopped, or does not answer.

        Takes up to `ROLL_CALL_S`, less when every peer answers or has visibly ended.

        Args:
            lost: the store is known not to answer.
        """
        answers: dict[int, str] = {}
        if lost is None:
            try:
                answers = self._ask_all()
            except StoreLostError as error:
                lost = error
        said = [self._about(rank, answers.get(rank)) for rank in range(self.world_size) if rank != self.rank]
        found = "; ".join(text for _, text in sorted(said, key=lambda item: item[0])) or "there are no peers"
        if lost is None:
            return f"{found[0].upper()}{found[1:]}."
        host = f"group rank {self.ranks.index(0)}" if 0 in self.ranks else "global rank 0"
        return (
            f"The group's store, which lives in {host} unless a launcher holds it, does not answer ({lost});"
            f" as far as can be seen from here: {found}."
        )

    def _ask_all(self) -> dict[int, str]:
        self._learn_identities()
        number = self._store.add("rolls", 1)
        self._store.set(f"roll/{number}", str(self.rank))
        answers: dict[int, str] = {}
        deadline = time.monotonic() + ROLL_CALL_S
        missing = [rank for rank in range(self.world_size) if rank != self.rank]
        while missing and time.monotonic() < deadline:
            for rank in missing:
                if self._store.check(f"roll/{number}/{rank}"):
                    answers[rank] = self._store.get(f"roll/{number}/{rank}")
            missing = [rank for rank in missing if rank not in answers and not self._ending(rank)]
            time.sleep(0.02)
        return answers

    def _about(self, rank: int, answer: str | None) -> tuple[int, str]:
        """What is known of one peer, with how much it explains."""
        name = f"group rank {rank}"
        if (shown := name_of(self._identities.get(rank))) and answer is None:
            name += f" ({shown})"
        if (ending := self._ending(rank)) is not None:
            return 0, f"{name} {ending}"
        if answer is None:
            return 1, f"{name} does not answer (stopped, dead or cut off)"
        return (3 if answer.startswith("waits") else 2), f"{name} {answer}"

    def _ending(self, rank: int) -> str | None:
        return ending_of(self._identities.get(rank))

    def _whereabouts(self) -> str:
        last = f", last in {self.place}" if self.place else ""
        if self._failure is not None:
            return f"gave up{last}"
        if self._waits is None:
            return f"runs, outside of specsync{last}"
        what, since = self._waits
        at = f" of {self.place}" if self.place and "meeting" not in what else ""
        return f"waits in {what}{at} for {time.monotonic() - since:.1f} s"

    def _look_for_news(self) -> None:
        """What the store's thread does a few times a second; without the store, what it can see from here."""
        self._notice_ends()
        self._stop_waits()
        if self._store.lost is not None:
            return
        self._read_failure()
        self._stop_waits()
        self._hear()
        while self._store.check(f"roll/{self._answered + 1}"):
            self._answered += 1
            self._store.set(f"roll/{self._answered}/{self.rank}", self._whereabouts())
        self._learn_identities()
        watchers = [look for watcher in self._watchers if (look := watcher()) is not None]
        self._store.pause_s = min((look() for look in watchers), default=POLL_S)

    def _learn_identities(self) -> None:
        for rank in range(self.world_size):
            if rank not in self._identities and self._store.check(f"who/{rank}"):
                self._identities[rank] = json.loads(self._store.get(f"who/{rank}"))

    def _try_to_set(self, key: str, value: Any) -> None:
        with suppress(StoreLostError):
            self._store.set(key, json.dumps(value))


_stores: WeakKeyDictionary[Any, GroupStore] = WeakKeyDictionary()
_making = threading.Lock()


def store_of(cpu_group: dist.ProcessGroup) -> GroupStore:
    """Return the one `GroupStore` of this process for a gloo group; a group of a test brings its own."""
    if (own := getattr(cpu_group, "specsync_store", None)) is not None:
        return own  # type: ignore[no-any-return]
    if (store := _stores.get(cpu_group)) is None:
        with _making:
            if (store := _stores.get(cpu_group)) is None:
                store = _stores[cpu_group] = GroupStore(cpu_group)
    return store
