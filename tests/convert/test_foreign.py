"""``compress_`` in models of other libraries, before and after an optimizer exists, with its trainer and files.

Each library runs in a process of its own: some rename parts of numpy, and PyKEEN must be imported before any other
library's optimizers (its resolver refuses two classes of one name). ``make install`` installs them without their
dependencies on other versions of torch. What had to be left out:

- FuxiCTR 2.3.10 imports Ray, which is as large as torch: 2.3.9 does not. It uses ``np.Inf``, which numpy 2 has not.
- RecBole uses ``np.float_`` and loads pickles, which numpy 2 and torch 2.6 refuse unless told; its LightGCN and its
  ``run_recbole`` need an old scipy and Ray.
"""

import copy
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from processes import python
from torch import Tensor, nn

import quorem

N, ROWS, BATCH = 3000, 1024, 256


def compressed(model: nn.Module, trained: bool) -> nn.Module:
    """The model with composed tables in place of all large ones, fitted if it was trained."""
    scheme = quorem.QR(4, operation="add")
    report = quorem.compress_(model, scheme, threshold=100, fit=trained)
    assert report.swapped and report.bytes_after < report.bytes_before / 2
    assert not report.outdated, report
    return model


def assert_all_move(model: nn.Module, train: Callable[[], object]) -> None:
    """Every parameter moves, and none becomes infinite."""
    before = copy.deepcopy(dict(model.named_parameters()))
    train()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all() and not torch.equal(parameter, before[name]), name


def clicks() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Made-up clicks on two columns of ids."""
    draw = np.random.default_rng(0)
    x = {name: draw.integers(1, N, ROWS) for name in "ab"}
    return x, ((x["a"] + x["b"]) % 3 == 0).astype(np.float32)


def rechub(folder: Path) -> None:
    """torch-rechub: the optimizer is the trainer's; features hold the tables; ``fit`` saves the ``state_dict``."""
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.basic.loss_func import RegularizationLoss
    from torch_rechub.models.ranking import DeepFM
    from torch_rechub.trainers import CTRTrainer
    from torch_rechub.utils.data import DataGenerator

    train, valid, test = DataGenerator(*clicks()).generate_dataloader(split_ratio=[0.7, 0.1], batch_size=BATCH)

    def build() -> nn.Module:
        features = [SparseFeature(name, N, embed_dim=8) for name in "ab"]
        return DeepFM(features, features, {"dims": [8], "dropout": 0.0})

    for exists in (False, True):
        model = build() if exists else compressed(build(), False)
        trainer = CTRTrainer(model, optimizer_params={"lr": 0.01}, n_epoch=1, model_path=str(folder))
        if exists:
            trainer.fit(train, valid)
            compressed(model, True)
        assert_all_move(model, lambda: trainer.fit(train, valid))  # noqa: B023
        loaded = compressed(build(), False)
        loaded.load_state_dict(torch.load(folder / "model.pth"))
        assert trainer.predict(loaded, test) == trainer.predict(model, test)
    rows = sum(float(m.stored.square().sum()) for m in model.modules() if isinstance(m, quorem.Embedding))
    dense = RegularizationLoss(dense_l2=1.0)(model).item() - RegularizationLoss(dense_l2=1.0)(model.mlp).item()
    assert RegularizationLoss(embedding_l2=1.0)(model) == 0 and dense >= rows * 0.999  # as docs/compress.md says


def deepctr(folder: Path) -> None:
    """DeepCTR-Torch: the optimizer is made by ``compile``; lists hold the weights to regularize."""
    from deepctr_torch.inputs import SparseFeat
    from deepctr_torch.models import DeepFM

    x, y = clicks()
    features = [SparseFeat(name, N, embedding_dim=8) for name in "ab"]
    for exists in (False, True):
        model = DeepFM(features, features, dnn_hidden_units=(8,), device="cpu")
        if not exists:
            compressed(model, False)
        model.compile("adagrad", "binary_crossentropy")
        if exists:
            model.fit(x, y, BATCH, verbose=0)
            compressed(model, True)
        assert_all_move(model, lambda: model.fit(x, y, BATCH, verbose=0))  # noqa: B023
        torch.save(model.state_dict(), folder / "weights.h5")
        torch.save(model, folder / "model.h5")
        loaded = compressed(DeepFM(features, features, dnn_hidden_units=(8,), device="cpu"), False)
        loaded.load_state_dict(torch.load(folder / "weights.h5"))
        for other in (loaded, torch.load(folder / "model.h5", weights_only=False)):
            assert np.array_equal(other.predict(x), model.predict(x))


def fuxictr(folder: Path) -> None:
    """FuxiCTR: the optimizer is made by the constructor; ``fit`` saves the best weights and loads them."""
    np.Inf = np.inf
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding
    from fuxictr.pytorch.models import BaseModel

    class FM(BaseModel):
        def __init__(self, features: FeatureMap) -> None:
            files = {"model_root": str(folder), "metrics": ["AUC"], "verbose": 0}
            super().__init__(features, "FM", embedding_regularizer="l2(1e-5)", **files)
            self.embedding_layer, self.fm = FeatureEmbedding(features, 8), FactorizationMachine(features)
            self.compile("adam", "binary_crossentropy", 0.01)
            self.reset_parameters()

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            x = self.get_inputs(inputs)
            return {"y_pred": self.output_activation(self.fm(x, self.embedding_layer(x)))}

    features = FeatureMap("data", str(folder))
    features.labels, features.num_fields, features.default_emb_dim = ["y"], 2, 8
    column = {"type": "categorical", "source": "", "vocab_size": N, "padding_idx": 0}
    features.features = {name: dict(column) for name in "ab"}
    (folder / "data").mkdir()
    x, y = clicks()
    rows = {"y": torch.from_numpy(y), **{name: torch.from_numpy(ids) for name, ids in x.items()}}
    batches = [{name: values[i : i + BATCH] for name, values in rows.items()} for i in range(0, ROWS, BATCH)]
    for trained in (False, True):
        model = FM(features)
        if trained:
            model.fit(batches, validation_data=batches)
        compressed(model, trained)
        assert_all_move(model, lambda: model.fit(batches, validation_data=batches))  # noqa: B023
        loaded = compressed(FM(features), False)
        loaded.load_weights(model.checkpoint)
        assert np.array_equal(loaded.predict(batches), model.predict(batches))


def recbole(folder: Path) -> None:
    """RecBole: the optimizer is the trainer's; models score by ``weight``; checkpoints have model and optimizer."""
    np.float_, np.complex_, np.unicode_ = np.float64, np.complex128, np.str_
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    os.chdir(folder)
    sys.argv[1:] = []
    sys.modules["torch.utils.tensorboard"] = mock.MagicMock()  # where its trainer writes losses
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    draw = np.random.default_rng(0)
    pairs = zip(draw.integers(0, 200, 4000), draw.integers(0, 2000, 4000), strict=True)
    lines = [f"{user}\t{item}\t{time}" for time, (user, item) in enumerate(pairs)]
    (folder / "made_up").mkdir()
    head = "user_id:token\titem_id:token\ttimestamp:float"
    (folder / "made_up" / "made_up.inter").write_text("\n".join([head, *lines]))
    options = {"data_path": str(folder), "epochs": 1, "train_batch_size": 512, "embedding_size": 8, "n_layers": 1}
    options |= {"device": "cpu", "use_gpu": False, "state": "ERROR", "show_progress": False, "checkpoint_dir": "."}
    options |= {"load_col": {"inter": ["user_id", "item_id", "timestamp"]}, "hidden_size": 8, "inner_size": 8}
    for name, more in {"BPR": {}, "SASRec": {"train_neg_sample_args": None}}.items():
        config = Config(model=name, dataset="made_up", config_dict=options | more)
        init_seed(0, True)
        train, valid, test = data_preparation(config, create_dataset(config))

        def build() -> nn.Module:
            return get_model(name)(config, train.dataset)  # noqa: B023

        for exists in (False, True) if name == "BPR" else (True,):
            model = build() if exists else compressed(build(), False)
            trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
            if exists:
                trainer.fit(train, verbose=False, saved=False)
                compressed(model, True)
            assert_all_move(model, lambda: trainer.fit(train, valid, verbose=False))  # noqa: B023
            expected = trainer.evaluate(test)  # loads the best weights from its file
            loaded = compressed(build(), False)
            other = get_trainer(config["MODEL_TYPE"], name)(config, loaded)
            other.resume_checkpoint(trainer.saved_model_file)
            assert other.evaluate(test, load_best_model=False) == expected


def pykeen(folder: Path) -> None:
    """PyKEEN assigns to ``weight.data`` in every epoch: its tables stay, for that reason, and train as before."""
    from pykeen.models import ComplEx, DistMult, RotatE, TransE
    from pykeen.training import SLCWATrainingLoop
    from pykeen.triples import TriplesFactory

    draw = torch.Generator().manual_seed(0)
    triples = torch.stack([torch.randint(0, n, (ROWS,), generator=draw) for n in (200, 5, 200)], 1)
    entities, relations = ({str(i): i for i in range(n)} for n in (200, 5))
    factory = TriplesFactory(triples, entity_to_id=entities, relation_to_id=relations)
    for kind in (ComplEx, DistMult, RotatE, TransE):
        losses = []
        for compress in (False, True):
            model = kind(triples_factory=factory, embedding_dim=8, random_seed=0)
            optimizer = torch.optim.Adam(model.get_grad_params())
            if compress:
                left = quorem.compress_(model, quorem.QR(4)).left
                assert all("reset_parameters assigns to data" in why for why in left.values()) and len(left) == 2
            torch.manual_seed(0)
            loop = SLCWATrainingLoop(model=model, triples_factory=factory, optimizer=optimizer)
            losses.append(loop.train(factory, num_epochs=2, use_tqdm=False))
        assert losses[0] == losses[1]
        model.save_state(folder / "model.pt")
        kind(triples_factory=factory, embedding_dim=8).load_state(folder / "model.pt")


def transformers(folder: Path) -> None:
    """transformers: tied heads and tables, its trainer, ``save_pretrained`` and ``from_pretrained``.

    Plans by counts and quantized rows come back too, and rows that mean something else are refused.
    """
    import transformers as hf

    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    bart = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    bart |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    models = {
        hf.GPT2LMHeadModel: hf.GPT2Config(vocab_size=N, n_positions=16, n_embd=16, n_layer=1, n_head=2),
        hf.BertForMaskedLM: hf.BertConfig(vocab_size=N, max_position_embeddings=16, **heads),
        hf.LlamaForCausalLM: hf.LlamaConfig(vocab_size=N, tie_word_embeddings=True, **heads),
        hf.T5ForConditionalGeneration: hf.T5Config(
            vocab_size=N, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        ),
        hf.BartForConditionalGeneration: hf.BartConfig(vocab_size=N, max_position_embeddings=16, **bart),
    }
    draw = torch.Generator().manual_seed(0)
    data = [dict.fromkeys(("input_ids", "labels"), torch.randint(3, N, (8,), generator=draw)) for _ in range(32)]
    options = {"use_cpu": True, "max_steps": 3, "learning_rate": 0.01, "report_to": [], "disable_tqdm": True}
    arguments = hf.TrainingArguments(str(folder / "runs"), save_strategy="no", logging_strategy="no", **options)
    for kind, config in models.items():
        scaled = kind is hf.BartForConditionalGeneration  # its tables have a scale of their own, and stay

        class Compressed(kind):
            def __init__(self, config: object) -> None:
                super().__init__(config)
                quorem.compress_(self, quorem.QR(4, operation="add"), threshold=100)

        for exists in (False, True):
            torch.manual_seed(0)
            model = kind(config)
            trainer = hf.Trainer(model, arguments, train_dataset=data)
            if exists:
                trainer.train()
            if scaled:
                left = quorem.compress_(model, quorem.QR(4)).left
                assert left["model.shared"] == "BartScaledWordEmbedding has methods of its own (forward)"
            else:
                compressed(model, exists)
            assert_all_move(model, trainer.train)
            trainer.save_model(str(folder / "saved"))
            loaded = (kind if scaled else Compressed).from_pretrained(folder / "saved")
            state = loaded.state_dict()
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
            batch = {"input_ids": torch.arange(3, N, 300)[None], "labels": torch.arange(3, N, 300)[None]}
            torch.testing.assert_close(loaded.eval()(**batch).logits, model.eval()(**batch).logits)
        if not scaled:
            quorem.decompress_(model, optimizer=trainer.optimizer)
            model.save_pretrained(folder / "full")
            state = kind.from_pretrained(folder / "full").state_dict()
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())

    class Restored(hf.GPT2LMHeadModel):
        def __init__(self, config: object, scheme: object, bits: int = 0, counts: object = None) -> None:
            super().__init__(config)
            quorem.compress_(self, scheme, threshold=100, frequencies=counts)
            if bits:
                quorem.quantize_(self, bits)

    config, ids = models[hf.GPT2LMHeadModel], torch.arange(0, N, 300)[None]
    counts = {"transformer.wte": (9000 / torch.arange(1, N + 1)).long().flip(0), "transformer.wpe": torch.ones(16)}
    planned = quorem.plan(hf.GPT2LMHeadModel(config), 40_000, frequencies=counts)
    assert any(table.ranked for table in planned.tables)
    for scheme, bits, given in ((planned, 0, counts), (quorem.QR(4, width=4), 8, None), (quorem.QR(4), 0, None)):
        model = Restored(config, scheme, bits, given).eval()
        model.save_pretrained(folder / "restored")
        loaded = Restored.from_pretrained(folder / "restored", scheme, bits, dtype=torch.float32).eval()
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    with pytest.raises(RuntimeError, match=r"table holds mult of .* in the checkpoint and add of"):
        Restored.from_pretrained(folder / "restored", quorem.QR(4, operation="add"))(ids)


PACKAGES = {
    rechub: "torch_rechub",
    deepctr: "deepctr_torch",
    fuxictr: "fuxictr",
    recbole: "recbole",
    pykeen: "pykeen",
    transformers: "transformers",
}


@pytest.mark.parametrize("library", PACKAGES, ids=PACKAGES.values())
def test_a_model_is_trained_and_saved_by_its_library(library: Callable[[Path], None], tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[library]) is None:
        pytest.skip("needs the libraries of `make install`")
    python("-W", "ignore", __file__, library.__name__, tmp_path)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
