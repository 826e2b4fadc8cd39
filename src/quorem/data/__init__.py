"""Click logs: preparing files (``criteo`` and ``table``, with Polars), synthetic logs, and reading them as tensors."""

from .batches import Bags, Batch
from .prepared import Prepared
from .synthetic import ClickLog, synthesize

__all__ = ["Prepared", "Batch", "Bags", "ClickLog", "synthesize"]
