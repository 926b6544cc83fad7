"""The page of the real model shows what is counted and predicted."""

from pathlib import Path

import pytest

WHEEL = "the wheel's environments have JAX and pytest alone"
real_model = pytest.importorskip("real_model", reason=WHEEL)

pytestmark = [pytest.mark.needs("text"), pytest.mark.long]

PAGE = Path(real_model.__file__).parents[1] / "docs" / "real-model.md"


@pytest.mark.rare
def test_the_page_shows_the_tables():
    text = PAGE.read_text()
    for row in [row for table in real_model.tables() for row in table]:
        assert row in text
    assert f"{real_model.over_all_devices():.2f} times the mean of all 64" in text


def test_ranks_of_a_ring_have_equal_work():
    assert max(real_model.work()["`balance_documents`"]) <= 1.05
    assert real_model.placement().max_over_mean_by_step <= 1.05
    assert real_model.placement().computed_over_visible <= 1.02


def test_the_window_stands_for_as_many_pairs():
    """The busiest row's documents have the pairs of the window, within a token."""
    window, length = real_model.window_like_documents(), real_model.LENGTH
    pairs = real_model.keys_of_layers()["global"].sum(1).max()
    assert sum(min(i + 1, window) for i in range(length)) == pytest.approx(pairs, abs=length)


def test_placed_blocks_beat_contiguous_rows():
    """Where a row is one document, by nearly the ratio 2 − 1/P of causal attention's work."""
    ours, theirs = (
        sum(real_model.layer_ms(real_model.layers()[f"global layer, {name}, one document"]))
        for name in ("placed blocks", "contiguous all-gather")
    )
    assert theirs / ours == pytest.approx(2 - 1 / real_model.CONTEXT, rel=0.02)
