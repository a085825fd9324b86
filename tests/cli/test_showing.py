"""`connector show`: tensors, statistics, files, the story."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import connector
from connector.cli.inspecting import STORABLE
from connector.core.errors import InvalidPayload
from connector.core.names import Edge
from connector.core.specs import DTYPE_BITS

Run = Callable[..., Any]
TORCH_DTYPES = sorted(name for name in DTYPE_BITS if isinstance(vars(torch).get(name), torch.dtype))


def put(node: connector.Node, rid: str, payload: dict[str, torch.Tensor], edge: str = "talker") -> None:
    node.edge("thinker", edge).put(rid, payload)
    node.flush()


def test_show_tells_all_of_a_payload(clean: connector.Node, run: Run) -> None:
    """Names, dtypes, shapes, bytes, age, writer, holders."""
    put(clean, "r1", {"h": torch.zeros(3, 4), "ids": torch.arange(5)})
    (told,) = run("show", "thinker:talker/r1[0]", "--json").json()["payloads"]
    assert told["tensors"] == [
        {"key": "h", "dtype": "float32", "shape": [3, 4], "nbytes": 48},
        {"key": "ids", "dtype": "int64", "shape": [5], "nbytes": 40},
    ]
    assert (told["state"], told["holders"], told["last"], told["nbytes"]) == ("sealed", [], True, 88)
    assert told["writer"].startswith("thinker (pid ")
    done = run("show", "r1")
    for word in ("thinker:talker:0/r1[0]", "writer: thinker", "holders: none", "[3,4]", "last"):
        assert word in done.out


def test_a_rid_alone_is_looked_for_on_every_edge(clean: connector.Node, run: Run) -> None:
    """And narrowed by edge and index, in KEY or in options."""
    put(clean, "r", {"a": torch.zeros(1)})
    clean.edge("thinker", "code").put("r", {"b": torch.zeros(1)}, index=0, last=False)
    clean.edge("thinker", "code").put("r", {"c": torch.zeros(1)}, index=1, last=True)
    clean.flush()

    def keys(*arguments: str) -> list[str]:
        found = run("show", "--json", *arguments).json()["payloads"]
        return [tensor["key"] for payload in found for tensor in payload["tensors"]]

    assert keys("r") == keys("--rid", "r") == ["a", "b", "c"]
    assert keys("r[1]") == keys("--rid", "r", "--index", "1") == ["c"]
    assert keys("thinker:code/r") == keys("--rid", "r", "--edge", "thinker:code") == ["b", "c"]


def test_a_rid_that_looks_like_a_key_goes_through_the_options(clean: connector.Node, run: Run) -> None:
    """As KEY it names another payload; the answer is no, with what was looked for."""
    rid = "a:b/r[0]"
    put(clean, rid, {"a": torch.zeros(1)})
    done = run("show", rid)
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: no such live payload [rid='r' edge='a:b:0' index=0]\n"
    assert run("show", "--rid", rid).code == 0


@pytest.mark.parametrize("arguments", [[], ["r", "--rid", "r"], ["r", "--index", "0"], ["--index", "0"]])
def test_a_payload_is_named_once(clean: connector.Node, run: Run, arguments: list[str]) -> None:
    """By KEY or by options."""
    done = run("show", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: name ")


def test_stats_are_those_of_the_values(clean: connector.Node, run: Run) -> None:
    """NaN counted and left out; integers exact; infinities as JSON text; nothing for no elements."""
    payload = {
        "f": torch.tensor([1.0, math.nan, -2.0, 4.0]),
        "big": torch.tensor([2**62 + 1, -(2**62)]),
        "yes": torch.tensor([True, False, True, True]),
        "inf": torch.tensor([math.inf, 0.0]),
        "nan": torch.tensor([math.nan]),
        "none": torch.zeros(0),
        "zero_dim": torch.tensor(3, dtype=torch.uint16),
        "c": torch.tensor([1 + 2j, 3 - 2j]),
    }
    put(clean, "s", payload)
    (told,) = run("show", "s", "--stats", "--json").json()["payloads"]
    stats = {tensor["key"]: tuple(tensor["stats"].values()) for tensor in told["tensors"]}
    assert stats == {
        "f": (-2.0, 4.0, 1.0, 1),
        "big": (-(2**62), 2**62 + 1, 0.0, 0),
        "yes": (0, 1, 0.75, 0),
        "inf": (0.0, "inf", "inf", 0),
        "nan": (None, None, None, 1),
        "none": (None, None, None, 0),
        "zero_dim": (3, 3, 3.0, 0),
        "c": (None, None, "(2+0j)", 0),
    }
    assert "MEAN" in run("show", "s", "--stats").out


def test_stats_of_more_than_one_step(clean: connector.Node, run: Run) -> None:
    """Steps are joined."""
    values = torch.arange(2_500_000, dtype=torch.int32)
    put(clean, "long", {"v": values})
    (told,) = run("show", "long", "--stats", "--json").json()["payloads"]
    assert told["tensors"][0]["stats"] == {"min": 0, "max": 2_499_999, "mean": 1_249_999.5, "nan": 0}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_has_stats_or_none_and_is_saved_or_refused_by_name(
    clean: connector.Node, run: Run, tmp_path: Path, dtype: str
) -> None:
    """Saved bit for bit."""
    from safetensors.torch import load_file

    bits = torch.zeros(64, dtype=torch.uint8)
    payload = {"k": bits.view(getattr(torch, dtype))}
    put(clean, "d", payload)
    (told,) = run("show", "d", "--stats", "--json").json()["payloads"]
    nan = told["tensors"][0]["stats"]["nan"]
    assert nan == 0 or (nan is None and told["tensors"][0]["stats"]["mean"] is None)
    file = tmp_path / "d.safetensors"
    done = run("show", "d", "--save", str(file))
    if dtype in STORABLE:
        assert (done.code, done.err) == (0, "")
        found = load_file(file)["k"]
        assert found.dtype is payload["k"].dtype
        assert torch.equal(found.view(torch.uint8), bits)
    else:
        assert done.code == 2
        assert f"key='k' dtype='{dtype}'" in done.err
    assert [path.name for path in tmp_path.iterdir()] == (["d.safetensors"] if dtype in STORABLE else [])


def test_a_look_takes_nothing(clean: connector.Node, run: Run, tmp_path: Path) -> None:
    """The reader gets the payload afterwards, and then it is gone: no hold of the look is left."""
    payload = {"h": torch.randn(100), "e": torch.zeros(0, 3)}
    put(clean, "keep", payload)
    assert run("show", "keep", "--stats", "--save", str(tmp_path / "f")).code == 0
    assert [row["state"] for row in run("ls", "--json").json()] == ["sealed", "sealed"]
    with connector.connect(stage="talker", endpoint=clean.endpoint) as reader:
        got = reader.edge("thinker", "talker").take("keep", timeout=30.0)
        assert torch.equal(got["h"], payload["h"])
        got.release()
        del got
        reader.flush()
    assert run("ls", "--json").json() == []


def test_save_wants_one_payload(clean: connector.Node, run: Run, tmp_path: Path) -> None:
    """Several: named; none: no; END alone: nothing to save."""
    edge = clean.edge("thinker", "talker")
    edge.put("two", {"a": torch.zeros(1)}, index=0, last=False)
    edge.put("two", {"a": torch.ones(1)}, index=1, last=True)
    edge.end("over")
    clean.flush()
    file = tmp_path / "f.safetensors"
    several = run("show", "two", "--save", str(file))
    assert several.code == 2
    assert "thinker:talker:0/two[1]" in several.err
    assert run("show", "absent", "--save", str(file)).code == 1
    assert run("show", "over", "--save", str(file)).code == 2
    assert list(tmp_path.iterdir()) == []
    assert run("show", "two[1]", "--save", str(file)).code == 0
    assert file.stat().st_size > 0


def test_what_a_safetensors_file_cannot_hold_leaves_no_file(clean: connector.Node, run: Run, tmp_path: Path) -> None:
    """The key that the format keeps; a folder that is not there."""
    put(clean, "meta", {"__metadata__": torch.zeros(1)})
    done = run("show", "meta", "--save", str(tmp_path / "f"))
    assert done.code == 2
    assert "key='__metadata__'" in done.err
    put(clean, "fine", {"a": torch.zeros(1)})
    done = run("show", "fine", "--save", str(tmp_path / "none" / "f"))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert str(tmp_path / "none" / "f") in done.err
    assert list(tmp_path.iterdir()) == []


def test_without_safetensors_save_says_how_to_get_it(
    clean: connector.Node, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, no traceback."""
    put(clean, "r", {"a": torch.zeros(1)})
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    done = run("show", "r", "--save", str(tmp_path / "f"))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "pip install 'tensor-connector[demo]'" in done.err


def test_a_question_about_what_is_no_rid_is_refused_at_once(clean: connector.Node) -> None:
    """The broker could not answer it: it would be waited for in vain."""
    for rid in ("", "x" * 1025):
        with pytest.raises(InvalidPayload):
            clean.story(rid)
        with pytest.raises(InvalidPayload):
            clean.inspect(Edge("a", "b"), rid)
        with pytest.raises(InvalidPayload):
            clean.remove(Edge("a", "b"), rid)


def test_the_story_outlives_the_payload(clean: connector.Node, run: Run) -> None:
    """What happened, in order; without it a payload that is gone is not found."""
    put(clean, "told", {"a": torch.zeros(1)})
    clean.abort("told", "enough")
    assert run("show", "told").code == 1
    story = run("show", "told", "--story", "--json").json()["story"]
    assert [line["what"] for line in story][0] == "sealed"
    assert "enough" in [line["detail"] for line in story]
    assert "ago" in run("show", "told", "--story").out
