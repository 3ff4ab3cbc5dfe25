"""Bad input to the demo: each is refused before any process starts, in words that say what would be right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsync_core.algorithm import Algorithm
from specsync_core.demo.keep import MOST_KEPT, keep_recordings
from specsync_core.demo.options import DemoError, Options, default_fault, prepare, read_prompts
from specsync_core.diagnostics.runs import runs_in
from specsync_core.errors import PolicyError
from specsync_core.registry import Registry

GOOD = Options()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"algorithm": "dspak"},
            r"--algorithm: unknown algorithm 'dspak' \(did you mean 'dspark'\?\).*specsync plugins",
        ),
        ({"ranks": 1}, r"--ranks: 1 ranks have nobody to disagree with.*2, 4, 8"),
        ({"ranks": 3}, r"--ranks: 3 ranks cannot share 8 attention heads equally.*1, 2, 4, 8"),
        ({"steps": 0}, r"--steps: 0 is too small; give at least 1"),
        ({"train": -1}, r"--train: -1 is too small; give at least 0"),
        ({"seed": -1}, r"--seed: -1 is too small"),
        ({"temperature": -0.5}, r"--temperature: -0.5 is not between 0 \(greedy\) and 100"),
        ({"temperature": float("nan")}, r"--temperature: nan is not between"),
        ({"transport": "one-shott"}, r"--transport: unknown transport 'one-shott'.*auto"),
        ({"transport": "one-shot"}, r"--transport: one-shot is a kernel for GPUs. Add --device cuda"),
        ({"device": "cudda"}, r"--device: unknown device 'cudda' \(did you mean 'cuda'\?\)"),
        ({"sites": "dspark-plam"}, r"--sites: unknown token 'dspark-plam' \(did you mean 'dspark-plan'\?\)"),
        ({"fault": ""}, r"--fault: empty.*'none'"),
        ({"fault": "dspark-plan"}, r"--fault.*rank"),
        ({"fault": "dspark-plam:rank=1:add=1"}, r"--fault.*dspark-plam"),
        ({"fault": "dflash-target:rank=1:add=1"}, r"dflash-target is a site of dflash; with --algorithm dspark"),
        ({"fault": "dspark-plan:rank=2:add=1"}, r"there is no rank 2; the ranks are 0 to 1"),
        ({"fault": "dspark-plan:rank=1:step=32:add=1"}, r"step 32 is never reached; a run's steps are 0 to 31"),
        ({"prompts": Path("no-such-file.txt")}, r"--prompts: no-such-file.txt cannot be read: No such file"),
    ],
)
def test_a_bad_option_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises((DemoError, PolicyError), match=r"(?s)" + words):
        prepare(replace(GOOD, **change))  # type: ignore[arg-type]


def test_a_directory_that_cannot_hold_recordings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DemoError, match=r"--keep \(or SPECSYNC_DUMP_DIR\): .*/file/x: .* Give a directory for recordings"
    ):
        prepare(replace(GOOD, keep=tmp_path / "file" / "x"))
    assert prepare(replace(GOOD, keep=tmp_path / "new" / "one")).options.keep is not None
    assert (tmp_path / "new" / "one").is_dir()


def test_recordings_and_dumps_alone_are_kept_and_old_runs_go(tmp_path: Path) -> None:
    recordings, kept = tmp_path / "sync off", tmp_path / "kept"
    recordings.mkdir()
    for name in ("rank-0000.specsync", "rank-0000.dump.json", ".rank-0000.dump.json.12.new"):
        (recordings / name).write_text("x")
    kept.mkdir()
    (kept / "mine.txt").touch()
    for _ in range(MOST_KEPT + 1):
        run = keep_recordings(recordings, kept)
    assert sorted(path.name for path in run.iterdir()) == ["rank-0000.dump.json", "rank-0000.specsync"]
    assert len(runs_in(kept)) == MOST_KEPT
    assert run.is_dir()
    assert (kept / "mine.txt").exists()


class TestCuda:
    def test_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(DemoError, match=r"--device: this torch .* finds no CUDA device. Use --device cpu"):
            prepare(replace(GOOD, device="cuda"))

    def test_too_few_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        with pytest.raises(DemoError, match=r"--device: 2 ranks need a GPU each, and there are 1"):
            prepare(replace(GOOD, device="cuda"))


class TestPrompts:
    def test_lines_are_prompts_and_blank_lines_are_not(self, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("one \n\n  zwölf\n", encoding="utf-8")
        assert read_prompts(tmp_path / "p.txt") == (b"one", "zwölf".encode())

    def test_those_that_ship(self) -> None:
        prompts = read_prompts(None)
        assert len(prompts) >= 8
        assert all(prompt.isascii() for prompt in prompts)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "holds no prompt. Write one a line"),
            (b"  \n\n", "holds no prompt"),
            (b"caf\xe9", r"is not UTF-8 \(byte 0xe9 at offset 3\)"),
            (b"short\n" + b"x" * 1025, "line 2: 1025 bytes; the demo takes at most 1024"),
        ],
    )
    def test_a_file_that_holds_none(self, content: bytes, words: str, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_bytes(content)
        with pytest.raises(DemoError, match=words):
            read_prompts(tmp_path / "p.txt")

    def test_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(DemoError, match="cannot be read: Is a directory"):
            read_prompts(tmp_path)


class TestFaults:
    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({}, "dspark-accept-greedy:rank=1:step=8:add=1"),
            ({"temperature": 1.0}, "dspark-accept-sample:rank=1:step=8:add=1"),
            ({"folded": True}, "dspark-accept-graph:rank=1:step=8:add=1"),
            ({"folded": True, "device": "cuda"}, "dspark-plan:rank=1:from=8:set=1"),
            ({"folded": True, "device": "cuda", "temperature": 1.0}, "dspark-accept-sample:rank=1:step=8:add=1"),
            ({"algorithm": "dflash", "folded": True, "device": "cuda"}, "dflash-accept-greedy:rank=1:step=8:add=1"),
            ({"algorithm": "dflash"}, "dflash-accept-greedy:rank=1:step=8:add=1"),
            ({"algorithm": "dflash", "temperature": 1.0}, "dflash-accept-sample:rank=1:step=8:add=1"),
            ({"algorithm": "eagle"}, "eagle-verify-greedy:rank=1:step=8:tensor=num_correct_drafts:add=1"),
            ({"steps": 3}, "dspark-accept-greedy:rank=1:step=2:add=1"),
        ],
    )
    def test_the_default_skews_what_the_run_goes_through(
        self, change: dict[str, object], fault: str, registry: Registry
    ) -> None:
        options = replace(GOOD, **change)  # type: ignore[arg-type]
        assert default_fault(options, registry, options.algorithm) == fault

    def test_an_algorithm_without_an_accept_site_needs_one_by_name(self, registry: Registry) -> None:
        with pytest.raises(DemoError, match="--fault: medusa declares no accept site"):
            default_fault(GOOD, registry, "medusa")

    def test_none_injects_none(self) -> None:
        assert prepare(replace(GOOD, fault=" None ")).faults == ()


def test_good_options_name_what_they_mean() -> None:
    setup = prepare(GOOD)
    assert isinstance(setup.algorithm, Algorithm)
    assert setup.fault_text == "dspark-accept-greedy:rank=1:step=8:add=1"
    assert (setup.device, setup.transport) == ("cpu", "auto")
