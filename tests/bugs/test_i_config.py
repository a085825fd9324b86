"""Kind I: typos in a configuration, two ends that look in different places, a listing that does not add up."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import connector
from connector.broker import config
from connector.core.errors import BrokerLost, ConfigError, InvalidPayload
from connector.core.keys import KeyTemplate, TemplateSet


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("run_dir: /tmp/x\npol: 1GiB\n", 2, "'pool'"),
        ("pool: 1GiB\nwindwo: 5\n", 2, "'window'"),
        ("pool: 1GiB\npool: 2GiB\n", 2, "pool"),
        ('heartbeat: 5\nwindow: "yes"\n', 2, "window"),
        ("window: yes\n", 1, "window"),
        ("pool: 1GB\n", 1, "units"),
        ("log_level: verbose\n", 1, "log_level"),
        ("edges:\n  - from: a\n    too: b\n", 3, "'to'"),
        ("edges:\n  - {from: a, to: b}\n  - {from: a, to: b}\n", 3, "stands twice"),
        ("heartbeat: .nan\n", 1, "heartbeat"),
        ("run_dir: relative/path\n", 1, "absolute"),
    ],
)
def test_b91_a_typo_in_the_file_is_refused_with_line_and_nearest_name(
    tmp_path: Path, text: str, line: int, told: str
) -> None:
    """Nothing falls back to a default in silence."""
    file = tmp_path / "broker.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(file, {}, {})
    assert f"{file}:{line}:" in str(caught.value)
    assert told in str(caught.value)


def test_b91_a_typo_of_an_embedded_broker_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        connector.connect(stage="a", embedded=True, pol="1GiB")
    assert "'pool'" in str(caught.value)


def test_b91_a_variable_that_only_looks_like_ours_is_told() -> None:
    """It cannot be refused: other programs share the environment."""
    (warning,) = config.load(None, {"CONNECTOR_POOOL": "1GiB"}, {"run_dir": "/tmp/x"}).warnings
    assert "CONNECTOR_POOOL" in warning
    assert "CONNECTOR_POOL" in warning


@pytest.mark.parametrize(
    "template",
    ["{rid}-{layerid}", "{rid}", "{layer_id}", "{rid!r}-{layer_id}", "{0}-{1}", "{}", "{rid}{layer_id}", "x", ""],
)
def test_b91_a_template_that_two_layers_share_or_that_has_a_typo_is_refused(template: str) -> None:
    """`{rid}` alone would give all layers of a request one key."""
    with pytest.raises(ConfigError) as caught:
        TemplateSet({"hidden_states": template})
    assert caught.value.facts["category"] == "hidden_states"


def test_b91_a_template_with_a_typo_names_the_nearest_placeholder() -> None:
    with pytest.raises(ConfigError) as caught:
        KeyTemplate("{rid}-{layerid}")
    assert caught.value.facts["nearest"] == "layer_id"


@pytest.mark.parametrize("how", ["argument", "variable", "file", "default"])
def test_b92_a_worker_that_looks_elsewhere_says_where_and_why_there(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error with the path tried, where the path came from, how long, and what to do; not silence."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as folder:
        elsewhere = folder + "/elsewhere"
        endpoint = None
        for name in ("CONNECTOR_ENDPOINT", "CONNECTOR_RUN_DIR", "CONNECTOR_CONFIG"):
            monkeypatch.delenv(name, raising=False)
        if how == "argument":
            endpoint, source = elsewhere, "argument"
        elif how == "variable":
            monkeypatch.setenv("CONNECTOR_ENDPOINT", elsewhere)
            source = "$CONNECTOR_ENDPOINT"
        elif how == "file":
            (tmp_path / "c.yaml").write_text(f"run_dir: {elsewhere}\n")
            monkeypatch.setenv("CONNECTOR_CONFIG", str(tmp_path / "c.yaml"))
            source = str(tmp_path / "c.yaml")
        else:
            # Root's default cannot be moved; this user's can.
            monkeypatch.setattr("connector.client.resolve.default_run_dir", lambda uid, env: elsewhere)
            source = "default"
        with connector.connect(stage="a", embedded=True, pool="2MiB"), pytest.raises(BrokerLost) as caught:
            connector.connect(stage="b", endpoint=endpoint, timeout=0.2)
    facts = caught.value.facts
    assert (facts["path"], facts["path_from"], facts["waited"]) == (elsewhere, source, 0.2)
    assert "connector serve" in str(caught.value)
    assert "$CONNECTOR_ENDPOINT" in str(caught.value)


@pytest.fixture(scope="module")
def node() -> Iterator[connector.Node]:
    with connector.connect(stage="a", embedded=True, pool="8MiB") as made:
        yield made


def test_b94_a_listing_at_rest_adds_up(node: connector.Node) -> None:
    """Sizes of the rows, of the edges and of the pool tell of the same bytes: logical ones and those of blocks."""
    edge = node.edge("sum", "up")
    edge.put_many({"r1": {"x": torch.zeros(100)}, "r2": {"x": torch.zeros(7, dtype=torch.int8), "y": torch.zeros(0)}})
    edge.put("r3", {})
    edge.end("r1")
    node.flush(60)
    rows = list(node.payloads(edge="sum:up:0"))
    assert [(row["rid"], row["nbytes"], row["end_only"]) for row in rows] == [
        ("r1", 400, False),
        ("r2", 7, False),
        ("r3", 0, False),
        ("r1", 0, True),
    ]
    for row in rows:
        assert row["nbytes"] == sum(size for _, _, _, size in row["tensors"])
        assert row["length"] >= row["nbytes"]
        assert row["writer"].startswith("a (pid ")
    blocks = {row["offset"]: row["length"] for row in rows}
    summary = node.status()
    assert summary["used_bytes"] == sum(blocks.values()) + summary["reserved_bytes"]
    assert summary["used_bytes"] + summary["free_bytes"] == summary["pool_bytes"]
    assert summary["payloads"] == len(rows)
    (row,) = [found for found in node.status("edges")["edges"] if found["edge"] == "sum:up:0"]
    # An END alone has a row, but it is no payload.
    assert (row["payloads_live"], row["bytes_sealed"]) == (3, 407)
    assert node.counters()["payloads_live"] == sum(edge["payloads_live"] for edge in node.status("edges")["edges"])
    node.abort("r1")
    node.abort("r2")
    node.abort("r3")
    assert node.status()["payloads"] == 0


def test_b94_a_listing_during_churn_shows_no_impossible_number(node: connector.Node) -> None:
    """Each page is of one moment; pages end at the snapshot; nothing is negative, nothing is shown twice."""
    stop = threading.Event()

    def churn() -> None:
        edge = node.edge("churn", "ing")
        number = 0
        while not stop.is_set():
            number += 1
            edge.put(f"c{number}", {"x": torch.zeros(number % 50)})
            edge.take(f"c{number}", timeout=60)
            node.finish(f"c{number}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            snapshot = node.status()["snapshot"]
            rows = list(node.payloads())
            serials = [row["serial"] for row in rows]
            assert serials == sorted(set(serials))
            assert all(row["nbytes"] >= 0 and row["length"] > 0 and row["age"] >= 0 for row in rows)
            summary = node.status()
            assert summary["snapshot"] >= snapshot
            sizes = (
                "used_bytes",
                "free_bytes",
                "reserved_bytes",
                "quarantined_bytes",
                "blocks",
                "blocks_left",
                "payloads",
            )
            assert min(summary[name] for name in sizes) >= 0, summary
            assert summary["used_bytes"] + summary["free_bytes"] == summary["pool_bytes"]
            for edge in node.status("edges")["edges"]:
                assert min(value for value in edge.values() if isinstance(value, int)) >= 0, edge
    finally:
        stop.set()
        thread.join(60)


def test_b94_an_owner_that_is_gone_is_shown_as_gone(node: connector.Node) -> None:
    """Not as another one, and not as nobody: with its stage and pid."""
    with connector.connect(stage="writer", endpoint=node.endpoint, timeout=60) as writer:
        writer.edge("w", "r").put("left", {"x": torch.zeros(3)})
        writer.flush(60)
    (row,) = node.payloads(rid="left")
    assert row["writer"] == f"writer (pid {os.getpid()}), gone"
    node.abort("left")


def test_b94_a_filter_that_is_none_is_refused(node: connector.Node) -> None:
    """An empty page would look like an empty node."""
    for filters in ({"rod": "x"}, {"state": "none such"}, {"edge": "a"}):
        with pytest.raises((InvalidPayload, connector.errors.UsageError)):
            list(node.payloads(**filters))
