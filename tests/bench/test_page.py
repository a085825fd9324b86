"""The page of figures, made of a stored small result."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from connector.bench.musts import BROKER_PATH, MUSTS
from connector.bench.rules import RULES

ROOT = Path(__file__).parents[2]
JOB = ROOT / "scripts" / "bench_job"
STORED = Path(__file__).with_name("little.json")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(STORED.read_text())
    return read


def written(docs: Path, file: Path = STORED) -> str:
    command = [sys.executable, str(JOB / "page.py"), str(file), str(docs), "scripts/bench --peers --write"]
    subprocess.run(command, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})
    return (docs / "performance.md").read_text()


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    written(folder)
    return folder


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(text: str, first: str) -> list[str]:
    """The row of a table that begins with so."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_page_says_what_made_it_and_on_which_machine(docs: Path, figures: dict[str, Any]) -> None:
    page = (docs / "performance.md").read_text()
    assert "`scripts/bench --peers --write`" in page
    assert all(str(value) in section(page, "The machine") for value in figures["machine"].values())
    assert json.loads((docs / "performance" / "figures.json").read_text()) == figures


def test_each_system_has_a_row_under_each_workload_with_its_medians(docs: Path, figures: dict[str, Any]) -> None:
    workloads = section((docs / "performance.md").read_text(), "Workloads")
    for workload in {row["workload"] for row in figures["rows"]}:
        text = workloads.split(f"\n### {workload}\n")[1].split("\n### ")[0]
        systems = {row["system"] for row in figures["rows"] if row["workload"] == workload}
        assert {cells(text, system)[0] for system in systems} == systems
    two = [row["p50_us"] for row in figures["rows"] if (row["workload"], row["system"]) == ("chunk", "zmq_hop")]
    assert (
        len(two) == 2 and cells(workloads.split("### chunk")[1].split("###")[0], "zmq_hop")[1] == f"{sum(two) / 2:.1f}"
    )


def test_ratios_stand_against_what_they_must_be(docs: Path, figures: dict[str, Any], tmp_path: Path) -> None:
    ratios = section((docs / "performance.md").read_text(), "Ratios")
    assert cells(ratios, "`large_vs_vllm_omni`")[1:4] == [
        "≤ 0.04",
        "≤ 0.035",
        f"{figures['ratios']['large_vs_vllm_omni']:.3f}",
    ]
    changed = json.loads(STORED.read_text())
    changed["ratios"] |= {"prefill_vs_memcpy": 1.61, "large_vs_memcpy": 1.1, "chunks_per_s_16_vs_zmq": 1.5}
    del changed["ratios"]["idle_cpu_percent"]
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    told = section(written(tmp_path, tmp_path / "changed.json"), "Ratios")
    states = ("`prefill_vs_memcpy`", "`large_vs_memcpy`", "`chunks_per_s_16_vs_zmq`")
    assert [cells(told, name)[-1] for name in states] == ["**missed**", "holds", "aim"]
    assert "Not measured: `idle_cpu_percent`." in told


def test_there_is_a_must_for_each_ratio_of_a_rule() -> None:
    assert {rule.name for rule in RULES} <= MUSTS.keys() and BROKER_PATH.keys() <= MUSTS.keys()


def test_where_a_peer_is_ahead_is_told_with_by_how_much_and_why(docs: Path, figures: dict[str, Any]) -> None:
    losses = section((docs / "performance.md").read_text(), "Where a peer is ahead")
    told = losses.split("\n### iceoryx2\n")[1].split("\n### ")[0]
    rows = [line for line in told.splitlines() if line.startswith("| chunk | p50")]
    theirs, ours = (
        sum(row["p50_us"] for row in figures["rows"] if (row["workload"], row["system"]) == ("chunk", system)) / 2
        for system in ("iceoryx2", "connector")
    )
    assert theirs < ours and len(rows) == 1 and f"| {ours / theirs:.2f} × |" in rows[0]
    assert "no directory" in told
    # A limit is nobody's peer, and one that is behind is not told.
    assert "ring_sem" not in losses and "memcpy" not in losses and "| large |" not in losses


def test_growth_is_drawn_once_an_axis_and_pools_say_where_they_end(docs: Path, figures: dict[str, Any]) -> None:
    growth = section((docs / "performance.md").read_text(), "Growth")
    for axis in ("live", "sessions", "pool"):
        assert f"(performance/{axis}.svg)" in growth
        drawing = xml.parse(docs / "performance" / f"{axis}.svg").getroot()
        points = [row for row in figures["growth"] if row["axis"] == axis]
        assert len(drawing.findall(f"{SVG}polyline")) == 2
        assert len(drawing.findall(f"{SVG}circle")) == 2 * len(points)
        width, height = (float(size) for size in drawing.attrib["viewBox"].split()[2:])
        spots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in drawing.findall(f"{SVG}circle")]
        assert all(0 < x < width and 0 < y < height for x, y in spots)
    assert "Pools end before" in growth


def test_what_was_not_installed_is_a_line(docs: Path) -> None:
    assert "- ray: not installed: " in section((docs / "performance.md").read_text(), "Not measured")


def test_a_line_rises_with_its_values_and_a_logarithmic_axis_has_equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOB))
    from plots import line_plot

    text = line_plot("a < b", "x", "y", {"one": [(10, 1), (100, 2), (1000, 3)]}, log_x=True)
    dots = xml.fromstring(text).findall(f"{SVG}circle")
    xs, ys = ([float(dot.attrib[name]) for dot in dots] for name in ("cx", "cy"))
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2) and xs == sorted(xs)
    assert ys == sorted(ys, reverse=True)
