"""Which scheme for a catalogue? Recall and NDCG of a sequential recommender at equal bytes, on two sets of sessions.

    python benchmarks/catalogue_quality.py --movielens ml-100k.inter --out benchmarks/results/catalogue_quality.json

``--movielens`` is the file of MovieLens-100k with columns user, item, rating, timestamp, as RecBole's wheel has it
(``recbole/dataset_example/ml-100k/ml-100k.inter``). Without it only made-up sessions are used. The last item of each
user is for the test; those before it train. The made-up catalogue has topics, and a session stays in one.

The model sees the last items of a session and scores every item: mean of their vectors, one hidden layer, product with
the table. It is trained by ``quorem.cross_entropy`` and tested with ``topk`` over all items. Bytes are those of all
parameters and buffers of the table.
"""

import argparse
import math
from itertools import product
from pathlib import Path
from typing import Any

import result_file
import torch
from torch import Tensor, nn

import quorem

D, SEEN, EPOCHS, BATCH, K = 32, 8, 3, 512, 20
LONGEST = 60  # items of a user of MovieLens, the last ones
TIMES = (4, 16, 60)
LARGE = "QR add, large quotient"
SETTINGS = ("hash", "QR add", "QR mult", LARGE, "QR add, ordered", f"{LARGE}, ordered", "hot, pool")


def made_up(items: int = 2000, topics: int = 40, users: int = 1000, length: int = 20, seed: int = 0) -> list[Tensor]:
    """Sessions of items of one topic each, some popular and some not, numbered at random."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randperm(items, generator=generator)
    size = items // topics
    popularity = 1 / torch.arange(1, size + 1).double()
    topic = torch.randint(topics, (users,), generator=generator)
    within = torch.multinomial(popularity.expand(users, size), length, generator=generator)
    noise = torch.rand(users, length, generator=generator) < 0.1
    drawn = torch.where(noise, torch.randint(items, noise.shape, generator=generator), topic[:, None] * size + within)
    return list(number[drawn])


def movielens(path: Path) -> list[Tensor]:
    """The last items of each user in order of time."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    items = {item: i for i, item in enumerate(dict.fromkeys(row[1] for row in rows))}
    sessions: dict[str, list[int]] = {}
    for user, item, _, _ in sorted(rows, key=lambda row: float(row[3])):
        sessions.setdefault(user, []).append(items[item])
    return [torch.tensor(session[-LONGEST:]) for session in sessions.values()]


def examples(sessions: list[Tensor], last: bool) -> tuple[Tensor, Tensor]:
    """The SEEN items before an item, and the item; those of the last items, or all others."""
    windows = []
    for session in sessions:
        padded = torch.cat([session[:1].expand(SEEN), session])
        of_session = padded.unfold(0, SEEN + 1, 1)
        windows.append(of_session[-1:] if last else of_session[1:-1])
    both = torch.cat(windows)
    return both[:, :-1], both[:, -1]


def scheme_of(setting: str, n: int, times: int, counts: Tensor) -> tuple[quorem.Scheme, Tensor | None]:
    rows = n // times
    if setting == "hot, pool":
        rows = int(rows * D * 4 / (D * 4 + 8))  # lists of hot ids are bytes, too
        least = 2 * math.isqrt(2 ** (n - 1).bit_length()) + 4  # a pool must tell all cold ids apart
        pool = max(rows // 2, least)
        return quorem.HotCold(max(1, rows - pool), cold=quorem.Pool(pool)), counts
    large: Any = "quotient" if setting.startswith(LARGE) else "remainder"
    schemes = {"hash": quorem.Hash(times), "QR mult": quorem.QR(times)}
    return schemes.get(setting, quorem.QR(times, operation="add", large=large)), None


class Recommender(nn.Module):
    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items = items
        self.hidden = nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D))

    def forward(self, seen: Tensor) -> Tensor:
        mean = self.items(seen).mean(1)
        return mean + self.hidden(mean)


def run(sessions: list[Tensor], n: int, setting: str, times: int, seed: int) -> dict[str, Any]:
    """Train and test one setting."""
    seen, following = examples(sessions, last=False)
    counts = torch.bincount(following, minlength=n)
    torch.manual_seed(seed)
    scheme, frequencies = (quorem.Full(), None) if setting == "full" else scheme_of(setting, n, times, counts)
    items = quorem.Embedding(n, D, scheme, frequencies=frequencies, init_std=0.1)
    model = Recommender(items)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(seen)).split(BATCH):
            loss = quorem.cross_entropy(model(seen[batch]), items, following[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    seen, following = examples(sessions, last=True)
    with torch.no_grad():
        _, best = items.topk(model(seen), K)
    hits = (best == following[:, None]).float()
    gain = hits / (torch.arange(K) + 2).log2()
    tensors = [*items.parameters(), *items.buffers()]
    size = sum(tensor.nbytes for tensor in tensors)
    return {"recall": hits.sum(1).mean().item(), "ndcg": gain.sum(1).mean().item(), "bytes": size}


def main() -> None:
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--movielens", type=Path, help="ml-100k.inter of RecBole's wheel")
    parser.add_argument("--seeds", type=int, default=5)
    options: argparse.Namespace = parser.parse_args()
    logs = {"made up": made_up()} | ({"MovieLens-100k": movielens(options.movielens)} if options.movielens else {})
    config = {
        "dim": D,
        "seen": SEEN,
        "longest": LONGEST,
        "epochs": EPOCHS,
        "batch": BATCH,
        "k": K,
        "seeds": options.seeds,
    }
    result: dict[str, Any] = {**result_file.made_by("torch"), "config": config, "rows": []}
    for name, sessions in logs.items():
        n = int(max(session.max() for session in sessions)) + 1
        order = quorem.order_by_cooccurrence([session[:-1] for session in sessions], n)
        for setting, times in [("full", 1), *product(SETTINGS, TIMES)]:
            numbered = [order[session] for session in sessions] if setting.endswith("ordered") else sessions
            runs = [run(numbered, n, setting, times, seed) for seed in range(options.seeds)]
            row: dict[str, Any] = {
                "log": name,
                "items": n,
                "setting": setting,
                "times": times,
                "bytes": runs[0]["bytes"],
            }
            for metric in ("recall", "ndcg"):
                values = torch.tensor([each[metric] for each in runs], dtype=torch.float64)
                row[metric] = round(values.mean().item(), 4)
                row[f"{metric}_error"] = round(values.std().item() / math.sqrt(len(values)), 4)
            print(row, flush=True)
            result["rows"].append(row)
    result_file.write(options.out, result)


if __name__ == "__main__":
    main()
