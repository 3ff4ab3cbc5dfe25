"""The other end of the control socket: ``specsync ctl``. No torch."""

from __future__ import annotations

import glob
import json
import re
import socket
from contextlib import suppress
from typing import Any

from specsync_core.control.protocol import MAX_ANSWER_BYTES, Request, encode_request, read_line
from specsync_core.errors import ControlError

MARGIN_S = 20.0
"""What an answer may take beyond the time that the request asks for."""


def ask(path: str, request: Request) -> dict[str, Any]:
    """Send one request, and return the answer.

    Args:
        path: the engine's SPECSYNC_CONTROL, as it was given or with the process id filled in.

    Raises:
        ControlError: nobody listens there, the answer does not come, or it is a refusal.
    """
    line = encode_request(request)
    path = find_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5.0)
        try:
            connection.connect(path)
            with suppress(BrokenPipeError):  # sent away before the line was read: the answer says so
                connection.sendall(line)
            answer = json.loads(read_line(connection, MAX_ANSWER_BYTES, request.wait_s + MARGIN_S))
        except OSError as error:
            raise ControlError(f"{path}: {_why(error)}") from error
        except (ValueError, RecursionError) as error:
            raise ControlError(f"{path}: what answers there is not specsync.") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        raise ControlError(f"{path}: what answers there is not specsync.")
    if not answer.pop("ok"):
        raise ControlError(str(answer.get("error")))
    return answer


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
    if isinstance(error, PermissionError):
        return "this user may not use it. Run `specsync ctl` as the engine's user."
    return f"the connection failed: {error.strerror or error}."
