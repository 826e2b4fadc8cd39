"""Beyond the paper: more than two tables, at equal budgets down to a thousandth of the parameters.

Two tables cannot have fewer than 2 sqrt(n) rows; three or four can. The figure compares, at each budget, hashing, the
quotient-remainder trick (one large and one small table), and generalized quotient-remainder and Chinese remainder with
2, 3 or 4 tables of equal size.
"""

from collections.abc import Sequence

from ..paper.schemes import QR, ChineseRemainder, GeneralizedQR, Hash, Scheme
from .figures import Axes, Point
from .paper_figures import Study

SHARES = (4, 16, 60, 250, 1000)  # rows of the full table for each stored row
AXES = Axes(
    name="budgets",
    title="Beyond the paper: 2, 3 and 4 tables at equal budgets",
    x="embedding_bytes",
    x_label="bytes of the embedding tables",
    x_log=True,
    paper="Not in the paper, whose experiments have two tables, one of them large.",
    baseline="full",
)


def schemes(share: int) -> dict[str, Scheme]:
    """Schemes that store ``1 / share`` of the rows; or the fewest that cover the ids, if those are more."""
    result: dict[str, Scheme] = {"hash": Hash(share), "mult": QR(share)}
    for k in (2, 3, 4):
        result[f"generalized, k={k}"] = GeneralizedQR(k, num_collisions=share)
        result[f"chinese, k={k}"] = ChineseRemainder(k, num_collisions=share)
    return result


def points(study: Study) -> list[Point]:
    """Every scheme at every share; a scheme that has reached its smallest size is not repeated."""
    result, seen = study.points("full"), set()
    for share in SHARES:
        for series, scheme in schemes(share).items():
            if (layout := (series, rows_of(scheme, study.cardinalities))) not in seen:
                seen.add(layout)
                result += study.of_each_network(series, share, {"scheme": scheme})
    return result


def rows_of(scheme: Scheme, cardinalities: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Number of rows of each stored table, for each feature.

    >>> rows_of(GeneralizedQR(3, num_collisions=60), [10**6, 1000])
    ((5556, 5556, 5555), (10, 10, 10))
    """
    return tuple(tuple(rows for rows, _ in scheme.spec(n, 16).shapes) for n in cardinalities)
