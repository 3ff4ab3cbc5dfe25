import pytest
import torch

from specsync_core.payload import declared, describe, find_problem
from specsync_core.registry import Site, TensorSpec


@pytest.fixture
def accept() -> Site:
    return Site(
        number=1000,
        slug="toy-accept",
        algorithm="toy",
        phase="accept",
        kind="broadcast",
        cause="float",
        tensors=(
            TensorSpec(name="lens", shape=("B",), dtypes=("int32", "int64")),
            TensorSpec(name="tokens", shape=("B", "D"), dtypes=("int64",)),
            TensorSpec(name="scores", shape=("B",), dtypes=("float32",), optional=True),
        ),
        graph=False,
        platforms=("cpu",),
        summary="a test's site",
    )


def lens(count: int = 3) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def tokens(count: int = 3) -> torch.Tensor:
    return torch.zeros(count, 2, dtype=torch.int64)


def test_what_fits_has_no_problem(accept):
    assert find_problem(accept, (lens(), tokens())) is None
    assert find_problem(accept, (lens(), tokens(), torch.zeros(3))) is None
    assert find_problem(accept, (lens(0), tokens(0))) is None
    assert find_problem(accept, (lens(6)[::2], torch.zeros(2, 3, dtype=torch.int64).t())) is None


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ((), "it takes 2 to 3 tensors, not 0"),
        ((lens(),), "it takes 2 to 3 tensors, not 1"),
        ((lens(), tokens(), torch.zeros(3), lens()), "it takes 2 to 3 tensors, not 4"),
        (([1, 2, 3], tokens()), "lens is a list, not a tensor"),
        ((lens().float(), tokens()), "lens is float32, not int32 or int64"),
        ((lens(), tokens()[:, 0]), r"tokens has shape [3], not [B, D]"),
        ((lens(4), tokens(3)), "B is 4 in lens and 3 in tokens"),
        ((lens(1).expand(3), tokens()), "lens is an expanded view whose elements share memory"),
        ((lens(), tokens(), torch.zeros(3, requires_grad=True)), "scores requires grad"),
        ((lens().to_sparse(), tokens()), "lens is torch.sparse_coo on cpu"),
        ((lens().to("meta"), tokens()), "lens is torch.strided on meta"),
    ],
)
def test_what_does_not_fit_is_named(accept, tensors, problem):
    assert problem in (find_problem(accept, tensors) or "nothing")


def test_a_tensor_of_inference_mode_is_refused_outside_of_it(accept):
    with torch.inference_mode():
        made = lens()
        assert find_problem(accept, (made, tokens())) is None
    assert "call sync in inference mode too" in (find_problem(accept, (made, tokens())) or "nothing")


def test_payloads_and_declarations_are_readable(accept):
    assert describe((lens(), tokens(), 5)) == "int32[3], int64[3, 2], int"
    assert declared(accept) == "lens int32|int64[B], tokens int64[B, D], scores float32[B] (optional)"
