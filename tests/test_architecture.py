"""The picture of docs/architecture.md, held by walking syntax trees; each rule is proven on a source that breaks it.

A rule is a function from a `Source` to complaints. Imports inside functions count like any other; under
`if TYPE_CHECKING:` a third-party name is no dependency, but a room is still a room.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = ("core", "wire", "arena", "config", "broker", "client", "bench", "cli", "testing")
ALL = frozenset(ROOMS)
#: Room -> rooms and packages it may import, beside the standard library and itself.
TABLE: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "core": (frozenset(), frozenset()),
    "wire": (frozenset({"core"}), frozenset({"msgpack"})),
    "arena": (frozenset({"core"}), frozenset({"posix_ipc"})),
    "config": (frozenset({"core"}), frozenset({"yaml", "pydantic"})),
    "broker": (frozenset({"core", "wire", "arena", "config"}), frozenset({"zmq", "pydantic"})),
    "client": (frozenset({"core", "wire", "arena", "config"}), frozenset({"zmq"})),
    # A user of the public API; its limits do by hand what the rooms do.
    "bench": (frozenset({"connector"}), frozenset({"torch", "zmq", "msgpack", "posix_ipc"})),
    "cli": (ALL | {"connector", "runner_adapter"}, frozenset({"click", "rich", "zmq", "safetensors"})),
    "testing": (ALL | {"connector"}, frozenset({"zmq", "pytest"})),
    # The public API: connector/__init__.py and other modules beside it.
    "connector": (ALL, frozenset()),
    # Besides its engines it sees the public API alone, which is no room.
    "runner_adapter": (
        frozenset({"connector"}),
        frozenset({"torch", "numpy", "yaml", "pydantic", "transformers", "vllm", "vllm_omni"}),
    ),
}
#: File -> the package that it alone of its room may import.
ALONE = {
    "connector/arena/tensors.py": "torch",
    "connector/arena/cuda.py": "torch",
    "runner_adapter/adapters/vllm_omni/codec.py": "msgpack",
}
#: A package that comes with another and has its own name.
PART_OF = {"pydantic_core": "pydantic"}
#: No clock, no I/O, no threads, no chance.
CORE_FORBIDS = frozenset(
    "os time random threading asyncio logging socket subprocess multiprocessing mmap select selectors signal"
    " ctypes fcntl tempfile shutil secrets".split()
)
#: The outermost doors, one broad `except` each.
DOORS = ("connector/broker/loop.py", "connector/cli/main.py", "runner_adapter/hooks.py")
UNSAFE_MODULES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
UNSAFE_METHODS = frozenset({"recv_pyobj", "send_pyobj"})

SOURCE_LINES, TEST_LINES, FUNCTION_LINES = 400, 500, 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One imported module by its absolute name; `typed` when it stands under TYPE_CHECKING."""

    module: str
    line: int
    typed: bool


class Source:
    """A file by its path from the project's root, and its text."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.tree = ast.parse(text, path)

    @property
    def shipped(self) -> bool:
        return self.path.startswith(("connector/", "runner_adapter/"))

    @property
    def room(self) -> str:
        """The row of TABLE, or "" for tests and scripts."""
        top, _, rest = self.path.partition("/")
        if top != "connector":
            return top if top == "runner_adapter" else ""
        first = rest.partition("/")[0]
        return first if first in ROOMS else "connector"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        typed = {id(inner) for node in self.nodes if _is_type_checking(node) for inner in _body_of(node)}
        return [
            Import(module, node.lineno, id(node) in typed)
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
            for module in self.imported_by(node)
        ]

    def imported_by(self, node: ast.Import | ast.ImportFrom | ast.Call) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = self.path.removesuffix(".py").split("/")[: -node.level] if node.level else []
            base = ".".join([*package, node.module] if node.module else package)
            # `from connector import core` names a room, `from connector.core import errors` a module.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif _name(node.func) in ("import_module", "importlib.import_module", "__import__") and node.args:
            named = node.args[0]
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                yield named.value


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _name(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _body_of(node: ast.AST) -> Iterator[ast.AST]:
    assert isinstance(node, ast.If)
    return (inner for statement in node.body for inner in ast.walk(statement))


def _name(node: ast.AST) -> str:
    """`a.b.c` as text; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def room_of_module(module: str) -> str:
    """The row of TABLE that a module of ours belongs to, "" for others'."""
    top, *rest = module.split(".")
    if top != "connector":
        return top if top == "runner_adapter" else ""
    return rest[0] if rest and rest[0] in ROOMS else "connector"


def is_private(module: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in module.split("."))


def rooms_are_kept(source: Source) -> Iterator[str]:
    """A room imports the rooms of its row, and runner_adapter no private part of the public API."""
    if not source.room:
        return
    allowed = TABLE[source.room][0] | {source.room, ""}
    for found in source.imports:
        room = room_of_module(found.module)
        hidden = source.room == "runner_adapter" and room == "connector" and is_private(found.module)
        if room not in allowed or hidden:
            yield f"{source.path}:{found.line}: {source.room} must not import {found.module}"


def packages_are_kept(source: Source) -> Iterator[str]:
    """A room imports the packages of its row, a file of ALONE its own besides, and core no clock or I/O."""
    if not source.room:
        return
    allowed = TABLE[source.room][1] | {ALONE.get(source.path, "")}
    for found in source.imports:
        top = found.module.partition(".")[0]
        if source.room == "core" and top in CORE_FORBIDS:
            yield f"{source.path}:{found.line}: core must not import {top}"
        known = top in sys.stdlib_module_names or room_of_module(found.module) != "" or found.typed
        if not known and PART_OF.get(top, top) not in allowed:
            yield f"{source.path}:{found.line}: {source.room} must not import {top}"


def adapters_stand_apart(source: Source) -> Iterator[str]:
    """A file under runner_adapter/adapters does not import another."""
    if not source.path.startswith("runner_adapter/adapters/") or source.path.endswith("__init__.py"):
        return
    own = source.path.removesuffix(".py").split("/")[2]
    for found in source.imports:
        parts = found.module.split(".")
        if parts[:2] == ["runner_adapter", "adapters"] and parts[2:3] != [own]:
            yield f"{source.path}:{found.line}: an adapter must not import {found.module}"


def files_are_short(source: Source) -> Iterator[str]:
    """400 lines, 500 for tests."""
    limit = TEST_LINES if source.path.startswith("tests/") else SOURCE_LINES
    lines = len(source.text.splitlines())
    if lines > limit:
        yield f"{source.path}: {lines} lines, at most {limit}"


def functions_are_short(source: Source) -> Iterator[str]:
    """60 lines, from `def` to the last line."""
    for node in source.nodes:
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES}"


def nothing_is_swallowed(source: Source) -> Iterator[str]:
    """`except Exception`, broader or bare, and suppress(Exception), stand at the doors only: one each.

    A handler that throws whatever it caught into a generator hands it on: that is how verbs are driven.
    """
    if not source.shipped:
        return
    broad = sorted(line for node in source.nodes for line in _broad(node))
    for line in broad[1:] if source.path in DOORS else broad:
        yield f"{source.path}:{line}: a broad except away from the three doors"


def _broad(node: ast.AST) -> Iterator[int]:
    """The line of a handler, or of a suppress(), that catches whatever comes."""
    if isinstance(node, ast.ExceptHandler) and not _hands_on(node):
        caught: list[ast.expr | None] = [node.type]
    elif isinstance(node, ast.Call) and _name(node.func) in ("suppress", "contextlib.suppress"):
        caught = [*node.args]
    else:
        return
    flat = [part for kind in caught for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    if any(kind is None or _name(kind) in ("Exception", "BaseException") for kind in flat):
        yield node.lineno


def _hands_on(handler: ast.ExceptHandler) -> bool:
    """True if the handler is nothing but a throw of what it caught into a generator."""
    last = handler.body[-1]
    thrown = last.value if isinstance(last, ast.Assign | ast.Expr) else None
    return isinstance(thrown, ast.Call) and isinstance(thrown.func, ast.Attribute) and thrown.func.attr == "throw"


def nothing_is_probed(source: Source) -> Iterator[str]:
    """No hasattr: a type says what it has."""
    if source.shipped:
        for node in source.nodes:
            if isinstance(node, ast.Name) and node.id == "hasattr":
                yield f"{source.path}:{node.lineno}: hasattr"


def nothing_runs_data(source: Source) -> Iterator[str]:
    """No pickle and its kin, no eval or exec, no torch.load."""
    if not source.shipped:
        return
    for found in source.imports:
        if found.module.partition(".")[0] in UNSAFE_MODULES or found.module in (
            "torch.load",
            "torch.serialization.load",
        ):
            yield f"{source.path}:{found.line}: {found.module} runs what it reads"
    for node in source.nodes:
        runs = isinstance(node, ast.Name) and node.id in ("eval", "exec")
        loads = isinstance(node, ast.Attribute) and (
            node.attr in UNSAFE_METHODS or _name(node) in ("torch.load", "torch.serialization.load")
        )
        if runs or loads:
            assert isinstance(node, ast.expr)
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)} runs what it reads"


def commits_are_single_stores(source: Source) -> Iterator[str]:
    """No pack_into in arena: it zeroes the field first, and another process sees the zero."""
    if source.room != "arena":
        return
    for node in source.nodes:
        named = isinstance(node, ast.ImportFrom) and any(alias.name == "pack_into" for alias in node.names)
        if named or (isinstance(node, ast.Attribute) and node.attr == "pack_into"):
            assert isinstance(node, ast.stmt | ast.expr)
            yield f"{source.path}:{node.lineno}: pack_into in arena"


RULES: tuple[Callable[[Source], Iterable[str]], ...] = (
    rooms_are_kept,
    packages_are_kept,
    adapters_stand_apart,
    files_are_short,
    functions_are_short,
    nothing_is_swallowed,
    nothing_is_probed,
    nothing_runs_data,
    commits_are_single_stores,
)


def room_cycle(sources: Iterable[Source]) -> list[str]:
    """Rooms that import each other in a circle, in order; [] when there is none."""
    edges: dict[str, set[str]] = {}
    for source in sources:
        reached = {room_of_module(found.module) for found in source.imports} & TABLE.keys()
        edges.setdefault(source.room, set()).update(reached - {source.room})
    # Dropping rooms that lead nowhere, again and again, leaves the circles and what leads to them.
    while ends := [room for room, reached in edges.items() if not reached & edges.keys()]:
        for room in ends:
            del edges[room]
    path: list[str] = sorted(edges)[:1]
    while path and path[-1] not in path[:-1]:
        path.append(min(edges[path[-1]] & edges.keys()))
    return path[path.index(path[-1]) :] if path else []


@cache
def project() -> tuple[Source, ...]:
    folders = ("connector", "runner_adapter", "scripts", "tests")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files)


def test_the_walk_sees_the_project() -> None:
    """Else every rule would hold for nothing."""
    seen = {source.room for source in project()}
    assert {"core", "broker", "connector", "runner_adapter", ""} <= seen


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps(rule: Callable[[Source], Iterable[str]]) -> None:
    """Each rule holds in every file."""
    assert [complaint for source in project() for complaint in rule(source)] == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    """Whatever TABLE allows."""
    assert room_cycle(source for source in project() if source.room) == []


def test_the_page_tells_the_same_table() -> None:
    """The rows of docs/architecture.md for the rooms that name their imports one by one."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `connector/(\w+)` \|[^|]*\| ([^|;]*)", page, re.MULTILINE))
    for room in ("core", "wire", "arena", "broker", "client"):
        rooms, packages = TABLE[room]
        told = {word.strip() for word in rows[room].split(",")} - {"nothing"}
        assert told == rooms | packages, room


def test_core_and_wire_load_nothing_heavy() -> None:
    """Importing every module of core and wire in a new process loads no torch, zmq, posix_ipc or mmap."""
    program = (
        "import importlib, pkgutil, sys\n"
        "names = []\n"
        "for room in ('connector.core', 'connector.wire'):\n"
        "    package = importlib.import_module(room)\n"
        "    names += [m.name for m in pkgutil.walk_packages(package.__path__, room + '.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), *[m for m in ('torch', 'zmq', 'posix_ipc', 'mmap') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, *loaded = done.stdout.split()
    assert int(count) >= 3
    assert loaded == []


ARENA, BROKER, CORE = "connector/arena/x.py", "connector/broker/x.py", "connector/core/x.py"
ADAPTER, CLI, CLIENT, WIRE = "runner_adapter/x.py", "connector/cli/x.py", "connector/client/x.py", "connector/wire/x.py"
TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
TRY = "try:\n    pass\n"

BROKEN = [
    (rooms_are_kept, CORE, "from connector.wire import messages"),
    (rooms_are_kept, CORE, "from connector import wire"),
    (rooms_are_kept, CORE, "from ..wire import messages"),
    (rooms_are_kept, CORE, "import connector.arena.table"),
    (rooms_are_kept, CORE, "def f():\n    from connector.broker import loop"),
    (rooms_are_kept, CORE, "import importlib\nimportlib.import_module('connector.client')"),
    (rooms_are_kept, CORE, TYPED + "from connector.broker import loop"),
    (rooms_are_kept, "connector/core/directory/x.py", "from ...arena import table"),
    (rooms_are_kept, WIRE, "from connector.arena import table"),
    (rooms_are_kept, ARENA, "from connector.wire import manifest"),
    (rooms_are_kept, BROKER, "from connector.client import session"),
    (rooms_are_kept, BROKER, "from connector.cli import main"),
    (rooms_are_kept, BROKER, "from connector.testing import fakes"),
    (rooms_are_kept, CLIENT, "from connector.broker import loop"),
    (rooms_are_kept, CLIENT, "from connector import connect"),
    (rooms_are_kept, CLIENT, "import runner_adapter"),
    (rooms_are_kept, "connector/__init__.py", "import runner_adapter"),
    (rooms_are_kept, ADAPTER, "from connector.client import session"),
    (rooms_are_kept, ADAPTER, "from connector.core.errors import ConfigError"),
    (rooms_are_kept, ADAPTER, "from connector import core"),
    (rooms_are_kept, ADAPTER, "from connector import _private"),
    (packages_are_kept, CORE, "import torch"),
    (packages_are_kept, CORE, "import msgpack"),
    *((packages_are_kept, CORE, f"import {name}") for name in sorted(CORE_FORBIDS)),
    (packages_are_kept, CORE, "from os import path"),
    (packages_are_kept, CORE, "def f():\n    import time"),
    (packages_are_kept, WIRE, "import zmq"),
    (packages_are_kept, ARENA, "import torch"),
    (packages_are_kept, ARENA, "import msgpack"),
    (packages_are_kept, BROKER, "import posix_ipc"),
    (packages_are_kept, BROKER, "import msgpack"),
    (packages_are_kept, CLIENT, "def f():\n    import torch"),
    (packages_are_kept, CLIENT, "import yaml"),
    (packages_are_kept, CLI, "import torch"),
    (packages_are_kept, "connector/__init__.py", "import zmq"),
    (packages_are_kept, ADAPTER, "import zmq"),
    (packages_are_kept, ADAPTER, "import msgpack"),
    (packages_are_kept, BROKER, "import somebody_elses"),
    (adapters_stand_apart, "runner_adapter/adapters/vllm.py", "from runner_adapter.adapters import transformers"),
    (adapters_stand_apart, "runner_adapter/adapters/vllm.py", "from .transformers import hook"),
    (files_are_short, CORE, "x = 1\n" * 401),
    (files_are_short, "tests/core/test_x.py", "x = 1\n" * 501),
    (functions_are_short, CORE, "def f():\n" + "    x = 1\n" * 60),
    (functions_are_short, "tests/core/test_x.py", "class C:\n    async def f(self):\n" + "        x = 1\n" * 60),
    (nothing_is_swallowed, CORE, TRY + "except Exception:\n    raise"),
    (nothing_is_swallowed, ADAPTER, TRY + "except BaseException as e:\n    raise"),
    (nothing_is_swallowed, CORE, TRY + "except:\n    raise"),
    (nothing_is_swallowed, CORE, TRY + "except (OSError, Exception):\n    raise"),
    (nothing_is_swallowed, CORE, "import contextlib\nwith contextlib.suppress(Exception):\n    pass"),
    (nothing_is_swallowed, DOORS[0], TRY + "except Exception:\n    pass\n" + TRY + "except Exception:\n    pass"),
    (nothing_is_probed, CORE, "hasattr(1, 'x')"),
    (nothing_is_probed, ADAPTER, "probe = hasattr"),
    *((nothing_runs_data, BROKER, f"import {name}") for name in sorted(UNSAFE_MODULES)),
    (nothing_runs_data, ADAPTER, "from pickle import loads"),
    (nothing_runs_data, ADAPTER, "import torch\ntorch.load('x')"),
    (nothing_runs_data, ADAPTER, "from torch import load"),
    (nothing_runs_data, ADAPTER, "eval('1')"),
    (nothing_runs_data, ADAPTER, "exec('1')"),
    (nothing_runs_data, BROKER, "def f(s):\n    return s.recv_pyobj()"),
    (commits_are_single_stores, ARENA, "import struct\nstruct.pack_into('Q', b, 0, 1)"),
    (commits_are_single_stores, ARENA, "from struct import pack_into"),
    (commits_are_single_stores, ARENA, "import struct\nstruct.Struct('Q').pack_into(b, 0, 1)"),
]

#: What must pass, so that no rule refuses everything.
KEPT = [
    (CORE, "from connector.core.errors import ConfigError\nfrom . import names\nimport struct"),
    (WIRE, "import msgpack\nfrom ..core import names"),
    ("connector/arena/tensors.py", "import torch\nimport ctypes"),
    ("runner_adapter/adapters/vllm_omni/codec.py", "import msgpack\nimport torch"),
    (ARENA, "import os, mmap, posix_ipc\nfrom connector.core import layout\nw = memoryview(b'').cast('Q')"),
    (BROKER, "import zmq, pydantic\nfrom connector.arena import table\nfrom connector.config import reader"),
    (CLIENT, TYPED + "import torch"),
    (CLIENT, "from connector.arena import tensors\nimport zmq.asyncio"),
    (CLI, "import click, rich\nfrom connector.broker import loop\nfrom connector import connect"),
    (CLI, "from runner_adapter import stagefile"),
    ("connector/config/x.py", "import yaml, pydantic\nfrom connector.core import errors"),
    (ADAPTER, "import torch, connector\nfrom connector import connect\nmodel.eval()"),
    (
        "runner_adapter/adapters/vllm.py",
        "from runner_adapter.adapters.vllm import x\nfrom runner_adapter import gather",
    ),
    ("scripts/x.py", "import torch, pickle\nfrom connector.client import session"),
    ("tests/core/test_x.py", "import torch, zmq\n" + "x = 1\n" * 450),
    (CORE, "def f():\n" + "    x = 1\n" * 59),
    (DOORS[1], TRY + "except Exception:\n    pass"),
    (CORE, TRY + "except (OSError, ValueError):\n    pass"),
    (BROKER, "import struct\nstruct.pack_into('Q', b, 0, 1)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_a_rule_sees_what_breaks_it(rule: Callable[[Source], Iterable[str]], path: str, text: str) -> None:
    """One complaint, which starts with the file."""
    complaints = list(rule(Source(path, text)))
    assert [complaint.startswith(path) for complaint in complaints] == [True]


@pytest.mark.parametrize(("path", "text"), KEPT)
def test_the_rules_let_pass_what_is_right(path: str, text: str) -> None:
    """No rule complains."""
    assert [complaint for rule in RULES for complaint in rule(Source(path, text))] == []


def test_a_circle_of_rooms_is_found() -> None:
    """Through any number of rooms; a chain is none."""
    chain = [
        Source(CLI, "import connector.client"),
        Source(CLIENT, "import connector.wire"),
        Source(WIRE, "import json"),
    ]
    assert room_cycle(chain) == []
    assert room_cycle([*chain, Source(WIRE, "import connector.cli")]) == ["cli", "client", "wire", "cli"]
