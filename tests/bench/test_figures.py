"""The benchmark's arithmetic, on numbers whose answers are known."""

from __future__ import annotations

import pytest

from connector.bench import figures
from connector.bench.figures import Row, Rule

RULE = Rule("a_vs_b", "p50_us", "a", "chunk", "p50_us", "b", "chunk")


def row(system: str, at: int, p50: float) -> Row:
    return Row(system, "chunk", at, 10, 4104, p50, 2 * p50, 100.0, 5.0, 1.0)


def test_a_ratio_is_made_in_each_round_and_its_median_is_told() -> None:
    rows = [row("a", 0, 10), row("b", 0, 10), row("a", 1, 30), row("b", 1, 10), row("b", 2, 1), row("a", 2, 4)]
    found = figures.ratios(rows, [RULE])["a_vs_b"]
    assert found == ("a_vs_b", 3.0, 1.0, 4.0, 3)


def test_a_round_without_both_sides_counts_in_no_ratio() -> None:
    assert figures.ratios([row("a", 0, 10), row("b", 1, 10)], [RULE]) == {}
    assert figures.ratios([row("a", 0, 10), row("a", 1, 9), row("b", 1, 3)], [RULE])["a_vs_b"].rounds == 1


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 51.0), (0.99, 100.0), (1.0, 100.0)])
def test_a_quantile_is_a_value_that_was_measured(share: float, value: float) -> None:
    assert figures.quantile([float(number) for number in range(100, 0, -1)], share) == value


def test_the_first_tenth_is_left_out() -> None:
    assert list(figures.settled([9.0] * 2 + [1.0] * 18)) == [1.0] * 18


def test_a_rate_is_microseconds_each() -> None:
    assert row("a", 0, 1)._replace(per_s=20_000.0).us_each == 50.0


@pytest.mark.parametrize(("measured", "void"), [(49.0, True), (50.0, False), (200.0, False), (201.0, True)])
def test_limits_beyond_a_factor_two_make_a_run_void(measured: float, void: bool) -> None:
    assert figures.far_off({"x": measured, "other": 1.0}, {"x": 100.0}) == ({"x": (measured, 100.0)} if void else {})
