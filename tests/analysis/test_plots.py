"""Figures have named axes and draw what they are given."""

import numpy as np

from headlab.analysis import plots
from headlab.analysis.spectra import Spectrum


def test_spectra_are_normalised_on_a_log_axis_with_their_theorems():
    found = Spectrum(np.array([4.0, 2.0, 0.0]), 9, 9)
    sketch = Spectrum(np.array([3.0, 1.0]), 9, 9, sketch=2)
    (axes,) = plots.draw_spectra({"tied": found, "mos": sketch}, {"tied": 2, "mos": None}).axes
    assert axes.get_yscale() == "log" and axes.get_xlabel() and axes.get_ylabel()
    first, second = (
        line for line in axes.lines if len(line.get_ydata()) == 2 and line.get_label()[0] != "_"
    )
    np.testing.assert_allclose(first.get_ydata(), [1, 0.5])  # the zero has no place on a log axis
    np.testing.assert_allclose(second.get_ydata(), [1, 1 / 3])
    assert second.get_label() == "mos (sketch, estimates)"
    assert "theorem: 2" in [text.get_text() for text in axes.texts]


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
