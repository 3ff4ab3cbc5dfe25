import json

import pytest

from specsync_core.cli import main
from specsync_core.cli.doctor import examine_engine
from specsync_core.engines import known
from specsync_core.errors import EngineError


def run(capsys, *words):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    return exit_.value.code, capsys.readouterr()


@pytest.fixture
def installed(monkeypatch):
    def pretend(version):
        monkeypatch.setattr(known.KnownEngine, "installed", lambda engine: version)

    return pretend


def test_an_engine_that_is_not_installed_is_listed(capsys, installed):
    installed(None)
    code, output = run(capsys, "engines", "--json")
    assert code == 0
    (sglang, *_) = json.loads(output.out)
    assert (sglang["engine"], sglang["support"], sglang["sites"]) == ("sglang", "not installed", [])


def test_each_site_says_who_synchronises_it(capsys, installed):
    installed("0.5.23")
    code, output = run(capsys, "engines")
    lines = output.out.splitlines()
    assert code == 0
    assert any(line.split()[:4] == ["sglang", "0.5.23", "supported,", "tested"] for line in lines)
    said = {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
    assert (said["dflash-accept-sample"], said["eagle-verify-greedy"]) == ("engine", "specsync")


@pytest.mark.parametrize(
    ("version", "support"),
    [("0.5.17", "supported, tested"), ("0.5.20", "supported, targets checked"), ("0.6.0", "not supported")],
)
def test_support_is_said_in_words(version, support):
    assert known.SGLANG.support(version) == support


def test_the_doctor_finds_that_no_target_can_be_imported(capsys, installed):
    installed("0.5.17")
    code, output = run(capsys, "doctor", "--engine", "sglang")
    assert code == 1
    assert "PROBLEM  sglang.srt.speculative.eagle_utils.eagle_sample: not found: no module named sglang" in output.out


def test_the_doctor_needs_one_thing_to_examine(capsys):
    code, output = run(capsys, "doctor")
    assert code == 2
    assert "SPECSYNC_DUMP_DIR of the run, or --engine NAME, with sglang or vllm." in output.err
    assert run(capsys, "doctor", "somewhere", "--engine", "sglang")[0] == 2


@pytest.mark.parametrize(
    ("engine", "value", "said"),
    [
        (known.SGLANG, None, None),
        (known.SGLANG, "", None),
        (known.SGLANG, "other, specsync", None),
        (known.SGLANG, "other", "SGLANG_PLUGINS='other' leaves specsync out, and the engine runs without it: set"),
        (known.SGLANG, "other", "set SGLANG_PLUGINS=other,specsync"),
        (known.VLLM, None, None),
        (known.VLLM, "specsync,other", None),
        (known.VLLM, "", "set VLLM_PLUGINS=specsync"),
        (known.VLLM, "other, specsync", "(vllm takes blanks as part of a name), and the engine runs without it: set"),
        (known.VLLM, "other, specsync", "set VLLM_PLUGINS=other,specsync"),
    ],
)
def test_an_allowlist_that_leaves_specsync_out_is_told(engine, value, said):
    environ = {} if value is None else {engine.allowlist: value}
    problem = engine.loading_problem(environ)
    assert problem is None if said is None else said in problem


def test_an_entry_point_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(known, "entry_points", lambda group: ())
    assert known.VLLM.loading_problem({}).startswith("no entry point specsync in vllm.general_plugins: install")


def test_the_doctor_tells_of_an_allowlist(capsys, installed, monkeypatch):
    installed("0.5.17")
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    code, output = run(capsys, "doctor", "--engine", "sglang")
    assert code == 1
    assert "  PROBLEM  SGLANG_PLUGINS='other' leaves specsync out" in output.out


def test_the_doctor_says_once_what_is_not_installed(capsys, installed, monkeypatch):
    installed("0.5.17")
    problems = iter(["x cannot be imported: No module named 'torchvision'", "y cannot be imported:\n\n  KeyError: 'x'"])
    monkeypatch.setattr("specsync_core.engines.targets.check_target", lambda path, signature: next(problems, None))
    code, output = run(capsys, "doctor", "--engine", "sglang")
    assert code == 1
    assert "  PROBLEM  y cannot be imported: KeyError: 'x'\n" in output.out
    assert "\nNot installed here: torchvision. Install that first: other problems may come from it.\n" in output.out


def test_an_engine_that_is_unknown_or_absent_is_an_error(installed):
    installed(None)
    with pytest.raises(EngineError, match=r"unknown engine 'sglan' \(did you mean 'sglang'\?\). Known: sglang"):
        examine_engine("sglan")
    with pytest.raises(EngineError, match=r"sglang is not installed here\. Known versions: 0\.5\.16"):
        examine_engine("sglang")
