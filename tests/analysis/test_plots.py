"""Figures have named axes and draw what they are given."""

import numpy as np

from headlab.analysis import plots
from headlab.analysis.spectra import Spectrum


def test_spectra_are_normalised_on_a_log_axis_with_their_theorems():
    found = Spectrum(np.array([4.0, 2.0, 0.0]), 9, 9)
    sketch = Spectrum(np.array([3.0, 1.0]), 9, 9, sketch=2)
    (axes,) = plots.draw_spectra({"tied": found, "mos": sketch}, {"tied": 2, "mos": None}).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlabel() and axes.get_ylabel()
    rule, first, second = axes.lines
    assert list(rule.get_xdata()) == [2, 2]
    np.testing.assert_allclose(first.get_ydata(), [1, 0.5])  # the zero has no place on a log axis
    np.testing.assert_allclose(second.get_ydata(), [1, 1 / 3])
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["tied, theorem: 2", "mos (sketch, estimates)"]


def test_the_legend_of_many_spectra_hides_none_of_them(tmp_path):
    spectra = {str(n): Spectrum(np.array([4.0, 1.0 / n]), 9, 9) for n in range(1, 10)}
    figure = plots.draw_spectra(spectra, dict.fromkeys(spectra, 2))
    figure.savefig(tmp_path / "figure.png")
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent()
    assert legend.x0 >= axes.get_window_extent().x1
    assert legend.x1 <= figure.bbox.x1 and len(axes.get_legend().get_texts()) == 9


def test_points_are_drawn_in_order_with_units(tmp_path):
    points = {"tied": [(4, 5.0), (2, 3.0)], "mos": [(2, 9.0)]}
    for figure, unit in (
        (plots.draw_rank(points, {"tied": [(2, 3.0), (4, 5.0)]}), "rank"),
        (plots.draw_loss(points), "nats"),
        (plots.draw_excess(points, rank=3), "nats"),
        (plots.draw_steps(points, "anisotropy (cosine)"), "cosine"),
    ):
        (axes,) = figure.axes
        assert unit in axes.get_ylabel() and axes.get_xlabel()
        figure.savefig(tmp_path / "figure.png")
    assert list(plots.draw_rank(points).axes[0].lines[0].get_xdata()) == [2, 4]
