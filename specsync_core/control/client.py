"""The other end of the control socket: ``specsync ctl``. No torch."""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import stat
import time
from contextlib import suppress
from typing import Any

from specsync_core.control.protocol import MAX_ANSWER_BYTES, Request, encode_request, read_line
from specsync_core.errors import ControlError, UnsettledError
from specsync_core.liveness import has_ended, peer_of, standstill_of

LOOK_S = 2.0
"""After so much silence the listener's process is looked at; what changes nothing may take as long beyond its wait."""
END_S = 1.0
"""How long a process that closed the connection without an answer is watched: it may be ending."""
CHANGE_MARGIN_S = 20.0
"""What a change may take beyond its wait: the ranks have to be asked, and one that is silent is waited for."""
UNSETTLED = "It may be applied, or may still be: ask `specsync ctl status`."


def ask(path: str, request: Request) -> dict[str, Any]:
    """Send one request, and return the answer.

    Args:
        path: the engine's SPECSYNC_CONTROL, as it was given or with the process id filled in.

    Raises:
        ControlError: nobody listens there, the answer does not come, or it is a refusal.
        UnsettledError: a change was asked for, and what became of it is not known.
    """
    line = encode_request(request)
    path = find_socket(path)
    _check_socket(path)
    answer = _exchange(path, line, request)
    if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        raise ControlError(f"{path}: what answers there is not specsync.")
    if not answer.pop("ok"):
        if answer.get("unsettled"):
            raise UnsettledError(f"{answer.get('error')}\n  {UNSETTLED}")
        raise ControlError(str(answer.get("error")))
    return answer


def _exchange(path: str, line: bytes, request: Request) -> Any:
    """Send a line and return what was answered, parsed; an answer that does not come leaves a change unsettled."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5.0)
        try:
            connection.connect(path)
        except OSError as error:
            raise ControlError(f"{path}: {_why(error)}") from error
        try:
            with suppress(BrokenPipeError):  # sent away before the line was read: the answer says so
                connection.sendall(line)
            _wait_for_answer(connection, _patience(request))
            return json.loads(read_line(connection, MAX_ANSWER_BYTES, LOOK_S))
        except (OSError, ControlError) as error:
            why = _why(error) if isinstance(error, OSError) else str(error)
            if request.command in ("sites", "mode"):
                raise UnsettledError(f"{path}: {why}\n  {UNSETTLED}") from error
            raise ControlError(f"{path}: {why}") from error
        except (ValueError, RecursionError) as error:
            raise ControlError(f"{path}: what answers there is not specsync.") from error


def _patience(request: Request) -> float:
    """How long an answer may take to begin, in seconds."""
    if request.command == "status":
        return LOOK_S
    if request.command == "stats":  # one that finds idle ranks takes some seconds, whatever it was asked for
        return max(request.wait_s, LOOK_S) + LOOK_S
    return request.wait_s + CHANGE_MARGIN_S


def _wait_for_answer(connection: socket.socket, timeout_s: float) -> None:
    """Wait until an answer begins; where the process that listens is stopped, no longer than `LOOK_S`."""
    deadline = time.monotonic() + timeout_s
    pid = _listener_of(connection)
    while True:
        connection.settimeout(max(min(LOOK_S, deadline - time.monotonic()), 1e-3))
        try:
            if connection.recv(1, socket.MSG_PEEK):
                return
            raise ControlError(_why_closed(pid))
        except ConnectionResetError:  # it left the request unread
            raise ControlError(_why_closed(pid)) from None
        except TimeoutError:
            standstill = None if pid is None else standstill_of(pid)
        if standstill is not None:
            raise ControlError(f"group rank 0, process {pid}, {standstill} and cannot answer: `kill -CONT {pid}`.")
        if time.monotonic() >= deadline:
            raise ControlError(f"{_listener(pid)} did not answer within {timeout_s:g} s.")


def _why_closed(pid: int | None) -> str:
    """Why the connection is closed without an answer; a process that ends closes its files some time before."""
    deadline = time.monotonic() + END_S
    while pid is not None and time.monotonic() < deadline:
        if has_ended(pid):
            return f"group rank 0, process {pid}, ended before it answered."
        time.sleep(0.02)
    return f"{_listener(pid)} closed the connection without an answer. Is it the engine's SPECSYNC_CONTROL?"


def _listener(pid: int | None) -> str:
    return "what listens there" if pid is None else f"process {pid}, which listens there,"


def _listener_of(connection: socket.socket) -> int | None:
    """The process that opened the socket; None where the system does not tell, or not in this pid namespace."""
    peer = peer_of(connection)
    return None if peer is None else peer[0] or None


def _check_socket(path: str) -> None:
    """Raises ControlError where a path names something else; one that names nothing is for `connect` to find."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISSOCK(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "a file of another kind"
        raise ControlError(f"{path}: this is {what}, no socket. Give the path that the engine has in SPECSYNC_CONTROL.")


def find_socket(path: str) -> str:
    """Fill in ``{pid}``, which stands for digits alone: the one engine's whose socket is there.

    Raises:
        ControlError: there is none, or there are several to choose from.
    """
    if "{pid}" not in path:
        return path
    first, *others = map(re.escape, path.split("{pid}"))
    written = re.compile(f"{first}(?P<pid>[0-9]+){'(?P=pid)'.join(others)}")
    there = sorted(glob.glob("*".join(map(glob.escape, path.split("{pid}")))))
    alive = [found for found in there if written.fullmatch(found) and _answers(found)]
    if len(alive) == 1:
        return alive[0]
    if not alive:
        raise ControlError(f"{path}: no engine listens there. Start it with SPECSYNC_CONTROL={path}")
    raise ControlError(f"{path}: several engines listen: {', '.join(alive)}. Choose one with --socket.")


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no socket. Was the engine started with SPECSYNC_CONTROL set to this path?"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens any more: group rank 0 has ended."
    if isinstance(error, TimeoutError):
        return "no connection is taken: group rank 0 is stopped, or serves too many."
    if isinstance(error, PermissionError):
        return "this user may not use it. Run `specsync ctl` as the engine's user."
    return f"the connection failed: {error.strerror or error}."
