"""Click logs: prepared (``criteo``, ``table``; these need Polars), made up (``synthetic``) and read as tensors."""

from .batches import Bags, Batch, Prepared
from .synthetic import ClickLog, synthesize

__all__ = ["Prepared", "Batch", "Bags", "ClickLog", "synthesize"]
