"""``specsync ctl`` at its other end: a socket that answers what a test says."""

import json
import os

import pytest

from specsync_core.cli import main
from specsync_core.control.listener import Listener
from specsync_core.control.protocol import Request
from specsync_core.errors import ControlError, UnsettledError

STATUS = {
    **{"pid": 7, "group_ranks": 2, "step": 9, "digest": "ab" * 32, "generation": 1, "pending_step": None},
    **{"refuses": None, "sites": {"dspark-mem": "sync", "dspark-plan": "audit"}, "fixed": ["dspark-mem"]},
    "origins": {"dspark-mem": "default", "dspark-plan": "specsync ctl at step 4"},
    "history": [{"step": 4, "digest": "ab" * 32, "modes": {"dspark-plan": "audit"}, "request": "mode 7 audit"}],
}
CHANGED = {
    **{"pid": 7, "applied": 12, "group_ranks": 2, "digest": "cd" * 32, "was": "ab" * 32, "generation": 2},
    **{
        "changes": {"dspark-plan": ["audit", "off"], "dspark-target": ["audit", "off"]},
        "kept": {"dspark-mem": "it stays"},
    },
}
FIRST = {"step": 3, "call": 4, "group_rank": 1, "tensor": "bonus", "index": [2], "own": 5, "rank0": 6}
COUNTS = {"mode": "audit", "calls": 4, "compared": 8, "mismatches": 1, "first_divergence": FIRST}


class Engine:
    def __init__(self):
        self.answers, self.asked = {}, []

    def answer(self, request: Request):
        self.asked.append(request)
        found = self.answers[request.command]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def engine(tmp_path, monkeypatch):
    engine = Engine()
    listener = Listener(str(tmp_path / "ctl.sock"), engine.answer)
    monkeypatch.setenv("SPECSYNC_CONTROL", listener.path)
    yield engine
    listener.close()


def ctl(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["ctl", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_status_shows_every_site_and_the_last_changes(engine, capsys):
    engine.answers["status"] = STATUS
    code, out, _ = ctl(capsys, "status")
    assert (code, [line.rstrip() for line in out.splitlines()]) == (
        0,
        [
            "Process 7, 2 group ranks, step 9, plan abababababab, generation 1.",
            "site         mode          origin",
            "dspark-mem   sync   stays  default",
            "dspark-plan  audit         specsync ctl at step 4",
            "Step 4: mode 7 audit (1 site, plan abababababab).",
        ],
    )
    engine.answers["status"] = STATUS | {"pending_step": 11, "refuses": "its graphs were captured"}
    code, out, _ = ctl(capsys, "status")
    assert code == 0
    assert "A change is agreed for step 11.\nSites cannot change here: its graphs were captured\n" in out


def test_a_change_says_where_it_was_made_and_what_stayed(engine, capsys):
    engine.answers["sites"] = CHANGED
    code, out, _ = ctl(capsys, "sites", "off", "--wait", "3")
    assert (code, out.splitlines()) == (
        0,
        [
            "Applied at step 12 on all 2 group ranks (plan cdcdcdcdcdcd, was abababababab, generation 2).",
            f"  engine: process 7, {os.environ['SPECSYNC_CONTROL']}",
            "  audit -> off: dspark-plan, dspark-target",
            "  not changed: dspark-mem: it stays.",
        ],
    )
    assert engine.asked == [Request("sites", "off", wait_s=3.0)]


def test_what_is_not_made_yet_or_changes_nothing_says_so(engine, capsys):
    engine.answers["mode"] = CHANGED | {"applied": None, "pending_step": 14}
    code, out, _ = ctl(capsys, "mode", "dspark-plan", "off")
    assert code == 3
    assert out.startswith("Agreed for step 14, which the engine has not begun yet. See `specsync ctl status`.\n")
    engine.answers["mode"] = CHANGED | {"applied": None, "changes": {}, "kept": {}}
    assert ctl(capsys, "mode", "dspark-plan", "off")[:2] == (0, "Nothing to change: the sites are so already.\n")


def test_stats_show_every_rank(engine, capsys):
    engine.answers["stats"] = {"step": 3, "group_ranks": {"0": {}, "1": {"dspark-plan": COUNTS}}}
    code, out, _ = ctl(capsys, "stats")
    assert code == 0
    assert out.splitlines()[1].split(maxsplit=6) == [
        *("dspark-plan", "1", "audit", "4", "8", "1"),
        "step 3: bonus[2] is 5, 6 on group rank 0",
    ]
    engine.answers["stats"]["group_ranks"]["0"] = None
    code, out, _ = ctl(capsys, "stats")
    assert code == 1
    assert "this rank did not report in time" in out


def test_json_is_the_answer(engine, capsys):
    engine.answers["sites"] = CHANGED
    code, out, _ = ctl(capsys, "sites", "off", "--json")
    assert (code, json.loads(out)) == (0, CHANGED)


def test_a_refusal_is_one_error_on_stderr(engine, capsys):
    engine.answers["sites"] = ControlError("dspark-mem stays sync: it stays.")
    assert ctl(capsys, "sites", "all,-dspark-mem") == (1, "", "ControlError: dspark-mem stays sync: it stays.\n")


def test_a_change_that_nobody_reported_is_no_refusal(engine, capsys):
    engine.answers["mode"] = UnsettledError("group rank 1 did not report within 0 s that the change was made.")
    assert ctl(capsys, "mode", "dspark-plan", "off", "--wait", "0") == (
        3,
        "",
        "UnsettledError: group rank 1 did not report within 0 s that the change was made.\n"
        "  It may be applied, or may still be: ask `specsync ctl status`.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["statu"], "ctl: unknown command 'statu' (did you mean 'status'?). Usage: status | sites POLICY | mode SITES"),
        (["sites"], "ctl sites takes 1 arguments, not 0. Usage: "),
        (["mode", "dspark-plan"], "ctl mode takes 2 arguments, not 1. Usage: "),
        (["status", "now"], "ctl status takes 0 arguments, not 1. Usage: "),
        (["status", "--wait", "601"], "--wait takes 0 to 600 seconds."),
        (["status", "--socket", ""], "--socket is empty: it takes the path that the engine has in SPECSYNC_CONTROL."),
    ],
)
def test_usage(engine, capsys, arguments, error):
    code, out, err = ctl(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"specsync: {error}")
    assert engine.asked == []


def test_without_a_socket_it_asks_for_one(capsys):
    assert ctl(capsys, "status") == (
        2,
        "",
        "specsync: ctl: say which engine: --socket PATH, or SPECSYNC_CONTROL=PATH as the engine has it.\n",
    )


def test_a_wrong_variable_is_named(monkeypatch, capsys):
    monkeypatch.setenv("SPECSYNC_CONTROL", "relative.sock")
    code, _, err = ctl(capsys, "status")
    assert code == 1
    assert "SPECSYNC_CONTROL: takes the absolute path of a socket, such as /run/user/1000/specsync-{pid}.sock" in err
