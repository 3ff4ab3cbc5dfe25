"""docs/sglang-matrix.md is generated; the part that needs no engine is compared with what the plugins say today."""

from __future__ import annotations

from tests.engines.sglang.matrix_page import PAGE, site_table


def test_the_page_says_who_synchronises_each_site_in_each_version():
    missing = [line for line in site_table() if line not in PAGE.read_text().splitlines()]
    assert missing == [], "run `python -m tests.engines.sglang.matrix_page RESULTS.xml`"
