"""The story's three processes, with a thinker and a talker that are runners of genuine engines.

To be imported with the demo's modules on the path. Only those two stages load an engine: the import takes seconds.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from pipelines import Request

from tests.e2e import stages
from tests.e2e.crew import StoryCrew


@dataclass(frozen=True)
class Way:
    """How a run goes: on which runner; whether the thinker sends one payload a request; whether what comes for the
    talker's decoding requests is lost."""

    version: str
    full_payload: bool = False
    deaf: bool = False


VERSIONS = ("v1", "v1-omni", "v2")
WAYS = {f"{version}, {how}": Way(version) for version in VERSIONS for how in ("usual", "failing")}
WAYS |= {f"{version}, full payload": Way(version, full_payload=True) for version in VERSIONS}
WAYS |= {f"{version}, deaf": Way(version, deaf=True) for version in VERSIONS}


def work(
    name: str, stage: str, endpoint: str, pipe: Connection, requests: list[Request], folder: str, tamper: str | None
) -> None:
    """The body of a stage process: the story's own, whose runs go these ways, too."""
    engines = {} if stage == "code2wav" else importlib.import_module("tests.engines.story_stages").STAGES
    for how, way in WAYS.items():
        stages.OTHERS[how] = {name: partial(kind, way) for name, kind in engines.items()}
    stages.work(name, stage, endpoint, pipe, requests, folder, tamper)


class EngineCrew(StoryCrew):
    BODY = staticmethod(work)
