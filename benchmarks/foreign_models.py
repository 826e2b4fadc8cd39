"""Models of other libraries, trained before and after ``compress_``, with the memory measured.

    python benchmarks/foreign_models.py --out benchmarks/results/foreign_models.json

Each model is built by its library's own code, trained for some steps by Adagrad, compressed with ``fit=True`` and
``optimizer=``, and trained on by the same optimizer. ``bytes`` are those of every tensor that is alive in the process,
found by the garbage collector: model, optimizer's state and whatever still holds an old table. ``loss`` is the mean of
the last ten steps. A library that is not installed is left out, and said so:

    pip install transformers; pip install --no-deps -r tests/foreign.txt
"""

import gc
import json
import math
from collections.abc import Callable
from typing import Any

import result_file
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quorem
from quorem.files.provenance import commit, versions

IDS, DIM, BATCH, LENGTH = 50_000, 32, 256, 8
SCHEME = quorem.QR(4, operation="add")
Loss = Callable[[], Tensor]


def zipf(*shape: int, n: int | None = None) -> Tensor:
    """Ids from 1 on, log-uniform: id i about as often as 1 / i."""
    n = IDS if n is None else n
    return (n ** torch.rand(shape)).long().clamp(1, n - 1)


def label(*ids: Tensor) -> Tensor:
    """A function of the ids that a model can learn: about half of them are 1."""
    return (sum(ids) % 7 < 3).float()


def rechub_features(names: str) -> list[Any]:
    from torch_rechub.basic.features import SparseFeature

    return [SparseFeature(name, vocab_size=IDS, embed_dim=DIM) for name in names]


def rechub_ctr(model: nn.Module, names: str) -> Loss:
    def loss() -> Tensor:
        x = {name: zipf(BATCH) for name in names}
        return F.binary_cross_entropy(model(x).view(-1), label(*x.values()))

    return loss


def rechub_deepfm() -> tuple[nn.Module, Loss]:
    """torch-rechub DeepFM: features, plain objects in lists, hold the modules too."""
    from torch_rechub.models.ranking import DeepFM

    features = rechub_features("ab")
    model = DeepFM(features, features, {"dims": [64], "dropout": 0.0})
    return model, rechub_ctr(model, "ab")


def rechub_dcn() -> tuple[nn.Module, Loss]:
    """torch-rechub DCN."""
    from torch_rechub.models.ranking import DCN

    model = DCN(rechub_features("ab"), n_cross_layers=2, mlp_params={"dims": [64], "dropout": 0.0})
    return model, rechub_ctr(model, "ab")


def rechub_hstu() -> tuple[nn.Module, Loss]:
    """torch-rechub HSTU: the head is ``F.linear`` with the embedding's weight."""
    from torch_rechub.models.generative.hstu import HSTUModel

    model = HSTUModel(IDS // 5, d_model=DIM, n_heads=2, n_layers=1, dqk=16, dv=16, max_seq_len=LENGTH, dropout=0.0)

    def loss() -> Tensor:
        ids = zipf(BATCH // 8, LENGTH, n=IDS // 5)
        return F.cross_entropy(model(ids).flatten(0, 1), (ids * 3 % (IDS // 5)).flatten())

    return model, loss


def bert() -> tuple[nn.Module, Loss]:
    """Hugging Face BERT: the decoder's weight is the embedding's."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(vocab_size=IDS // 5, max_position_embeddings=64, **sizes))

    def loss() -> Tensor:
        ids = zipf(BATCH // 8, LENGTH, n=IDS // 5)
        return model(input_ids=ids, labels=ids * 3 % (IDS // 5)).loss

    return model, loss


class RecBoleData:
    """What RecBole's models ask of a data set."""

    def num(self, field: str) -> int:
        return IDS


RECBOLE = {"USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item", "NEG_PREFIX": "neg_", "device": "cpu"}
RECBOLE |= {"LIST_SUFFIX": "_list", "ITEM_LIST_LENGTH_FIELD": "length", "MAX_ITEM_LIST_LENGTH": LENGTH}
RECBOLE |= {"embedding_size": DIM, "hidden_size": DIM, "inner_size": 64, "n_layers": 1, "n_heads": 2}
RECBOLE |= {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
RECBOLE |= {"initializer_range": 0.02, "loss_type": "CE"}


def recbole_bpr() -> tuple[nn.Module, Loss]:
    """RecBole BPR: a matrix factorization that ranks by ``item_embedding.weight``."""
    from recbole.model.general_recommender.bpr import BPR

    model = BPR(RECBOLE, RecBoleData())

    def loss() -> Tensor:
        user = zipf(BATCH)
        batch = {"user": user, "item": user * 3 % IDS, "neg_item": zipf(BATCH)}
        assert model.full_sort_predict({"user": user[:1]}).shape == (IDS,)
        return model.calculate_loss(batch)

    return model, loss


def recbole_sasrec() -> tuple[nn.Module, Loss]:
    """RecBole SASRec: initialized by writes into ``weight.data``, trained on scores by ``weight``."""
    from recbole.model.sequential_recommender.sasrec import SASRec

    model = SASRec(RECBOLE, RecBoleData())

    def loss() -> Tensor:
        ids = zipf(BATCH // 8, LENGTH)
        batch = {"item_list": ids, "length": torch.full((BATCH // 8,), LENGTH), "item": ids[:, -1] * 3 % IDS}
        return model.calculate_loss(batch)

    return model, loss


def deepctr_deepfm() -> tuple[nn.Module, Loss]:
    """DeepCTR-Torch DeepFM: lists of the parameters that it regularizes."""
    from deepctr_torch.inputs import SparseFeat
    from deepctr_torch.models import DeepFM

    features = [SparseFeat(name, IDS, embedding_dim=DIM) for name in "ab"]
    model = DeepFM(features, features, dnn_hidden_units=(64,), device="cpu")

    def loss() -> Tensor:
        ids = zipf(BATCH, 2)
        fitted = F.binary_cross_entropy(model(ids.float()).view(-1), label(ids[:, 0], ids[:, 1]))
        return fitted + model.get_regularization_loss().sum()

    return model, loss


class Factors(nn.Module):
    """A matrix factorization as people write it: all items are scored by ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(IDS, DIM), nn.Embedding(IDS // 5, DIM)

    def forward(self, user: Tensor) -> Tensor:
        return self.users(user) @ self.items.weight.T


def factorization() -> tuple[nn.Module, Loss]:
    """A matrix factorization, trained on the scores of all items."""
    model = Factors()

    def loss() -> Tensor:
        user = zipf(BATCH)
        return F.cross_entropy(model(user), user * 3 % (IDS // 5))

    return model, loss


MODELS = {
    "torch-rechub DeepFM": rechub_deepfm,
    "torch-rechub DCN": rechub_dcn,
    "torch-rechub HSTU, tied head": rechub_hstu,
    "transformers BERT, tied head": bert,
    "RecBole BPR": recbole_bpr,
    "RecBole SASRec": recbole_sasrec,
    "DeepCTR-Torch DeepFM": deepctr_deepfm,
    "matrix factorization": factorization,
}


def live_bytes() -> int:
    """Bytes of all tensors that are alive in this process; those of a compiler hold none."""
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        plain = type(value) in (Tensor, nn.Parameter) and torch._C._has_storage(value)
        if plain and value.device.type == "cpu" and value.layout == torch.strided:
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def trained(optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> float:
    """Train; the mean loss of the last ten steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    optimizer.zero_grad()
    last = losses[-10:]
    if not all(map(math.isfinite, last)):
        raise ValueError(f"the loss ({last}) must be finite")
    return sum(last) / len(last)


def measure(name: str, steps: int) -> dict[str, Any]:
    """Train a model, compress it, train it on."""
    torch.manual_seed(0)
    elsewhere = live_bytes()
    model, loss = MODELS[name]()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    first = trained(optimizer, loss, 1)
    before = trained(optimizer, loss, steps)
    bytes_before = live_bytes() - elsewhere
    report = quorem.compress_(model, SCHEME, threshold=1000, fit=True, optimizer=optimizer)
    bytes_after = live_bytes() - elsewhere
    after = trained(optimizer, loss, steps)
    return {
        "model": name,
        "first_loss": round(first, 4),
        "loss_before": round(before, 4),
        "loss_after": round(after, 4),
        "bytes_before": bytes_before,
        "bytes_after": bytes_after,
        "table_bytes_before": report.bytes_before,
        "table_bytes_after": report.bytes_after,
        "swapped": report.swapped,
        "left": report.left,
        "references": report.references,
        "outdated": report.outdated,
    }


def main() -> None:
    """Read the command line, measure, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="before and after")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    rows, missing = [], {}
    for name in arguments.models:
        try:
            rows.append(measure(name, arguments.steps))
        except ImportError as error:
            missing[name] = str(error)
            continue
        print(json.dumps(rows[-1]), flush=True)
    print(f"not installed: {missing}" if missing else "all measured")
    config = {"ids": IDS, "dim": DIM, "batch": BATCH, "steps": arguments.steps, "scheme": repr(SCHEME)}
    head = {"config": config, "missing": missing, "versions": versions(), "commit": commit()}
    result_file.write(arguments.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
