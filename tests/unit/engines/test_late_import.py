"""Acting on a module when it is imported by somebody else."""

import importlib
import sys

import pytest

from specsync_core.engines.late_import import when_imported


@pytest.fixture
def late(tmp_path, monkeypatch):
    (tmp_path / "late_toy.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "late_toy"
    sys.modules.pop("late_toy", None)


def test_a_module_is_not_imported_for_the_sake_of_it(late):
    seen = []
    when_imported(late, seen.append)
    assert late not in sys.modules
    assert seen == []


def test_it_is_acted_on_once_after_it_ran(late):
    seen = []
    when_imported(late, lambda module: seen.append(module.value))
    importlib.import_module(late)
    importlib.import_module(late)
    assert seen == [1]


def test_two_wishes_both_come_true(late):
    seen = []
    when_imported(late, lambda _: seen.append("first"))
    when_imported(late, lambda _: seen.append("second"))
    importlib.import_module(late)
    assert sorted(seen) == ["first", "second"]


def test_an_imported_module_is_acted_on_at_once(late):
    module = importlib.import_module(late)
    seen = []
    when_imported(late, seen.append)
    assert seen == [module]


def test_the_module_keeps_its_own_loader(late):
    when_imported(late, lambda _: None)
    module = importlib.import_module(late)
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
