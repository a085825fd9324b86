"""The table of docs/reliability.md: known faults of this job, and the tests that answer them.

An entry's tests are found by name: `test_b43_…` under tests/ answers B43. Entries that no test can answer yet are
answered in words, at most ten. `python tests/reliability_table.py > docs/reliability.md` writes the page.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
MOST_IN_WORDS = 10

KINDS = {
    "A": "Data: dtype, shape, layout, keys",
    "B": "Life: leaks and clean-up",
    "D": "Capacity and back-pressure",
    "E": "Races, order, identity",
    "F": "Hangs and time-outs",
    "G": "Fork and threads",
    "H": "Files, permissions, names, containers",
    "I": "Command line and configuration",
}

#: Entry -> (kind, the fault in a few words).
FAULTS: dict[str, tuple[str, str]] = {
    "B01": ("A", "bfloat16 cannot be sent, or arrives widened"),
    "B03": ("A", "a non-contiguous tensor is sent as if it were contiguous"),
    "B04": ("A", "a 0-dim tensor breaks its whole payload"),
    "B05": ("A", "an empty tensor cannot be rebuilt"),
    "B06": ("A", "a valid but falsy payload counts as absent"),
    "B07": ("A", "rows of a batch are cloned to every request"),
    "B08": ("A", "batch order is taken from a dict"),
    "B10": ("A", "requests without an id share one state"),
    "B11": ("A", "live requests look stale in a half-built batch"),
    "B12": ("A", "a row swap leaves one state on two rows"),
    "B13": ("A", "the consumer asks for a key that was never sent"),
    "B14": ("A", "a name is nested on one side and flat on the other"),
    "B15": ("A", "one reader's write shows up at another"),
    "B16": ("A", "the sender's buffer is overwritten before it was sent"),
    "B17": ("A", "several rows in a chunk, and only the first is used"),
    "B18": ("A", "page rounding becomes data"),
    "B19": ("A", "types change on the way: tuple and list, str and bytes"),
    "B20": ("A", "a chunk is cut while its header says complete"),
    "B21": ("B", "chunks that nobody reads live for ever"),
    "B22": ("B", "per-request maps grow with every abort"),
    "B23": ("B", "lock and side files outlive their segment"),
    "B24": ("B", "one way of ending cleans up, its twin does not"),
    "B25": ("B", "an attaching process deletes the segment when it exits"),
    "B26": ("B", "the first of several readers takes it from the others"),
    "B27": ("B", "looked at, never fetched: pinned for ever"),
    "B29": ("B", "'in use' never clears"),
    "B30": ("B", "closing while views are alive crashes or hides an error"),
    "B31": ("B", "a dropped client stays connected"),
    "B43": ("D", "a lazy tmpfs turns the first large payload into SIGBUS"),
    "B44": ("D", "a failed put is a False that nobody looks at"),
    "B45": ("D", "a slow consumer lets shared memory fill"),
    "B46": ("D", "a put hangs although the working set would fit"),
    "B48": ("D", "others fill the same tmpfs"),
    "B49": ("D", "descriptors run out before memory does"),
    "B50": ("D", "big control messages meet a serializer's limits"),
    "B51": ("D", "a stuck peer's queue grows without bound"),
    "B52": ("D", "a spill loop floods the log"),
    "B53": ("E", "ready is seen before the data"),
    "B54": ("E", "one request id is in flight twice"),
    "B55": ("E", "both ends derive different ids"),
    "B56": ("E", "check-then-put races"),
    "B57": ("E", "keys differ between processes"),
    "B58": ("E", "preemption replays chunks"),
    "B59": ("E", "a full queue loses the order"),
    "B60": ("E", "a second put frees what is still read"),
    "B62": ("E", "the end of a stream is lost in a race"),
    "B63": ("E", "requests are mixed between replicas"),
    "B64": ("F", "waiting for a chunk that never comes"),
    "B65": ("F", "a request without output stalls the batch"),
    "B66": ("F", "a transfer mode is not wired on one runner"),
    "B67": ("F", "producer and consumer expect different modes"),
    "B68": ("F", "a dead reader blocks the writer"),
    "B69": ("F", "a wake-up is lost and ready data sleeps"),
    "B70": ("F", "an error while decoding keeps the slot"),
    "B71": ("F", "after one time-out every later call fails"),
    "B72": ("F", "exit hangs on unsent messages"),
    "B74": ("F", "one lost control message wedges a transfer"),
    "B75": ("F", "a missing acknowledgement fails all, or leaks"),
    "B76": ("G", "a forked child's exit deletes the parent's data"),
    "B77": ("G", "sockets are used after fork"),
    "B78": ("G", "threads share a socket"),
    "B79": ("G", "threads share an encoder"),
    "B80": ("H", "a socket path is longer than 107 bytes"),
    "B81": ("H", "a stale socket, or a silent takeover"),
    "B83": ("H", "PrivateTmp hides the socket"),
    "B84": ("H", "another user's leftover blocks us"),
    "B85": ("H", "the cleaner may not delete"),
    "B86": ("H", "control works, data does not"),
    "B87": ("H", "names too long, or with slashes"),
    "B89": ("I", "a flag is accepted and has no effect"),
    "B90": ("I", "the file silently overrides the command line"),
    "B91": ("I", "a wrong name falls back to a default"),
    "B92": ("I", "two ends look at different paths: silence"),
    "B94": ("I", "a listing shows impossible numbers"),
}

IN_WORDS: dict[str, str] = {
    "B52": "there is no spill and no fallback to disk: a full pool is back-pressure, then `PoolFull`",
    "B83": "sockets live in the run directory, `/run/tensor-connector` for root, not in /tmp; the unit comes later",
}


def answers() -> dict[str, list[str]]:
    """Entry -> ids (path::name) of the tests named after it, in order."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for match in re.finditer(r"^\s*(?:async )?def (test_(b\d\d)_\w+)", path.read_text(), re.MULTILINE):
            name = f"{path.relative_to(TESTS.parent)}::{match[1]}"
            found.setdefault(match[2].upper(), []).append(name)
    return found


def render() -> str:
    """The page."""
    tests = answers()
    lines = [
        "# Reliability",
        "",
        "Faults that people who do this job have met, and what answers each here. This page is written by",
        "`python tests/reliability_table.py > docs/reliability.md`; a test holds it, and that the tests named ran.",
    ]
    for kind, title in KINDS.items():
        lines += ["", f"## {title}", "", "| entry | the fault | answered by |", "|---|---|---|"]
        for entry, (where, fault) in FAULTS.items():
            if where == kind:
                told = "<br>".join(f"`{test}`" for test in tests.get(entry, [])) or IN_WORDS.get(entry, "**nothing**")
                lines.append(f"| {entry} | {fault} | {told} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
