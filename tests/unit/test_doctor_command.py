"""`specsync doctor DIR`: the first line is the answer; runs in a directory; the page."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from typer.testing import CliRunner

from specsync_core.cli.app import app
from specsync_core.cli.output import UsageError
from specsync_core.diagnostics import Recorder, diagnose, recording_path
from specsync_core.diagnostics.runs import examine_runs, prune, runs_in
from specsync_core.registry_files import builtin_registry, merge_registries

REGISTRY = merge_registries([builtin_registry()])
PLAN, ACCEPT, TARGET, MEM = (REGISTRY.site(number) for number in (7, 8, 11, 1))


def recorders(folder, world_size=2, **changes):
    given = {"world_size": world_size, "ranks": range(world_size), "plan_digest": "d", "sites": REGISTRY.sites}
    return [
        Recorder(recording_path(folder, rank), group_rank=rank, **{**given, "slots": 256, **changes})
        for rank in range(world_size)
    ]


def call(site, step, by_recorder):
    for recorder, values in by_recorder:
        recorder.before(site, [torch.tensor(value) for value in values], step)
        recorder.after(site, [torch.tensor(value) for value in values], step)


def healthy(group, steps=3):
    for step in range(steps):
        call(PLAN, step, [(recorder, [[4, 4]]) for recorder in group])


def run(*arguments):
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    return result.exit_code, result.stdout


# --- the first line -------------------------------------------------------------------------------------


def test_a_rank_that_is_behind_is_named_with_the_call_that_it_has_not_come_to(tmp_path):
    ahead, behind = recorders(tmp_path)
    healthy((ahead, behind))
    ahead.before(ACCEPT, [torch.tensor([1])] * 3, 2)
    found = diagnose(tmp_path, {0: None, 1: None})
    assert found.headline == (
        "Rank 1 is behind: it has not come to dspark-accept-greedy in step 2 (call 1); rank 0 waits there."
    )
    ahead.after(ACCEPT, [torch.tensor([1])] * 3, 2)
    ahead.begin_wait("tp all-reduce")
    found = diagnose(tmp_path, {0: None, 1: None})
    assert found.headline.endswith("dspark-accept-greedy in step 2 (call 1); rank 0 has left it.")
    assert found.behind_at[1].site == "dspark-accept-greedy"


def test_a_rank_that_came_to_nothing_is_behind_too(tmp_path):
    ahead, _ = recorders(tmp_path)
    ahead.before(MEM, [torch.tensor(1.0)], 0)
    assert (
        "Rank 1 is behind: it has not come to dspark-mem in step 0" in diagnose(tmp_path, {0: None, 1: None}).headline
    )


def test_a_rank_that_ended_is_named_with_its_end(tmp_path):
    ahead, ended = recorders(tmp_path)
    healthy((ahead, ended))
    ahead.before(ACCEPT, [torch.tensor([1])] * 3, 2)
    found = diagnose(tmp_path, {0: None, 1: 3})
    assert found.headline == (
        "Rank 1 exited with code 3 before it came to dspark-accept-greedy in step 2 (call 1);"
        " no divergence was seen: 0 mismatches in 3 comparisons."
    )


def test_a_sync_that_was_left_out_is_named_whatever_the_values_are(tmp_path):
    one, other = recorders(tmp_path)
    for recorder, is_skipped in ((one, False), (other, True)):
        recorder.before(PLAN, [torch.tensor([4])], 5)
        if is_skipped:
            recorder.skipped(PLAN)
        recorder.after(PLAN, [torch.tensor([4])], 5)
    found = diagnose(tmp_path)
    assert found.divergence.kind == "skip"
    assert found.headline.startswith("Rank 1 left the sync out at dspark-plan in step 5, in which the others took part")
    assert "dspark-plan, step 5, call 1: rank 1 left the sync out, rank 0 took part" in found.text


def test_ways_that_part_after_a_measurement(tmp_path):
    """Free memory differs by nature: it is no divergence, but it explains one."""
    modes = {"dspark-mem": "off"}
    one, other = recorders(tmp_path, modes=modes)
    call(MEM, 0, [(one, [9.0]), (other, [0.5])])
    for recorder in (one, other):
        recorder.close()
    found = diagnose(tmp_path)
    assert (found.finding, found.divergence) == ("inconclusive", None)
    assert "Each rank went by its own measurement (calls): dspark-mem 1; first dspark-mem, step 0" in found.text

    one, other = recorders(tmp_path, modes=modes)
    call(MEM, 0, [(one, [9.0]), (other, [0.5])])
    call(TARGET, 0, [(one, [[1]])])
    call(PLAN, 0, [(other, [[1]])])
    assert diagnose(tmp_path).headline.startswith(
        "The ranks went different ways in step 0 (dspark-target on rank 0 and dspark-plan on rank 1), after they went"
        " by their own measurement at dspark-mem (9 on rank 0 and 0.5 on rank 1)"
    )


def test_all_in_one_place_is_the_transport(tmp_path):
    group = recorders(tmp_path)
    healthy(group)
    for recorder in group:
        recorder.before(ACCEPT, [torch.tensor([1])] * 3, 2)
    found = diagnose(tmp_path, {0: None, 1: None})
    assert found.headline == (
        "All ranks wait in the sync of dspark-accept-greedy: look at the transport;"
        " no divergence was seen: 0 mismatches in 3 comparisons."
    )


def test_an_engine_that_was_stopped_while_idle_is_no_finding(tmp_path, monkeypatch):
    group = recorders(tmp_path)
    healthy(group)
    monkeypatch.setattr("specsync_core.diagnostics.progress.is_alive", lambda recording: False)
    assert diagnose(tmp_path).finding == "clean"
    group[0].begin_wait("engine step")
    assert diagnose(tmp_path).finding == "dead-rank"


# --- the command ------------------------------------------------------------------------------------------


def test_the_first_line_is_the_answer_and_the_exit_code_says_whether_there_is_a_finding(tmp_path):
    group = recorders(tmp_path)
    healthy(group)
    for recorder in group:
        recorder.close()
    code, text = run(tmp_path)
    assert (code, text.splitlines()[0]) == (0, "No divergence: 0 mismatches in 3 comparisons at declared sites.")

    group = recorders(tmp_path)
    call(TARGET, 1, [(group[0], [[1]]), (group[1], [[2]])])
    for recorder in group:
        recorder.close()
    code, text = run(tmp_path)
    assert code == 1
    assert text.startswith(
        "Rank 1 decided differently at dspark-target in step 1 (next_token_ids[0]: 2, and 1 on rank 0)"
    )
    code, text = run(tmp_path, "--json")
    assert (code, json.loads(text)["headline"].split(";")[0]) == (1, run(tmp_path)[1].splitlines()[0].split(";")[0])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "give either a directory"),
        (("absent",), "absent: no such directory"),
        (("empty",), "no rank-*.specsync or *.dump.json in empty: was SPECSYNC_DUMP_DIR set before the start"),
        (("--engine", "vlm"), "--engine: unknown engine 'vlm' (did you mean 'vllm'?). Known: sglang, vllm."),
        (("--engine", "vllm", "--html", "x.html"), "--html goes with a directory"),
        ((".", "--html", "no/x.html"), "--html: no/x.html cannot be written: No such file or directory"),
    ],
)
def test_misuse(tmp_path, monkeypatch, arguments, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    recorders(tmp_path)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(result.exception, UsageError), "exit code 2"
    assert hint in str(result.exception)


# --- several runs -----------------------------------------------------------------------------------------


def named(directory, number):
    return directory / f"run-20260101-00000{number}-abcde{number}"


def test_of_several_runs_the_newest_is_examined_and_older_ones_are_named(tmp_path, monkeypatch):
    clock = [1_000.0]
    monkeypatch.setattr("specsync_core.diagnostics.recorder.time.time", lambda: clock[0])
    for number in range(3):
        clock[0] += 1_000
        group = recorders(named(tmp_path, number), run_id=str(number))
        healthy(group)
        for recorder in group:
            recorder.close()
    runs, older = examine_runs(tmp_path)
    assert [run.path for run in runs] == [named(tmp_path, 2)]
    assert older == [named(tmp_path, 1), named(tmp_path, 0)]


def test_replicas_that_ran_side_by_side_are_examined_together(tmp_path):
    for number in range(2):
        ranks = (2 * number, 2 * number + 1)
        group = recorders(named(tmp_path, number), run_id=str(number), ranks=ranks)
        healthy(group)
        call(TARGET, 9, [(group[0], [[1]]), (group[1], [[1 + number]])])
        for recorder in group:
            recorder.close()
    code, text = run(tmp_path)
    assert code == 1
    assert "run-20260101-000001-abcde1, global ranks 2, 3:\nRank 1 decided differently at dspark-target" in text
    assert "run-20260101-000000-abcde0, global ranks 0, 1:\nNo divergence: 0 mismatches in 4" in text
    assert len(json.loads(run(tmp_path, "--json")[1])) == 2


def test_old_runs_are_removed_and_nothing_else_is(tmp_path, monkeypatch):
    for number in range(4):
        healthy(recorders(named(tmp_path, number)))
    (tmp_path / "run-of-somebody").mkdir()
    prune(tmp_path, 2)
    assert len(runs_in(tmp_path)) == 4, "this process, which wrote them, lives"
    monkeypatch.setattr("specsync_core.diagnostics.runs.is_alive", lambda recording: False)
    prune(tmp_path, 2)
    assert [path.name for path in runs_in(tmp_path)] == [named(tmp_path, 3).name, named(tmp_path, 2).name]
    assert (tmp_path / "run-of-somebody").is_dir()
    shutil.rmtree(tmp_path / "run-of-somebody")


# --- the page ---------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags are closed, and collects what would be loaded or run."""

    VOID = frozenset({"meta", "line", "rect-void"})

    def __init__(self):
        super().__init__()
        self.open, self.external, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.external += [value for name, value in attributes if name in ("src", "href", "onload", "onclick")]
        assert tag not in ("script", "link", "img", "iframe")

    def handle_startendtag(self, tag, attributes):
        assert tag == "line"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("odd", ['<script>alert("x")</script>', "</title></svg>&amp;<b>"])
def test_the_page_holds_everything_and_runs_nothing(tmp_path, odd):
    one, other = recorders(tmp_path / "in", versions={"torch": odd}, run_id=odd)
    healthy((one, other))
    call(ACCEPT, 3, [(one, [[1], [7], [0]]), (other, [[2], [7], [0]])])
    one.begin_wait("tp all-reduce", odd)
    other.begin_wait("request broadcast")
    page = tmp_path / "report.html"
    code, text = run(tmp_path / "in", "--html", page)
    assert code == 1
    content = page.read_text()
    assert odd not in content
    assert "://" not in content
    assert not re.search(r"@import|url\(", content)
    parser = Page()
    parser.feed(content)
    assert (parser.open, parser.external) == ([], [])
    shown = "".join(parser.texts)
    assert text.splitlines()[0] in shown
    assert odd in shown, "escaped, it is shown as it is"
    assert content.count('class="differs"') == 2, "the first divergence, on both ranks"
    assert content.count('class="open"') == 2
    assert 'name="viewport"' in content


def test_a_page_without_records(tmp_path):
    recorders(tmp_path / "in")
    page = tmp_path / "report.html"
    assert run(tmp_path / "in", "--html", page)[0] == 1
    assert "Nothing could be compared" in page.read_text()


def test_a_picture_is_bounded(tmp_path):
    group = recorders(tmp_path / "in", slots=8192)
    healthy(group, 3000)
    page = tmp_path / "report.html"
    run(tmp_path / "in", "--html", page)
    assert page.read_text().count("<rect") <= 2 * 400
