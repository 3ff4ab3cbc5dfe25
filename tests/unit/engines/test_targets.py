import pytest

from specsync_core import BroadcastPoint, Scope, no_tensors
from specsync_core.engines.targets import check_points, check_target, find_target, targets_of
from tests.unit.engines import toy_engine

TOY = "tests.unit.engines.toy_engine"


def test_a_function_and_a_method_are_found():
    assert find_target(f"{TOY}.decide") is toy_engine.decide
    assert find_target(f"{TOY}.Worker.step") is toy_engine.Worker.step


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{TOY}.decidee", r"tests.unit.engines.toy_engine has no decidee \(did you mean 'decide'\?\)"),
        (f"{TOY}.Worker.stop", "tests.unit.engines.toy_engine.Worker has no stop"),
        ("no_such_engine.module.function", "no module named no_such_engine"),
        ("tests.unit.engines.no_such_module.function", "tests.unit.engines has no no_such_module"),
    ],
)
def test_what_is_absent_is_named(path, message):
    with pytest.raises(LookupError, match=message):
        find_target(path)


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_engine.py").write_text("import no_such_kernel")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match="broken_engine cannot be imported: No module named 'no_such_kernel'"):
        find_target("broken_engine.function")


def test_a_changed_signature_shows_both():
    assert check_target(f"{TOY}.decide", ("logits", "greedy")) is None
    problem = check_target(f"{TOY}.decide", ("logits", "temperature"))
    assert problem == f"{TOY}.decide: its parameters are (logits, greedy), known are (logits, temperature)"


def test_scopes_are_checked_too_and_each_target_once():
    scope = Scope(f"{TOY}.gone", lambda _: "x", ("logits",))
    point = BroadcastPoint(
        target=f"{TOY}.decide",
        when="after",
        sites=("eagle-target",),
        site_of=lambda _: None,
        tensors_of=no_tensors,
        versions="==1",
        signature=("logits", "greedy"),
        within=(scope,),
    )
    assert [path for path, _ in targets_of([point, point])] == [f"{TOY}.decide", f"{TOY}.gone"]
    assert list(check_points([point, point])) == [f"{TOY}.gone: not found: {TOY} has no gone"]
