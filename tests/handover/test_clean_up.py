"""What is cleaned up at one end of a stage leaves the other: a load may fail while a save of its rid is under way."""

from __future__ import annotations

from connector import errors
from runner_adapter.outbox import Outbox
from tests.handover.links import CONFIG, TO, Calls, Gate, Link, ids, keyed, read

NEXT = "code2wav"


RIDS = ["r"]


def test_a_failed_load_with_a_save_under_way_cleans_up_the_receiver_alone(pair: Link) -> None:
    """PR, third fix. The save is held in its thread while the load is found to have failed and is cleaned up."""
    inbox = pair.inbox(full_payload=True)
    gate = Gate()
    sends, reads = pair.node(TO), pair.node(NEXT)
    outbox = Outbox(sends, Calls(sends.edge(TO, NEXT), r=gate), CONFIG, background=True)  # type: ignore[arg-type]
    try:
        outbox.send(1, {"r": ids(10)})
        assert gate.reached.wait(60.0)
        # A stream where one payload is expected.
        for number in (1, 2):
            pair.out().put("r", keyed("r", number), last=False)
        pair.settle()
        assert isinstance(inbox.pull(["r"]).failed["r"], errors.InvalidPayload)
        inbox.finish("r")
        assert list(inbox) == []
        gate.open.set()
        outbox.send(2, {"r": ids(20)}, last=["r"])
        outbox.flush()
        assert outbox.failures() == {}
        found = list(reads.edge(TO, NEXT).stream("r", timeout=10.0))
        assert read({"r": found}) == {"r": [[10], [20]]}
        del found
    finally:
        gate.open.set()
        outbox.close()
