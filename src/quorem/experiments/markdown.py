"""A figure's numbers as Markdown tables, one for each network; a test compares the documents with the files."""

from . import words
from .conditions import all_conditions
from .figures import Figure, Result, grouped

MARKS = {"adagrad": "", "amsgrad": "*"}


def markdown(figure: Figure) -> str:
    """The tables: a line for each series, and a column for each value of x.

    The cells have the parameters if the figure is about parameters. Otherwise they have the loss that the figure draws,
    and the size if sizes differ within a column.
    """
    if not figure.points:
        return "No point of this figure is trained yet.\n"
    axes, text = figure.axes, []
    for network, results in grouped(figure.points, lambda point: point.network).items():
        xs: list[float | None] = [*sorted({point.x for point in results if point.x is not None})]
        columns = [f"{axes.x_column} {x:g}" for x in xs] or ["final"]
        rows = [[f"{words.network(network)}, {axes.y_label}", *columns]]
        for series, members in grouped(results, lambda point: point.series).items():
            line = {point.x: point for point in members}
            cells = [cell(figure, line.get(x, line.get(None))) for x in xs or [None]]
            if None in line and xs:
                cells[1:] = [""] * (len(cells) - 1)
            rows.append([series, *cells])
        text += [*words.table(rows), ""]
    if axes.y != "parameters":
        text.append(note(figure))
    return "\n".join(text).rstrip() + "\n"


def cell(figure: Figure, point: Result | None) -> str:
    """One cell."""
    if point is None:
        return ""
    if figure.axes.y == "parameters":
        return f"{point.parameters:,}"
    mean, deviation = point.loss(figure.axes.y)
    if mean is None:
        return ""
    size = f", {words.size(point.embedding_bytes)}" if figure.axes.x == "embedding_bytes" else ""
    deviation_text = f" ± {deviation:.4f}" if point.trials > 1 and deviation is not None else ""
    return f"{mean:.4f}{deviation_text}{MARKS.get(point.optimizer, '')}{size}"


def note(figure: Figure) -> str:
    """A note that explains the cells, and says what the models were trained on."""
    trials = sorted({point.trials for point in figure.points})
    many = " to ".join(map(str, dict.fromkeys((trials[0], trials[-1]))))
    what = "One trial" if trials == [1] else f"Mean and standard deviation over {many} trials"
    rows = "; ".join(conditions.text() for conditions in all_conditions(figure))
    return f"{what} after the last step; * with AMSGrad, otherwise Adagrad.\nTrained on {rows}."
