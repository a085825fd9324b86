"""Nothing sealed is ever evicted: a put that finds no room waits, and is refused at its deadline."""

from __future__ import annotations

from typing import Any

import pytest

from connector.core.errors import PoolFull


@pytest.mark.parametrize("ahead", [False, True], ids=["who waits", "who reserves ahead"])
def test_a_payload_that_nobody_has_come_for_keeps_its_room(make_rig: Any, ahead: bool) -> None:
    """However long it has been there, and whoever asks; its reader finds it."""
    rig = make_rig(pool=128)
    writer = rig.join()
    rig.put(writer, "a", last=True, size=128, tag="kept")
    if ahead:
        assert rig.ahead(rig.join(), [64]) == []
    else:
        waiting = rig.reserve(rig.join(), 64, timeout=5.0, edge=rig.other)
        rig.tick(5.0)
        assert isinstance(rig.refusal(2, waiting), PoolFull)
    assert rig.used == 128
    assert [d.manifest for d in rig.read(rig.reader())] == [b"kept"] and rig.is_empty()
