"""A step's payloads as columns: what they share is said once, and what differs is checked a column at a time.

Rows (hot.py) and columns mean the same, and either is taken; a step of many is written as columns if its payloads share
what a row repeats. A column's check is a few calls for all of it; one that is not plain is read row by row, which says
what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from connector.core.directory.effects import Descriptor
from connector.core.directory.events import Member
from connector.core.names import MAX_INDEX, MAX_RID_BYTES
from connector.wire import fields as f
from connector.wire import hot
from connector.wire.fields import MAX_WORD
from connector.wire.message import MANY

#: Below, columns are not worth it.
FEWEST = 4


def pack_members(members: Sequence[Member]) -> Any:
    """Members as they travel: `[attempt, flags, readers, nbytes, [rid, …], [index, …], [manifest, …]]`, or as rows.
    One manifest stands for its list if all have it."""
    if len(members) < FEWEST:
        return members
    rids, indexes, attempts, flags, readers, manifests, nbytes = zip(*members, strict=True)
    shared = (attempts, flags, readers, nbytes)
    if not all(map(_is_alike, shared)):
        return members
    return [*[column[0] for column in shared], rids, indexes, _one_or_all(manifests)]


def members(value: Any) -> tuple[Member, ...]:
    """What pack_members gives, checked."""
    if type(value) is not list or len(value) != 7 or type(value[0]) is not int:
        return _member_rows(value)
    attempt, flags, readers, nbytes, rids, indexes, manifests = value
    count = _length(rids, indexes, *_if_list(manifests))

    def rows() -> Iterator[tuple[Any, ...]]:
        shared = (repeat(attempt), repeat(flags), repeat(readers))
        return zip(rids, indexes, *shared, _each(manifests), repeat(nbytes))

    if not count or not (_are_rids(rids) and _are_ints(indexes, 0, MAX_INDEX) and _are_manifests(manifests)):
        return _member_rows(list(map(list, rows())))
    # What is shared is checked with the first.
    hot.member(list(next(rows())))
    return tuple(map(tuple.__new__, repeat(Member), rows()))


def pack_descriptors(descriptors: Sequence[Descriptor]) -> Any:
    """Descriptors as they travel: `[0, edge, reader, attempt, flags, handle, length, [data_offset, …], [rid, …],
    [life, …], [index, …], [member, …], [manifest, …], [behind, …]]`, or as rows. One data_offset, or manifest, stands
    for its list if all have it."""
    if len(descriptors) < FEWEST:
        return descriptors
    edges, readers, rids, lives, indexes, attempts, flags, handles, lengths, offsets, places, manifests, behinds = zip(
        *descriptors, strict=True
    )
    shared = (edges, readers, attempts, flags, handles, lengths)
    if not all(map(_is_alike, shared)):
        return descriptors
    first = [column[0] for column in shared]
    return [0, *first, _one_or_all(offsets), rids, lives, indexes, places, _one_or_all(manifests), behinds]


def descriptors(value: Any) -> tuple[Descriptor, ...]:
    """What pack_descriptors gives, checked."""
    if type(value) is not list or len(value) != 14 or type(value[0]) is not int:
        return _descriptor_rows(value)
    _, edge, reader, attempt, flags, handle, length, offsets, rids, lives, indexes, places, manifests, behinds = value
    count = _length(rids, lives, indexes, places, behinds, *_if_list(offsets), *_if_list(manifests))
    plain = (
        count
        and _are_rids(rids)
        and _are_ints(lives, 0, MAX_WORD)
        and _are_ints(indexes, 0, MAX_INDEX)
        and _are_ints(places, 0, f.MAX_MEMBER)
        and _are_manifests(manifests)
        and _are_ints(behinds, -1, MAX_INDEX)
        and (type(offsets) is not list or _are_ints(offsets, 0, MAX_WORD))
    )

    def rows(where: Any, block: Any) -> Iterator[tuple[Any, ...]]:
        begin = (repeat(where), repeat(reader), rids, lives, indexes, repeat(attempt), repeat(flags))
        return zip(*begin, repeat(block), repeat(length), _each(offsets), places, _each(manifests), behinds)

    if not plain:
        return _descriptor_rows(list(map(list, rows(edge, handle))))
    first = hot.descriptor(list(next(rows(edge, handle))))
    return tuple(map(tuple.__new__, repeat(Descriptor), rows(first.edge, first.handle)))


_member_rows: Callable[[Any], tuple[Member, ...]] = f.many(hot.member, MANY)
_descriptor_rows: Callable[[Any], tuple[Descriptor, ...]] = f.many(hot.descriptor, MANY)


def _is_alike(column: Sequence[Any]) -> bool:
    return column.count(column[0]) == len(column)


def _one_or_all(column: Sequence[Any]) -> Any:
    return column[0] if _is_alike(column) else column


def _if_list(value: Any) -> tuple[Any, ...]:
    return (value,) if type(value) is list else ()


def _each(value: Any) -> Iterable[Any]:
    return value if type(value) is list else repeat(value)


def _length(*columns: Any) -> int:
    """How many rows there are. BadField: they are no lists, of one length, of at most MANY."""
    if any(type(column) is not list for column in columns):
        raise f.BadField("a column is no list")
    count = len(columns[0])
    if count > MANY or any(len(column) != count for column in columns):
        raise f.BadField(f"columns are not of one length, of at most {MANY}")
    return count


def _are_ints(column: list[Any], least: int, most: int) -> bool:
    return set(map(type, column)) == {int} and least <= min(column) and max(column) <= most


def _are_rids(column: list[Any]) -> bool:
    if set(map(type, column)) != {str} or not "".join(column).isascii():
        return False
    lengths = list(map(len, column))
    return min(lengths) > 0 and max(lengths) <= MAX_RID_BYTES


def _are_manifests(column: Any) -> bool:
    if type(column) is not list:
        # It is checked with the first.
        return True
    return set(map(type, column)) == {bytes} and max(map(len, column)) <= f.MAX_MANIFEST
