"""A file that is replaced whole: by the new text, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specsync_core.whole_file import replace_whole


@pytest.mark.parametrize("durable", [False, True])
def test_the_new_text_replaces_the_old(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "report.json"
    for text in ("first\n", "a longer second: äöü\n", ""):
        replace_whole(path, text, durable=durable)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_text_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    replace_whole(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_whole(path, "new", durable=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    replace_whole(path, "old")
    seen = []
    move = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (seen.append(path.read_text()), move(self, to))[1])
    replace_whole(path, "new")
    assert (seen, path.read_text()) == (["old"], "new")
