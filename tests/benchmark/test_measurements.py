"""What the measurements print."""

from vit_finetune.formatting import spread


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.26], 1) == "2.3 (1.0 to 3.0)"
    assert spread([10, 20]) == "15 (10 to 20)"
