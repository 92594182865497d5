"""Parts that all plots share: their style, axes, colours, legends, and names from a store shown as plain text.

The style is declared here, once. A plot has no background of its own, and each colour is readable on a white page and
on the dark page of a notebook or of the documentation: its contrast with both is at least 3:1 (WCAG 2, 1.4.11).
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any

from rmq_spark.store import bytes_text, span_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SERIES = 7  # the number of colours that are easily distinguished; the smallest series are joined as "others"
DARK_PAGE = "#1E2129"  # the background of mkdocs-material's dark pages; those of notebooks are darker
INK = "#7F7F7F"  # text, axes and ticks
# The palette of Okabe and Ito. Orange and sky blue are darker, and brown replaces black, for the contrast.
COLOURS = ("#0072B2", "#C08400", "#009E73", "#CC79A7", "#2F97DA", "#D55E00", "#8C6D46")
VIOLET, CRIMSON = "#8A63D2", "#D6336C"
# Cells with white text, whose contrast with the text is at least 4.5:1. Neighbours differ for colour-blind readers too.
CELL_COLOURS, CELL_INK = ("#0072B2", "#B85000", "#007C91", "#B5487B", "#8C6D46"), "#FFFFFF"
# matplotlib's settings for the style, as `matplotlib.rcParams.update` accepts them.
PLOT_STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "legend.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
}
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "---")  # for print, and for readers who do not see colours
MARKERS = "osD^vPX"
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
OTHERS = "#808080"
# The number of characters that are shown of a long name. Its end is shown because long names often differ only there.
_NAME_HEAD, _NAME_TAIL, _NAME_EDGE = 24, 15, 8
_TITLE_CHARS = 75  # per line
_LEGEND_BELOW_INCHES = 0.55  # room for the labels of the axis

# Round durations for the ticks of an axis, in ms.
_SPANS_MS = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 86_400_000, *(864 * 10**n for n in range(6, 11)))
_MAX_SPANS = 10
_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 14_400, 28_800, 43_200, 86_400)
_STEPS_S_SHOWN = 7

# Fonts for characters that matplotlib's default font lacks. The first one that is installed is used.
_HAN_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Arial Unicode MS",
)


def axes(ax: "Axes | None", height: float = 4.2) -> "Axes":
    """Return `ax` if it is given, else the axes of a new figure with a height of `height` inches.

    Raises ModuleNotFoundError with the pip command if matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ModuleNotFoundError(
            f"drawing needs matplotlib: it is not installed for {sys.executable}; expected the extra plot. "
            'Install it: pip install "rmq-spark[plot]".',
            name="matplotlib",
        ) from None
    if ax is None:
        _, ax = plt.subplots(figsize=(9, height), layout="constrained", facecolor=PLOT_STYLE["figure.facecolor"])
    apply_style(ax)
    return ax


def apply_style(ax: "Axes") -> None:
    """Set the colours of axes as PLOT_STYLE has them. The background of the figure stays as the caller made it."""
    ax.set_facecolor(PLOT_STYLE["axes.facecolor"])
    ax.spines[:].set_edgecolor(INK)
    ax.tick_params(which="both", colors=INK)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_color(INK)
        axis.get_offset_text().set_color(INK)


def shown_name(name: str) -> str:
    """Return a name on one line. A long name is shortened in the middle."""
    return shown_names([name])[0]


def shown_names(names: Iterable[str]) -> list[str]:
    """Return each name on one line. Long names are shortened so that the parts in which they differ remain.

    A name that begins with an underscore gets a leading space, because matplotlib would leave it out of legends.
    """
    lines = ["".join(char if char.isprintable() else ascii(char)[1:-1] for char in name) for name in names]
    shown = [_without_middle(line) for line in lines]
    for short in [short for short, count in Counter(shown).items() if count > 1]:
        alike = [at for at, one in enumerate(shown) if one == short]
        low, high = min(lines[at] for at in alike), max(lines[at] for at in alike)
        differ_at = next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
        for at in alike:
            begin = max(differ_at - _NAME_EDGE, 0)
            shown[at] = f"{lines[at][:_NAME_EDGE]}…{lines[at][begin : begin + _NAME_HEAD]}…"
    return [f" {short}" if short.startswith("_") else short for short in shown]


def _without_middle(line: str) -> str:
    return line if len(line) <= _NAME_HEAD + _NAME_TAIL + 1 else f"{line[:_NAME_HEAD]}…{line[-_NAME_TAIL:]}"


def font_families() -> list[str]:
    """Return the names of matplotlib's fonts, and of one font with Chinese characters if one is installed."""
    from matplotlib import rcParams
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [*rcParams["font.family"], *[name for name in _HAN_FONTS if name in installed][:1]]


def title(ax: "Axes", first: str, *more: str) -> None:
    """Set the title: one line, or two if it is long, with `more` on the second. Dollar signs do not start formulas."""
    line = ", ".join((first, *more))
    ax.set_title(
        line if len(line) <= _TITLE_CHARS else "\n".join((first, *more)), fontsize="medium", parse_math=False, color=INK
    )


def largest(series: dict[str, list[float]], join: Any = sum) -> list[tuple[str, list[float]]]:
    """Return at most MAX_SERIES series as (name, values), in descending order of their sums.

    If there are more, the smallest ones become one series "N others"; `join` combines their values at each position.
    NaN means a missing value.
    """
    ordered = sorted(series.items(), key=lambda one: -sum(_known(one[1])))
    if len(ordered) <= MAX_SERIES:
        return ordered
    rest = [values for _, values in ordered[MAX_SERIES - 1 :]]
    joined = [join(known) if (known := _known(values)) else math.nan for values in zip(*rest, strict=True)]
    return [*ordered[: MAX_SERIES - 1], (f"{len(rest)} others", joined)]


def colours(drawn: Sequence[tuple[str, Any]]) -> list[str]:
    """Return a colour for each series. The series "N others" of `largest` is grey.

    It cannot be mistaken for a topic, because topic names contain no space.
    """
    return [OTHERS if name.endswith(" others") else colour for (name, _), colour in zip(drawn, COLOURS, strict=False)]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def moment(time_ms: float) -> datetime:
    """Return a time in ms since the epoch as a datetime in UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def time_axis(ax: "Axes", label: str) -> None:
    """Format the x axis as times. Ticks show days or times of day; what they share is shown once, at the axis' end."""
    from matplotlib.dates import MINUTELY, SECONDLY, AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=7)
    locator.intervald[MINUTELY] = locator.intervald[SECONDLY] = [1, 2, 5, 10, 15, 30]
    formatter = ConciseDateFormatter(locator, tz=UTC)
    formatter.formats[2] = formatter.zero_formats[2] = "%b %d"
    formatter.offset_formats[2] = "%Y"
    formatter.formats[5] = "%H:%M:%S.%f"  # the default, seconds alone, is ambiguous
    formatter.zero_formats[5] = "%H:%M:%S"
    formatter.offset_formats[5] = "%Y-%b-%d"
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(formatter)
    ax.set_xlabel(label)


def count_axis(ax: "Axes", what: str) -> None:
    """Format the y axis, which starts at 0, for `what`: "messages", "bytes" or "seconds"."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    ax.set_ylim(0, max(ax.get_ylim()[1], 1))
    most = ax.get_ylim()[1]
    if what == "bytes":
        bytes_axis(ax.yaxis, most)
        ax.set_ylabel("bytes of records")
    elif what == "seconds":
        steps = [*_STEPS_S, math.ceil(most / _STEPS_S_SHOWN / 86_400) * 86_400]
        step = next(step for step in steps if step * _STEPS_S_SHOWN >= most)
        ax.yaxis.set_major_locator(MultipleLocator(step))
        ax.yaxis.set_major_formatter(lambda value, _: span_text(value))
        ax.set_ylabel("time behind")
    else:
        ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.set_ylabel("messages")
    frame(ax, "y")


def bytes_axis(axis: Any, most: float, ticks: int = 8) -> None:
    """Format an axis that ends at `most` bytes, with at most `ticks` ticks at round numbers of KiB, MiB and so on."""
    from matplotlib.ticker import MultipleLocator

    axis.set_major_locator(MultipleLocator(2 ** max(0, math.ceil(math.log2(max(most, 1) / ticks)))))
    axis.set_major_formatter(lambda value, _: bytes_text(value))


def spans_axis(ax: "Axes", least_ms: float, most_ms: float) -> None:
    """Format the x axis for durations from `least_ms` to `most_ms`: logarithmic on both sides of 0, round limits."""
    from matplotlib.ticker import FixedLocator, NullLocator

    reach = max(abs(least_ms), abs(most_ms), 1)
    spans = [span for at, span in enumerate(_SPANS_MS) if at == 0 or _SPANS_MS[at - 1] < reach]
    ticks = [*(-span for span in reversed(spans)), 0, *spans]
    below = max((tick for tick in ticks if tick <= least_ms), default=least_ms)
    above = min((tick for tick in ticks if tick >= max(most_ms, 1)), default=most_ms)
    begin = min(below, 0)
    shown = [tick for tick in ticks if begin <= tick <= above]
    every = -(-len(shown) // _MAX_SPANS)
    ax.set_xscale("symlog", linthresh=1)
    ax.xaxis.set_major_locator(
        FixedLocator([tick for tick in shown if (shown.index(tick) - shown.index(0)) % every == 0])
    )
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: "0" if value == 0 else span_text(value / 1000))
    ax.set_xlim(begin, above)


def frame(ax: "Axes", axis: str) -> None:
    """Draw the grid lines of `axis` ("x", "y" or "both"), and hide the top and right lines of the frame."""
    ax.set_axisbelow(True)
    ax.grid(axis=axis, color=INK, alpha=0.25, lw=0.8)
    ax.spines[["top", "right"]].set_visible(False)


def legend(ax: "Axes", count: int, is_stacked: bool = False) -> None:
    """Draw a legend beside the plot if `count`, the number of series, is more than one.

    With `is_stacked` the topmost series of the stack is the first one in the legend.
    """
    if count > 1:
        drawn = ax.legend(
            reverse=is_stacked,
            loc="upper left",
            bbox_to_anchor=(1.01, 1),
            frameon=False,
            labelcolor=INK,
            fontsize="small",
            handleheight=1.3 if is_stacked else None,  # room for a hatch
        )
        _disable_formulas(drawn)


def legend_below(ax: "Axes") -> None:
    """Draw a legend below the plot, where long names have room."""
    from matplotlib.transforms import ScaledTranslation

    down = ScaledTranslation(0, -_LEGEND_BELOW_INCHES, ax.figure.dpi_scale_trans)
    drawn = ax.legend(
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + down,
        borderaxespad=0,
        frameon=False,
        labelcolor=INK,
        fontsize="small",
    )
    _disable_formulas(drawn)


def nothing(ax: "Axes", why: str) -> "Axes":
    """Write `why` in place of an empty plot, and return the axes."""
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes, parse_math=False, color=INK)
    ax.set_axis_off()
    return ax


def ms_text(delay_ms: float) -> str:
    """Return a delay as text, such as "12 ms", "1,051 ms" or "2 min 3 s"."""
    return f"{delay_ms:,.0f} ms" if abs(delay_ms) < 10_000 else span_text(delay_ms / 1000)


def _disable_formulas(drawn_legend: Any) -> None:
    for text in drawn_legend.get_texts():
        text.set_parse_math(False)


def svg_text(ax: "Axes") -> str:
    """Return the figure of `ax` as an SVG image with a transparent background. Equal figures give equal texts."""
    from matplotlib import rc_context

    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "rmq-spark", "svg.fonttype": "path"}):
        ax.figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode()
