"""What comes from outside is data: none of it is executed, imported or unpickled, and all of it is bounded."""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from specsync_core import bounded_file
from specsync_core.bounded_file import MAX_RECORDING_BYTES, MAX_TEXT_BYTES, TooLongError, read_bounded
from specsync_core.diagnostics import recording as fmt
from specsync_core.diagnostics.recording import RecordingError, read_recording
from specsync_core.errors import PolicyError, RegistryError
from specsync_core.policy_file import find_policy_file, read_policy_file
from specsync_core.registry_files import read_registry

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "specsync_core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])

BANNED_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "jsonpickle",
    "code",
}
BANNED_CALLS = {
    *("eval", "exec", "compile", "__import__", "import_module", "exec_module", "load_module", "run_path", "run_module"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list"),
    *("system", "popen", "Popen", "check_output", "check_call"),
}
"""Calls that execute, import, or unpickle what a string or a peer says. ``run`` and ``load`` are looked at below."""

HARMLESS = {("re", "compile"), ("triton", "compile")}

ALLOWED = {
    ("specsync_core/__init__.py", "import_module"): "names of its own table, so that importing it costs no torch",
    ("specsync_core/bisect/processes.py", "Popen"): "the command that the operator typed, without a shell",
    ("specsync_core/cli/app.py", "import_module"): "its own commands, each imported when it is called",
    ("specsync_core/engines/targets.py", "import_module"): "the engine's module that an installed plugin names in code",
    ("specsync_core/testing/__init__.py", "import_module"): "names of its own table",
    ("specsync_core/testing/conformance.py", "all_gather_object"): "records, among the ranks of one test",
    ("specsync_core/testing/ranks.py", "pickle"): "values of ranks that it started, over pipes that only they hold",
    ("specsync_core/engines/late_import.py", "exec_module"): "hands on to the loader of a module the engine imports",
    ("specsync_core/transports/communicators.py", "broadcast_object_list"): "NCCL's id, among the ranks of one job",
    ("specsync_core/demo/tensor_parallel.py", "broadcast_object_list"): "requests, from rank 0 to its siblings",
}
"""File and name, with the reason why what it reads is not foreign."""

SUBPROCESSES = {"specsync_core/bench/report.py", "specsync_core/bisect/processes.py"}
"""Run commands: fixed ones, or the command that the operator typed."""


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every banned module and call in a file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0], node.lineno
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            if name in BANNED_CALLS and (owner, name) not in HARMLESS:
                yield name, node.lineno
            safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
            if (owner, name) == ("torch", "load") and not safe:
                yield "torch.load without weights_only=True", node.lineno
            if any(word.arg == "shell" and ast.unparse(word.value) != "False" for word in node.keywords):
                yield "shell=", node.lineno


def found_in(source: str) -> set[str]:
    names = {name for name, _ in uses(ast.parse(source))}
    return {name for name in names if name in BANNED_MODULES | BANNED_CALLS or " " in name or "=" in name}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_executes_or_unpickles_what_it_is_given(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    allowed = {what for file, what in ALLOWED if file == name}
    assert found_in(path.read_text(encoding="utf-8")) <= allowed


def test_only_few_modules_run_commands() -> None:
    running = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(name == "subprocess" for name, _ in uses(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert {name for name in running if name not in SUBPROCESSES} == set()


def test_the_allow_list_is_about_what_is_there() -> None:
    for (file, what), reason in ALLOWED.items():
        assert reason
        if (ROOT / file).exists():
            assert what in found_in((ROOT / file).read_text(encoding="utf-8")), (file, what)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml.constructor",
        "eval(text)",
        "builtins.exec(text)",
        "__import__(name)",
        "importlib.import_module(name)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "dist.broadcast_object_list(objects)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "compile(text, '', 'exec')",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert found_in(source)


def test_the_search_leaves_the_harmless_alone() -> None:
    assert not found_in("import re\nre.compile('x')\ntorch.load(file, weights_only=True)\nrun(shell=False)")


# --- sizes ------------------------------------------------------------------------------------------


def test_a_policy_file_or_registry_that_is_too_long_says_so(tmp_path: Path) -> None:
    path = tmp_path / "specsync.toml"
    path.write_bytes(b"#" * MAX_TEXT_BYTES)
    assert read_policy_file(path).tables.sites is None
    assert read_registry(path, "somebody").sites == ()
    path.write_bytes(b"#" * (MAX_TEXT_BYTES + 1))
    words = "it holds more than 1048576 bytes, which is the bound; is it the right file?"
    with pytest.raises(PolicyError, match=f"the policy file cannot be read: {words}"):
        read_policy_file(path)
    with pytest.raises(PolicyError, match=words):
        find_policy_file(None, tmp_path)
    with pytest.raises(RegistryError, match=f"the registry cannot be read: {words}"):
        read_registry(path, "somebody")


def test_a_file_without_end_is_not_read_for_ever() -> None:
    with pytest.raises(TooLongError):
        read_bounded(Path("/dev/zero"), 1000)
    with pytest.raises(PolicyError, match="more than 1048576 bytes"):
        read_policy_file(Path("/dev/zero"))


def test_a_recording_that_is_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0000.specsync"
    with path.open("wb") as file:
        file.truncate(MAX_RECORDING_BYTES + 1)  # a hole, which costs no disk
    monkeypatch.setattr(fmt, "MAX_RECORDING_BYTES", 10_000)
    assert bounded_file.MAX_RECORDING_BYTES == 2**28
    with pytest.raises(RecordingError, match="it holds more than 10000 bytes"):
        read_recording(path)


@pytest.mark.parametrize(
    "text", [b"[]", b"{}", b'"x"', b"nonsense", b'{"sites": [1]}', b'{"sites": {"x": 1}}', b"[" * 100_000, b"\xff"]
)
def test_a_recording_with_a_forged_header_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "rank-0000.specsync"
    preamble = fmt.PREAMBLE.pack(fmt.MAGIC, fmt.VERSION, fmt.SLOT_BYTES, 2**63, 4096, len(text), crc32(text))
    path.write_bytes(preamble + text)
    with pytest.raises(RecordingError, match="the recording's header does not hold what it should"):
        read_recording(path)


def test_a_record_of_any_bytes_is_read_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.specsync"
    fields = {
        **{"group_rank": 0, "world_size": 2, "ranks": [0, 1], "plan_digest": "", "run_id": "", "pid": 1, "host": {}},
        **{"versions": {}, "started_s": 0.0, "sites": {}},
    }
    header = fmt.write_header(fields, 4)
    body = bytes(range(1, 1 + fmt.BODY.size % 256)).ljust(fmt.BODY.size, b"\xff")
    path.write_bytes(header + body + struct.pack("<I", crc32(body)))
    assert len(read_recording(path).records) + read_recording(path).torn == 1
