"""The two segments, and the effects that touch them. Only the broker writes the table."""

from __future__ import annotations

import contextlib
import os
import uuid as uuids

from connector.arena import blocks, sweep
from connector.arena.arena import Arena, create_arena
from connector.arena.prefault import Prefault
from connector.arena.segment import SHM_DIR
from connector.arena.table import Table
from connector.broker.rundir import RunDir
from connector.core.directory.effects import Effect, FreeEntry, RaiseCeiling, WriteEntry


class Store:
    """TABLE and ARENA of this broker's life. Raises NoSpace, at creation, if the node has not the memory."""

    def __init__(self, run_dir: RunDir, pool: int, entries: int) -> None:
        self.uuid = uuids.uuid4().hex
        self.epoch = 1
        # Whatever ends this, a signal too: nothing may be left.
        with contextlib.ExitStack() as undo:
            self.table = Table.create(
                self.uuid, entries, pool, run_dir.path, self.epoch, mode=run_dir.file_mode, gid=run_dir.gid
            )
            undo.callback(self.table.close)
            undo.callback(self.table.unlink)
            self.arena: Arena = create_arena(self.uuid, pool, self.epoch, run_dir.file_mode, run_dir.gid)
            undo.callback(self.arena.close)
            undo.callback(self.arena.unlink)
            self.prefault = Prefault(self.arena.segment).start()
            undo.pop_all()

    def perform(self, effect: Effect) -> bool:
        """Apply an effect on shared memory, body before word; False if it is none of these."""
        if isinstance(effect, WriteEntry):
            offset, generation = effect.handle
            blocks.clear_ready(self.arena, offset)
            self.table.reserve(effect.entry, offset, effect.length, effect.session, generation)
        elif isinstance(effect, FreeEntry):
            self.table.set_free(effect.entry, effect.handle.generation)
        elif isinstance(effect, RaiseCeiling):
            self.table.raise_ceiling()
        else:
            return False
        return True

    def remove(self) -> None:
        """Clean stop: both names go. Views in clients keep their pages until they die."""
        self.prefault.stop()
        self.arena.unlink()
        self.table.unlink()
        self.arena.close()
        self.table.close()


def reclaim(run_dir: str) -> list[tuple[str, int]]:
    """Remove what dead brokers of this run directory left, before anything is allocated; paths and bytes removed."""
    stale = [found for found in sweep.find() if found.verdict == "stale" and found.run_dir == run_dir]
    sizes = {os.path.join(SHM_DIR, found.name): found.size for found in stale}
    return [(path, sizes.get(path, 0)) for path in sweep.remove(stale)] if stale else []
