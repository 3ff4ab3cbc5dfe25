"""An end for the engines' suites: what has not begun by then is skipped, by name and with a reason."""

from __future__ import annotations

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--none-after",
        type=float,
        metavar="EPOCH_S",
        help="begin no test after this time (seconds since 1970): it is skipped, with a reason",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    end = item.config.getoption("--none-after")
    if end is not None and time.time() > end:
        pytest.skip("the time given to the engines is over: run `make test-engines`")
