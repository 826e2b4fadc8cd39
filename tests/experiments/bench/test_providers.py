"""Every provider computes the vectors and the step of the same tables."""

import pytest
import torch

from quorem.experiments.bench import run
from quorem.experiments.bench.grid import FBGEMM, PROVIDERS, draw_ids, scheme_of
from quorem.experiments.bench.providers import Skipped

SIZES = (50, 4, 1000, 7)
CPU = torch.device("cpu")


def contender(provider: str, scheme: str, mode: str):
    if provider in FBGEMM:
        pytest.importorskip("fbgemm_gpu", reason='needs FBGEMM: pip install "quorem[torchrec-cpu]"')
    return run.build(provider, scheme, mode, SIZES, 8, CPU)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with the mean of a row's squared gradient instead of each square, on dense gradients."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.sums = [torch.zeros(len(p), 1) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:
        for p, total in zip(self.param_groups[0]["params"], self.sums, strict=True):
            total += p.grad.square().mean(1, keepdim=True)
            p -= self.defaults["lr"] * p.grad / (total.sqrt() + 1e-10)


@pytest.mark.parametrize(
    ("provider", "scheme"), [*((provider, "QR(4)") for provider in PROVIDERS), ("fused", "GeneralizedQR(3)")]
)
def test_every_provider_gives_the_vectors_of_the_same_tables(provider, scheme):
    ids = draw_ids("zipf", SIZES, 33, seed=3)
    made = contender(provider, scheme, "forward")
    tables = run.collection(scheme_of(provider, scheme), SIZES, 8, CPU).to_dense().values()
    expected = torch.stack([table[ids[:, f]] for f, table in enumerate(tables)], 1)
    with torch.no_grad():
        torch.testing.assert_close(made.module(ids), expected[:, made.order or list(range(4))])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_provider_takes_the_same_step(provider):
    """Adagrad's on the dense gradient of the tables, as ``torch.optim`` takes it, or with one sum a row."""
    ids = draw_ids("zipf", SIZES, 33, seed=3)
    made = contender(provider, "QR(4)", "step")
    oracle = run.collection(scheme_of(provider, "QR(4)"), SIZES, 8, CPU)
    rule = RowWiseAdagrad if "row-wise" in made.optimizer else torch.optim.Adagrad
    optimizer = rule(oracle.parameters(), lr=0.01)
    order = made.order or list(range(4))
    grad = torch.randn(33, 4, 8, generator=torch.Generator().manual_seed(33)) / 33  # as in the benchmark
    for _ in range(2):
        run.operation("step", made, ids)()
        oracle(ids)[:, order].backward(grad)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(made.module(ids), oracle(ids)[:, order])


def test_a_provider_of_other_vectors_is_refused(monkeypatch):
    def wrong(source, mode):
        source.stored.data.mul_(2)
        return run.Contender(source)

    monkeypatch.setitem(run.BUILD, "loop", wrong)
    with pytest.raises(Skipped, match="its vectors differ"):
        run.build("loop", "QR(4)", "forward", SIZES, 8, CPU)


@pytest.mark.parametrize("provider", FBGEMM)
def test_fbgemm_runs_in_a_graph_where_fused_does(provider):
    made = contender(provider, "QR(4)", "step")
    assert made.captures_step
    assert made.setting == ("fastest" if provider.endswith("fastest") else "default")
    bounds = made.module.lookup.bounds_check_mode_int
    assert (bounds == 3) == (made.setting == "fastest")  # BoundsCheckMode.NONE
