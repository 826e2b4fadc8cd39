"""A grid of one's own: which scheme, at which size, on my data?

    quorem sweep examples/my_sweep.py --data PREPARED --out runs/mine

Every point is trained with each optimizer and several seeds; the page shows mean and deviation of the better one.
"""

from quorem import QR, ChineseRemainder, Full
from quorem.experiments.figures import Axes, Point

AXES = Axes(
    name="my_sweep",
    title="Products, sums, and a third table",
    x="embedding_bytes",
    x_label="bytes of the embedding tables",
    x_log=True,
    baseline="full",
)

POINTS = [Point(series="full", x=None, options={"network": "dlrm", "scheme": Full()})]
for c in (4, 16, 60):
    for series, scheme in {
        "mult": QR(c),
        "add": QR(c, operation="add"),
        "chinese, k=3": ChineseRemainder(3, num_collisions=c),
    }.items():
        POINTS.append(Point(series=series, x=c, options={"network": "dlrm", "scheme": scheme}))
