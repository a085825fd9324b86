"""The main job: requests through a model cut into three processes, and the same in one process, bit for bit.

Exit code 0: identical. 1: not identical, or a stage failed. 2: the arguments are wrong. 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from pipelines import PIPELINES, SINK, Outcome, Pipeline, Request, make_requests
from processes import Crew, StageFailed
from report import WIDTH, Run, Watch, as_data, differences, print_tables
from rich.console import Console
from transport import Receiver, Station
from wav import write_wav

from connector.core.errors import ConnectorError

#: Seconds without any chunk, after which the run is given up.
STALL = 120.0
MOST_REQUESTS = 256


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked as far as they can be without a model; exits with 2 on a wrong one."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    models = "\n".join(f"{p.name}: {p.about}" for p in PIPELINES.values())
    parser.add_argument("--model", choices=list(PIPELINES), default="hibari", help=models)
    parser.add_argument("--text", help="speak these words, as the only request (hibari)")
    parser.add_argument("--requests", type=int, default=4, metavar="N", help="requests at once (default 4)")
    parser.add_argument("--tamper", metavar="FROM:TO", help="flip one bit of one payload on this edge")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of the WAV files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables' numbers there")
    options = parser.parse_args(argv)
    pipeline = PIPELINES[options.model]
    if not 1 <= options.requests <= MOST_REQUESTS:
        parser.error(f"--requests must be from 1 to {MOST_REQUESTS}, not {options.requests}")
    if options.tamper is not None and options.tamper not in pipeline.edges:
        edges = ", ".join(pipeline.edges)
        parser.error(f"--tamper: {options.model} has no edge {options.tamper!r}; its edges are {edges}")
    if options.text is not None:
        # Bytes of the command line that are no UTF-8 come as lone surrogates.
        if any("\ud800" <= symbol <= "\udfff" for symbol in options.text):
            parser.error("--text: not valid UTF-8")
        if not pipeline.speaks:
            parser.error(f"--text: {options.model} has random weights and no tokenizer; hibari speaks a text")
        if not options.text.strip():
            parser.error("--text: the text is empty")
        if (why := pipeline.load().check(options.text)) is not None:
            parser.error(f"--text: {why}")
    for folder in (options.out, options.json.parent if options.json else options.out):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot make the folder {folder}: {error.strerror}")
    return options


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM leaves through every `finally`, as Ctrl-C does, so that no process and no segment stays."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def collect(
    receiver: Receiver, crew: Crew, requests: list[Request], watch: Watch
) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Read the last edge until every request is complete or has failed: outcomes, and what the others failed of.

    StageFailed if a stage fails or nothing comes.
    """
    parts: dict[str, list[dict[str, torch.Tensor]]] = {request.rid: [] for request in requests}
    failed: dict[str, str] = {}
    open_rids, heard = set(parts), time.monotonic()
    while open_rids:
        crew.check()
        failed |= crew.failed
        for rid, tensors, last in receiver.ready(0.2, failed):
            if rid in failed:
                continue
            # Copies: a view would hold its block in the pool to the end of the run.
            parts[rid].append({key: tensor.clone() for key, tensor in tensors.items()})
            watch.heard(rid, tensors["wav"].numel(), last)
            heard = time.monotonic()
            if last:
                open_rids.remove(rid)
        for rid in open_rids & failed.keys():
            watch.say(f"{rid}: failed: {failed[rid]}")
            open_rids.remove(rid)
        if time.monotonic() - heard > STALL:
            raise StageFailed(f"no chunk in {STALL:.0f} s; waiting for {', '.join(sorted(open_rids))}")
    return {rid: _join(chunks) for rid, chunks in parts.items() if rid not in failed}, failed


def _join(chunks: list[dict[str, torch.Tensor]]) -> Outcome:
    wav = torch.cat([chunk["wav"].flatten() for chunk in chunks])
    codes = torch.cat([chunk["codes"] for chunk in chunks], -1) if "codes" in chunks[0] else None
    return Outcome(wav, codes)


def staged(pipeline: Pipeline, requests: list[Request], folder: Path, tamper: str | None, watch: Watch) -> Run:
    """The run through three processes and a private broker, all of them gone when this returns."""
    with Station(SINK, None) as station:
        receiver = station.receiver(pipeline.stages[-1])
        with Crew(pipeline, station.endpoint, requests, folder, tamper) as crew:
            watch.say(f"private broker at {station.endpoint}")
            for stage, pid in crew.pids.items():
                watch.say(f"stage {stage} starts as process {pid}")
            pipeline.load().prepare(folder)
            crew.go()
            watch.say("the model is in place; the stages begin")
            outcomes, failed = collect(receiver, crew, requests, watch)
            crew.wait(STALL)
            for request in requests:
                station.finish(request.rid)
            received = {**crew.received, receiver.flow.edge: receiver.flow}
            counters = station.counters()
            return Run(pipeline, requests, crew.pids, outcomes, failed, crew.sent, received, crew.steps, counters)


def run(options: argparse.Namespace) -> bool:
    """Both runs, the files and the tables; True if identical."""
    torch.set_num_threads(1)
    pipeline = PIPELINES[options.model]
    requests = make_requests(pipeline, options.requests, options.text)
    with tempfile.TemporaryDirectory(prefix="demo-") as name, Watch(requests, pipeline.samples_per_second) as watch:
        folder = Path(name)
        watch.say(f"{pipeline.name}: {pipeline.about}")
        result = staged(pipeline, requests, folder, options.tamper, watch)
        watch.close_bars()
        watch.say("the same requests in one process")
        found = differences(result, pipeline.load().reference(requests, folder))
    for rid, outcome in result.outcomes.items():
        path = options.out / f"{rid}.wav"
        write_wav(path, outcome.wav, pipeline.samples_per_second)
        result.files[rid] = str(path)
    data = as_data(result, found)
    if options.json is not None:
        options.json.write_text(json.dumps(data, indent=2) + "\n")
    console = Console()
    print_tables(console if console.width >= WIDTH else Console(width=WIDTH), data)
    for line in found:
        print(line)
    print(f"identical: {'no' if found else 'yes'}", flush=True)
    return not found


def main(argv: list[str] | None = None) -> int:
    """Run the demo; its exit code."""
    try:
        with sigterm_unwinds():
            return 0 if run(parse(argv)) else 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    except (StageFailed, ConnectorError, OSError) as error:
        print(f"demo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
