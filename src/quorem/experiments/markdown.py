"""A figure's numbers as Markdown tables, one for each network; a test compares the documents with the files."""

from . import words
from .conditions import all_conditions
from .figures import Figure, Result

MARKS = {"adagrad": "", "amsgrad": "*"}
NOTE = "{what} after the last step; * with AMSGrad, otherwise Adagrad.\nTrained on {rows}."


def markdown(figure: Figure) -> str:
    """The tables: a line for each series, and a column for each value of x.

    The cells have the parameters if the figure is about parameters. Otherwise they have the loss that the figure draws,
    and the size if sizes differ within a column.
    """
    axes, text = figure.axes, []
    for network in dict.fromkeys(point.network for point in figure.points):
        results = [point for point in figure.points if point.network == network]
        xs: list[float | None] = [*sorted({point.x for point in results if point.x is not None})]
        head = [
            f"{words.network(network)}, {axes.y_label}",
            *([f"{axes.x_column} {x:g}" for x in xs] or ["final"]),
        ]
        rows = [head]
        for series in dict.fromkeys(point.series for point in results):
            line = {point.x: point for point in results if point.series == series}
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
    mean, deviation = (
        (point.validation_mean, point.validation_sd)
        if figure.axes.y == "validation"
        else (point.test_mean, point.test_sd)
    )
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
    return NOTE.format(what=what, rows="; ".join(conditions.text() for conditions in all_conditions(figure)))
