"""The command line: what goes to stdout, what to stderr, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specsync_core.algorithm import Algorithm
from specsync_core.cli import main, output
from specsync_core.cli.plan import detect_platform
from specsync_core.facts import EngineFacts
from specsync_core.hookspecs import BroadcastPoint, hookimpl
from specsync_core.manager import PluginManager
from specsync_core.registry import Registry

Install = Callable[..., Path]
ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """Run the command line in this process, in an empty directory, 100 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("specsync_core.cli.plan.detect_platform", lambda: "cpu")
    monkeypatch.setattr("specsync_core.cli.check.detect_platform", lambda: "cpu")

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        code = caught.value.code
        return Ended(code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


Run = Callable[..., Ended]


def fine(ended: Ended) -> str:
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def data(ended: Ended) -> Any:
    return json.loads(fine(ended))


def row(text: str, word: str) -> list[str]:
    """The words of the line that begins with a word."""
    (found,) = [line for line in text.splitlines() if line.split()[:1] == [word]]
    return found.split()


def test_version(run: Run) -> None:
    assert fine(run("--version")) == "specsync 0.1.0\n"


def test_help_names_every_command(run: Run) -> None:
    text = fine(run("--help"))
    assert all(command in text for command in ("sites", "plan", "plugins", "check", "demo"))


@pytest.mark.parametrize("command", ["sites", "plan", "plugins", "check", "demo"])
def test_every_command_has_help_and_json(run: Run, command: str) -> None:
    assert "--json" in fine(run(command, "--help"))


def test_no_command_is_a_usage_error(run: Run) -> None:
    assert run().code == 2


@pytest.mark.parametrize("arguments", [("sites", "--jsno"), ("plan", "7", "8")])
def test_usage_errors(run: Run, arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Usage: specsync" in ended.err


def test_an_unknown_command_is_told_with_the_known_ones(run: Run) -> None:
    ended = run("docter", "dumps")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("specsync: unknown command 'docter' (did you mean 'doctor'?). Known: sites, plan, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "--ranks takes 2 or more, not 0: one rank syncs with nobody."),
        (("--out", "gone/bench.json"), "--out: gone/bench.json cannot be written: give a file in a directory that"),
        (("--out", "."), "--out: . cannot be written"),
        (("--plot", "gone/bench.png"), "--plot: gone/bench.png cannot be written"),
    ],
)
def test_bench_refuses_before_it_measures(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("bench", "--device", "cpu", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert "measuring" not in ended.err


# --- sites ---


def test_sites_lists_every_site_preset_and_handle(run: Run, registry: Registry) -> None:
    text = fine(run("sites"))
    for site in registry.sites:
        assert row(text, str(site.number))[1:4] == [site.slug, site.phase, site.cause]
    assert row(text, "rng")[1] == "19"
    assert row(text, "17")[1:3] == ["dspark-draft", "alias"]
    assert max(map(len, text.splitlines())) <= 100


def test_sites_of_one_algorithm(run: Run, registry: Registry) -> None:
    text = fine(run("sites", "--algorithm", "DFlash"))
    assert text.count("dflash-") == sum(site.algorithm == "dflash" for site in registry.sites)
    assert "dspark-" not in text


def test_sites_of_an_unknown_algorithm(run: Run) -> None:
    assert run("sites", "--algorithm", "dsprak") == (
        2,
        "",
        "specsync: unknown algorithm 'dsprak' (did you mean 'dspark'?). Known: dflash, dspark, eagle, state, vllm.\n",
    )


def test_sites_answers_whatever_the_environment_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "dspark-plam")
    monkeypatch.setenv("SPECSYNC_TIMEOUT_S", "soon")
    assert fine(run("sites"))  # the message about the first one sends people here
    assert fine(run("plugins"))


def test_sites_as_json(run: Run, registry: Registry) -> None:
    found = data(run("sites", "--json"))
    assert [site["number"] for site in found["sites"]] == [site.number for site in registry.sites]
    plan = next(site for site in found["sites"] if site["slug"] == "dspark-plan")
    assert plan["tensors"] == [{"name": "verify_lens", "shape": ["B"], "dtypes": ["int32"], "optional": False}]
    assert plan["source"] == "specsync-core"
    assert found["presets"]["init"]["sites"] == ["dspark-mem", "dflash-mem"]
    assert found["handles"]["dspark-draft"]["number"] == 17


# --- plan ---


def test_plan_of_one_site_shows_value_origin_and_what_was_rejected(run: Run) -> None:
    assert fine(run("plan", "dspark-plan", "--dp-attention")) == (
        "mode        sync     default (preset all)\n"
        "group       attn_tp  dp attention is on (tp rejected: idle DP ranks would not take part)\n"
        "transport   auto     default\n"
        "auto takes  grouped  one collective per call (one-shot rejected: it needs CUDA tensors)\n"
    )


def test_plan_of_one_site_under_a_policy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "all,-7")
    text = fine(run("plan", "7"))
    assert "SPECSYNC_SITES (-dspark-plan) (sync rejected: default (preset all))" in text


def test_plan_of_a_host_agreement_has_no_transport(run: Run) -> None:
    text = fine(run("plan", "dspark-mem"))
    assert row(text, "group")[1] == "capture"
    assert "transport" not in text


def test_plan_of_an_unknown_site(run: Run) -> None:
    assert run("plan", "dspark-plam") == (
        2,
        "",
        "specsync: unknown site 'dspark-plam' (did you mean 'dspark-plan'?). List the sites with `specsync sites`.\n",
    )


def test_plan_shows_every_site_and_setting(run: Run, registry: Registry) -> None:
    text = fine(run("plan", "--model", "Org/Model", "--no-dp-attention"))
    for site in registry.sites:
        assert row(text, site.slug)[1] == "sync"
    assert row(text, "timeout_s")[1:] == ["30.0", "default"]
    assert row(text, "counters")[1:] == ["on", "default"]
    assert row(text, "platform")[1:] == ["cpu", "detected"]
    assert row(text, "model")[1:] == ["Org/Model", "given"]


def test_a_narrow_plan_warns_on_stderr(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "init")
    ended = run("plan")
    assert ended.code == 0
    assert row(ended.out, "dspark-plan")[1] == "off"
    assert ended.err.startswith("the plan is narrower than 'all': ")


def test_plan_by_model_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[models."*qwen*"]\nsites = "7:audit"\n')
    ended = run("plan", "--config", "other.toml", "--model", "Qwen3", "--json")
    found = json.loads(ended.out)
    site = next(site for site in found["sites"] if site["site"] == "dspark-plan")
    assert site["mode"] == {
        "value": "audit",
        "origin": "other.toml:2 (dspark-plan:audit)",
        "rejected": [{"value": "sync", "why": "default (preset all)"}],
    }
    assert found["facts"] == {"platform": "cpu", "model": "Qwen3", "dp_attention": None}
    assert found["warning"].startswith("the plan is narrower")


def test_plan_of_one_site_as_json(run: Run) -> None:
    found = data(run("plan", "dspark-mem", "--json", "--platform", "rocm"))
    assert (found["site"], found["group"]["value"], found["transport"]) == ("dspark-mem", "capture", None)


def test_a_handled_error_is_one_message_without_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "dspark-plam")
    assert run("plan") == (
        1,
        "",
        "PolicyError: SPECSYNC_SITES: unknown token 'dspark-plam' (did you mean 'dspark-plan'?).\n"
        "  Presets: all, init, none, off, rng. List the sites with `specsync sites`.\n",
    )


def test_a_policy_whose_tokens_no_comma_separates(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "all -dspark-plan")
    assert "\n  Tokens are separated by commas; spaces count for nothing.\n" in run("plan").err
    monkeypatch.setenv("SPECSYNC_SITES", "all, -dspark-plam")
    assert "commas" not in run("plan").err


def test_an_unexpected_error_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("specsync_core.cli.sites.load_registry", lambda manager: fail())
    with pytest.raises(ZeroDivisionError):
        main(["sites"])


@pytest.mark.parametrize(("device", "platform"), [("nvidiactl", "cuda"), ("kfd", "rocm"), ("null", "cpu")])
def test_the_platform_is_detected_by_device_files(tmp_path: Path, device: str, platform: str) -> None:
    (tmp_path / device).touch()
    assert detect_platform(tmp_path) == platform


# --- plugins ---


def test_plugins(run: Run) -> None:
    text = fine(run("plugins"))
    assert row(text, "eagle-rocm") == ["eagle-rocm", "specsync-core", "0.1.0", "active", "specsync_broadcast_points"]


def test_plugins_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_DISABLE", "eagle")
    found = {plugin["name"]: plugin for plugin in data(run("plugins", "--json"))}
    assert found["eagle"]["status"] == "disabled"
    assert found["dspark"]["hooks"][0] == "specsync_algorithm"


def test_a_broken_plugin_is_shown_and_is_a_finding(run: Run, install_plugin: Install) -> None:
    install_plugin("bad", "import no_such_module")
    ended = run("plugins")
    assert ended.code == 1
    assert row(ended.out, "bad")[3] == "broken"
    assert row(ended.out, "dspark")[3] == "active"
    assert ended.err.startswith("PluginError: plugin 'bad' of specsync-bad 1.0 ")
    assert run("sites").code == 1


# --- check ---


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"versions": ">>9"}, "BroadcastPoint at x.y: engine versions '>>9'"),
        ({"when": "afterwards"}, "BroadcastPoint at x.y: unknown when 'afterwards'"),
        ({"name": "lookaheads"}, "algorithm 'lookaheads' has no site"),
        ({"draft_kind": "blocks"}, "algorithm 'dspark': unknown draft_kind 'blocks'"),
    ],
)
def test_check_asks_plugins_what_an_engine_and_the_demo_would(
    run: Run, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], problem: str
) -> None:
    class Wrong:
        @hookimpl
        def specsync_broadcast_points(self, engine: EngineFacts) -> list[BroadcastPoint]:
            words = {"versions": ">=0.1", "when": "after", **answers}
            return [
                BroadcastPoint(
                    "x.y",
                    words["when"],
                    ("dspark-target",),
                    str,
                    tuple,
                    words["versions"],
                    ("self",),  # type: ignore[arg-type]
                )
            ]

        @hookimpl
        def specsync_algorithm(self) -> Algorithm:
            words = {"name": "dspark", "draft_kind": "block", **answers}
            return Algorithm(words["name"], "", words["draft_kind"], str)  # type: ignore[arg-type]

    def load(manager: PluginManager, disable: object = ()) -> None:
        manager.register(Wrong(), "wrong", "dist-wrong")

    monkeypatch.setattr(PluginManager, "load", load)
    ended = run("check")
    assert ended.code == 1
    assert ended.out.count("plugin 'wrong' of dist-wrong") == 1
    assert problem in ended.out


def test_check_finds_nothing(run: Run, registry: Registry) -> None:
    assert fine(run("check")) == f"no problem: environment, 5 plugins, registry of {len(registry.sites)} sites.\n"


def test_check_reads_the_policy_file_in_force(run: Run, tmp_path: Path) -> None:
    (tmp_path / "specsync.toml").write_text('sites = "all"')
    assert "policy file specsync.toml" in fine(run("check"))


def test_check_prints_every_problem(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_plugin: Install
) -> None:
    install_plugin("bad", "import no_such_module")
    monkeypatch.setenv("SPECSYNC_TIMEOUT_S", "soon")
    monkeypatch.setenv("SPECSYNC_SITE", "all")
    (tmp_path / "policy.toml").write_text('sites = "dspark-plam"\n[algorithms.dsprak]\nsites = "all"\n')
    ended = run("check", "policy.toml")
    assert (ended.code, ended.err) == (1, "")
    for problem in (
        "PolicyError: unknown variable SPECSYNC_SITE (did you mean SPECSYNC_SITES?).",
        "PolicyError: SPECSYNC_TIMEOUT_S: takes a number of seconds above 0, not 'soon'.",
        "PluginError: plugin 'bad' of specsync-bad 1.0 ",
        "PolicyError: policy.toml:1: unknown token 'dspark-plam'",
        "PolicyError: policy.toml:2: unknown algorithm 'dsprak'",
    ):
        assert problem in ended.out
    assert ended.out.endswith("5 problems.\n")


def test_check_as_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('sties = "all"\n')
    ended = run("check", "policy.toml", "--json")
    (problem,) = json.loads(ended.out)["problems"]
    assert (ended.code, problem["error"]) == (1, "PolicyError")
    assert problem["message"].startswith("policy.toml:1: unknown key 'sties' (did you mean 'sites'?).")


def test_check_warns_of_a_narrow_plan_which_is_no_finding(run: Run, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('sites = "init"\n')
    ended = run("check", "policy.toml")
    assert (ended.code, ended.err[:33]) == (0, "the plan is narrower than 'all': ")


def test_check_a_registry(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_text('[preset.mine]\nsummary = ""\nsites = ["dspark-plan"]\n')
    assert "no problem" in fine(run("check", str(path)))
    path.write_text('[preset.mine]\nsummary = ""\nsites = ["dspark-plam"]\n')
    ended = run("check", str(path))
    assert ended.code == 1
    assert "[preset.mine]: key 'sites': unknown site 'dspark-plam'" in ended.out


def test_check_the_built_in_registry(run: Run) -> None:
    assert "no problem" in fine(run("check", str(ROOT / "sites.toml")))


def test_check_faults(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_FAULTS", "dspark-plam:rank=1:step=2:add=1")
    ended = run("check")
    assert ended.code == 1
    assert "dspark-plam" in ended.out


def test_check_faults_that_are_not_allowed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_FAULTS", "dspark-plan:rank=1:step=2:add=1")
    ended = run("check")
    assert ended.code == 1
    assert "and not allowed. Set SPECSYNC_ALLOW_FAULTS=1 where wrong tokens and dead ranks do no harm" in ended.out
    monkeypatch.setenv("SPECSYNC_ALLOW_FAULTS", "1")
    assert "no problem" in fine(run("check"))


def test_check_the_control_socket(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    (tmp_path / "notes.txt").touch()
    for path, problem in (
        (shared / "x.sock", "other users may write to its directory"),
        (tmp_path / "notes.txt", "there is a file that is no socket."),
        (tmp_path / ("x" * 120), "a socket's has at most 107."),
        (tmp_path / "absent" / "x.sock", "its directory cannot be used: No such file or directory. Make it first."),
        (Path("/proc/x.sock"), "/proc takes no file: "),
    ):
        monkeypatch.setenv("SPECSYNC_CONTROL", str(path))
        ended = run("check")
        assert (ended.code, ended.out[: len(said := f"ControlError: SPECSYNC_CONTROL: {path}: ")]) == (1, said)
        assert problem in ended.out
    monkeypatch.setenv("SPECSYNC_CONTROL", f"{tmp_path}/{{pid}}.sock")
    assert "no problem" in fine(run("check"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "shared"]


@pytest.mark.parametrize("variable", ["SPECSYNC_DUMP_DIR", "SPECSYNC_STATS_DIR"])
def test_check_directories(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").touch()
    for path, there in (("/proc/x", "/proc"), (f"{tmp_path}/file", f"{tmp_path}/file")):
        monkeypatch.setenv(variable, path)
        ended = run("check")
        assert ended.code == 1
        assert f"PolicyError: {variable}: {path}: {there} takes no file: " in ended.out
        assert "Give a directory that this user may write to." in ended.out
    monkeypatch.setenv(variable, f"{tmp_path}/new/deep")
    assert "no problem" in fine(run("check"))
    assert not (tmp_path / "new").exists()


def test_check_a_missing_file_is_a_usage_error(run: Run) -> None:
    assert run("check", "none.toml") == (2, "", "specsync: none.toml: there is no such file.\n")


def test_check_broken_toml(run: Run, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("[site.x\n")
    ended = run("check", "policy.toml")
    assert ended.code == 1
    assert "PolicyError: policy.toml: not valid TOML: " in ended.out


# --- tables ---

ROWS = [("7", "dspark-draft-multinomial", "word " * 30), ("101", "x", "")]


@pytest.mark.parametrize("width", [20, 80, 120])
def test_tables_wrap_the_last_column_and_shorten_nothing(width: int) -> None:
    lines = list(output.layout(("no", "site", "what"), ROWS, width))
    assert " ".join("\n".join(lines).split()).count("word") == 30
    assert lines[1].startswith("7    dspark-draft-multinomial  word")
    assert lines[-1] == "101  x"
    assert all(len(line) <= max(width, 31 + output.LEAST_LAST_COLUMN) for line in lines)


def test_tables_do_not_break_slugs() -> None:
    slugs = ["dspark-draft-multinomial", "dspark-accept-simulated", "a" * 50] * 4
    lines = output.layout(("handle", "sites"), [("x", ", ".join(slugs))], 60)
    assert " ".join(" ".join(lines).split()) == f"handle sites x {', '.join(slugs)}"


@pytest.mark.parametrize("width", ["80", "120"])
def test_tables_on_a_terminal_shorten_nothing_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.print_table(("no", "site", "what"), ROWS)
    text = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert "7    dspark-draft-multinomial  word" in text
    assert text.count("word") == 30
    assert max(map(len, text.splitlines())) <= int(width)


# --- what it costs ---


@pytest.mark.parametrize(
    "arguments", ["sites", "plan", "plan dspark-plan --json", "plugins", "check", "demo --help", "--help"]
)
def test_no_torch(arguments: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom specsync_core.cli import main\n"
        f"try: main({arguments.split()!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_plain_output_needs_no_rich(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom specsync_core.cli import main\n"
        "try: main(['sites'])\nfinally: assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_the_console_script_and_the_module_run(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("specsync")
    for command in ([str(script)], [sys.executable, "-m", "specsync_core.cli"]):
        ended = subprocess.run(
            [*command, "plan", "dspark-plam"], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ
        )
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith("specsync: unknown site 'dspark-plam'")
