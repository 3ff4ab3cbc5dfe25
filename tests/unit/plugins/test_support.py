import pytest
import torch

from tests.unit.plugins.support import LoneSync, assert_distributed, chi_square_p


@pytest.mark.parametrize(
    ("statistic", "degrees", "p_value"), [(3.841, 1, 0.05), (18.307, 10, 0.05), (13.277, 4, 0.01), (37.566, 20, 0.01)]
)
def test_p_values_are_the_tables(statistic, degrees, p_value):
    counts = torch.full((degrees + 1,), 1000.0)
    # Two cells off by d each make a statistic of 2 d^2 / expected.
    shift = (statistic * 1000 / 2) ** 0.5
    counts[0] += shift
    counts[1] -= shift
    assert chi_square_p(counts, torch.full((degrees + 1,), 1 / (degrees + 1))) == pytest.approx(p_value, rel=1e-2)


def test_a_slightly_wrong_distribution_is_noticed():
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    draws = torch.multinomial(probabilities, 40_000, replacement=True, generator=torch.Generator().manual_seed(0))
    assert_distributed(draws.unsqueeze(1), probabilities)
    with pytest.raises(AssertionError, match="p ="):
        assert_distributed(draws.unsqueeze(1), torch.tensor([0.115, 0.2, 0.3, 0.385]))


def test_the_lone_sync_refuses_a_payload_that_its_site_does_not_declare():
    with pytest.raises(AssertionError, match="dspark-plan: verify_lens is int64, not int32"):
        LoneSync().sync("dspark-plan", torch.zeros(2, dtype=torch.int64))
