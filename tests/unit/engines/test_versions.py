import pytest

from specsync_core import EngineError
from specsync_core.engines.versions import is_among


@pytest.mark.parametrize(
    ("version", "wanted", "among"),
    [
        ("0.5.17", ">=0.5.16,<0.5.19", True),
        ("0.5.19", ">=0.5.16,<0.5.19", False),
        ("0.5.9", ">=0.5.16,<0.5.19", False),
        ("0.5.17", "==0.5.17", True),
        ("0.5.17+cpu", "==0.5.17", True),
        ("0.5.17.post1", "==0.5.17", False),
        ("0.5.18rc1", ">=0.5.16,<0.5.19", False),
        ("1.0", "!=0.5.17, >0.9", True),
        ("0.9", "<=0.9", True),
    ],
)
def test_a_version_is_among_those_that_meet_every_condition(version, wanted, among):
    assert is_among(version, wanted) is among


@pytest.mark.parametrize("wanted", ["0.5.17", "~=0.5", ">=x", ""])
def test_a_condition_that_cannot_be_read_is_an_error(wanted):
    with pytest.raises(EngineError, match="is not one of ==, !=, >=, <=, >, < and a version"):
        is_among("0.5.17", wanted)
