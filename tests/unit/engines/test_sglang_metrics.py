"""SGLang's step hook feeds the page, and tells live control what the engine has decided by itself."""

from types import SimpleNamespace

from specsync_core.engines import sglang


class Worker:
    def forward_batch_generation(self, batch):
        raise AssertionError


def adapter_of(sync) -> sglang.Adapter:
    adapter = sglang.Adapter.__new__(sglang.Adapter)
    adapter.sync, adapter._decode_steps, adapter.points = sync, 100, []
    adapter.session = None
    adapter.facts = SimpleNamespace(version="0.5.23")
    return adapter


def test_every_step_counts_and_brings_the_page_up_to_date(monkeypatch):
    acts = []
    monkeypatch.setattr(sglang, "Metrics", lambda sync: SimpleNamespace(update=lambda: acts.append("page")))
    (hook,) = adapter_of(SimpleNamespace(next_step=lambda: acts.append("step")))._step_hooks(Worker)
    for _ in range(2):
        hook.function(Worker(), SimpleNamespace())
    assert acts == ["step", "page"] * 2
    assert (hook.kind, hook.target) == ("before", f"{__name__}.Worker.forward_batch_generation")


def test_live_control_keeps_what_the_engine_broadcasts_itself_and_what_is_not_hooked():
    fixed = {}
    control = SimpleNamespace(fix=lambda slugs, reason: fixed.update(dict.fromkeys(slugs, reason)))
    adapter = adapter_of(SimpleNamespace(control=control))
    hooked = SimpleNamespace(when="after", sites=("dspark-target",))
    adapter.points = [hooked]
    lost, own = (
        SimpleNamespace(when="after", sites=("dspark-plan",)),
        SimpleNamespace(when="engine", sites=("dspark-mem",)),
    )
    adapter._fix_what_cannot_change([hooked, lost, own])
    assert fixed == {
        "dspark-plan": "it is not hooked here",
        "dspark-mem": "SGLang 0.5.23 broadcasts there itself, by its policy at the start",
    }
    adapter.sync = SimpleNamespace(control=None)
    adapter._fix_what_cannot_change([hooked])
