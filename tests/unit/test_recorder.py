"""The recorder and its file: what is written is read back, and damage is survived."""

import json
import os
import signal
import struct
import subprocess
import sys

import pytest
import torch

from specsync_core.diagnostics import Recorder, RecordingError, read_recording, recording_path
from specsync_core.diagnostics import recording as fmt
from specsync_core.registry_files import builtin_registry, merge_registries

REGISTRY = merge_registries([builtin_registry()])
ACCEPT = REGISTRY.site("dspark-accept-greedy")
TARGET = REGISTRY.site("dspark-target")


def make(path, **changes):
    known = {"group_rank": 1, "world_size": 2, "ranks": (4, 5), "plan_digest": "abc", "sites": REGISTRY.sites}
    return Recorder(path, **{**known, **changes})


@pytest.fixture
def path(tmp_path):
    return recording_path(tmp_path / "run", 1)


def test_a_recording_describes_itself(path):
    with make(path, run_id="monday"):
        pass
    header = read_recording(path).header
    assert (header.group_rank, header.world_size, header.ranks) == (1, 2, (4, 5))
    assert (header.plan_digest, header.run_id, header.pid) == ("abc", "monday", os.getpid())
    assert header.versions["torch"] == torch.__version__
    assert set(header.versions) == {"python", "specsync", "torch", "cuda", "nccl"}
    assert header.slug(8) == "dspark-accept-greedy"
    assert header.tensor(8, 1) == "bonus"
    assert header.is_consensus(1)
    assert not header.is_consensus(8)
    assert (header.slug(4711), header.tensor(4711, 0), header.tensor(4711, 2)) == ("site-4711", "value", "tensor-2")
    text = path.read_bytes()[fmt.PREAMBLE.size :]
    layout = json.loads(text[: text.index(b"\0")])["record"]
    assert len(layout["fields"]) == len(struct.Struct(layout["struct"]).unpack(bytes(fmt.BODY.size)))
    assert layout["dtypes"][6] == "int64"


def test_a_call_is_read_back(path):
    lens, trim = torch.tensor([3, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    bonus = torch.tensor([70, 71])
    recorder = make(path)
    recorder.before(ACCEPT, (lens, bonus, trim), 20)
    lens += 1
    recorder.after(ACCEPT, (lens, bonus, trim), 20)
    recorder.before(TARGET, (bonus,), 21)
    recorder.close()
    records = read_recording(path).records
    assert [record.kind for record in records] == ["before"] * 3 + ["after"] * 3 + ["before", "closed"]
    assert [record.sequence for record in records] == list(range(1, 9))
    assert [record.values for record in records[:4]] == [(3, 1), (70, 71), (0, 0), (4, 2)]
    assert [record.dtype for record in records[:3]] == ["int32", "int64", "int32"]
    assert {(r.site_number, r.step, r.call, r.tensor_count) for r in records[:6]} == {(8, 20, 1, 3)}
    assert [record.tensor_index for record in records[:6]] == [0, 1, 2, 0, 1, 2]
    assert records[0].crc32 != records[3].crc32
    assert records[1].crc32 == records[4].crc32
    assert (records[0].ndim, records[0].dims, records[0].numel) == (1, (2,), 2)
    assert records[0].wall_s <= records[7].wall_s
    assert records[0].monotonic_s <= records[7].monotonic_s
    assert records[7].what == "finished"


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "uint16", "uint32"),
    ],
)
def test_values_of_every_dtype(path, dtype):
    tensor = torch.tensor([1, 0, 3]).to(getattr(torch, dtype))
    recorder = make(path)
    recorder.before(TARGET, (tensor,), 0)
    record = read_recording(path).records[0]
    assert record.dtype == dtype
    assert list(record.values) == tensor.tolist()


def test_eight_bit_floats_are_kept_as_bits(path):
    tensor = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    make(path).before(TARGET, (tensor,), 0)
    assert list(read_recording(path).records[0].values) == tensor.view(torch.uint8).tolist()


def test_an_unknown_dtype_has_a_checksum_and_no_values(path):
    recorder = make(path)
    recorder.before(TARGET, (torch.tensor([1j]),), 0)
    recorder.after(TARGET, (torch.tensor([2j]),), 0)
    before, after = read_recording(path).records
    assert (before.dtype, before.values) == ("unknown", ())
    assert before.crc32 != after.crc32


def test_odd_tensors(path):
    """Empty, without dimensions, transposed, of five dimensions, larger than what is kept."""
    square = torch.arange(4).reshape(2, 2)
    empty, deep = torch.empty(0, dtype=torch.int64), torch.ones(1, 2, 1, 1, 2)
    make(path).before(TARGET, (empty, torch.tensor(7), square.t(), deep, torch.arange(100)), 0)
    empty, scalar, transposed, deep, large = read_recording(path).records
    assert (empty.has_values, empty.values, empty.dims) == (True, (), (0,))
    assert (scalar.values, scalar.dims) == ((7,), ())
    assert transposed.values == (0, 2, 1, 3)
    assert (deep.ndim, deep.dims, deep.numel) == (5, (1, 2, 1, 1), 4)
    assert large.values == tuple(range(16))
    assert large.numel == 100


def test_the_checksum_covers_what_is_not_kept(path):
    recorder = make(path)
    tensor = torch.arange(100)
    recorder.before(TARGET, (tensor,), 0)
    tensor[99] = 0
    recorder.after(TARGET, (tensor,), 0)
    before, after = read_recording(path).records
    assert before.values == after.values
    assert before.crc32 != after.crc32


@pytest.mark.parametrize("values", [False, True])
def test_a_tensor_without_memory_is_recorded_by_shape(path, values):
    make(path, values=values).before(TARGET, (torch.empty(3, device="meta"),), 0)
    record = read_recording(path).records[0]
    assert (record.has_values, record.values, record.dims) == (False, (), (3,))


def test_a_call_without_tensors_is_recorded(path):
    make(path).before(REGISTRY.site("dspark-mem"), (), 0)
    record = read_recording(path).records[0]
    assert (record.kind, record.tensor_count, record.site_number) == ("before", 0, 1)


def test_waits(path):
    recorder = make(path)
    recorder.step = 5
    with recorder.waiting("tp all-reduce", "layer 1 mlp, batch 7"):
        during = read_recording(path)
    with pytest.raises(KeyError), recorder.waiting("request broadcast"):
        raise KeyError
    begin, end, _, failed = read_recording(path).records
    assert [record.kind for record in during.records] == ["wait-begin"]
    assert (begin.what, begin.detail, begin.step, begin.call) == ("tp all-reduce", "layer 1 mlp, batch 7", 5, 1)
    assert (end.kind, end.call, end.failed) == ("wait-end", 1, False)
    assert (failed.kind, failed.call, failed.failed, failed.what) == ("wait-end", 2, True, "KeyError")


def test_a_long_wait_text_is_cut_between_characters(path):
    recorder = make(path)
    recorder.begin_wait("é" * 200)
    assert read_recording(path).records[0].what == "é" * 64


def test_the_ring_wraps(path):
    recorder = make(path, slots=4)
    for step in range(10):
        recorder.before(TARGET, (torch.tensor([step]),), step)
    recording = read_recording(path)
    assert [record.step for record in recording.records] == [6, 7, 8, 9]
    assert (recording.wrapped, recording.lost, recording.torn) == (True, 0, 0)
    assert recording.records[-1].call == 10


def test_closing(path):
    recorder = make(path)
    assert read_recording(path).closed is None
    recorder.close()
    recorder.close()
    recorder.before(TARGET, (torch.tensor([1]),), 0)
    with recorder.waiting("anything"):
        pass
    recording = read_recording(path)
    assert recording.closed is not None
    assert len(recording.records) == 1


def test_leaving_by_an_exception_is_recorded_by_type_alone(path):
    with pytest.raises(ValueError, match="secret prompt"), make(path):
        raise ValueError("secret prompt")
    closed = read_recording(path).closed
    assert closed is not None
    assert closed.what == "failed: ValueError"
    assert b"secret" not in path.read_bytes()


def test_a_new_recorder_leaves_a_mapped_older_file_alone(path):
    older = make(path)
    make(path).close()
    older.before(TARGET, (torch.tensor([1]),), 0)  # SIGBUS, if the file had been cut
    assert [record.kind for record in read_recording(path).records] == ["closed"]


def test_a_recording_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match=r"rank-0001\.specsync: the recording cannot be made: .*Choose another"):
        make(recording_path(tmp_path / "file", 1))
    with pytest.raises(RecordingError, match="a ring of 0 records holds nothing"):
        make(tmp_path / "a", slots=0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RecordingError, match="No space left on device"):
        make(tmp_path / "a")


def test_a_torn_record_is_left_out(path):
    recorder = make(path)
    for step in range(3):
        recorder.before(TARGET, (torch.tensor([step]),), step)
    data = bytearray(path.read_bytes())
    ring = fmt.PREAMBLE.unpack_from(data)[4]
    data[ring + fmt.SLOT_BYTES + 40] ^= 1
    path.write_bytes(data)
    recording = read_recording(path)
    assert [record.step for record in recording.records] == [0, 2]
    assert (recording.torn, recording.lost) == (1, 1)


def test_a_cut_file_is_read_as_far_as_it_goes(path):
    recorder = make(path)
    for step in range(3):
        recorder.before(TARGET, (torch.tensor([step]),), step)
    data = path.read_bytes()
    ring = fmt.PREAMBLE.unpack_from(data)[4]
    path.write_bytes(data[: ring + 2 * fmt.SLOT_BYTES + 17])
    recording = read_recording(path)
    assert [record.step for record in recording.records] == [0, 1]
    assert recording.truncated


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a recording"),
        (b"something else entirely, and longer than a preamble", "not a recording"),
        (b"SPECSYNC\x01", "not a recording"),
        (fmt.PREAMBLE.pack(fmt.MAGIC, 99, 0, 0, 0, 0, 0), "version 99; this specsync reads version 1"),
        (fmt.PREAMBLE.pack(fmt.MAGIC, 1, fmt.SLOT_BYTES, 4, 4096, 10, 0) + b"0123456789", "damaged or cut off"),
        (fmt.PREAMBLE.pack(fmt.MAGIC, 1, fmt.SLOT_BYTES, 4, 4096, 10, 0) + b"01", "damaged or cut off"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, data, message):
    file = tmp_path / "x.specsync"
    file.write_bytes(data)
    with pytest.raises(RecordingError, match=message) as caught:
        read_recording(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecordingError, match=r"nowhere\.specsync: the recording cannot be read"):
        read_recording(tmp_path / "nowhere.specsync")


KILLED = """
import os, signal, sys, torch
from specsync_core.diagnostics import Recorder
from specsync_core.registry_files import builtin_registry, merge_registries
registry = merge_registries([builtin_registry()])
recorder = Recorder(sys.argv[1], group_rank=0, world_size=1, ranks=[0], plan_digest="", sites=registry.sites)
recorder.before(registry.site("dspark-target"), (torch.tensor([7, 8]),), 3)
recorder.begin_wait("tp all-reduce", "layer 0")
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_recording_survives_its_writer(path, number):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(int(number))], check=False, timeout=60)
    assert done.returncode == -number
    recording = read_recording(path)
    assert recording.records[0].values == (7, 8)
    assert recording.records[1].what == "tp all-reduce"
    assert recording.closed is None


def test_recording_and_reading_need_no_torch():
    code = (
        "import sys, specsync_core.diagnostics as d; d.parse_faults; d.Recorder; d.diagnose;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
