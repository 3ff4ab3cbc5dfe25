"""The recorder and the fault injector on CUDA tensors: eager, and while a graph is captured."""

import pytest
import torch

from specsync_core.diagnostics import FaultInjector, Recorder, parse_faults, read_recording
from specsync_core.diagnostics import recording as fmt
from specsync_core.registry_files import builtin_registry, merge_registries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

REGISTRY = merge_registries([builtin_registry()])
TARGET = REGISTRY.site("dspark-target")


def recorded(path, values):
    return Recorder(
        path, group_rank=0, world_size=1, ranks=(0,), plan_digest="", sites=REGISTRY.sites, values=values, slots=64
    )


def captured(*taps):
    """A graph that adds one to its static tensor, with the taps around it; and the tensor."""
    tokens = torch.tensor([7, 8], device="cuda")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for tap in taps:
            tap.before(TARGET, (tokens,), 3)
        tokens += 1
        for tap in taps:
            tap.after(TARGET, (tokens,), 3)
    return graph, tokens


@pytest.mark.parametrize("values", [False, True])
def test_values_on_the_device_are_read_on_request_alone(tmp_path, values):
    recorder = recorded(tmp_path / "a", values)
    recorder.before(TARGET, (torch.tensor([7, 8], device="cuda"),), 3)
    (record,) = read_recording(tmp_path / "a").records
    assert (record.dtype, record.dims, record.has_values) == ("int64", (2,), values)
    assert record.values == ((7, 8) if values else ())


@pytest.mark.parametrize("values", [False, True])
def test_nothing_is_read_while_a_graph_is_captured(tmp_path, values):
    recorder = recorded(tmp_path / "a", values)
    graph, tokens = captured(recorder)
    for round_ in range(2):
        tokens.copy_(torch.tensor([10 * round_, 1]))
        graph.replay()
        assert tokens.tolist() == [10 * round_ + 1, 2]
    before, after = read_recording(tmp_path / "a").records
    assert [before.has_values, after.has_values] == [False, False]
    assert (before.dims, after.kind) == ((2,), "after")
    assert bool(before.flags & fmt.CAPTURING) == values


@pytest.mark.parametrize(("when", "strikes"), [("", True), (":step=3", False), (":prob=1", False)])
def test_only_a_fault_without_conditions_is_captured(when, strikes):
    fault = f"11:rank=0:index=0:add=100{when}"
    injector = FaultInjector(parse_faults(fault, REGISTRY, "test"), 0, allowed=True)
    graph, tokens = captured(injector)
    for round_ in range(2):
        tokens.copy_(torch.tensor([10 * round_, 1]))
        graph.replay()
        assert tokens.tolist() == [10 * round_ + 1 + 100 * strikes, 2]
    assert injector.firings() == {fault: int(strikes)}
    assert bool(injector.unfired()) != strikes


def test_the_nccl_version_is_recorded(tmp_path):
    recorded(tmp_path / "a", False).close()
    versions = read_recording(tmp_path / "a").header.versions
    assert versions["cuda"] == torch.version.cuda
    assert versions["nccl"] is not None
    assert versions["nccl"].count(".") == 2
