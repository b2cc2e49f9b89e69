"""A plot of a comparison's speedups."""

from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from backend_kwargs.compare.rows import Comparison, Row
from backend_kwargs.errors import BackendKwargsError, error_text, pip_install, wrong_value
from backend_kwargs.files.atomic_write import write_whole


def plot(comparison: Comparison, path: str | Path) -> None:
    """Write an image of the speedups with their intervals; the suffix of `path` selects the format.

    Raises BackendKwargsError if matplotlib is missing, does not know the format, or cannot write there.
    """
    check_drawable(path)
    from matplotlib.figure import Figure

    rows = comparison.rows
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    _draw_rows(axes, rows)
    if comparison.noise:
        axes.axvspan(comparison.noise.low, comparison.noise.high, color="0.88", zorder=0)
    axes.axvline(1.0, color="0.4", linewidth=1, zorder=1)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    band = "; grey: the baseline against itself" if comparison.noise else ""
    axes.set_xlabel(f"speedup over {comparison.baseline or 'nothing'}, median and 95 % interval{band}")
    where = comparison.environment
    axes.set_title(f"{comparison.mode} on {where['device_name']}, torch {where['torch']}", fontsize=10, loc="left")
    suffix = Path(path).suffix[1:].lower()
    # Not into the file: on a full disk matplotlib's writers leave it open, or raise errors of their own.
    image = StringIO() if suffix == "pgf" else BytesIO()
    try:
        figure.savefig(image, format=suffix, dpi=150)
    except (OSError, RuntimeError, ValueError) as error:  # pgf: no LaTeX
        raise BackendKwargsError(f"Cannot write {str(path)!r}: {error_text(error)}.") from error
    write_whole(Path(path), image.getvalue())


def check_drawable(path: str | Path) -> None:
    """Raise BackendKwargsError if `plot` cannot write a file of this name."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BackendKwargsError(f"plot needs matplotlib: {pip_install('plot')}.") from error
    if Path(path).suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise wrong_value("plot", "a file with the suffix of an image, such as .png, .svg or .pdf", str(path))


def _draw_rows(axes: Any, rows: list[Row]) -> None:
    # Notes are in a column next to the plot, where they cannot overlap a point.
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8, "annotation_clip": False}
    for at, row in enumerate(rows):
        axes.annotate(_note(row), (1.02, at), color="0.25" if row.passed else "tab:red", **beside)
        if row.speedup:
            middle = row.speedup.median
            reach = [[middle - row.speedup.low], [row.speedup.high - middle]]
            colour = "0.5" if row.verdict else "tab:blue" if middle > 1 else "tab:orange"
            axes.errorbar(middle, at, xerr=reach, fmt="o", color=colour, capsize=3, zorder=2)


def _note(row: Row) -> str:
    """Return what stands beside a row: its speedup, compile time and status."""
    if not row.passed and not row.speedup:
        return row.status
    compiled = f"compile {row.compile_s:.1f} s" if row.compile_s is not None else "not compiled"
    timed = f"{row.speedup.median:.2f}x   {compiled}" if row.speedup else compiled
    return timed if row.passed else f"{timed}   {row.status}"
