"""In which order shared memory is written, and what a reader of it does not believe."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import connector
from connector.arena import blocks, tensors
from connector.broker.rundir import RunDir
from connector.broker.store import Store
from connector.client.payload import open_payload
from connector.client.rid_queue import Arrived
from connector.client.session import Session
from connector.core import layout
from connector.core.directory.effects import Descriptor, FreeEntry, RaiseCeiling, WriteEntry
from connector.core.errors import Broken
from connector.core.names import Edge, Handle
from connector.core.specs import TensorSpec
from connector.wire import messages as msg
from connector.wire.manifest import pack_manifest


@pytest.fixture
def store() -> Iterator[Store]:
    """A broker's two segments, without the broker."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        run_dir = RunDir(folder + "/run", None)
        made = Store(run_dir, 1 << 20, 8)
        made.perform(RaiseCeiling())
        yield made
        made.remove()
        run_dir.remove_contents()


def test_a_put_copies_then_writes_the_header_then_the_ready_word_then_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ready word says SEALED: killed before it, the payload never existed."""
    done: list[str] = []

    def noted(what: str, call: Any) -> Any:
        def told(*arguments: Any) -> Any:
            done.append(what)
            return call(*arguments)

        return told

    def post(session: Session, message: msg.Message, *more: Any) -> None:
        if isinstance(message, msg.Seal):
            done.append("Seal")
        really_post(session, message, *more)

    with connector.connect(stage="a", embedded=True, pool="2MiB") as node:
        edge = node.edge("a", "b")
        really_post = Session.post
        with monkeypatch.context() as patch:
            patch.setattr(tensors, "copy_payload", noted("bytes", tensors.copy_payload))
            patch.setattr(blocks, "write_header", noted("header", blocks.write_header))
            patch.setattr(blocks, "seal", noted("ready", blocks.seal))
            patch.setattr(Session, "post", post)
            edge.put("r", {"x": torch.zeros(3), "y": torch.zeros(3)})
        node.flush()
        node.abort("r")
    assert done == ["bytes", "header", "ready", "Seal"]


def test_a_reserved_block_is_no_payload_of_its_former_owner(store: Store) -> None:
    """What stood there is cleared before the table names the block's new session."""
    offset = store.arena.data_begin
    blocks.seal(store.arena, offset, 5)
    assert blocks.is_ready(store.arena, offset, 5)
    seen: list[bool] = []
    reserve = store.table.reserve

    class Table:
        """The store's table; looks at the ready word when the entry is written."""

        def reserve(self, *arguments: int) -> None:
            seen.append(blocks.is_ready(store.arena, offset, 5))
            reserve(*arguments)

    real = store.table
    store.table = Table()  # type: ignore[assignment]
    try:
        store.perform(WriteEntry(0, Handle(offset, 6), 128, 1))
    finally:
        store.table = real
    assert seen == [False]
    assert [(one.number, one.entry.generation) for one in store.table.committed()] == [(0, 6)]


def test_a_freed_block_is_free_in_the_table(store: Store) -> None:
    """(FREE | generation) is what a broker that comes later finds."""
    handle = Handle(store.arena.data_begin, 7)
    store.perform(WriteEntry(3, handle, 128, 1))
    store.perform(FreeEntry(3, handle))
    assert list(store.table.committed()) == []
    assert store.table.read(3)[:2] == (0, 7)


@pytest.mark.parametrize("generation", [8, 10], ids=["older", "newer"])
def test_a_block_of_another_generation_is_broken_and_goes_back(store: Store, generation: int) -> None:
    """A descriptor of a block that was used anew shows nobody else's bytes."""
    manifest = layout.plan([[TensorSpec("x", "uint8", (8,))]])[0]
    handle = Handle(store.arena.data_begin, 9)
    blocks.seal(store.arena, handle.offset, generation)
    told = Descriptor(Edge("a", "b"), 0, "r", 1, 0, 0, 0, handle, 128, 64, 0, pack_manifest(manifest))
    arrived, freed = Arrived.of(told, store.arena), []
    with pytest.raises(Broken) as caught:
        open_payload(arrived, store.arena, False, True, lambda *hold: freed.append(hold))
    assert (caught.value.facts["found"], caught.value.facts["expected"]) == (generation, 9)
    assert freed == [(store.arena.uuid, arrived.hold)]
