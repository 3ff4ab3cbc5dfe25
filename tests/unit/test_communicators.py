"""Which communicator ``grouped`` takes, and how it uses the engine's."""

from types import SimpleNamespace

import pytest
import torch

from specsync_core.groups import EngineGroup
from specsync_core.transports.communicators import EngineCommunicator, as_bytes_where_needed, engine_communicator
from specsync_core.transports.grouped import DirectTransport, PackedTransport, device_lane
from specsync_core.transports.one_shot_channel import process_group_of


class PyNccl:
    """Notes what is asked of it, and whether it would have obeyed."""

    available = True

    def __init__(self):
        self.disabled = True
        self.asked = []

    def group_start(self):
        self.asked.append(("start", self.disabled))

    def group_end(self):
        self.asked.append(("end", self.disabled))

    def broadcast(self, tensor, src):  # SGLang's; vLLM's takes a stream, too, and defaults to the current one
        self.asked.append((tensor.dtype, src, self.disabled))


def coordinator(**more):
    """What an engine hands to a worker: SGLang's has ``pynccl_comm``, vLLM's has it in ``device_communicator``."""
    return SimpleNamespace(
        world_size=2,
        rank_in_group=0,
        ranks=[0, 1],
        device=torch.device("cpu"),
        device_group=None,
        cpu_group=None,
        broadcast=lambda tensor, src=0: None,
        **more,
    )


def test_the_engine_s_communicator_is_enabled_for_one_call_and_put_back():
    pynccl = PyNccl()
    communicator = EngineCommunicator(pynccl)
    communicator.start()
    communicator.broadcast(torch.zeros(3, dtype=torch.bool), "stream")
    communicator.broadcast(torch.zeros(3), "stream")
    communicator.end()
    assert pynccl.asked == [
        ("start", False),
        (torch.uint8, 0, False),
        (torch.float32, 0, False),
        ("end", False),
    ]
    assert pynccl.disabled


@pytest.mark.parametrize("wrap", [lambda bare: bare, EngineGroup])
def test_sglang_s_and_vllm_s_places_are_found(wrap):
    assert engine_communicator(wrap(coordinator(pynccl_comm=PyNccl()))) is not None
    inner = SimpleNamespace(pynccl_comm=PyNccl())
    assert engine_communicator(wrap(coordinator(device_communicator=inner))) is not None
    assert engine_communicator(wrap(coordinator(pynccl_comm=None))) is None
    unavailable = PyNccl()
    unavailable.available = False
    assert engine_communicator(wrap(coordinator(pynccl_comm=unavailable))) is None


def test_an_engine_s_group_shares_memory_in_the_engine_s_device_group():
    bare = coordinator()
    bare.device_group = object()
    assert process_group_of(EngineGroup(bare)) is bare.device_group


def test_the_engine_s_communicator_comes_first_and_packing_last():
    assert isinstance(device_lane(coordinator(pynccl_comm=PyNccl())), DirectTransport)
    assert isinstance(device_lane(coordinator()), PackedTransport)


def test_bytes_keep_the_memory():
    scalar = torch.tensor(3, dtype=torch.int16)
    as_bytes_where_needed(scalar).fill_(1)
    assert scalar.item() == 257
    plain = torch.zeros(2)
    assert as_bytes_where_needed(plain) is plain
