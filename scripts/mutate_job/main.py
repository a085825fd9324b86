"""Applies each patch of tests/mutations/ to a copy of the tree and wants the tests that it names to fail."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from patches import Patch, PatchError, all_names, changed, has_test, read
from scratch import Scratch, scratch

T = TypeVar("T")
R = TypeVar("R")

#: Seconds for all named tests together, unpatched.
BASELINE_LIMIT = 1800.0
#: Verdicts that are good enough.
CAUGHT = ("caught", "caught (hang)")


class Row(NamedTuple):
    promise: str
    patch: str
    test: str
    verdict: str


def matching(test: str, outcomes: dict[str, str]) -> list[str]:
    """Outcomes of a test id, all its parameters together."""
    return [word for name, word in outcomes.items() if name == test or name.startswith(f"{test}[")]


def is_red(test: str, outcomes: dict[str, str]) -> bool:
    return any(word != "PASSED" for word in matching(test, outcomes))


def try_patch(patch: Patch, place: Scratch, unpatched: dict[str, str]) -> list[Row]:
    """One row a named test. The copy is as it was when this returns."""
    try:
        texts = changed(patch, place.root)
    except PatchError as error:
        return [Row(patch.promise, patch.name, test, f"does not apply: {error}") for test in patch.tests]
    before = {file: file.read_text() for file in texts}
    known = [test for test in patch.tests if matching(test, unpatched) and not is_red(test, unpatched)]
    try:
        for file, text in texts.items():
            file.write_text(text)
        outcomes, hung = run_mutant(known, place)
    finally:
        for file, text in before.items():
            file.write_text(text)
    rows = []
    for test in patch.tests:
        if test not in known:
            reasons = [word for word in matching(test, unpatched) if word != "PASSED"]
            verdict = f"red without the patch: {reasons[0]}" if reasons else "test not found"
        elif is_red(test, outcomes):
            verdict = "caught"
        elif test in hung:
            verdict = "caught (hang)"
        else:
            # Not run at all: the patch broke more than a promise, and proves nothing.
            verdict = "SURVIVED" if matching(test, outcomes) else "breaks the tree"
        rows.append(Row(patch.promise, patch.name, test, verdict))
    return rows


def run_mutant(tests: list[str], place: Scratch) -> tuple[dict[str, str], set[str]]:
    """Outcomes, and the tests that hang."""
    outcomes, over = place.run(tests) if tests else ({}, False)
    if not over or len(tests) == 1:
        return outcomes, set(tests) if over else set()
    # Which of them it was.
    alone = {test: place.run([test]) for test in tests}
    return {k: v for got, _ in alone.values() for k, v in got.items()}, {t for t, (_, late) in alone.items() if late}


def run_unpatched(tests: Iterable[str], places: list[Scratch]) -> dict[str, str]:
    """Outcomes of the tests that are there, as the tree is. A file's tests share what they set up: it is not cut."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        if has_test(test, places[0].root):
            files.setdefault(test.partition("::")[0], []).append(test)
    parts: list[list[str]] = [[] for _ in places]
    for several in sorted(files.values(), key=len, reverse=True):
        min(parts, key=len).extend(several)
    outcomes: dict[str, str] = {}
    for got in spread(places, lambda place, part: place.run(part, BASELINE_LIMIT)[0], [part for part in parts if part]):
        outcomes |= got
    return outcomes


def try_all(patches: list[Patch], places: list[Scratch], before: dict[str, str]) -> list[Row]:
    """The rows of each patch, in the patches' order."""

    def one(place: Scratch, patch: Patch) -> list[Row]:
        began = time.monotonic()
        found = try_patch(patch, place, before)
        verdicts = ", ".join(dict.fromkeys(row.verdict for row in found))
        print(f"mutate: {patch.name}: {verdicts} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
        return found

    return [row for found in spread(places, one, patches) for row in found]


def spread(places: list[Scratch], work: Callable[[Scratch, T], R], parts: list[T]) -> list[R]:
    """What the work gives for each part, in their order, each in whichever copy is free."""
    free: SimpleQueue[Scratch] = SimpleQueue()
    for place in places:
        free.put(place)

    def one(part: T) -> R:
        place = free.get()
        try:
            return work(place, part)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        try:
            return list(pool.map(one, parts))
        except KeyboardInterrupt:
            # What runs is in sessions of its own: the terminal's Ctrl-C did not reach it. The rest does not begin.
            for place in places:
                place.stop()
            raise


def table(rows: list[Row]) -> str:
    """Columns as wide as their widest cell."""
    lines = [Row("promise", "patch", "test", "verdict"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="patches to run; without any: all")
    parser.add_argument("--list", action="store_true", help="print the patches, and run nothing")
    parser.add_argument("--jobs", type=int, metavar="N", help="copies to try patches in at once (the processors)")
    told = parser.parse_args(arguments)
    known = all_names()
    unknown = [name for name in told.names if name not in known]
    if unknown:
        parser.error(f"no such patch: {', '.join(unknown)}; --list prints those there are")
    try:
        patches = [read(name) for name in told.names or known]
    except PatchError as error:
        parser.error(str(error))
    if told.list:
        print(table([Row(patch.promise, patch.name, test, "") for patch in patches for test in patch.tests]))
        return 0
    began = time.monotonic()
    with ExitStack() as copies:
        places = [copies.enter_context(scratch())]
        places[0].check()
        # Without namespaces one would see what another leaves.
        jobs = min(told.jobs or os.cpu_count() or 1, len(patches)) if places[0].alone else 1
        places += [copies.enter_context(scratch()) for _ in range(jobs - 1)]
        before = run_unpatched([test for patch in patches for test in patch.tests], places)
        count = sum(word == "PASSED" for word in before.values())
        print(f"mutate: unpatched, {count} of {len(before)} pass ({time.monotonic() - began:.0f} s)", file=sys.stderr)
        if not before:
            print("mutate: no test ran unpatched: pytest cannot collect them, and says why", file=sys.stderr)
            return 1
        rows = try_all(patches, places, before)
    print(table(rows))
    missed = [row for row in rows if row.verdict not in CAUGHT]
    took = f"{len(patches)} patches, {time.monotonic() - began:.0f} s"
    print(f"{len(rows) - len(missed)} of {len(rows)} tests caught the mutation that they are for ({took})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
