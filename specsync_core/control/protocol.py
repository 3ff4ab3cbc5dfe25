"""Requests and answers: one line of JSON each way, every size bounded. Data, never code."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specsync_core.errors import ControlError, did_you_mean

VERSION = 1
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 22
MAX_WAIT_S = 600.0
DEFAULT_WAIT_S = 10.0

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "status": (),
    "stats": (),
    "sites": ("policy",),
    "mode": ("policy", "mode"),
}
"""Every command, with the fields of `Request` that it takes."""


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    command: str
    policy: str = ""
    """``sites``: a policy; ``mode``: the words of a policy, without modes."""
    mode: str = ""
    wait_s: float = DEFAULT_WAIT_S
    """How long the client waits for the engine to take the step at which a change is made, and for ranks to report."""


def encode_request(request: Request) -> bytes:
    """Raises ControlError when the request is too long to be sent."""
    line = json.dumps({"specsync": VERSION, **asdict(request)}).encode() + b"\n"
    if len(line) > MAX_REQUEST_BYTES:
        raise ControlError(f"the request has {len(line)} bytes; at most {MAX_REQUEST_BYTES} are taken. Shorten it.")
    return line


def decode_request(line: bytes) -> Request:
    """Read one line.

    Raises:
        ControlError: it is not a request that `encode_request` could have written; the message says why.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ControlError("the request is not a line of JSON. Send it with `specsync ctl`.") from None
    if not isinstance(fields, dict) or fields.pop("specsync", None) != VERSION:
        raise ControlError(f"the request is not of version {VERSION}. Use the `specsync ctl` of the engine's specsync.")
    command = fields.pop("command", None)
    if not isinstance(command, str) or command not in ARGUMENTS:
        hint = did_you_mean(command, ARGUMENTS) if isinstance(command, str) else ""
        raise ControlError(f"unknown command {str(command)[:40]!r}{hint}. Known: {', '.join(ARGUMENTS)}.")
    if unknown := fields.keys() - {"policy", "mode", "wait_s"}:
        raise ControlError(f"unknown field {min(unknown)[:40]!r}. Known: policy, mode, wait_s.")
    return Request(command, _text(fields, "policy"), _text(fields, "mode"), _seconds(fields))


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ControlError(f"{name} takes a text, not {type(value).__name__}.")
    return value


def _seconds(fields: Mapping[str, Any]) -> float:
    value = fields.get("wait_s", DEFAULT_WAIT_S)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_WAIT_S:
        raise ControlError(f"wait_s takes 0 to {MAX_WAIT_S:g} seconds.")
    return float(value) if math.isfinite(value) else DEFAULT_WAIT_S


def encode_answer(answer: Mapping[str, Any]) -> bytes:
    """Write an answer; one that is too long becomes an error that says so."""
    line = json.dumps(answer).encode() + b"\n"
    if len(line) > MAX_ANSWER_BYTES:
        refusal = {"ok": False, "error": f"the answer has {len(line)} bytes, too many to send."}
        line = json.dumps(refusal).encode() + b"\n"
    return line


def read_line(connection: socket.socket, limit: int, timeout_s: float) -> bytes:
    """Read one line, and no more than that.

    Args:
        limit: bytes that the line may have, its end included.
        timeout_s: for the whole line, however slowly it comes.

    Raises:
        ControlError: the line is too long, ends before its end, comes too late, or something follows it.
    """
    deadline = time.monotonic() + timeout_s
    data = b""
    while b"\n" not in data:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            part = connection.recv(min(65536, limit + 1 - len(data)))
        except TimeoutError:
            raise ControlError(f"no whole line came within {timeout_s:g} s.") from None
        if not part:
            raise ControlError("the connection ended before the line did.")
        data += part
        if len(data) > limit:
            raise ControlError(f"the line has more than {limit} bytes.")
        if time.monotonic() > deadline:
            raise ControlError(f"no whole line came within {timeout_s:g} s.")
    line, _, rest = data.partition(b"\n")
    if rest:
        raise ControlError("something follows the line; a connection carries one.")
    return line
