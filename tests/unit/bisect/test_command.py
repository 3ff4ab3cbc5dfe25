"""``specsync bisect`` as a command: its answer, its report, its refusals. A toy script stands for the engine."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import specsync_core
from specsync_core.bisect.lock import hold
from specsync_core.cli import main
from specsync_core.cli.bisect import UNSURE
from tests.unit.bisect.oracles import CALLED, A, B
from tests.unit.bisect.toy import processes_with, toy


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command line in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as caught:
            main(["bisect", *arguments])
        code = caught.value.code
        return Ended(code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


def report(path: str = "specsync-bisect.json") -> Any:
    return json.loads(Path(path).read_text())


QUICK = ("--sites", "dspark", "--runs", "5")
QUICKEST = ("--sites", f"{A},dspark-plan", "--runs", "1")


def test_it_finds_the_culprit_and_says_so(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICK, "--", *toy(tmp_path, [A], called=CALLED))
    assert ended.code == UNSURE
    assert ended.out.startswith("1 minimal set of sites found, in ")
    assert f"With {A} off, " in ended.out
    sure = r"; with everything else off and it on, 0 of \d+ \(99% that the bad rate is under \d+%\); \d+ of these by"
    assert re.search(sure, ended.out)
    assert "\nNoise: all on, 0 of " in ended.out
    assert "So not everything here is 99% sure" in ended.out  # --runs 5 is too few for that
    assert "The command never called the other 7 candidate sites." in ended.out
    assert re.match(r"\d\d:\d\d:\d\d trial 1: all sites on: started, at most 10 min\n", ended.err)
    assert re.search(r"^\d\d:\d\d:\d\d trial 1: all sites on: good \(ended well, ", ended.err, re.MULTILINE)
    assert "about " in ended.err
    assert "more runs" in ended.err
    saved = report()
    assert (saved["kind"], saved["version"], saved["status"]) == ("specsync-bisect", 1, "found")
    assert saved["answer"]["sets"][0]["sites"] == [A]
    assert saved["summary"] == ended.out.splitlines()
    kept = {path.name for path in Path("specsync-bisect.trials").iterdir()}
    assert kept == {f"{trial['number']:04d}" for trial in saved["trials"] if trial["outcome"] == "bad"}
    assert not list(tmp_path.glob(".specsync-bisect*"))


def test_two_culprits_in_parallel_as_json(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICK, "--parallel", "2", "--json", "--", *toy(tmp_path, [A], [B], called=CALLED))
    assert ended.code == UNSURE
    answer = json.loads(ended.out)["answer"]
    assert [each["sites"] for each in answer["sets"]] == [[A], [B]]
    assert [each["kept_on"] for each in answer["checks"]] == [[A, B]]


def test_a_hang_is_ended_and_named(run: Run, tmp_path: Path) -> None:
    command = toy(tmp_path, [A], how="hangs", called=CALLED)
    ended = run(*QUICKEST, "--timeout", "5", "--", *command)
    assert f"With {A} off, 1 of 1 run hangs" in ended.out
    assert "bad (time-out after 5 s, 5.0 s)" in ended.err
    assert not processes_with(str(tmp_path / "specsync-bisect.trials"))


def test_output_other_than_expected(run: Run, tmp_path: Path) -> None:
    Path("expected.txt").write_text("hello\n")
    command = toy(tmp_path, [A], how="prints", called=CALLED)
    ended = run(*QUICK, "--expect", "expected.txt", "--", *command)
    assert f"With {A} off, " in ended.out
    assert "output other than expected" in ended.err
    Path("expected.txt").write_text("bye\n")
    ended = run(*QUICK, "--expect", "expected.txt", "--report", "other.json", "--", *command)
    assert ended.code == 1
    assert "With all sites on, 2 of 2 runs differ, and all of them should be good" in ended.out


def test_the_end_points(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICK, "--", *toy(tmp_path, how="always fails", called=CALLED))
    assert ended.code == 1
    assert "No answer, in 2 runs (2 bad; " in ended.out
    assert "With all sites on, 2 of 2 runs fail, and all of them should be good: no site heals this." in ended.out
    ended = run(*QUICK, "--report", "b.json", "--", *toy(tmp_path, called=CALLED))
    assert ended.code == 1
    assert ended.out.startswith("No site was seen to matter, in ")
    assert "With all 12 candidate sites off, 0 of " in ended.out
    assert "ranks differed nowhere" in ended.out


def test_a_command_that_fails_before_its_first_sync_is_untestable(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICK, "--", *toy(tmp_path, how="never starts"))
    assert ended.code == 1
    assert "With all sites on, the command fails before its first sync, so it cannot be tested." in ended.out
    folder = tmp_path / "specsync-bisect.trials" / "0003"
    assert f"Last: exit code 7, before the first sync: cannot begin. Its output is in {folder}." in ended.out
    assert [trial["outcome"] for trial in report()["trials"]] == ["untestable"] * 3


def test_a_command_without_any_counts_is_bisected_with_a_warning(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICK, "--", *toy(tmp_path, [A]))
    assert ended.code == UNSURE
    assert f"With {A} off, " in ended.out
    assert "No run left counts: the command did not sync anything" in ended.out


def test_counts_that_do_not_show_what_is_wrong_are_left_out_of_account(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICK, "--runs", "8", "--", *toy(tmp_path, [A], called=CALLED, differs=False))
    assert ended.code == UNSURE
    assert f"With {A} off, " in ended.out
    assert f"Counts were left out of account: with {A} off runs are bad, though where they were on" in ended.out
    assert "by counts:" not in ended.out


def test_a_command_with_a_policy_of_its_own_is_refused(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICK, "--", *toy(tmp_path, [A], how="own policy", called=CALLED))
    assert ended.code == 1
    assert "though SPECSYNC_SITES said off: it sets a policy of its own." in ended.err
    assert report()["status"] == "stopped"


def test_what_a_run_leaves_behind_is_ended_with_it(run: Run, tmp_path: Path) -> None:
    ended = run(*QUICKEST, "--", *toy(tmp_path, [A], how="leaves", called=CALLED))
    assert ended.code == UNSURE
    assert not processes_with(str(tmp_path / "specsync-bisect.trials"))


def test_a_finished_report_is_told_again_and_can_be_made_surer(run: Run, tmp_path: Path) -> None:
    command = toy(tmp_path, [A], called=CALLED)
    first = run(*QUICK, "--", *command)
    runs = len(report()["trials"])
    assert run("--resume").out == first.out
    again = run("--resume", "--runs", "40", "--", *command)
    assert again.code == 0
    assert "Error rate: at most 1% that a set named here does not matter" in again.out
    assert len(report()["trials"]) > runs
    assert report()["options"]["runs"] == 40


def test_the_shells_own_policy_is_replaced_and_that_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SPEC_TP_SYNC", "rng")
    ended = run(*QUICKEST, "--", *toy(tmp_path, [A], called=CALLED))
    assert ended.code == UNSURE
    assert "note: SGLANG_SPEC_TP_SYNC='rng' of this shell is replaced in every run." in ended.err


def test_resume_runs_the_command_where_it_ran(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is named by a relative path is another one, or none, in another directory."""
    command = toy(tmp_path, [A], called=CALLED)
    relative = [*command[:3], "toy.py", *command[4:]]
    first = run(*QUICK, "--", *relative)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = run("--resume", "--runs", "40", "--report", "../specsync-bisect.json")
    assert (first.code, again.code) == (UNSURE, 0)
    assert again.out.startswith("1 minimal set of sites found")


def test_a_refused_end_point_is_tried_again_on_resume(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    command = toy(tmp_path, [A], called=CALLED)
    text = script.read_text()
    for broken, status in (("import sys; sys.exit(3)", "untestable"), (f"{text}\nsys.exit(3)", "on-is-bad")):
        path = f"{status}.json"
        script.write_text(broken)
        assert run(*QUICK, "--report", path, "--", *command).code == 1
        assert report(path)["status"] == status
        script.write_text(text)
        assert run("--resume", "--report", path).out.startswith("1 minimal set of sites found")
        numbers = [trial["number"] for trial in report(path)["trials"]]
        assert numbers == sorted(set(numbers))


def test_a_good_end_that_was_to_be_bad_is_tried_again_on_resume(run: Run, tmp_path: Path) -> None:
    command = toy(tmp_path, called=CALLED)
    assert run(*QUICK, "--", *command).code == 1
    text = (tmp_path / "toy.py").read_text()
    (tmp_path / "toy.py").write_text(text.replace('plan["culprits"] if', f'[["{A}"]] if'))
    assert run("--resume").out.startswith("1 minimal set of sites found")


def test_the_first_line_other_than_expected_is_told(run: Run, tmp_path: Path) -> None:
    Path("expected.txt").write_text("bye\n")
    ended = run(*QUICK, "--expect", "expected.txt", "--", *toy(tmp_path, called=CALLED))
    assert "Last: output other than expected: line 1 is 'hello', not 'bye'." in ended.out


def test_a_time_out_is_told_to_be_short(run: Run) -> None:
    ended = run(*QUICK, "--timeout", "0.001", "--", "sleep", "60")
    assert ended.code == 1
    assert "time-out after 0 s" not in ended.out
    assert "Where it needs longer, raise --timeout." in ended.out


def test_a_report_whose_place_is_gone_ends_with_what_is_known(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ended = run("--sites", A, "--report", "out/r.json", "--", "sh", "-c", "rm -rf out && touch out")
    assert ended.code == 1
    assert re.search(r"\d\d stopped; now all sites on; about ", ended.err)
    assert "out/r.json: the report cannot be written: Not a directory." in ended.err


# --- refusals ---


def test_a_report_that_another_one_writes_is_refused(run: Run, tmp_path: Path) -> None:
    with hold(Path("specsync-bisect.json")):
        ended = run("--", "true")
    assert (ended.code, ended.out) == (2, "")
    assert f"the bisection of process {os.getpid()} is writing this report." in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a command behind `--`"),
        (("--", "no-such-program"), "no-such-program: there is no such program."),
        (("--sites", "none", "--", "true"), "--sites: 'none' selects no site. List the sites"),
        (("--sites", "state", "--", "true"), "selects no site but checks, which change nothing"),
        (("--sites", "dspark-plam", "--", "true"), "unknown token 'dspark-plam' (did you mean 'dspark-plan'?)"),
        (("--sites", "all:audit", "--", "true"), "--sites: 'all:audit' gives a mode; candidates have none"),
        (("--timeout", "0", "--", "true"), "--timeout takes seconds above 0, not 0."),
        (("--runs", "0", "--", "true"), "--runs takes 1 or more, not 0."),
        (("--confidence", "1", "--", "true"), "--confidence takes 0.5 to 0.9999, not 1."),
        (("--parallel", "0", "--", "true"), "--parallel takes 1 or more, not 0."),
        (("--expect", "none.txt", "--", "true"), "--expect: none.txt cannot be read: No such file or directory."),
        (("--resume",), "there is no report to resume. Leave out --resume to begin."),
    ],
)
def test_bad_input_is_usage_and_starts_nothing(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert not list(Path().iterdir())


def test_a_report_is_never_overwritten(run: Run) -> None:
    Path("specsync-bisect.json").write_text("hours of work")
    ended = run("--", "true")
    assert ended.code == 2
    assert "specsync-bisect.json is there already. Go on from it with --resume" in ended.err
    assert Path("specsync-bisect.json").read_text() == "hours of work"


def test_a_report_that_cannot_be_written_is_known_before_anything_runs(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    ended = run("--report", "no/such/place.json", "--", *toy(tmp_path, [A], log=log))
    assert ended.code == 2
    assert "no/such/place.json: the report cannot be written: No such file or directory. Give another" in ended.err
    assert not list(log.iterdir())


GOOD: dict[str, Any] = {
    "kind": "specsync-bisect",
    "version": 1,
    "specsync": specsync_core.__version__,
    "asked": {"command": ["true"], "sites": [A]},
    "options": {"runs": 5, "confidence": 0.99, "parallel": 1},
    "status": "interrupted",
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "this is no JSON"),
        ("[" * 100_000, "this is no JSON"),
        ("[]", "this is no report of `specsync bisect`. To begin anew, give another --report"),
        (GOOD | {"kind": "x"}, "this is no report of `specsync bisect`"),
        (GOOD | {"version": 2}, "the report has version 2; this specsync reads version 1."),
        (GOOD | {"specsync": "9.9"}, "the report was made by specsync 9.9, and this is "),
        (GOOD | {"trials": [{"number": 0}]}, "the report is damaged: trials.0.number: input should be greater than"),
        (GOOD | {"color": "red"}, "the report is damaged: color: extra inputs are not permitted"),
        (
            GOOD | {"asked": {"command": ["false"], "sites": [A]}},
            "another bisection: command was 'false' and is 'true'",
        ),
        (GOOD | {"asked": {"command": ["true"], "sites": [B]}}, f"another bisection: sites was '{B}' and is '{A}'"),
    ],
)
def test_a_report_that_does_not_fit_is_refused(run: Run, content: Any, message: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    Path("specsync-bisect.json").write_text(text)
    ended = run("--resume", "--sites", A, "--", "true")
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert Path("specsync-bisect.json").read_text() == text


def test_help_shows_examples(run: Run) -> None:
    text = run("--help").out
    for said in ("specsync bisect --resume", "--confidence", "--expect", "Examples:", "Exit code 0"):
        assert said in text


def test_options_behind_the_command_are_the_commands_own(run: Run, tmp_path: Path) -> None:
    command = toy(tmp_path, [A])
    ended = run(*QUICKEST, *command, "--sites", "nonsense")
    assert report()["asked"]["command"] == [*command, "--sites", "nonsense"]
    assert ended.code == UNSURE


def test_nothing_imports_torch() -> None:
    import subprocess

    code = "import specsync_core.cli.bisect, specsync_core.bisect.run, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
