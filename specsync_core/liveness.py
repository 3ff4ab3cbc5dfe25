"""Who a peer is, and whether its process still lives, as far as this machine can tell. No torch."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

HAS_ENDED = "has ended"
STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": HAS_ENDED, "X": HAS_ENDED}
"""States of ``/proc/PID/stat`` in which a process does nothing any more."""


def own_identity() -> dict[str, Any]:
    """Return what a peer on the same machine needs to ask after this process; JSON can hold it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "place": _place(), "start": _stat(os.getpid())[1]}


def name_of(identity: dict[str, Any] | None) -> str:
    """Return ``pid 4711 on HOST``, or nothing for a process that never introduced itself."""
    return "" if identity is None else f"pid {identity['pid']} on {identity['host']}"


def ending_of(identity: dict[str, Any] | None) -> str | None:
    """Return why a process does nothing any more, in words that follow its name.

    None when it runs, or when that cannot be seen from here: another machine, another pid namespace.
    """
    if identity is None or identity["place"] is None or identity["place"] != _place():
        return None
    state, start = _stat(identity["pid"])
    if state is None:
        return HAS_ENDED if _is_gone(identity["pid"]) else None
    if start != identity["start"]:  # its number belongs to another process now
        return HAS_ENDED
    return STATES.get(state)


def _is_gone(pid: int) -> bool:
    """Whether no process has this number; a ``/proc`` that hides it (hidepid), or cannot be read, does not say so."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def peer_of(connection: socket.socket) -> tuple[int, int] | None:
    """Return the process and the user that opened the other end of a Unix socket; None where the system does not tell.

    The process is 0 where its number means nothing in this pid namespace.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def standstill_of(pid: int) -> str | None:
    """Return why a process of this machine does nothing any more, as `ending_of`; None when that is not seen."""
    return STATES.get(_stat(pid)[0] or "")


def has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone, or a zombie."""
    return _is_gone(pid) or standstill_of(pid) == HAS_ENDED


def _place() -> str | None:
    """What a pid is relative to: this boot of this machine, and the pid namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None  # the /proc of another pid namespace: what it says of a number is about someone else
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str | None, str | None]:
    """State letter and start time, None for both where there is no such process or no ``/proc``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold brackets
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None, None
