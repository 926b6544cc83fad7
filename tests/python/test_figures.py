"""Pages that repeat measured figures, compared with the files of results."""

import importlib

import platforms
import pytest

pytestmark = pytest.mark.needs("text")


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(platforms.ROOT / "benchmarks")
    return importlib.import_module("figures")


def test_tables_are_those_of_the_results(figures):
    for page in figures.pages():
        text = page.read_text()
        assert figures.filled(text) == text, "run make figures"


def test_every_table_stands_in_a_page(figures):
    named = [
        found["name"]
        for page in figures.pages()
        for found in figures.BLOCK.finditer(page.read_text())
    ]
    assert set(named) == set(figures.TABLES)


def test_sentences_have_the_figures_of_the_results(figures):
    assert figures.missing() == []


def test_another_figure_changes_the_table(figures, monkeypatch):
    page = platforms.ROOT / "docs" / "gpus.md"
    assert "| forward d128 full 8k | 563 | 557 |" in page.read_text()
    speed = [
        row | {"contenders": {"ours": {"tflops": 619.0}}}
        for row in figures.results(figures.H100)["speed"]
    ]
    monkeypatch.setattr(figures, "results", lambda name: {"speed": speed})
    assert "| forward d128 full 8k | 563 | 619 |" in figures.markdown(figures.gpu_rates())
