"""``order_by_cooccurrence`` on sessions with planted clusters."""

import pytest
import torch

import quorem


def planted(items: int, clusters: int, sessions: int, noise: float = 0.05) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    cluster = torch.randperm(items, generator=generator) % clusters
    members = [(cluster == c).nonzero().flatten() for c in range(clusters)]
    drawn = []
    for s in range(sessions):
        own = members[s % clusters]
        session = own[torch.randint(len(own), (12,), generator=generator)]
        strangers = torch.randint(items, (12,), generator=generator)
        drawn.append(torch.where(torch.rand(12, generator=generator) < noise, strangers, session))
    return drawn, cluster


def test_clusters_become_runs_of_numbers():
    sessions, cluster = planted(256, 8, 800)
    number = quorem.order_by_cooccurrence(sessions)
    assert sorted(number.tolist()) == list(range(256))
    ordered = cluster[torch.argsort(number)]
    assert (ordered[1:] != ordered[:-1]).sum() < 3 * 8  # at random there would be about 223 changes


def test_ids_that_are_rare_or_never_occur_have_numbers():
    generator = torch.Generator().manual_seed(1)
    popularity = 1 / torch.arange(1, 1501).double() ** 2
    sessions = list(torch.multinomial(popularity, 40 * 100, replacement=True, generator=generator).view(40, 100))
    assert sorted(quorem.order_by_cooccurrence(sessions, 1500).tolist()) == list(range(1500))


@pytest.mark.parametrize(
    ("sessions", "n", "message"),
    [
        ([], None, "sessions must hold at least one id"),
        ([[], torch.tensor([])], None, "sessions must hold at least one id"),
        ([[0.5]], None, r"session \(torch.float32\) must be an integer tensor"),
        ([torch.tensor([1, 9])], 5, r"sessions hold id 9, which must be in \[0, 5\)"),
        ([torch.tensor([-1, 2])], 5, r"sessions hold id -1, which must be in \[0, 5\)"),
    ],
)
def test_refused(sessions, n, message):
    with pytest.raises((TypeError, ValueError), match=message):
        quorem.order_by_cooccurrence(sessions, n)
