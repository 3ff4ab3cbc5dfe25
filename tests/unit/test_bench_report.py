"""From measured microseconds to the table and the JSON of ``specsync bench``."""

import json

from specsync_core.bench.gpu import median_difference
from specsync_core.bench.report import TITLES, report, slowest, table

ROW = {1: 10.0, 16: 20.0}


def test_the_slower_rank_counts_row_by_row():
    assert slowest([{"pg 1": {1: 3.0, 16: 9.0}}, {"pg 1": {1: 5.0, 16: 8.0}}]) == {"pg 1": {1: 5.0, 16: 9.0}}


def test_a_cost_is_the_median_of_what_each_sample_took_longer_in_its_turn():
    assert median_difference([110.0, 160.0, 215.0], [100.0, 150.0, 200.0]) == 10.0


def test_rows_are_compared_with_the_process_group_at_the_same_batch_and_clock():
    ranks = [{"pg 1": ROW, "one-shot 1": {1: 2.0, 16: 5.0}, "host pg 1": {16: 30.0}, "host one-shot 1": {16: 6.0}}]
    result = report(ranks, "graph")
    ratios = {row["key"]: row["ratio"] for row in result["rows"]}
    assert ratios["one-shot 1"] == {1: 0.2, 16: 0.25}
    assert ratios["host one-shot 1"] == {16: 0.2}
    assert [row["time"] for row in result["rows"]] == ["graph", "graph", "host", "host"]
    assert {"schema", "date", "machine", "torch", "commit", "ranks"} <= set(result)
    json.dumps(result)


def test_the_table_shows_microseconds_and_ratios():
    columns, rows = table(report([{"pg 1": ROW, "one-shot 1": {16: 5.0}}], "graph"))
    assert columns == ["time", "bs=1", "bs=16", "what"]
    assert rows == [
        ["graph", "10.0 (1.00)", "20.0 (1.00)", "one broadcast, process group"],
        ["graph", "", "5.0 (0.25)", "one-shot, one tensor"],
    ]


def test_every_baseline_is_a_row():
    assert {baseline for _, baseline in TITLES.values() if baseline} <= set(TITLES)
