"""Trained English text to speech, cut where the library has its own seams: ids, spectrum, waveform.

| edge | key | shape | dtype |
|---|---|---|---|
| text -> acoustic | ids | [1, symbols] | int64 |
| acoustic -> vocoder | lh th ln lr phi | [601, frames] | float32 |
| | f0 | [frames] | float32 |
| vocoder -> main | wav | [300 * frames] | float32 |
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from hibari import Hibari, dsp
from pipelines import SINK, Outcome, Reference, Request
from transport import Station, Tensors

#: The network's outputs, in the order in which it gives them and the vocoder wants them.
SPECTRUM = ("lh", "th", "ln", "lr", "phi", "f0")
#: ids of a sentence are framed by two pads; with fewer than one symbol between them there is nothing to say.
LEAST_IDS = 3
#: How long a stage sleeps when no chunk has come, in seconds.
TICK = 1.0


def prepare(folder: Path) -> None:
    """Nothing to write: the weights lie in the package, and each stage opens them itself."""


def check(text: str) -> str | None:
    """Why `text` cannot be spoken, or None."""
    if not any(symbol.isalpha() for sentence in Hibari(threads=1).phonemize(text) for symbol in sentence):
        return "the text holds no sentence that can be pronounced (the voice speaks English)"
    return None


def _sentences(tts: Hibari, text: str) -> Iterator[tuple[Tensors, bool]]:
    """({"ids": int64 [1, symbols]}, is it the last) of each sentence."""
    every = [tts.ids(phonemes) for phonemes in tts.phonemize(text)]
    spoken = [ids for ids in every if len(ids) >= LEAST_IDS]
    for number, ids in enumerate(spoken, start=1):
        yield {"ids": torch.tensor([ids])}, number == len(spoken)


def _text(station: Station, requests: list[Request], folder: Path) -> None:
    """Text to ids, one sentence of each request in turn, so that all of them are under way at once."""
    tts, sender = Hibari(threads=1), station.sender("acoustic")
    under_way = [(request.rid, _sentences(tts, request.says)) for request in requests]
    while under_way:
        rid, sentences = under_way.pop(0)
        tensors, last = next(sentences)
        sender.send(rid, tensors, last)
        if last:
            station.finish(rid)
        else:
            under_way.append((rid, sentences))


def _acoustic(station: Station, requests: list[Request], folder: Path) -> None:
    """Ids to spectrum, for whichever request has a sentence there."""
    net, receiver, sender = Hibari(threads=1).sess, station.receiver("text"), station.sender("vocoder")
    open_rids = {request.rid for request in requests}
    while open_rids:
        for rid, tensors, last in receiver.ready(TICK):
            outputs = net.run(None, {"ids": tensors["ids"].numpy(), "speed": np.ones(1, np.float32)})
            spectrum = {key: torch.from_numpy(part[0]) for key, part in zip(SPECTRUM, outputs, strict=True)}
            sender.send(rid, spectrum, last)
            if last:
                open_rids.remove(rid)
                station.finish(rid)


def _vocoder(station: Station, requests: list[Request], folder: Path) -> None:
    """Spectrum to waveform; a request's sentences draw their noise from one generator, one after the other."""
    receiver, sender = station.receiver("acoustic"), station.sender(SINK)
    noise = {request.rid: np.random.default_rng(request.seed) for request in requests}
    while noise:
        for rid, tensors, last in receiver.ready(TICK):
            wav = dsp.synth(*(tensors[key].numpy() for key in SPECTRUM), noise[rid])
            sender.send(rid, {"wav": torch.from_numpy(wav)}, last)
            if last:
                del noise[rid]
                station.finish(rid)


STAGES = {"text": _text, "acoustic": _acoustic, "vocoder": _vocoder}


def reference(requests: list[Request], folder: Path) -> Reference:
    """The library's own uncut call."""
    tts = Hibari(threads=1)
    return Reference({r.rid: Outcome(torch.from_numpy(tts(r.says, seed=r.seed))) for r in requests})
