"""Which old names each phase knows, and that a warning comes once."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector import errors
from runner_adapter import phases
from runner_adapter.kwargs import forward_kwargs
from runner_adapter.maps import BatchMaps
from runner_adapter.phases import Phase
from runner_adapter.plan import StepPlan

ROOM = Path(phases.__file__).parent
#: Where old names may stand: the phases, what decodes and migrates, and the engines.
OLD_ROOMS = {"phases.py", "legacy.py", "overlay.py", "migrate.py", "stagetext.py", "hops.py"}
OLD_WORDS = ("additional_information", "additionalinformation", "prompt_embeds", "promptembeds")


@pytest.fixture(autouse=True)
def _warnings_come_anew() -> Iterator[None]:
    phases.forget_warnings()
    yield
    phases.forget_warnings()


def test_a_phase_is_its_number() -> None:
    assert [(phase.name, int(phase)) for phase in Phase] == [("COMPAT", 1), ("SWITCH", 2), ("CLEAN", 3)]


@pytest.mark.parametrize(
    ("name", "read_in", "written_in"),
    [
        ("additional_information", {1, 2}, set()),
        ("runtime_additional_information", {1, 2}, {1}),
        ("additional_information_cpu", set(), {1}),
        ("prompt_embeds", {1, 2}, set()),
    ],
)
def test_phase_1_reads_and_writes_old_names_phase_2_reads_them_phase_3_knows_none(
    name: str, read_in: set[int], written_in: set[int]
) -> None:
    assert {int(phase) for phase in Phase if phases.reads(name, phase)} == read_in
    assert {int(phase) for phase in Phase if phases.writes(name, phase)} == written_in


def test_the_table_has_no_other_names() -> None:
    """So that the test above is about all of them."""
    assert len(phases.OLD_NAMES) == 4
    assert {old.new for old in phases.OLD_NAMES.values()} == {"model_intermediate_buffer"}


@pytest.mark.parametrize("phase", [Phase.COMPAT, Phase.SWITCH])
def test_an_old_name_is_warned_of_once_and_says_what_to_use(phase: Phase, caplog: pytest.LogCaptureFixture) -> None:
    for rid in ("a", "b"):
        phases.met("additional_information", phase, rid=rid)
    phases.met("prompt_embeds", phase, rid="a")
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        ("runner_adapter", logging.WARNING, f"{name} is deprecated: use model_intermediate_buffer")
        for name in ("additional_information", "prompt_embeds")
    ]


def test_after_forgetting_it_is_warned_of_again(caplog: pytest.LogCaptureFixture) -> None:
    phases.warn_once("old", "new")
    phases.forget_warnings()
    phases.warn_once("old", "new")
    assert [record.getMessage() for record in caplog.records] == ["old is deprecated: use new"] * 2


@pytest.mark.parametrize("name", phases.OLD_NAMES)
def test_phase_3_refuses_an_old_name_by_name(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(errors.UsageError, match=name) as refused:
        phases.met(name, Phase.CLEAN, rid="r")
    assert refused.value.facts == {"name": name, "new": "model_intermediate_buffer", "rid": "r"}
    assert caplog.records == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden_states.layer_24", "hidden_states.layers[24]"),
        ("hidden_states.layer_0", "hidden_states.layers[0]"),
        ("hidden_states.layer_007", "hidden_states.layer_007"),
        ("hidden_states.layer_1.x", "hidden_states.layer_1.x"),
        ("x.hidden_states.layer_1", "x.hidden_states.layer_1"),
        ("codes.audio", "codes.audio"),
    ],
)
def test_only_a_layer_has_another_spelling(old: str, new: str) -> None:
    assert phases.renamed(old) == new


def test_phase_3_gives_forward_no_old_name() -> None:
    """And phase 1 does, so that the test can fail."""
    given = {phase: forward_kwargs(BatchMaps(), StepPlan.empty(), phase).keys() for phase in Phase}
    assert {phase: given[phase] & phases.OLD_NAMES.keys() for phase in Phase} == {
        Phase.COMPAT: {"runtime_additional_information"},
        Phase.SWITCH: set(),
        Phase.CLEAN: set(),
    }


def spelled(tree: ast.AST) -> Iterator[str]:
    """Every name that a file defines, uses, takes or passes, and every string that is a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def old_symbols(path: Path) -> list[str]:
    names = spelled(ast.parse(path.read_text()))
    return [f"{path.name}: {name}" for name in names if any(word in name.lower() for word in OLD_WORDS)]


def test_no_old_symbol_stands_outside_the_files_that_go_with_phase_3() -> None:
    """RFC, phase 3: remove old symbols. Nothing else has to be touched then."""
    files = [path for path in sorted(ROOM.glob("*.py")) if path.name not in OLD_ROOMS]
    assert len(files) > 10
    assert [found for path in files for found in old_symbols(path)] == []
    # The walk sees them where they are.
    assert {found.partition(":")[0] for name in OLD_ROOMS for found in old_symbols(ROOM / name)} >= {
        "phases.py",
        "legacy.py",
    }
