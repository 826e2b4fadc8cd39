"""Networks of path-based tables in a ``state_dict``: saved by table, not by the group in which they run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .saved import Names, TransientNames, is_sharded, whole, write_shards_, wrong_shapes

if TYPE_CHECKING:
    from .paths import PathNetworks
    from .stored import StoredTables


class Layers(nn.ParameterList):
    """Parameters of a group. ``PathGroups`` saves them by table; entries under their names here can still be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._non_persistent_buffers_set = TransientNames()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters:
            if name.isdigit():  # other names come from pruning
                del destination[prefix + name]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *lists: list[str]
    ) -> None:
        absent: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, absent, *lists)
        missing += [name for name in absent if not name.removeprefix(prefix).isdigit()]


class NetworkLayer(NamedTuple):
    """One parameter ``[networks, ...]`` of a group, and the tables that its networks belong to."""

    owner: Layers
    number: str
    name: str  # name of the parameter in ``PathGroups``
    counts: dict[str, int]  # number of networks of each table, by the name under which they are saved

    @property
    def parameter(self) -> nn.Parameter:
        """The current parameter; loading may replace it by another object."""
        parameter = self.owner._parameters[self.number]
        assert parameter is not None
        return parameter

    def views(self) -> dict[str, Tensor]:
        """The networks of each table, as views by the name under which they are saved."""
        parts = whole(self.parameter).split(list(self.counts.values()))
        return dict(zip(self.counts, parts, strict=True))


class PathGroups(nn.ModuleList):
    """Networks of path-based tables, in groups that run together.

    In a ``state_dict`` they are ``NAME.LEVEL.LAYER.weight`` and ``.bias``: the networks of table ``NAME`` for partition
    ``LEVEL + 1``. ``Embedding`` and ``EmbeddingBag``, whose table has no name, leave it out. These names keep their
    meaning when tables are added, dropped, reordered or grouped differently. Earlier versions saved by group,
    ``GROUP.weights.N``.
    """

    _entries = Names()

    def layers(self) -> Iterator[NetworkLayer]:
        """Every parameter of every group."""
        for group_number, group in cast("Iterator[tuple[str, PathNetworks]]", self.named_children()):
            per_level = len(group.weights) // len(group.counts)
            for i in range(len(group.weights)):
                level, layer = divmod(i, per_level)
                for owner, kinds, kind in ((group.weights, "weights", "weight"), (group.biases, "biases", "bias")):
                    counts = {
                        f"{table}{'.' * bool(table)}{level}.{layer}.{kind}": sizes[level]
                        for table, sizes in group.tables.items()
                    }
                    if owner._parameters.get(str(i)) is not None:  # pruning computes it from others
                        yield NetworkLayer(owner, str(i), f"{group_number}.{kinds}.{i}", counts)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in ``StoredTables``: with ``recurse=False``, also the entries of the ``state_dict``."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            dot = "." if prefix else ""
            for layer in self.layers():
                yield from ((f"{prefix}{dot}{name}", view) for name, view in layer.views().items())

    def _fqn_modifiers(self) -> dict[str, str]:
        names = [name for layer in self.layers() for name in (layer.name, *layer.counts)]
        return {name.split(".")[0]: "_entries" for name in names}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for layer in self.layers():
            for name, view in layer.views().items():
                destination[prefix + name] = view if keep_vars else view.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, [], [], error_msgs)  # only runs hooks
        assign = local_metadata.get("assign_to_params_buffers", False)
        for layer in self.layers():
            keys = [prefix + name for name in layer.counts]
            values = {key: whole(state_dict.pop(key)) for key in keys if key in state_dict}
            if prefix + layer.name not in state_dict:  # else ``Layers`` loads it
                missing_keys += [key for key in keys if key not in values]
                error_msgs += _load_layer(layer, prefix, values, assign)
        if strict:
            unexpected_keys += [
                key for key in state_dict if key.removeprefix(prefix).split(".")[0] not in self._modules
            ]


def network_layers(tables: "StoredTables") -> Iterator[NetworkLayer]:
    """Every parameter of the networks of a module's tables; none where no table is path-based."""
    yield from tables.paths.layers() if isinstance(tables.paths, PathGroups) else ()


@torch.no_grad()
def _load_layer(layer: NetworkLayer, prefix: str, values: dict[str, Any], assign: bool) -> list[str]:
    """Load the networks of some tables; returns error messages, in which case nothing is loaded."""
    parameter = layer.parameter
    views = {prefix + name: view for name, view in layer.views().items()}
    wrong = wrong_shapes(views, values)
    assign = assign and len(values) == len(views) and not is_sharded(parameter)
    if parameter.is_meta and values and not assign:
        wrong.append(f"{prefix}{layer.name} is on the meta device: it takes all its networks at once, and assign=True")
    if wrong or not values:
        return wrong
    if assign:
        packed = nn.Parameter(torch.cat(list(values.values())), requires_grad=parameter.requires_grad)
        setattr(layer.owner, layer.number, packed)
        return []
    for key, value in values.items():
        views[key].copy_(value)
    if is_sharded(parameter):
        write_shards_(parameter, torch.cat(list(views.values())))
    return []
