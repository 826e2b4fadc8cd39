"""The pictures of the documents."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from bench_rows import row

spec = importlib.util.spec_from_file_location("pictures", Path(__file__).parents[2] / "benchmarks" / "pictures.py")
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)


def test_panels_share_a_legend_colours_and_the_sizes_that_were_measured():
    rows = [row(mode=mode, batch=batch) for mode in ("step", "forward") for batch in (2048, 1, 128)]
    rows += [row(provider="loop", median_us=10.0), row(provider="loop", mode="forward", graph=1, batch=1)]
    rows += [row(dim=64, batch=5), row(ids="uniform", batch=7)]
    rows += [row(scheme="ChineseRemainder(3)", batch=9), row(scheme="Full()", batch=8)]
    figure = pictures.speed(rows)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["loop", "fused", "eager", "CUDA graph"]
    assert [axis.get_title() for axis in figure.axes] == ["forward, D = 16", "step, D = 16"]
    for axis in figure.axes:
        assert axis.get_legend() is None
        assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "128", "2048"]
        lines = {drawn.get_label(): drawn.lines[0] for drawn in axis.containers}
        shown = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.get_lines(), strict=True)}
        assert {name: line.get_color() for name, line in lines.items()} == {n: shown[n].get_color() for n in lines}
        assert (lines["fused"].get_linestyle(), lines["fused"].get_xdata().tolist()) == ("--", [1, 128, 2048])
