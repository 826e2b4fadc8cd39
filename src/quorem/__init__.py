"""Compositional embeddings using complementary partitions: embedding tables that fit.

    modules      Embedding, EmbeddingBag, EmbeddingCollection of Tables
    schemes      Full, Hash, QR, GeneralizedQR, ChineseRemainder, Custom, Path, HotCold, Pool
    your model   compress_, decompress_, plan, quantize_
    training     optim.Adagrad and others, optim.apply_in_backward, models.DLRM and others
    files, ids   save, load, export, hash_strings

``quorem.api``, and torch with it, is imported when one of its names is first used, so ``quorem --help`` loads neither.

>>> import quorem, torch
>>> table = quorem.Embedding(1_000_000, 16, quorem.QR(num_collisions=4))
>>> table(torch.tensor([0, 999_999])).shape, round(table.compression, 2)
(torch.Size([2, 16]), 4.0)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .api import Path as Path
else:

    def __getattr__(name: str) -> Any:
        """Import a submodule; or import ``quorem.api``, after which all its names are ordinary attributes."""
        if name == "__all__" or not name.startswith("_"):
            if find_spec(f".{name}", __name__) is not None:
                return import_module(f".{name}", __name__)
            api = import_module(".api", __name__)
            names = (*getattr(api, "__all__", ()), "__all__", "Path")  # not set yet while api is being imported
            if name in names and hasattr(api, name):
                globals().update({known: getattr(api, known) for known in names})
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module(".api", __name__).__all__, "Path"})
