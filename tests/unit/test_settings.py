"""The environment and the policy file: what they may say, and how they refuse."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsync_core import bounded_file, settings
from specsync_core.errors import PolicyError
from specsync_core.policy_file import PolicyFile, find_policy_file, read_policy_file
from specsync_core.settings import VARIABLES, Environment, Setting, disabled_plugins, read_environment


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(PolicyError) as caught:
        read_environment(environ)
    return str(caught.value)


def write(directory: Path, text: str, name: str = "specsync.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def file_refusal(directory: Path, text: str, name: str = "specsync.toml") -> str:
    with pytest.raises(PolicyError) as caught:
        read_policy_file(write(directory, text, name))
    return str(caught.value)


def test_an_empty_environment_says_nothing() -> None:
    assert read_environment({}) == Environment()


def test_the_processs_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "rng")
    assert read_environment().sites == Setting("rng", "SPECSYNC_SITES")


def test_every_variable() -> None:
    found = read_environment(
        {
            "SPECSYNC_SITES": "all",
            "SPECSYNC_CONFIG": "/etc/specsync.toml",
            "SPECSYNC_TRANSPORT": " Grouped",
            "SPECSYNC_TIMEOUT_S": "2.5",
            "SPECSYNC_DISABLE": "eagle, ,other ",
            "SPECSYNC_COUNTERS": "off",
            "SPECSYNC_STRICT": "1",
            "SPECSYNC_FAULTS": "dspark-plan:rank=1:add=1",
            "SPECSYNC_ALLOW_FAULTS": "yes",
            "PATH": "/bin",
        }
    )
    assert found == Environment(
        sites=Setting("all", "SPECSYNC_SITES"),
        config=Path("/etc/specsync.toml"),
        transport=Setting("grouped", "SPECSYNC_TRANSPORT"),
        timeout_s=Setting(2.5, "SPECSYNC_TIMEOUT_S"),
        counters=Setting(False, "SPECSYNC_COUNTERS"),
        disable=frozenset({"eagle", "other"}),
        strict=True,
        faults="dspark-plan:rank=1:add=1",
        allow_faults=True,
    )


def test_the_published_variable_is_read_where_ours_is_not_set() -> None:
    assert read_environment({"SGLANG_SPEC_TP_SYNC": "rng"}).sites == Setting("rng", "SGLANG_SPEC_TP_SYNC")


def test_two_variables_that_say_the_same_are_fine() -> None:
    both = {"SPECSYNC_SITES": "all,-dspark-plan", "SGLANG_SPEC_TP_SYNC": "ALL, -dspark_plan,"}
    assert read_environment(both).sites == Setting("all,-dspark-plan", "SPECSYNC_SITES")


def test_two_variables_that_differ_are_an_error() -> None:
    assert refusal({"SPECSYNC_SITES": "all", "SGLANG_SPEC_TP_SYNC": ""}) == (
        "SPECSYNC_SITES is 'all' but SGLANG_SPEC_TP_SYNC is ''. Unset one of them, or make them equal."
    )


def test_an_empty_policy_is_a_policy() -> None:
    assert read_environment({"SPECSYNC_SITES": ""}).sites == Setting("", "SPECSYNC_SITES")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "30s"])
def test_a_time_out_is_a_positive_number(value: str) -> None:
    assert refusal({"SPECSYNC_TIMEOUT_S": value}) == (
        f"SPECSYNC_TIMEOUT_S: takes a number of seconds above 0, not {value!r}. Unset it for the default."
    )


def test_unknown_transport() -> None:
    assert refusal({"SPECSYNC_TRANSPORT": "groupt"}) == (
        "SPECSYNC_TRANSPORT: takes auto, group, grouped, one-shot (did you mean 'group'?), not 'groupt'."
        " Unset it for the default."
    )


@pytest.mark.parametrize("variable", ["SPECSYNC_COUNTERS", "SPECSYNC_STRICT", "SPECSYNC_ALLOW_FAULTS"])
def test_flags(variable: str) -> None:
    assert refusal({variable: "maybe"}) == (
        f"{variable}: takes on or off (1 or 0), not 'maybe'. Unset it for the default."
    )
    read_environment({variable: "On"})


def test_an_empty_path() -> None:
    assert refusal({"SPECSYNC_CONFIG": ""}).startswith("SPECSYNC_CONFIG: takes the path of a policy file, not ''.")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("SPECSYNC_SITE", "SPECSYNC_SITES"),
        ("SPECSYNC_TIMEOUT", "SPECSYNC_TIMEOUT_S"),
        ("SPECSYNC_COUNTER", "SPECSYNC_COUNTERS"),
        ("specsync_sites", "SPECSYNC_SITES"),
        ("SPECSYNC_TRANPORT", "SPECSYNC_TRANSPORT"),
    ],
)
def test_a_misspelt_variable_is_an_error(variable: str, meant: str) -> None:
    assert refusal({variable: "x"}) == f"unknown variable {variable} (did you mean {meant}?). Rename or unset it."


def test_a_merely_unknown_variable_is_logged_with_the_known_ones(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="specsync"):
        read_environment({"SPECSYNC_HOME": "/", "OTHER": ""})
    (message,) = caplog.messages
    assert message.startswith("unknown variable SPECSYNC_HOME has no effect. Known: ")
    assert all(variable in message for variable in VARIABLES)


def test_every_problem_is_told() -> None:
    problems = refusal({"SPECSYNC_TIMEOUT_S": "x", "SPECSYNC_COUNTERS": "x", "SPECSYNC_SITE": "x"})
    assert len(problems.splitlines()) == 3


def test_disabled_plugins_are_known_whatever_else_is_wrong() -> None:
    assert disabled_plugins({"SPECSYNC_DISABLE": "a,b", "SPECSYNC_SITE": "x"}) == {"a", "b"}


POLICY_FILE = """\
sites = "all"
transport = "grouped"
timeout_s = 60
counters = false

[presets]
careful = "all,-dspark-plan"

[algorithms.dflash]
sites = "rng:audit"

[models."*DeepSeek-V4*"]
sites = "careful"
transport = "group"
[models."*DeepSeek-V4*".algorithms.dspark]
sites = "all"
"""


def test_a_whole_policy_file(tmp_path: Path) -> None:
    found = read_policy_file(write(tmp_path, POLICY_FILE))
    tables = found.tables
    assert (tables.sites, tables.transport, tables.timeout_s, tables.counters) == ("all", "grouped", 60.0, False)
    assert tables.presets == {"careful": "all,-dspark-plan"}
    assert tables.algorithms["dflash"].sites == "rng:audit"
    model = tables.models["*DeepSeek-V4*"]
    assert (model.sites, model.transport, model.algorithms["dspark"].sites) == ("careful", "group", "all")


def test_origins_name_file_and_line(tmp_path: Path) -> None:
    found = read_policy_file(write(tmp_path, POLICY_FILE))
    path = tmp_path / "specsync.toml"
    assert found.origin("sites") == f"{path}:1"
    assert found.origin("presets", "careful") == f"{path}:7"
    assert found.origin("algorithms", "dflash", "sites") == f"{path}:10"
    assert found.origin("models", "*DeepSeek-V4*", "sites") == f"{path}:13"
    assert found.origin("models", "*DeepSeek-V4*", "algorithms", "dspark", "sites") == f"{path}:16"


def test_origins_of_dotted_and_inline_keys(tmp_path: Path) -> None:
    found = read_policy_file(write(tmp_path, 'presets.careful = "all"\nalgorithms = { dflash = { sites = "all" } }\n'))
    assert found.origin("presets", "careful").endswith("specsync.toml:1")
    assert found.origin("algorithms", "dflash", "sites").endswith("specsync.toml:2")


def test_the_origin_of_a_key_whose_line_is_not_known(tmp_path: Path) -> None:
    found = PolicyFile("there.toml", read_policy_file(write(tmp_path, POLICY_FILE)).tables, {})
    assert found.origin("algorithms", "dflash", "sites") == "there.toml: [algorithms.dflash] sites"


def test_models_match_in_file_order_and_any_case(tmp_path: Path) -> None:
    text = '[models."*"]\nsites = "rng"\n[models."*/qwen*"]\nsites = "all"\n[models.other]\nsites = "off"\n'
    found = read_policy_file(write(tmp_path, text))
    assert [glob for glob, _ in found.models_matching("Org/QWEN-3")] == ["*", "*/qwen*"]
    assert found.models_matching(None) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('sties = "all"', ":1: unknown key 'sties' (did you mean 'sites'?). Known keys: sites, transport, timeout_s,"),
        ("sites = 7", ":1: key 'sites': Input should be a valid string, not 7."),
        ('timeout_s = "30"', ":1: key 'timeout_s': Input should be a valid number, not '30'."),
        ("timeout_s = 0", ":1: key 'timeout_s': Input should be greater than 0, not 0."),
        ("timeout_s = inf", ":1: key 'timeout_s': Input should be a finite number, not inf."),
        ("timeout_s = true", ":1: key 'timeout_s': Input should be a valid number, not True."),
        ('\ncounters = "on"', ":2: key 'counters': Input should be a valid boolean, not 'on'."),
        (
            'transport = "fast"',
            ":1: key 'transport': Input should be 'auto', 'group', 'grouped' or 'one-shot', not 'fast'.",
        ),
        ("[presets]\nmine = 1", ":2: [presets] key 'mine': Input should be a valid string, not 1."),
        (
            '[algorithms.dflash]\nsitse = "all"\nsites = "all"',
            ":2: [algorithms.dflash] unknown key 'sitse' (did you mean 'sites'?). Known keys: sites.",
        ),
        ("[algorithms.dflash]", ":1: [algorithms.dflash] key 'sites' is missing."),
        (
            '[models."a/*"]\ntimeout_s = 3',
            ":2: [models.\"a/*\"] unknown key 'timeout_s'. Known keys: sites, transport, algorithms.",
        ),
    ],
)
def test_wrong_policy_files(tmp_path: Path, text: str, expected: str) -> None:
    assert file_refusal(tmp_path, text).startswith(f"{tmp_path / 'specsync.toml'}{expected}")


def test_a_table_where_a_string_belongs(tmp_path: Path) -> None:
    assert ":1: [algorithms] key 'dflash': " in file_refusal(tmp_path, 'algorithms.dflash = "all"')


def test_every_problem_of_a_policy_file_is_told(tmp_path: Path) -> None:
    assert len(file_refusal(tmp_path, "sites = 7\ncounters = 7\n").splitlines()) == 2


def test_broken_toml(tmp_path: Path) -> None:
    message = file_refusal(tmp_path, "sites = all\n")
    assert message.startswith(f"{tmp_path / 'specsync.toml'}: not valid TOML: ")
    assert "line 1" in message


def test_a_policy_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "specsync.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="the policy file cannot be read: "):
        find_policy_file(None, tmp_path)


def test_nothing_is_found_in_an_empty_directory(tmp_path: Path) -> None:
    assert find_policy_file(None, tmp_path) is None


def test_the_named_file_wins(tmp_path: Path) -> None:
    write(tmp_path, 'sites = "rng"')
    named = write(tmp_path, 'sites = "all"', "other.toml")
    found = find_policy_file(named, tmp_path)
    assert found is not None
    assert found.tables.sites == "all"


def test_a_named_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none\.toml: the policy file cannot be read: .*No such file"):
        find_policy_file(tmp_path / "none.toml", tmp_path)


def test_a_named_file_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="the policy file cannot be read: "):
        find_policy_file(tmp_path, tmp_path)


def test_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "specsync.toml").symlink_to(tmp_path / "gone.toml")
    with pytest.raises(PolicyError, match="the policy file cannot be read: "):
        find_policy_file(None, tmp_path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 'sites = "all"')

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(
        bounded_file, "_open_at_once", refuse
    )  # root may read everything, so the mode bits would not do
    with pytest.raises(PolicyError, match=r"specsync\.toml: the policy file cannot be read: .*Permission denied"):
        find_policy_file(None, path.parent)


@pytest.mark.parametrize("name", ["specsync.toml", "named.toml"])
@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(PolicyError) as caught:
        find_policy_file(None if name == "specsync.toml" else tmp_path / name, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / name}: the policy file cannot be read: it is a pipe, and no file."
        " Mend it, or name another in SPECSYNC_CONFIG."
    )


def test_a_relative_path_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=f"{tmp_path}/none.toml: the policy file cannot be read: No such file"):
        find_policy_file(Path("none.toml"))


def found_in(directory: Path) -> PolicyFile:
    found = find_policy_file(None, directory)
    assert found is not None
    return found


def test_specsync_toml_goes_before_pyproject(tmp_path: Path) -> None:
    write(tmp_path, '[tool.specsync]\nsites = "rng"', "pyproject.toml")
    assert found_in(tmp_path).tables.sites == "rng"
    write(tmp_path, 'sites = "all"')
    assert found_in(tmp_path).tables.sites == "all"


def test_origins_inside_pyproject(tmp_path: Path) -> None:
    write(tmp_path, '[project]\nname = "x"\n[tool.specsync]\nsites = "rng"\n', "pyproject.toml")
    assert found_in(tmp_path).origin("sites") == f"{tmp_path / 'pyproject.toml'}:4"


def test_wrong_keys_inside_pyproject(tmp_path: Path) -> None:
    message = file_refusal(tmp_path, "[tool.specsync.presets]\nmine = 1\n", "pyproject.toml")
    assert ":2: [tool.specsync.presets] key 'mine': " in message


@pytest.mark.parametrize("text", ['[project]\nname = "x"\n', "not toml at all\n", 'dependencies = ["specsync-core"]\n'])
def test_a_pyproject_without_the_table_is_ignored(tmp_path: Path, text: str) -> None:
    write(tmp_path, text, "pyproject.toml")
    assert find_policy_file(None, tmp_path) is None


BROKEN = 'dependencies = ["specsync-core"\n'


@pytest.mark.parametrize("made", ["no text", "too long", "a directory", "a dangling link", "a pipe", "broken"])
@pytest.mark.timeout(20)
def test_somebody_elses_pyproject_stops_nothing(tmp_path: Path, made: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pyproject.toml"
    {
        "no text": lambda: path.write_bytes(b"specsync \xff"),
        "too long": lambda: path.write_bytes(b"# specsync\n" * 100_000),
        "a directory": path.mkdir,
        "a dangling link": lambda: path.symlink_to(tmp_path / "gone.toml"),
        "a pipe": lambda: os.mkfifo(path),
        "broken": lambda: path.write_text(BROKEN),
    }[made]()
    assert find_policy_file(None, tmp_path) is None
    if made != "broken":
        assert f"would have no effect: {path}: the policy file cannot be read: " in caplog.text
    with pytest.raises(PolicyError):  # but what is named must be right
        find_policy_file(path)


def test_a_broken_pyproject_that_mentions_specsync_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "[tool.specsync\n", "pyproject.toml")
    with pytest.raises(PolicyError, match=r"pyproject\.toml: not valid TOML: "):
        find_policy_file(None, tmp_path)


def test_a_pyproject_that_is_named_must_have_the_table(tmp_path: Path) -> None:
    assert file_refusal(tmp_path, "[tool]\n", "pyproject.toml").endswith(
        "there is no table [tool.specsync]. Add it, or name another file."
    )


def test_the_table_must_be_a_table(tmp_path: Path) -> None:
    assert "write it as a table, [tool.specsync]." in file_refusal(tmp_path, "[tool]\nspecsync = 1\n", "pyproject.toml")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for variable in ("SPECSYNC_SITES", "SGLANG_SPEC_TP_SYNC"):
        monkeypatch.setenv(variable, "all")  # both are put back afterwards
        monkeypatch.delenv(variable)
    yield monkeypatch
    settings._handed_over.clear()


def test_what_is_handed_over_to_an_engine_is_not_read_back_as_the_operators(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("SPECSYNC_SITES", "eagle:audit")
    settings.hand_over("SGLANG_SPEC_TP_SYNC", "off")
    assert os.environ["SGLANG_SPEC_TP_SYNC"] == "off"
    assert read_environment().sites == Setting("eagle:audit", "SPECSYNC_SITES")


def test_the_operators_text_is_read_on_below_what_was_handed_over_twice(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("SGLANG_SPEC_TP_SYNC", "dspark-draft-greedy")
    settings.hand_over("SGLANG_SPEC_TP_SYNC", "dspark-draft")
    settings.hand_over("SGLANG_SPEC_TP_SYNC", "off")
    assert read_environment().sites == Setting("dspark-draft-greedy", "SGLANG_SPEC_TP_SYNC")


def test_what_somebody_else_wrote_there_since_counts(environ: pytest.MonkeyPatch) -> None:
    settings.hand_over("SGLANG_SPEC_TP_SYNC", "off")
    environ.setenv("SGLANG_SPEC_TP_SYNC", "rng")
    assert read_environment().sites == Setting("rng", "SGLANG_SPEC_TP_SYNC")


@pytest.mark.parametrize(("published", "shared"), [(None, "all,-eagle"), ("rng", "rng")])
def test_our_policy_is_shared_where_the_published_variable_is_not_set(
    environ: pytest.MonkeyPatch, published: str | None, shared: str
) -> None:
    environ.setenv("SPECSYNC_SITES", "all,-eagle")
    if published is not None:
        environ.setenv("SGLANG_SPEC_TP_SYNC", published)
    settings.share_policy()
    assert os.environ["SGLANG_SPEC_TP_SYNC"] == shared


def test_without_a_policy_nothing_is_shared(environ: pytest.MonkeyPatch) -> None:
    settings.share_policy()
    assert "SGLANG_SPEC_TP_SYNC" not in os.environ


def test_diagnostics_are_off_by_default_and_read_from_the_environment():
    assert (read_environment({}).dump_dir, read_environment({}).watchdog_s) == (None, 60.0)
    found = read_environment(
        {
            "SPECSYNC_DUMP_DIR": "dumps",
            "SPECSYNC_WATCHDOG_S": "2.5",
            "SPECSYNC_CHECK_EVERY": "8",
            "SPECSYNC_RECORD_VALUES": "1",
            "SPECSYNC_RECORD_PROMPTS": "on",
        }
    )
    assert (found.dump_dir, found.watchdog_s) == (Path("dumps").absolute(), 2.5)
    assert (found.record_values, found.record_prompts, found.check_every) == (True, True, 8)


@pytest.mark.parametrize(
    ("variable", "text", "hint"),
    [
        ("SPECSYNC_DUMP_DIR", "", "takes a directory"),
        ("SPECSYNC_WATCHDOG_S", "0", "takes a number of seconds above 0"),
        ("SPECSYNC_CHECK_EVERY", "-1", "takes a whole number of at least 0"),
        ("SPECSYNC_RECORD_VALUES", "maybe", "takes on or off"),
        ("SPECSYNC_RECORD_PROMPTS", "maybe", "takes on or off"),
    ],
)
def test_settings_of_diagnostics_that_cannot_be_understood(variable, text, hint):
    with pytest.raises(PolicyError, match=f"{variable}: {hint}"):
        read_environment({variable: text})
