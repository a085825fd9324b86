"""The batch's maps: one per row of this step, as a list and by rid."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, overload

from connector import errors
from runner_adapter.plan import StepPlan
from runner_adapter.requests import unknown

if TYPE_CHECKING:
    import torch

#: How a map names its tensors: connector keys, dotted names, or a model's nested dicts.
Form = Literal["keys", "names", "nested"]
Map = dict[str, Any]


class MapSource(Protocol):
    """What is gathered from: ModelIntermediateBuffer, or another mapping of rid to tensors by key."""

    def __contains__(self, rid: object, /) -> bool: ...
    def __getitem__(self, rid: str, /) -> Mapping[str, torch.Tensor]: ...
    def names(self, rid: str, /) -> Mapping[str, torch.Tensor]: ...
    def nested(self, rid: str, /) -> Mapping[str, Any]: ...


class BatchMaps(list[Map]):
    """A list of maps in batch order, one a row, padded rows last; with a rid for an index, that request's map.

    A row without state has an empty map: nothing is ever compacted. Iterating gives maps; `keys` and `items`
    leave the padding out. `form` is None where another runner made the maps.
    """

    __slots__ = ("_by_rid", "form", "rids")

    def __init__(self, maps: Iterable[Map] = (), rids: Iterable[str] = (), form: Form | None = None) -> None:
        super().__init__(maps)
        self.rids = tuple(rids)
        self.form = form
        # The maps, not their places: a model that sorts or shortens its list moves nobody's rid.
        self._by_rid = dict(zip(self.rids, self, strict=False))
        if len(self._by_rid) != len(self.rids):
            raise errors.UsageError("every rid needs a map and a place of its own", rids=len(self.rids), maps=len(self))

    @overload
    def __getitem__(self, at: str | SupportsIndex, /) -> Map: ...
    @overload
    def __getitem__(self, at: slice, /) -> list[Map]: ...
    def __getitem__(self, at: str | SupportsIndex | slice, /) -> Map | list[Map]:
        """A rid's map, or as a list. UnknownRequest if the rid has no row in this step."""
        if not isinstance(at, str):
            return super().__getitem__(at)
        found = self._by_rid.get(at)
        if found is None:
            raise unknown(at, self.rids, "the request has no row in this step")
        return found

    def __contains__(self, value: object) -> bool:
        return value in self._by_rid if isinstance(value, str) else super().__contains__(value)

    def get(self, rid: str, default: Map | None = None) -> Map | None:
        return self._by_rid.get(rid, default)

    def keys(self) -> KeysView[str]:
        """The rids, in batch order."""
        return self._by_rid.keys()

    def items(self) -> list[tuple[str, Map]]:
        """(rid, map), in batch order."""
        return list(self._by_rid.items())

    def check(self, plan: StepPlan) -> None:
        """UsageError if these maps were gathered for another plan: rows would go to others' requests."""
        if self.rids != plan.rids or len(self) != plan.padded_rows:
            differ = (here or there for here, there in zip_longest(plan.rids, self.rids) if here != there)
            raise errors.UsageError(
                "the maps are not this step's",
                rid=next(differ, None),
                maps=len(self),
                rows=len(plan.rids),
                padded_rows=plan.padded_rows,
            )


def gather(buffer: MapSource, plan: StepPlan, form: Form = "keys") -> BatchMaps:
    """The maps of this step's rows, in the plan's order; `{}` for a row without state and for a padded row.

    Dicts and lists are fresh at every level, so that nothing written into them reaches the buffer; the tensors are
    the buffer's own. UsageError for another form.
    """
    if form not in ("keys", "names", "nested"):
        raise errors.UsageError("a form is keys, names or nested", form=str(form)[:80])
    read = {"keys": buffer.__getitem__, "names": buffer.names, "nested": buffer.nested}[form]
    maps: list[Map] = [fresh(read(row.rid)) if row.rid in buffer else {} for row in plan.rows]
    maps += [{} for _ in range(plan.padded_rows - len(maps))]
    return BatchMaps(maps, plan.rids, form)


def fresh(value: Any) -> Any:
    """Mappings and lists copied at every level; what they hold stays what it is."""
    if isinstance(value, Mapping):
        return {key: fresh(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [fresh(inner) for inner in value]
    return value
