"""The control socket of group rank 0: local, of mode 0600, and unmoved by whatever is sent to it.

Only processes of the same user, or root, are answered. A client has `READ_S` seconds for its one line; each is served
by a thread of its own, and no more than `MAX_CLIENTS` at a time.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakMethod

from specsync_core.control import protocol
from specsync_core.control.protocol import MAX_REQUEST_BYTES, Request, encode_answer, read_line
from specsync_core.errors import ControlError, SpecSyncError, UnsettledError
from specsync_core.liveness import peer_of

READ_S = 2.0
WRITE_S = 5.0
MAX_CLIENTS = 8
MAX_PATH_BYTES = 107
"""What the kernel has room for."""

logger = logging.getLogger("specsync")


class Listener:
    """Answers requests on a socket until it is closed.

    Args:
        path: absolute; the file that the socket gets.
        answer: a bound method, held weakly; called on a thread of the listener, several at a time. What it raises is
            sent to the client.

    Raises:
        ControlError: the path cannot be used; the message says why, and what to do.
    """

    def __init__(self, path: str, answer: Callable[[Request], dict[str, Any]]) -> None:
        self.path = path
        self._answer = WeakMethod(answer)
        self._clients = threading.BoundedSemaphore(MAX_CLIENTS)
        self._socket = open_socket(path)
        self._inode = os.lstat(path).st_ino
        threading.Thread(target=self._accept, name="specsync-control", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop listening and remove the file, unless another has taken its place; more calls do nothing."""
        atexit.unregister(self.close)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            if not self._clients.acquire(blocking=False):
                _send(connection, {"ok": False, "error": f"{MAX_CLIENTS} clients are being served. Try again."})
                continue
            threading.Thread(target=self._serve, args=(connection,), name="specsync-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _send(connection, self._reply(connection))
        finally:
            self._clients.release()

    def _reply(self, connection: socket.socket) -> dict[str, Any]:
        try:
            _check_peer(connection)
            request = protocol.decode_request(read_line(connection, MAX_REQUEST_BYTES, READ_S))
            answer = self._answer()
            if answer is None:
                raise ControlError("the engine is ending.")
            return {"ok": True, **answer(request)}
        except SpecSyncError as error:
            return {"ok": False, "error": str(error), "unsettled": isinstance(error, UnsettledError)}
        except OSError as error:
            return {"ok": False, "error": f"the connection failed: {error}"}
        except Exception as error:
            # A mistake of ours must not end group rank 0, whose peers would hang.
            logger.exception("a request on the control socket failed")
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with connection, suppress(OSError):  # a client that has left, or does not read
        connection.settimeout(WRITE_S)
        connection.sendall(encode_answer(answer))


def _check_peer(connection: socket.socket) -> None:
    """Refuse other users, who could only have come past the file's mode; where the system names the peer."""
    peer = peer_of(connection)
    if peer is not None and peer[1] not in (0, os.geteuid()):
        raise ControlError(f"user {peer[1]} may not control an engine of user {os.geteuid()}.")


def open_socket(path: str) -> socket.socket:
    """Bind a listening socket of mode 0600 to a path; a file that a dead process left there is replaced.

    Raises:
        ControlError: the path cannot be used.
    """
    if (problem := find_problem(path) or _who_listens(path)) is not None:
        raise ControlError(f"SPECSYNC_CONTROL: {path}: {problem}")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(OSError):
            os.fchmod(listening.fileno(), 0o600)  # Linux gives the file this mode at birth
        with suppress(FileNotFoundError):
            os.unlink(path)
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen(MAX_CLIENTS)
    except OSError as error:
        listening.close()
        raise ControlError(
            f"SPECSYNC_CONTROL: {path}: the socket cannot be made: {error.strerror or error}."
            " Give a path in a directory that this user may write to."
        ) from error
    return listening


def find_problem(path: str) -> str | None:
    """Why no socket of this user's may be made at an absolute path, and what to do; None where it may."""
    if (size := len(os.fsencode(path))) > MAX_PATH_BYTES:
        return f"the path has {size} bytes; a socket's has at most {MAX_PATH_BYTES}. Give a shorter one."
    try:
        folder = os.stat(os.path.dirname(path))
    except OSError as error:
        return f"its directory cannot be used: {error.strerror}. Make it first."
    open_to_others = folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX
    if open_to_others or folder.st_uid not in (0, os.geteuid()):
        return "other users may write to its directory, and put a socket of theirs there. Give another directory."
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(there.st_mode):
        return "there is a file that is no socket. It is left alone: give another path."
    if there.st_uid != os.geteuid():
        return f"there is a socket of user {there.st_uid}, not of user {os.geteuid()}. Give another path."
    return None


def _who_listens(path: str) -> str | None:
    if not _is_alive(path):
        return None
    return (
        "an engine listens there already. Give each one a path of its own; {pid} in it stands for the process id of"
        " its group rank 0."
    )


def _is_alive(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it listens, and is busy
            return True
    return True
