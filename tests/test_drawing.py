"""The style of plots: no background, and colours that are readable on light and on dark pages."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark import drawing
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

matplotlib = pytest.importorskip("matplotlib", reason="the extra plot is not installed")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")
to_rgba = pytest.importorskip("matplotlib.colors").to_rgba

PAGES = ("#FFFFFF", drawing.DARK_PAGE)
READABLE = 3  # WCAG 2.1, 1.4.11: graphical objects, and large text
SMALL_TEXT = 4.5  # WCAG 2.1, 1.4.3

PLOTS: dict[str, Callable[[Path], Any]] = {
    "over time": rmq_spark.plot_over_time,
    "skew": lambda store: rmq_spark.plot_queue_skew(store, "payments"),
    "tags": lambda store: rmq_spark.plot_tag_shares(store, "payments"),
    "delay": rmq_spark.plot_delay,
    "segment": rmq_spark.plot_segment,
    "lag": lambda store: rmq_spark.plot_lag(rmq_spark.open_reader(store).lag("reporting")),
    "nothing": lambda store: rmq_spark.plot_lag([]),
}


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def luminance(colour: Any) -> float:
    """Return the relative luminance of a colour (WCAG 2.1)."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgba(colour)[:3]]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: Any, other: Any) -> float:
    """Return the contrast ratio of two colours (WCAG 2.1), from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def faint(colours: dict[str, Any]) -> list[str]:
    """Return which of the colours are hardly visible on a page."""
    return [f"{name}: {colour} on {page}" for name, colour in colours.items() for page in PAGES if hidden(colour, page)]


def hidden(colour: Any, page: str) -> bool:
    return contrast(colour, page) < READABLE


def used_colours(ax: Any) -> dict[str, Any]:
    """Return the colours of all texts, lines, bars and cells of axes, by what they are. Faint grids are left out."""
    found = {}
    for artist in ax.findobj(lambda one: one.get_visible()):
        kind = type(artist).__name__
        if kind in ("Text", "Annotation", "_AxesTitle") and artist.get_text().strip():
            found[f"text {artist.get_text()!r}"] = artist.get_color()
        elif kind == "Line2D" and artist.get_alpha() is None and len(artist.get_xdata()):
            found[f"line {artist.get_label()}"] = artist.get_color()
        elif kind == "Spine":
            found["spine"] = artist.get_edgecolor()
        elif kind in ("Rectangle", "Patch") and to_rgba(artist.get_facecolor())[3] > 0.5:
            found[f"patch {artist.get_facecolor()}"] = artist.get_facecolor()
        elif kind == "AxesImage":
            pixels = {tuple(pixel) for line in artist.get_array().tolist() for pixel in line}
            found |= {f"pixel {pixel}": pixel for pixel in pixels if pixel[3] > 0.5}
    return found


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#FFFFFF", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)
    assert faint({"yellow": "#F0E442", "black": "#000000"}) == [
        "yellow: #F0E442 on #FFFFFF",
        f"black: #000000 on {drawing.DARK_PAGE}",
    ]


def test_every_colour_of_the_style_is_readable_on_light_and_dark_pages() -> None:
    names = ("INK", "OTHERS", "VIOLET", "CRIMSON")
    colours = {name: getattr(drawing, name) for name in names}
    assert not faint(colours | {colour: colour for colour in (*drawing.COLOURS, *drawing.CELL_COLOURS)})
    assert all(contrast(drawing.CELL_INK, colour) >= SMALL_TEXT for colour in drawing.CELL_COLOURS)
    used = {*drawing.COLOURS, *colours.values(), *drawing.CELL_COLOURS}
    assert len(used) == len({*colours.values()}) + len({*drawing.COLOURS, *drawing.CELL_COLOURS})


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_has_no_background_and_only_readable_colours(golden: Path, name: str) -> None:
    ax = PLOTS[name](golden / "demo")
    ax.figure.canvas.draw()
    assert to_rgba(ax.figure.get_facecolor())[3] == 0
    assert to_rgba(ax.get_facecolor())[3] == 0
    found = used_colours(ax)
    assert found
    assert not faint(found)


def test_axes_of_the_caller_get_the_style_and_keep_the_background_of_their_figure(golden: Path) -> None:
    figure, ax = plt.subplots(facecolor="#EEEEEE")
    rmq_spark.plot_queue_skew(golden / "demo", "orders", ax=ax)
    figure.canvas.draw()
    assert to_rgba(figure.get_facecolor()) == to_rgba("#EEEEEE")
    assert not faint(used_colours(ax))


def test_plot_style_gives_own_plots_the_same_look() -> None:
    with matplotlib.rc_context(rmq_spark.PLOT_STYLE):
        figure, ax = plt.subplots()
        for number in range(len(drawing.COLOURS)):
            ax.plot([0, 1], [number, 1], label=f"line {number}")
        ax.set(title="title", xlabel="x", ylabel="y")
        ax.legend()
        figure.canvas.draw()
        found = used_colours(ax)
    assert [line.get_color() for line in ax.lines] == list(drawing.COLOURS)
    assert to_rgba(figure.get_facecolor())[3] == 0
    assert not faint(found)


def test_every_line_has_another_colour(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [SampleMessage(f"T{number}") for number in range(7)])
    ax = rmq_spark.plot_delay(tmp_path / "store")
    assert len({line.get_color() for line in ax.lines}) == 7


def test_svg_text_is_transparent_and_the_same_for_the_same_picture(golden: Path) -> None:
    first, second = (drawing.svg_text(rmq_spark.plot_queue_skew(golden / "demo", "orders")) for _ in range(2))
    assert first == second
    assert "<svg" in first
    assert "#ffffff" not in first.lower()
