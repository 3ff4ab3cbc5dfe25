import pytest
import torch

from specsync_core.errors import GroupError
from specsync_core.memory import GIB, can_capture, can_fold_sampling, folded_sampling_bytes, free_memory_gib


def test_capture_needs_one_gib():
    assert can_capture(1.0)
    assert not can_capture(1.0 - 1e-9)
    assert can_capture(0.5, headroom_gib=0.5)


def test_bytes_of_folded_sampling_are_noise_and_probabilities():
    assert (
        folded_sampling_bytes(max_batch=64, gamma=7, vocab_size=129_280, itemsize=2)
        == 64 * 129_280 * 4 + 64 * 7 * 129_280 * 2
    )


def test_auto_needs_the_bytes_on_top_of_the_headroom():
    assert can_fold_sampling("auto", 3.0, 2 * GIB)
    assert not can_fold_sampling("auto", 3.0, 2 * GIB + 1)


def test_off_and_force_need_no_probe():
    assert not can_fold_sampling("off", None, 0)
    assert can_fold_sampling("force", None, 2**60)
    with pytest.raises(ValueError, match="pass the group's minimum as free_gib"):
        can_fold_sampling("auto", None, 0)


def test_free_host_memory_is_plausible_and_other_devices_are_refused():
    with open("/proc/meminfo") as meminfo:
        total = int(meminfo.readline().split()[1]) * 1024
    assert 0 < free_memory_gib("cpu", 0) * GIB <= total
    with pytest.raises(GroupError, match="free memory of a cpuu device is not known here; known devices: cuda"):
        free_memory_gib("cpuu", 0)
    with pytest.raises(GroupError, match="free memory of a meta device is not known here; known devices: cuda"):
        free_memory_gib(torch.device("meta"), 0)
