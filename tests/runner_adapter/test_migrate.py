"""An old stage config says, rewritten, what crosses each edge; what it cannot be told is listed, not guessed."""

from __future__ import annotations

import copy
import difflib
import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from connector import errors, parse_yaml
from runner_adapter.config import TransferConfig
from runner_adapter.hops import HOOKS, PIPELINES
from runner_adapter.migrate import Migrated, Note, migrate
from runner_adapter.naming import key_part

ROOT = Path(__file__).parents[2]
TEMPLATES = {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"}
READS = {"enabled": True, "items": [], "key_templates": TEMPLATES}


def ids(*id_types: str) -> dict[str, Any]:
    return {"enabled": True, "items": ["ids"], "key_templates": TEMPLATES, "id_types": list(id_types)}


def migrated(text: str, name: str = "old.yaml", **more: Any) -> Migrated:
    """The only lines that go are those that hold a key that is renamed, or a one-line mapping that grows."""
    return migrate(dedent(text), name, **more)


def configs(found: Migrated) -> dict[int, Any]:
    """Each stage's transfer_config, as strict YAML has it."""
    value: Any = parse_yaml(found.text, "new.yaml").value
    stages = value.get("stages", value.get("stage_args"))
    return {stage["stage_id"]: (stage.get("engine_args") or {}).get("transfer_config") for stage in stages}


TWO = """
    stages:
      - stage_id: 0
        {sender}
      - stage_id: 1
        {reader}
"""


def two(sender: str = "devices: '0'", reader: str = "devices: '1'") -> str:
    return dedent(TWO).format(sender=sender, reader=reader)


# -- what a stage sends ------------------------------------------------------------------------------


def test_payload_keys_are_what_a_stage_sends() -> None:
    keys = "[codes.audio, encoder_output, ids.all, hidden_states.layer_24, 'hidden_states.layers[0]', codes.audio]"
    found = migrated(two(f"stage_output_payload_keys: {keys}"))
    assert found.unsaid == []
    assert configs(found) == {
        0: {
            "enabled": True,
            "items": ["hidden_states", "ids"],
            "key_templates": TEMPLATES,
            "hidden_state_layers": [24, 0],
            "id_types": ["codes.audio", "encoder_output", "all"],
        },
        1: READS,
    }


def test_what_a_reader_takes_is_what_its_sender_sends() -> None:
    found = migrated(two(reader="engine_args: {stage_input_payload_keys: [encoder_output]}"))
    assert (configs(found), found.unsaid) == ({0: ids("encoder_output"), 1: READS}, [])


def test_a_sender_s_own_word_goes_before_its_reader_s() -> None:
    found = migrated(two("stage_output_payload_keys: [a]", "stage_input_payload_keys: [b]"))
    assert configs(found)[0] == ids("a")


@pytest.mark.parametrize("field", ["custom_process_next_stage_input_func", "async_chunk_process_next_stage_input_func"])
@pytest.mark.parametrize("ending", ["full_payload", "async_chunk"])
def test_a_known_hook_tells_what_its_stage_sends(field: str, ending: str) -> None:
    hook = f"vllm_omni.model_executor.stage_input_processors.qwen2_5_omni.talker2code2wav_{ending}"
    found = migrated(two(f"engine_args: {{{field}: {hook}}}"))
    assert (configs(found), found.unsaid) == ({0: ids("codes.audio", "meta.finished"), 1: READS}, [])


def test_a_reader_s_known_hook_tells_what_its_sender_sends() -> None:
    found = migrated(two(reader="sync_process_input_func: x.voxtral_tts.generator2tokenizer_token_only"))
    assert configs(found)[0] == ids("codes.audio", "meta.finished")


def test_a_hook_that_is_not_known_is_listed_with_its_line_and_nothing_is_guessed() -> None:
    hooks = "custom_process_next_stage_input_func: my.own.hook\n    async_chunk_process_next_stage_input_func: {known}"
    text = two(hooks.format(known="x.qwen3_tts.talker2code2wav_async_chunk"))
    found = migrated(text, "qwen3_tts.yaml")
    assert found.unsaid == [Note(4, "stage 0: what my.own.hook hands over is not known: write a transfer_config")]
    assert configs(found) == {0: None, 1: READS}


@pytest.mark.parametrize("hook", ["qwen3_tts.talker2code2wav", "qwen3_tts.talker2code2wav_batch", "qwen3_tts"])
def test_hooks_of_other_versions_are_not_taken_for_known_ones(hook: str) -> None:
    found = migrated(two(f"custom_process_next_stage_input_func: {hook}"))
    assert [note.line for note in found.unsaid] == [4]


@pytest.mark.parametrize(
    ("head", "name", "more"),
    [
        ("pipeline: qwen3_tts\n", "old.yaml", {}),
        ("", "deploy/qwen3_tts.yaml", {}),
        ("pipeline: mine\n", "old.yaml", {"pipeline": "qwen3_tts"}),
        ("pipeline: qwen3_tts\n", "mimo_audio.yaml", {}),
    ],
    ids=["its field", "the file's name", "the caller", "its field before the file's name"],
)
def test_a_known_pipeline_tells_what_each_stage_sends(head: str, name: str, more: dict[str, str]) -> None:
    found = migrated(head + two(), name, **more)
    sent = [part[1] for name in HOOKS["qwen3_tts.talker2code2wav"] if (part := key_part(name)) is not None]
    assert (configs(found), found.unsaid) == ({0: ids(*sent), 1: READS}, [])


def test_a_pipeline_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(errors.UsageError) as refused:
        migrated(two(), pipeline="qwen4")
    assert refused.value.facts == {"pipeline": "qwen4", "known": sorted(PIPELINES)}


def test_a_stage_of_which_nothing_is_said_is_listed_with_its_line() -> None:
    found = migrated(two())
    note = "stage 0: nothing says what it sends: name the pipeline, or write a transfer_config"
    assert found.unsaid == [Note(3, note)]
    assert found.written == [Note(5, "stage 1: a transfer_config, from its place: it only reads")]
    assert configs(found) == {0: None, 1: READS}


@pytest.mark.parametrize("key", ["a-b", "x.", "codes..audio", "7", "'a b'", "ids.a.b", "hidden_states.layers"])
def test_a_payload_key_that_can_be_no_id_type_is_listed(key: str) -> None:
    """ids.a.b and hidden_states.layers are names with a key of their own; the others are none."""
    found = migrated(two(f"stage_output_payload_keys: [good, {key}]"))
    text = key.strip("'")
    if key_part(text) is not None:
        assert (configs(found)[0], found.unsaid) == (ids("good", text), [])
    else:
        assert found.unsaid == [Note(4, f"{text} can be no id type: the model must give it another name")]
        assert configs(found)[0] == ids("good")


def test_a_stage_that_has_a_transfer_config_keeps_it() -> None:
    text = two("engine_args: {transfer_config: {enabled: false}}", "engine_args: {transfer_config: {enabled: false}}")
    assert migrated(text, "qwen3_tts.yaml") == Migrated(text, [], [])


def test_what_was_migrated_has_nothing_left_to_do() -> None:
    once = migrated(two("stage_output_payload_keys: [a]"))
    assert migrated(once.text) == Migrated(once.text, [], [])


def test_every_config_that_is_put_in_is_taken() -> None:
    """For each known pipeline; the names that pass are those of its hook, and no others."""
    for pipeline, hops in PIPELINES.items():
        text = "stages:\n" + "".join(f"  - stage_id: {number}\n" for number in range(max(hops) + 2))
        found = configs(migrated(text, pipeline=pipeline))
        for number, hop in hops.items():
            config = TransferConfig.from_mapping(found[number])
            parts = [part for name in HOOKS[hop] if (part := key_part(name)) is not None]
            assert len(parts) == len(HOOKS[hop]), hop
            assert all(config.allows(*part) for part in parts)
            assert not config.allows("ids", "something_else")


# -- edges -------------------------------------------------------------------------------------------

THREE = """
{head}
stages:
  - {{stage_id: 2, stage_input_payload_keys: [b]}}
  - {{stage_id: 1, stage_input_payload_keys: [a]{one}}}
  - {{stage_id: 0{zero}}}
"""


@pytest.mark.parametrize(
    ("head", "zero", "one", "sent"),
    [
        ("", "", "", {0: "a", 1: "b"}),
        ("", ", output_connectors: {to_stage_2: x}", "", {0: "b", 1: "b"}),
        ("", ", output_connectors: {to_stage_1: x, to_stage_2: x}", "", {0: "ab", 1: "b"}),
        ("edges: [{from: 0, to: 2}]", "", "", {0: "b", 1: "b"}),
        ("runtime: {edges: [{from: 0, to: 2}]}", "", "", {0: "b", 1: "b"}),
        ("", "", ", input_connectors: {from_stage_0: x}", {0: "a", 1: "b"}),
        ("", "", ", engine_input_source: [2]", {0: "a", 1: "b", 2: "a"}),
    ],
    ids=["in a row", "output", "two outputs", "edges", "runtime edges", "input", "input source"],
)
def test_who_reads_a_stage_is_told_by_edges_or_is_the_next(
    head: str, zero: str, one: str, sent: dict[int, str]
) -> None:
    found = migrated(THREE.format(head=head, zero=zero, one=one))
    assert configs(found) == {number: ids(*sent[number]) if number in sent else READS for number in (0, 1, 2)}


def test_a_stage_that_sends_out_of_the_file_is_not_taken_for_a_mere_reader() -> None:
    found = migrated(two("stage_output_payload_keys: [a]", "output_connectors: {to_stage_7: x}"))
    assert configs(found)[1] is None
    assert [note.line for note in found.unsaid] == [5]


def test_a_file_of_one_stage_sends_nothing_unless_it_says_so() -> None:
    alone = "stages:\n  - stage_id: 0\n"
    assert migrated(alone) == Migrated(alone, [], [])
    top = "engine_args:\n  model: m\n"
    assert migrated(top) == Migrated(top, [], [])


def test_a_stage_without_a_list_is_migrated_at_the_top() -> None:
    found = migrated("engine_args:\n  model: m\n  stage_output_payload_keys: [a]\n")
    value: Any = parse_yaml(found.text, "new.yaml").value
    assert value == {
        "engine_args": {"transfer_config": ids("a"), "model": "m", "stage_output_payload_keys": ["a"]},
    }
    assert found.written == [Note(1, "the stage: a transfer_config, from its payload keys")]


def test_an_overlay_leaves_to_its_base_what_it_does_not_say() -> None:
    text = "base_config: base.yaml\n" + two("stage_output_payload_keys: [a]", "output_connectors: {to_stage_2: x}")
    found = migrated(text, "qwen3_tts.yaml")
    assert configs(found) == {0: ids("a"), 1: None}
    told = "what the stages of base.yaml send is said there: that file is migrated by itself"
    assert found.unsaid == [Note(1, told)]


# -- the text ----------------------------------------------------------------------------------------

PLACES = {
    "no engine_args": "- stage_id: 0   # first\n    # about devices\n    devices: '0'",
    "its number last": "- devices: '0'\n    stage_id: 0",
    "nothing but its number": "- stage_id: 0",
    "a block": "- stage_id: 0\n    engine_args:  # the engine's\n      # the model\n      model: m\n      n: {a: [1]}",
    "a deeper block": "-   stage_id: 0\n      # above\n      engine_args:\n            model: m",
    "in one line": "- {stage_id: 0, engine_args: {model: m}}",
    "in one line, empty": "- {stage_id: 0, engine_args: {}}",
    "in one line, without": "- {stage_id: 0, devices: '0'}",
    "over lines": "- stage_id: 0\n    engine_args: {\n      model: m,  # which\n    }",
    "anchored": "- stage_id: 0\n    engine_args: &mine {model: m}",
    "empty": "- stage_id: 0\n    engine_args:\n    devices: '0'",
    "empty at the end": "- stage_id: 0\n    engine_args:",
    "null": "- stage_id: 0\n    engine_args: null  # nothing yet\n    devices: '0'",
    "quoted": "- 'stage_id': 0\n    \"engine_args\":\n      model: m",
}

#: Where lines are put in, and none is touched.
BLOCKS = ("no engine_args", "its number last", "nothing but its number", "a block", "a deeper block", "quoted")


@pytest.mark.parametrize("end", ["\n", ""], ids=["last line ends", "last line does not"])
@pytest.mark.parametrize("key", ["stages", "stage_args"])
@pytest.mark.parametrize("place", PLACES)
def test_the_config_stands_in_its_place_and_nothing_else_is_changed(place: str, key: str, end: str) -> None:
    head = "# A file.\n\npipeline: qwen2_5_omni  # here\nedges: [{from: 0, to: 9}]\nx: é  # é\n"
    text = f"{head}{key}:\n  # The first.\n  {PLACES[place]}{end}"
    found = migrate(text, "old.yaml")
    old: Any = parse_yaml(text, "old.yaml").value
    new: Any = parse_yaml(found.text, "new.yaml").value
    expected = copy.deepcopy(old)
    expected[key][0]["engine_args"] = (expected[key][0].get("engine_args") or {}) | new[key][0]["engine_args"]
    assert new == expected
    assert new[key][0]["engine_args"]["transfer_config"]["id_types"][0] == "embed.prefill"
    assert found.unsaid == []
    # A line that holds engine_args whole has grown; no other line is gone.
    gone = [line[2:] for line in difflib.ndiff(text.splitlines(), found.text.splitlines()) if line.startswith("- ")]
    assert gone == [
        line for line in text.splitlines() if place not in BLOCKS and ("engine_args" in line or "{st" in line)
    ]
    assert found.text.count("#") == text.count("#")
    assert found.text.endswith("\n") is bool(end)


def test_line_ends_stay() -> None:
    text = two("stage_output_payload_keys: [a]").replace("\n", "\r\n")
    found = migrate(text, "old.yaml")
    assert text.splitlines() == [line for line in found.text.splitlines() if line in text.splitlines()]
    assert found.text.count("\r\n") == found.text.count("\n") > text.count("\n")


SHARED = {
    "engine_args of another": "engine_args: *args",
    "engine_args for another": "engine_args: &mine {model: m}",
    "merged": "<<: *both",
    "no mapping": "engine_args: [1]",
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_is_shared_or_no_mapping_is_listed_and_left(kind: str) -> None:
    """An edit there would be an edit of other stages."""
    head = "x: &args\n  model: m\ny: &both {engine_args: {model: m}}\n"
    tail = f"z: *{'mine' if 'mine' in SHARED[kind] else 'args'}\n"
    text = (
        head + two(SHARED[kind] + "\n    stage_output_payload_keys: [a]", "engine_args: {transfer_config: {}}") + tail
    )
    found = migrated(text)
    assert (found.text, found.written) == (text, [])
    (note,) = found.unsaid
    assert note.line == 6
    assert note.text.startswith("stage 0: its engine_args are shared, or no mapping; they need transfer_config: {")


def test_what_another_stage_merges_is_left_too() -> None:
    text = """\
stages:
  - &first
    stage_id: 0
    stage_output_payload_keys: [a]
    engine_args: {model: m}
  - <<: *first
    stage_id: 1
"""
    found = migrated(text)
    assert (found.text, found.written) == (text, [])
    assert [note.line for note in found.unsaid] == [2, 6]


ODD = {
    "a key apart from its value": "stages:\n- stage_id: 0\n  ? engine_args\n  : a: 1\n",
    "an id apart from its key": "stages:\n- ? stage_id\n  : 0\n",
    "an id further up, alone": "n: &n 0\nstages:\n- stage_id:\n    *n\n",
    "a brace in an anchor's comment": "stages:\n- stage_id: 0\n  engine_args: &a # {\n    {a: 1}\n",
}


@pytest.mark.parametrize("kind", ODD)
def test_where_nothing_can_be_put_in_nothing_is_changed(kind: str) -> None:
    """What would be no YAML, or mean something else, is left, with what it needs; other stages are not."""
    text = ODD[kind] + "  stage_output_payload_keys: [a]\n- stage_id: 1\n"
    found = migrated(text)
    assert found.text.startswith(text)
    assert configs(found) == {0: None, 1: READS}
    (note,) = found.unsaid
    assert note.line == text[: text.index("- ")].count("\n") + 1
    assert note.text == (
        "stage 0: it is written so that nothing can be put in; its engine_args need transfer_config: "
        + json.dumps(ids("a"))
    )


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x85", "\u2028", "\u2029"], ids=ascii)
def test_every_end_of_a_line_is_one(end: str) -> None:
    """As YAML has it; what is put in has the file's own."""
    text = two("stage_output_payload_keys: [a]", "engine_args:\n      a: 1").strip().replace("\n", end)
    found = migrated(text)
    assert (configs(found), found.unsaid) == ({0: ids("a"), 1: READS}, [])
    assert set(re.findall("\r\n|[\n\r\x85\u2028\u2029]", found.text)) == {end}


def test_an_id_by_an_alias_is_its_stage_s() -> None:
    """What is put in stands in the stage, and not where the id is told."""
    text = "n: &n 0\nstages:\n- stage_id: *n\n  stage_output_payload_keys: [a]\n- stage_id: 1\n"
    found = migrated(text)
    assert (configs(found), found.unsaid) == ({0: ids("a"), 1: READS}, [])
    assert found.text.startswith("n: &n 0\nstages:\n- stage_id: *n\n  engine_args:\n")


# -- old keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old", ["additional_information", "runtime_additional_information", "'additional_information'"]
)
def test_an_old_key_gets_the_new_name(old: str) -> None:
    text = f"stages:\n  - stage_id: 0\n    extra:\n      {old}: {{speaker: a}}  # who\n"
    found = migrated(text)
    assert found.text == text.replace(old, "model_intermediate_buffer")
    assert found.written == [Note(4, f"{old.strip(chr(39))} is model_intermediate_buffer now")]
    assert found.unsaid == []


@pytest.mark.parametrize(
    "keys",
    [
        {"additional_information_cpu": 1},
        {"prompt_embeds": 1},
        {"enable_update_additional_information": 1},
        {"additional_information": 1, "model_intermediate_buffer": 1},
        {"additional_information": 1, "runtime_additional_information": 1},
    ],
    ids=lambda keys: "+".join(keys),
)
def test_an_old_key_without_a_sure_successor_is_listed_and_left(keys: dict[str, int]) -> None:
    lines = [f"    {key}: 1" for key in keys]
    text = "\n".join(["stages:", "  - stage_id: 0", *lines, ""])
    found = migrated(text)
    old = [key for key in keys if key != "model_intermediate_buffer"]
    assert (found.text, found.written) == (text, [])
    assert found.unsaid == [
        Note(lines.index(f"    {key}: 1") + 3, f"{key} goes, and nothing says what takes its place here") for key in old
    ]


def test_a_key_that_another_is_laid_over_is_listed_and_left() -> None:
    """Two old names by a merge: with one name, what was under the other would be gone."""
    text = """\
b: &b
  additional_information: {a: 1}
stages:
- stage_id: 0
  extra:
    <<: *b
    runtime_additional_information: {b: 2}
  other: {additional_information: 3}
"""
    found = migrated(text)
    new, old = "model_intermediate_buffer", parse_yaml(text, "old.yaml").value
    assert found.text == text.replace("other: {additional_information", f"other: {{{new}")
    assert found.written == [Note(8, f"additional_information is {new} now")]
    rest = f"is {new} now: rename it, and what it is laid over or shared with"
    assert found.unsaid == [
        Note(2, f"additional_information {rest}"),
        Note(7, f"runtime_additional_information {rest}"),
    ]
    value: Any = parse_yaml(found.text, "new.yaml").value
    assert isinstance(old, dict) and value["stages"][0]["extra"] == old["stages"][0]["extra"]


# -- files that are none -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("pool: 1GiB\n", 1, "this is no stage config: it has none of stages, stage_args, engine_args, base_config"),
        ("- stages\n", 1, "this is no stage config: it has none of stages, stage_args, engine_args, base_config"),
        ("", 1, "this is no stage config: it has none of stages, stage_args, engine_args, base_config"),
        ("stages:\n  a: 1\n", 1, "stages is a list of stages"),
        ("stages:\n  - stage_id: 0\n  - 5\n", 3, "a stage has a stage_id of its own, an int from 0"),
        ("stages:\n  - devices: '0'\n", 2, "a stage has a stage_id of its own, an int from 0"),
        ("stages:\n  - stage_id: true\n", 2, "a stage has a stage_id of its own, an int from 0"),
        ("stages:\n  - stage_id: 0\n  - stage_id: 0\n", 3, "a stage has a stage_id of its own, an int from 0"),
        ("stages:\n  - stage_id: 0\n    stage_id: 1\n", 3, "'stage_id' stands twice, first on line 2"),
        ("stages: [\n", 2, "expected the node content, but found '<stream end>'"),
    ],
    ids=[
        "a broker's",
        "a list",
        "empty",
        "a mapping",
        "no entry",
        "no id",
        "a bool",
        "one id twice",
        "twice",
        "broken",
    ],
)
def test_what_is_no_stage_config_is_refused_with_file_and_line(text: str, line: int, problem: str) -> None:
    with pytest.raises(errors.ConfigError) as refused:
        migrate(text, "dir/old.yaml")
    assert refused.value.message == f"dir/old.yaml:{line}: {problem}"


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys\n"
        "from runner_adapter import phases\n"
        "from runner_adapter.migrate import migrate\n"
        "found = migrate('stages: [{stage_id: 0}, {stage_id: 1}]', 'qwen3_tts.yaml')\n"
        "print(len(found.written), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2 False\n", "")
