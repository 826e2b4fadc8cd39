"""Reading ahead: the next item is produced by another thread while one is used."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each produced by another thread while the previous one is used."""
    packed = ((item,) for item in items)
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, packed, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, packed, None)
            yield item[0]
