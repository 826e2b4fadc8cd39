"""Prepared data as tensors: memory-mapped, split by days, in contiguous batches. Needs torch and numpy only."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .folder import FORMAT, FORMAT_VERSION, file_name


@dataclass(frozen=True)
class Bags:
    """A multi-valued feature: the ids of all rows' bags, and where each begins.

    Shape:
        values ``[V]`` int32, offsets ``[B + 1]`` int64.
    """

    values: Tensor
    offsets: Tensor

    def rows(self, start: int, stop: int) -> "Bags":
        """The bags of some rows; offsets start at 0 again."""
        offsets = self.offsets[start : stop + 1]
        return Bags(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def take(self, index: Tensor) -> "Bags":
        """The bags of the rows ``index``, in that order."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[index]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        within = torch.arange(int(offsets[-1]), device=index.device) - offsets[:-1].repeat_interleave(lengths)
        return Bags(self.values[self.offsets[index].repeat_interleave(lengths) + within], offsets)


@dataclass(frozen=True)
class Batch:
    """Rows of a click log.

    Shape:
        labels ``[B]`` uint8, dense ``[B, 13]`` float32, ids ``[B, F]`` int32: the features with one value a row.
        ``bags`` holds those with several, by name.
    """

    labels: Tensor
    dense: Tensor
    ids: Tensor
    bags: Mapping[str, Bags] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows ``[start, stop)``, without a copy."""
        own = slice(start, stop)
        bags = {name: bag.rows(start, stop) for name, bag in self.bags.items()}
        return Batch(self.labels[own], self.dense[own], self.ids[own], bags)

    def take(self, index: Tensor) -> "Batch":
        """The rows ``index``, in that order."""
        bags = {name: bag.take(index) for name, bag in self.bags.items()}
        return Batch(self.labels[index], self.dense[index], self.ids[index], bags)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same rows on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same rows in page-locked memory, from which a GPU reads without waiting."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, apply: Any) -> "Batch":
        bags = {name: Bags(apply(bag.values), apply(bag.offsets)) for name, bag in self.bags.items()}
        return Batch(apply(self.labels), apply(self.dense), apply(self.ids), bags)

    def jagged(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """All features as ``EmbeddingCollection`` takes jagged input: values, and offsets ``[F * B + 1]``.

        Args:
            names: every categorical feature in order; those not among ``bags`` are the columns of ``ids``.

        Raises:
            ValueError: if the names do not fit.
        """
        single = [name for name in names if name not in self.bags]
        if len(single) != self.ids.shape[1] or len(names) != len(single) + len(self.bags):
            raise ValueError(
                f"names ({names}) must be {self.ids.shape[1]} single-valued features and {list(self.bags)}"
            )
        values, lengths = [], []
        columns = iter(self.ids.unbind(1))
        for name in names:
            if name in self.bags:
                values.append(self.bags[name].values)
                lengths.append(self.bags[name].offsets.diff())
            else:
                values.append(next(columns))
                lengths.append(torch.ones(len(self), dtype=torch.int64, device=self.ids.device))
        ends = torch.cat(lengths).cumsum(0)
        return torch.cat(values), torch.cat([ends.new_zeros(1), ends])

    def batches(self, size: int, *, seed: int | None = None, drop_last: bool = False) -> Iterator["Batch"]:
        """Consecutive batches, in order or in an order that ``seed`` decides.

        Args:
            size: rows of a batch; the last may have fewer.
            seed: of a shuffle; None keeps the order, as the paper trains, and copies nothing.
            drop_last: leave out a last batch with fewer rows.

        Raises:
            ValueError: if ``size`` is below 1.

        >>> rows = Batch(torch.arange(5), torch.zeros(5, 1), torch.zeros(5, 2))
        >>> [batch.labels.tolist() for batch in rows.batches(2)]
        [[0, 1], [2, 3], [4]]
        """
        if size < 1:
            raise ValueError(f"size ({size}) must be at least 1")
        order = None
        if seed is not None:
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).to(self.labels.device)
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            if drop_last and stop - start < size:
                return
            yield self.rows(start, stop) if order is None else self.take(order[start:stop])


class Prepared:
    """A folder of prepared data, memory-mapped.

    Args:
        path: what ``quorem prepare`` or ``quorem synthesize`` wrote.

    Raises:
        FileNotFoundError: if there is no such folder or one of its files is missing.
        ValueError: if it is not prepared data, or a file does not have the size that ``meta.json`` says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.meta = _read_meta(self.path)
        self.num_rows: int = self.meta["num_rows"]
        self.dense_names: list[str] = self.meta["dense"]
        self.names: list[str] = self.meta["categorical"]
        self.cardinalities: list[int] = self.meta["cardinalities"]
        n, single = self.num_rows, len(self.names) - len(self.meta["bags"])
        bags = {}
        for name in self.meta["bags"]:
            plain = file_name(name)
            offsets = self._map(f"bags/{plain}.offsets.npy", np.int64, (n + 1,))
            values = self._map(f"bags/{plain}.values.npy", np.int32, (int(offsets[-1]),))
            bags[name] = Bags(torch.from_numpy(values), torch.from_numpy(offsets))
        self.all = Batch(
            torch.from_numpy(self._map("labels.npy", np.uint8, (n,))),
            torch.from_numpy(self._map("dense.npy", np.float32, (n, len(self.dense_names)))),
            torch.from_numpy(self._map("categorical.npy", np.int32, (n, single))),
            bags,
        )

    def split(self, name: str) -> Batch:
        """The rows of ``"train"``, ``"validation"`` or ``"test"``, as views of the files.

        Raises:
            ValueError: if there is no split of that name.
        """
        if name not in self.meta["split"]:
            raise ValueError(f"split ({name!r}) must be one of {', '.join(map(repr, self.meta['split']))}")
        return self.all.rows(*self.meta["split"][name])

    def counts(self, name: str) -> NDArray[np.int64]:
        """How often each id of a feature occurs in the training rows.

        Raises:
            ValueError: if there is no feature of that name.
        """
        self._check_name(name)
        return self._map(f"counts/{file_name(name)}.npy", np.int64, (self.cardinalities[self.names.index(name)],))

    def vocabulary(self, name: str) -> list[str | None]:
        """The token of each id of a feature; None for the NULL id and the unknown id.

        Raises:
            ValueError: if there is no feature of that name, or its ids are hashed or made up.
        """
        self._check_name(name)
        first = self.meta.get("first_token_id")
        if first is None:
            raise ValueError(f"{self.path} has no vocabulary: its ids are {self.meta['config'].get('ids', 'made up')}")
        text = (self.path / "vocabulary" / f"{file_name(name)}.txt").read_bytes().decode()
        tokens = [_unescaped(token) if "\\" in token else token for token in text.split("\n")[:-1]]
        return [*[None] * first, *tokens]

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"name ({name!r}) must be one of the categorical features {', '.join(self.names)}")

    def _map(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
        path = self.path / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: prepare the data again")
        try:
            # Copy on write: tensors want writable memory, the file stays as it is.
            array = np.load(path, mmap_mode="c", allow_pickle=False) if 0 not in shape else np.load(path)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is damaged or cut off ({path.stat().st_size:,} bytes): {error}") from None
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{path} is {array.dtype} {array.shape} but meta.json says {np.dtype(dtype)} {shape}")
        return np.asarray(array)


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / "meta.json"
    if not file.exists():
        raise FileNotFoundError(f"{path} is not a folder of prepared data: {file.name} is missing")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{file} must be of format {FORMAT!r}")
    if meta.get("format_version") != FORMAT_VERSION:
        version = meta.get("format_version")
        raise ValueError(
            f"{file} has format version {version} but this quorem reads {FORMAT_VERSION}: prepare it again"
        )
    return meta


def _unescaped(token: str) -> str:
    parts = token.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)
