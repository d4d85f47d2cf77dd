"""What the measurements print."""

from vit_finetune.formatting import median_range


def test_spread_is_median_and_range() -> None:
    assert median_range([3.0, 1.0, 2.26], 1) == "2.3 (1.0 to 3.0)"
    assert median_range([10, 20]) == "15 (10 to 20)"
