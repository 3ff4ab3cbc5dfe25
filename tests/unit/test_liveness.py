"""What can be seen of a peer's process, and a store whose calls end in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore

from specsync_core import bounded_store, liveness
from specsync_core.bounded_store import BoundedStore, StoreLostError
from specsync_core.liveness import _stat, ending_of, name_of, own_identity


def identity_of(process: subprocess.Popen[bytes]) -> dict[str, object]:
    return {**own_identity(), "pid": process.pid, "start": _stat(process.pid)[1]}


def wait_for(ending: str | None, identity: dict[str, object]) -> None:
    deadline = time.monotonic() + 10
    while ending_of(identity) != ending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ending_of(identity) == ending


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_runs_is_stopped_goes_on_and_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identity = identity_of(process)
        assert ending_of(identity) is None
        process.send_signal(signal.SIGSTOP)
        wait_for("is stopped (SIGSTOP)", identity)
        process.send_signal(signal.SIGCONT)
        wait_for(None, identity)
    finally:
        process.kill()
    wait_for("has ended", identity)  # not reaped yet: a zombie
    process.wait()
    assert ending_of(identity) == "has ended"


def test_a_number_that_another_process_has_now_is_not_the_peer() -> None:
    assert ending_of(own_identity()) is None
    assert ending_of({**own_identity(), "start": "1"}) == "has ended"


def test_nothing_is_said_about_processes_of_other_machines() -> None:
    assert ending_of({**own_identity(), "place": "another boot", "pid": 2**22 + 1}) is None
    assert ending_of(None) is None
    assert name_of(None) == ""
    assert name_of({**own_identity(), "host": "node7"}) == f"pid {os.getpid()} on node7"


def test_a_proc_of_another_pid_namespace_says_nothing_about_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that mounts its host's /proc: its numbers belong to other processes."""
    peer = {**own_identity(), "start": "1"}
    assert ending_of(peer) == "has ended"
    links = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "4711" if path == "/proc/self" else links(path))
    assert own_identity()["place"] is None
    assert ending_of(peer) is None


def test_a_process_that_proc_hides_is_not_taken_for_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = own_identity()
    monkeypatch.setattr(liveness, "_stat", lambda _: (None, None))
    assert ending_of(peer) is None
    assert ending_of({**peer, "pid": 2**22 + 1}) == "has ended"


class Poller:
    def __init__(self) -> None:
        self.polls = 0
        self.error: Exception | None = None

    def poll(self) -> None:
        self.polls += 1
        if self.error is not None:
            raise self.error


class Stuck(HashStore):
    """Its host is stopped: calls wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.release.wait(30)
        return True


def test_calls_go_through_and_the_poll_is_kept_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "POLL_S", 0.02)
    poller = Poller()
    store = BoundedStore(HashStore(), poller.poll)
    store.set("key", "value")
    assert (store.get("key"), store.check("key"), store.check("key", "other")) == ("value", True, False)
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    store.delete("key")
    assert not store.check("key")
    deadline = time.monotonic() + 5
    while poller.polls < 3 and time.monotonic() < deadline:
        store.check("key")  # calls without a pause do not keep the poll from its turn
    assert poller.polls >= 3
    store.close()
    with pytest.raises(StoreLostError, match="this process has closed it"):
        store.check("key")


def test_a_store_that_does_not_answer_is_lost_and_stays_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "CALL_S", 0.1)
    stuck, poller = Stuck(), Poller()
    store = BoundedStore(stuck, poller.poll)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreLostError, match=r"it did not answer within 0\.1 s"):
            store.check("key")
    assert time.monotonic() - started < 10
    stuck.release.set()
    store.close(5)


def test_a_store_that_fails_is_lost_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "POLL_S", 0.01)
    poller = Poller()
    poller.error = RuntimeError("Connection reset by peer\nand a stack")
    store = BoundedStore(HashStore(), poller.poll)
    store._thread.join(5)
    with pytest.raises(StoreLostError, match=r"^Connection reset by peer$"):
        store.set("key", "value")


def test_the_thread_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "POLL_S", 0.01)
    poller = Poller()
    store = BoundedStore(HashStore(), poller.poll)
    del poller
    store._thread.join(5)
    assert not store._thread.is_alive()
