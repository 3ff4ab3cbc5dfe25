"""The control socket under hostile input: it refuses, answers the next client, and never ends its process."""

import json
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specsync_core.control import client as asking
from specsync_core.control import listener as listening
from specsync_core.control.client import ask, find_socket
from specsync_core.control.listener import Listener, open_socket
from specsync_core.control.protocol import MAX_REQUEST_BYTES, Request
from specsync_core.errors import ControlError, UnsettledError


class Engine:
    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.hold = threading.Event()

    def answer(self, request: Request) -> dict:
        self.asked.append(request)
        if request.policy == "wait":
            self.hold.wait(10)
        if request.policy == "fail":
            raise ControlError("it is refused.\n  Do something else.")
        if request.policy == "break":
            raise ZeroDivisionError("by mistake")
        return {"echo": request.policy, "blob": "x" * 300_000 if request.policy == "long" else ""}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def path(tmp_path, engine):
    path = str(tmp_path / "ctl.sock")
    listener = Listener(path, engine.answer)
    yield path
    engine.hold.set()
    listener.close()


def send(path: str, data: bytes, half_close: bool = True) -> dict | None:
    """Send bytes as they are, and return the answer; None when the connection just ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10)
        client.connect(path)
        try:
            client.sendall(data)
            if half_close:
                client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = b""
        try:
            while part := client.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    return json.loads(answer) if answer else None


def request(**fields) -> bytes:
    return json.dumps({"specsync": 1, "command": "status", **fields}).encode() + b"\n"


def test_the_socket_is_for_its_user_alone(path):
    found = os.lstat(path)
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_the_mode_is_there_from_birth_whatever_the_umask(tmp_path, monkeypatch):
    """No moment at which others could connect: the mode does not come from a chmod alone."""
    monkeypatch.setattr(listening.os, "chmod", lambda *_: None)
    before = os.umask(0)
    try:
        open_socket(str(tmp_path / "x.sock")).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.lstat(tmp_path / "x.sock").st_mode) == 0o600


def test_a_request_is_answered(path, engine):
    assert ask(path, Request("sites", "all")) == {"echo": "all", "blob": ""}
    assert engine.asked == [Request("sites", "all")]
    assert len(ask(path, Request("sites", "long"))["blob"]) == 300_000


def test_a_refusal_and_a_mistake_reach_the_client_and_the_next_is_served(path, caplog):
    with pytest.raises(ControlError, match=r"^it is refused\.\n  Do something else\.$"):
        ask(path, Request("sites", "fail"))
    with pytest.raises(ControlError, match="ZeroDivisionError: by mistake"):
        ask(path, Request("sites", "break"))
    assert "a request on the control socket failed" in caplog.text
    assert ask(path, Request("status"))["echo"] == ""


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "the connection ended before the line did."),
        (request()[:-1], "the connection ended before the line did."),
        (b"\n", "the request is not a line of JSON. Send it with `specsync ctl`."),
        (b"\x80\x04\x95garbage\x00\xff\n", "the request is not a line of JSON. Send it with `specsync ctl`."),
        (b"[" * 4000 + b"\n", "the request is not a line of JSON. Send it with `specsync ctl`."),
        (b"[1]\n", "the request is not of version 1. Use the `specsync ctl` of the engine's specsync."),
        (b'{"specsync": 2, "command": "status"}\n', "the request is not of version 1. Use the `specsync ctl` of the"),
        (request(command="stat"), "unknown command 'stat' (did you mean 'stats'?). Known: status, stats, sites, mode."),
        (request(command=["sites"]), "unknown command \"['sites']\". Known: "),
        (request(exec="import os"), "unknown field 'exec'. Known: policy, mode, wait_s."),
        (request(policy=7), "policy takes a text, not int."),
        (request(wait_s=1e9), "wait_s takes 0 to 600 seconds."),
        (request(wait_s=float("nan")), "wait_s takes 0 to 600 seconds."),
        (request(wait_s=True), "wait_s takes 0 to 600 seconds."),
        (request() + request(), "something follows the line; a connection carries one."),
        (b"x" * (MAX_REQUEST_BYTES + 1), "the line has more than 4096 bytes."),
        (b"x" * 4_000_000, "the line has more than 4096 bytes."),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_what_is_no_request_is_refused(path, engine, data, error):
    answer = send(path, data)
    assert answer is None or (answer["ok"], answer["error"].startswith(error)) == (False, True), answer
    assert answer is not None or len(data) > 1_000_000  # the end of what is not read resets the connection
    assert engine.asked == []
    assert ask(path, Request("status")) == {"echo": "", "blob": ""}


def test_a_slow_client_is_given_up_and_holds_nobody_up(path, engine, monkeypatch):
    monkeypatch.setattr(listening, "READ_S", 0.4)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.settimeout(10)
        slow.connect(path)
        slow.sendall(b'{"specsync"')
        assert ask(path, Request("status"))["echo"] == ""
        for _ in range(10):  # a byte now and then does not extend the time
            time.sleep(0.1)
            try:
                slow.sendall(b" ")
            except OSError:
                break
        assert json.loads(slow.recv(65536))["error"] == "no whole line came within 0.4 s."


def test_two_clients_are_served_side_by_side_and_a_ninth_is_sent_away(path, engine):
    waiting = [threading.Thread(target=ask, args=(path, Request("sites", "wait"))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    deadline = time.monotonic() + 10
    while len(engine.asked) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ControlError, match=r"8 clients are being served\. Try again\."):
        ask(path, Request("status"))
    engine.hold.set()
    for thread in waiting:
        thread.join()
    assert ask(path, Request("status"))["echo"] == ""


def test_a_client_that_leaves_before_the_answer_harms_nobody(path, engine):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
        client.sendall(request(command="sites", policy="wait"))
    engine.hold.set()
    assert ask(path, Request("status"))["echo"] == ""


def test_another_user_is_refused(path, monkeypatch):
    class Foreign(socket.socket):
        def getsockopt(self, *_):
            return struct.pack("3i", 1, 4711, 4711)

    monkeypatch.setattr(listening.os, "geteuid", lambda: 1000)
    with Foreign(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        with pytest.raises(ControlError, match=r"user 4711 may not control an engine of user 1000\."):
            listening._check_peer(connection)
        monkeypatch.setattr(listening.os, "geteuid", lambda: 4711)
        listening._check_peer(connection)


def test_the_user_is_checked_before_a_request_is_read(path, engine, monkeypatch):
    def refuse(connection):
        raise ControlError("user 4711 may not.")

    monkeypatch.setattr(listening, "_check_peer", refuse)
    with pytest.raises(ControlError, match=r"^user 4711 may not\.$"):
        ask(path, Request("status"))
    assert engine.asked == []


# --- the file ---------------------------------------------------------------------------------------------------


def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path, engine):
    path = str(tmp_path / "ctl.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    listener = Listener(path, engine.answer)
    assert ask(path, Request("status"))["echo"] == ""
    listener.close()
    assert not os.path.exists(path)


def refused(path: Path | str) -> str:
    with pytest.raises(ControlError, match=r"^SPECSYNC_CONTROL: ") as caught:
        open_socket(str(path))
    return str(caught.value).removeprefix(f"SPECSYNC_CONTROL: {path}: ")


def test_a_path_where_another_listens_is_refused(path):
    assert refused(path) == (
        "an engine listens there already. Give each one a path of its own; {pid} in it stands for the process id of"
        " its group rank 0."
    )
    assert ask(path, Request("status"))["echo"] == ""


def test_files_of_others_are_left_alone(tmp_path, monkeypatch):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert refused(file) == "there is a file that is no socket. It is left alone: give another path."
    (tmp_path / "link").symlink_to(file)
    assert refused(tmp_path / "link") == "there is a file that is no socket. It is left alone: give another path."
    assert file.read_text() == "mine"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "theirs"))
    real = os.lstat

    def lstat(name):
        found = list(real(name))
        found[4] = os.geteuid() + 1
        return os.stat_result(found)

    monkeypatch.setattr(listening.os, "lstat", lstat)
    theirs, mine = os.geteuid() + 1, os.geteuid()
    assert refused(tmp_path / "theirs") == (
        f"there is a socket of user {theirs}, not of user {mine}. Give another path."
    )


def test_directories_that_cannot_be_trusted_or_used_are_refused(tmp_path):
    assert refused(tmp_path / "absent" / "x.sock") == (
        "its directory cannot be used: No such file or directory. Make it first."
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert refused(shared / "x.sock") == (
        "other users may write to its directory, and put a socket of theirs there. Give another directory."
    )
    shared.chmod(0o1777)  # as /tmp is
    open_socket(str(shared / "x.sock")).close()


def test_a_path_that_is_too_long_is_refused_with_both_lengths(tmp_path):
    path = tmp_path / ("x" * 120)
    size = len(str(path))
    assert refused(path) == f"the path has {size} bytes; a socket's has at most 107. Give a shorter one."
    open_socket(f"{tmp_path}/{'x' * (107 - len(str(tmp_path)) - 1)}").close()


def test_a_socket_that_cannot_be_made_says_so(tmp_path):
    assert refused("/proc/self/x.sock").startswith("the socket cannot be made: ")
    assert refused("/proc/self/x.sock").endswith(" Give a path in a directory that this user may write to.")


def test_closing_leaves_a_successors_socket_alone(tmp_path, engine):
    path = str(tmp_path / "ctl.sock")
    first = Listener(path, engine.answer)
    os.unlink(path)
    second = Listener(path, engine.answer)
    first.close()
    first.close()
    assert ask(path, Request("status"))["echo"] == ""
    second.close()


def test_an_engine_that_is_gone_is_said_to_be_ending(tmp_path):
    engine = Engine()
    listener = Listener(str(tmp_path / "ctl.sock"), engine.answer)
    del engine
    with pytest.raises(ControlError, match=r"the engine is ending\."):
        ask(listener.path, Request("status"))
    listener.close()


# --- the client ---------------------------------------------------------------------------------------------------


def test_the_client_says_why_nobody_answers(tmp_path):
    with pytest.raises(ControlError, match=r"there is no socket\. Was the engine started with SPECSYNC_CONTROL set"):
        ask(str(tmp_path / "none.sock"), Request("status"))
    path = str(tmp_path / "dead.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    with pytest.raises(ControlError, match=r"nobody listens any more: group rank 0 has ended\."):
        ask(path, Request("status"))


@pytest.mark.parametrize("reply", [b"hello\n", b"[]\n", b'{"ok": 1}\n', b"[" * 100_000 + b"\n"])
def test_the_client_does_not_believe_just_anybody(tmp_path, reply):
    path = str(tmp_path / "x.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        other.listen()

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ControlError, match=r"what answers there is not specsync\."):
            ask(path, Request("status"))
        thread.join()


def test_a_request_that_is_too_long_is_not_sent(path, engine):
    with pytest.raises(ControlError, match=r"the request has \d+ bytes; at most 4096 are taken\. Shorten it\."):
        ask(path, Request("sites", "all," * 2000))
    assert engine.asked == []


def test_the_process_id_in_a_path_is_found(tmp_path, engine):
    template = f"{tmp_path}/x-{{pid}}.sock"
    with pytest.raises(ControlError, match=r"no engine listens there\. Start it with SPECSYNC_CONTROL="):
        find_socket(template)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(f"{tmp_path}/x-1.sock")
    one = Listener(f"{tmp_path}/x-2.sock", engine.answer)
    assert find_socket(template) == one.path
    two = Listener(f"{tmp_path}/x-3.sock", engine.answer)
    with pytest.raises(
        ControlError, match=r"several engines listen: .*x-2\.sock, .*x-3\.sock\. Choose one with --socket\."
    ):
        find_socket(template)
    one.close()
    two.close()


def test_the_process_id_in_a_path_is_digits_and_nothing_else(tmp_path, engine):
    """Else a request for one engine would change another's sites."""
    canary = Listener(f"{tmp_path}/x-canary-2.sock", engine.answer)
    nameless = Listener(f"{tmp_path}/x-.sock", engine.answer)
    with pytest.raises(ControlError, match=r"no engine listens there\."):
        ask(f"{tmp_path}/x-{{pid}}.sock", Request("sites", "off"))
    assert engine.asked == []
    (tmp_path / "12").mkdir()
    (tmp_path / "13").mkdir()
    twice = [Listener(f"{tmp_path}/{folder}/12.sock", engine.answer) for folder in ("12", "13")]
    assert find_socket(f"{tmp_path}/{{pid}}/{{pid}}.sock") == twice[0].path
    for listener in (canary, nameless, *twice):
        listener.close()


def test_what_is_no_socket_is_said_to_be_none(tmp_path):
    (tmp_path / "notes.txt").touch()
    for path, what in ((tmp_path, "a directory"), (tmp_path / "notes.txt", "a file of another kind")):
        with pytest.raises(ControlError) as caught:
            ask(str(path), Request("status"))
        assert str(caught.value) == (
            f"{path}: this is {what}, no socket. Give the path that the engine has in SPECSYNC_CONTROL."
        )


LISTENING = """
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
    listening.bind(sys.argv[1])
    listening.listen(4)
    print(flush=True)
    if sys.argv[2] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    connection, _ = listening.accept()
    if sys.argv[2] == "is mute":
        sys.stdin.read()
    if sys.argv[2] != "ends unread":
        connection.recv(4096)
    if sys.argv[2] == "hangs up":
        connection.close()
        sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("stops", "group rank 0, process {pid}, is stopped (SIGSTOP) and cannot answer: `kill -CONT {pid}`."),
        ("is mute", "process {pid}, which listens there, did not answer within {s:g} s."),
        ("ends", "group rank 0, process {pid}, ended before it answered."),
        ("ends unread", "group rank 0, process {pid}, ended before it answered."),
        (
            "hangs up",
            "process {pid}, which listens there, closed the connection without an answer."
            " Is it the engine's SPECSYNC_CONTROL?",
        ),
    ],
)
@pytest.mark.parametrize("command", ["status", "mode"])
def test_a_listener_that_gives_no_answer_is_given_up_and_named(tmp_path, monkeypatch, what, why, command):
    """A change that was asked for there may come true, and the client says so."""
    monkeypatch.setattr(asking, "LOOK_S", 0.3)
    monkeypatch.setattr(asking, "END_S", 0.3 if what == "hangs up" else 20.0)
    monkeypatch.setattr(asking, "CHANGE_MARGIN_S", 20.0 if what == "stops" else 0.3)
    words = [sys.executable, "-c", LISTENING, str(tmp_path / "x.sock"), what]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            with pytest.raises(ControlError) as caught:
                ask(words[-2], Request(command, "all", "off", 0.0 if command == "mode" else 10.0))
        finally:
            other.kill()
    said = f"{words[-2]}: {why.format(pid=other.pid, s=0.3)}"
    if command == "mode":
        said += "\n  It may be applied, or may still be: ask `specsync ctl status`."
    assert (str(caught.value), type(caught.value)) == (said, UnsettledError if command == "mode" else ControlError)
