"""Where transfer configs stand in an engine's file, and what a refusal points at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector import errors, read_config
from runner_adapter.config import AdapterConfig, TransferConfig
from runner_adapter.stagefile import handed_on, is_stage_file, load_stages, read_file, read_stages, stage_of

ROOT = Path(__file__).parents[2]
Write = Callable[[str], Path]

TWO = """\
model: some/model
{list}:
  - stage_id: 0
    runtime: {{devices: "0"}}
    engine_args:
      model_stage: thinker
      gpu_memory_utilization: 0.9
      transfer_config:
        enabled: true
        items: [ids]
        key_templates: &keys
          ids: "{{rid}}-{{id_type}}"
        id_types: [thinker_input_ids]
      runner_adapter: {{ranks: each}}
  - stage_id: talker
    engine_args: {{model_stage: talker, transfer_config: {{enabled: true, items: [], key_templates: *keys}}}}
  - stage_id: 2
runtime: {{edges: [{{from: 0, to: 1}}]}}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def writes(text: str) -> Path:
        file = tmp_path / "s.yaml"
        file.write_text(text)
        return file

    return writes


def refused(path: Path) -> str:
    with pytest.raises(errors.ConfigError) as refusal:
        load_stages(path)
    return str(refusal.value)


@pytest.mark.parametrize("form", ["stages", "stage_args"])
def test_each_stage_of_a_list_has_its_own_config(write: Write, form: str) -> None:
    """By its id, in the file's order; a stage without the section moves nothing."""
    found = load_stages(write(TWO.format(list=form)))
    assert list(found) == [0, "talker", 2]
    assert (found[0].items, found[0].id_types) == (("ids",), ("thinker_input_ids",))
    assert (found["talker"].enabled, found["talker"].items) == (True, ())
    assert found[2] == TransferConfig.disabled()


@pytest.mark.parametrize("form", ["stages", "stage_args"])
def test_each_stage_has_its_own_adapter_settings(write: Write, form: str) -> None:
    found = read_stages(write(TWO.format(list=form)))
    assert [stage.stage_id for stage in found.values()] == [0, "talker", 2]
    assert [stage.adapter.ranks for stage in found.values()] == ["each", "broadcast", "broadcast"]


def test_a_file_of_one_stage_has_its_sections_at_the_top(write: Write) -> None:
    """The RFC's form; its stage has no id."""
    file = write(
        'engine_args:\n  transfer_config: {enabled: true, items: [ids], key_templates: {ids: "{rid}-{id_type}"}}\n'
        "  runner_adapter: {migration_phase: 1}\n"
    )
    assert list(load_stages(file)) == [None]
    assert TransferConfig.from_yaml(file).items == ("ids",)
    assert AdapterConfig.from_yaml(str(file)).migration_phase == 1


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("engine_args:\n", [None]),
        ("engine_args: {model: x, transfer_config: null, runner_adapter: null}\n", [None]),
        ("stages: [{stage_id: 3, engine_args: null}]\n", [3]),
        ("stages: []\n", []),
    ],
)
def test_a_stage_without_sections_is_at_the_defaults(write: Write, text: str, ids: list[int | None]) -> None:
    found = read_stages(write(text))
    assert [(stage.stage_id, stage.transfer, stage.adapter) for stage in found.values()] == [
        (stage_id, TransferConfig(), AdapterConfig()) for stage_id in ids
    ]


def test_a_stage_is_picked_by_its_id(write: Write) -> None:
    """An int is no text; whoever asks for one that is not there, or for none of several, is told which there are."""
    file = write(TWO.format(list="stages"))
    assert TransferConfig.from_yaml(file, 0).id_types == ("thinker_input_ids",)
    assert TransferConfig.from_yaml(file, "talker").items == ()
    assert AdapterConfig.from_yaml(file, stage_id=0).ranks == "each"
    with pytest.raises(errors.ConfigError, match="it has 3 stages: name one") as refusal:
        stage_of(file)
    assert refusal.value.facts["stages"] == [0, "talker", 2]
    with pytest.raises(errors.ConfigError, match="there is no stage '0'; did you mean 0, an int?") as refusal:
        stage_of(file, "0")
    assert str(refusal.value).endswith("[stages=[0, 'talker', 2]]")
    with pytest.raises(errors.ConfigError, match="there is no stage 3 "):
        stage_of(file, 3)
    with pytest.raises(errors.ConfigError, match="there is no stage 4; did you mean '4', text?"):
        stage_of(write("stages: [{stage_id: '4'}]\n"), 4)


@pytest.mark.parametrize("stage_id", [True, 1.0, [1], b"1"])
def test_an_id_that_can_be_no_stage_s_is_refused(write: Write, stage_id: Any) -> None:
    """True is no 1."""
    with pytest.raises(errors.UsageError, match="a stage's id is an int or text"):
        TransferConfig.from_yaml(write("stages: [{stage_id: 1}]\n"), stage_id)


def test_the_only_stage_needs_no_id(write: Write) -> None:
    """And one without an id has none to be asked for by."""
    assert stage_of(write("stages: [{stage_id: 7}]\n")).stage_id == 7
    with pytest.raises(errors.ConfigError, match="there is no stage 7") as refusal:
        stage_of(write("engine_args: {}\n"), 7)
    assert refusal.value.facts["stages"] == ["one without an id"]
    with pytest.raises(errors.ConfigError, match="it has 0 stages"):
        stage_of(write("stages: []\n"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stages:\n- stage_id: 0\n  engine_args:\n    transfer_config:\n      enabld: true\n", "s.yaml:5: "
         "stages.0.engine_args.transfer_config.enabld: there is no such field; did you mean 'enabled'?"),
        ("stages:\n- stage_id: 0\n  engine_args:\n    runner_adapter: {rank: each}\n", "s.yaml:4: "
         "stages.0.engine_args.runner_adapter.rank: there is no such field; did you mean 'ranks'?"),
        ("engine_args:\n  transfer_config:\n    enabled: true\n    items:\n    - ids\n", "s.yaml:2: "
         "engine_args.transfer_config.key_templates: field required when enabled"),
        ("engine_args:\n  transfer_config:\n    enabled: true\n    items:\n    - ids\n    - hidden_stats\n", "yaml:6: "
         "engine_args.transfer_config.items.1: input should be 'hidden_states' or 'ids', given 'hidden_stats'; did you "
         "mean 'hidden_states'?"),
        ("engine_args:\n  transfer_config:\n    enabled: true\n    enabled: false\n", "yaml:4: 'enabled' stands twice"),
        ("engine_args:\n  transfer_config: true\n", "s.yaml:2: engine_args.transfer_config: input should be a valid"),
        ("stages:\n- engine_args: {}\n", "s.yaml:2: stages.0.stage_id: field required"),
        ("stages:\n- stage_id: true\n", "s.yaml:2: stages.0.stage_id: a stage's id is an int or text, given True"),
        ("stages:\n- stage_id: ''\n", "s.yaml:2: stages.0.stage_id: a stage's id is an int or text, given ''"),
        ("stages:\n- stage_id: 1\n- stage_id: 1\n", "s.yaml:3: stages.1.stage_id: the stage 1 stands twice"),
        ("stages:\n- stage_id: 1\nstage_args:\n- stage_id: 1\n", "s.yaml:4: stage_args.0.stage_id: the stage 1 stands"),
        ("stages:\n  stage_id: 1\n", "s.yaml:1: stages: input should be a valid list"),
        ("stages:\n- 1\n", "s.yaml:2: stages.0: input should be a valid dictionary"),
        ("stages:\n- stage_id: 0\n  transfer_config: {}\n", "s.yaml:3: stages.0.transfer_config: this stands under "
         "engine_args"),
        ("stages: []\nrunner_adapter: {}\n", "s.yaml:2: runner_adapter: this stands under engine_args"),
        ("stages:\n- stage_id: 0\nengine_args:\n  transfer_config: {enabled: false}\n", "s.yaml:3: engine_args: a file "
         "of stages has its sections in each stage's engine_args"),
        ("pool: 1GiB\n", "yaml: this is no stage file: it holds none of engine_args, stages, stage_args, base_config"),
        ("- 1\n", "s.yaml:1: the configuration must be a mapping"),
        ("", "this is no stage file"),
    ],
    ids=lambda text: type(text).__name__,
)  # fmt: skip
def test_a_refusal_points_at_file_line_and_field(write: Write, text: str, told: str) -> None:
    """With the nearest valid name, and what was given."""
    assert told in refused(write(text))


def test_all_problems_of_all_stages_are_told_at_once(write: Write) -> None:
    """A line each, so that a file is mended in one go."""
    text = (
        "stages:\n- stage_id: 0\n  engine_args:\n    transfer_config: {enabled: 1}\n    runner_adapter: {rank: each}\n"
        "- stage_id: 1\n  engine_args:\n    transfer_config: {enabled: true}\n"
    )
    assert [line.split(": ")[0].rpartition(":")[2] for line in refused(write(text)).splitlines()] == [
        "4",
        "5",
        "8",
        "8",
    ]


def test_other_fields_are_the_engines(write: Write) -> None:
    """However like ours they are named: an engine has a kv_transfer_config."""
    file = write(
        "engine_args: {kv_transfer_config: {a: 1}, ec_transfer_config: {a: 1}, transfer: {}, transfer_confg: 7}\n"
        "runtime: 3\nedges: {}\nstage: talker\nstage_id: 3\nstage_config: {}\nengine_extras: {}\n"
    )
    assert load_stages(file) == {None: TransferConfig()}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("engine_args:\n  model: m\n  transfer_confg: {}\n", "3: engine_args.transfer_confg: .. 'transfer_config'?"),
        ("engine_args:\n  transferconfig: {}\n", "2: engine_args.transferconfig: .. 'transfer_config'?"),
        ("engine_args:\n  transfer-config: {}\n", "2: engine_args.transfer-config: .. 'transfer_config'?"),
        ("engine_args:\n  Runner_Adaptor: {}\n", "2: engine_args.Runner_Adaptor: .. 'runner_adapter'?"),
        ("engine_arg: {transfer_config: {}}\n", "1: engine_arg: .. 'engine_args'?"),
        ("stage: [{stage_id: 0}]\n", "1: stage: .. 'stages'?"),
        ("model: m\nstage_arg: [{stage_id: 0}]\n", "2: stage_arg: .. 'stage_args'?"),
        ("base_confg: b.yaml\n", "1: base_confg: .. 'base_config'?"),
        ("stages: []\ntransfer_confg: {}\n", "2: transfer_confg: .. 'transfer_config'?"),
        ("stages:\n- stage_id: 0\n  engin_args: {}\n", "3: stages.0.engin_args: .. 'engine_args'?"),
        ("stages:\n- stage_id: 0\n  transfer_confg: {}\n", "3: stages.0.transfer_confg: .. 'transfer_config'?"),
        ("stage_args:\n- stage_id: 0\n- stage_id: 1\n  engine_args:\n    runer_adapter: {}\n",
         "5: stage_args.1.engine_args.runer_adapter: .. 'runner_adapter'?"),
    ],
)  # fmt: skip
def test_a_misspelled_section_is_no_field_of_the_engine(write: Write, text: str, told: str) -> None:
    """It would be passed over, the stage hand nothing on, and its reader wait."""
    assert is_stage_file(read_config(write(text)).values)
    assert refused(write(text)).partition(" [")[0].endswith(
        "s.yaml:" + told.replace("..", "there is no such section; did you mean")
    )  # fmt: skip


def test_a_misspelled_section_is_told_beside_all_other_problems(write: Write) -> None:
    text = "stages:\n- stage_id: 0\n  engine_arg: {}\n- engine_args: {transfer_confg: {}}\n"
    lines = refused(write(text)).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "stages.0.engine_arg",
        "stages.1.engine_args.transfer_confg",
        "stages.1.stage_id",
    ]


def test_what_a_base_config_holds_is_not_read_and_that_is_told(write: Write) -> None:
    """Its stages are its own; a file that only lies over others has none."""
    assert read_file(write("base_config: b.yaml\n")) == ({}, "b.yaml")
    with pytest.raises(errors.ConfigError, match="0 stages: name one; the stages of its base_config, b.yaml, are not"):
        TransferConfig.from_yaml(write("base_config: b.yaml\n"))
    over = write("base_config: b.yaml\nstages: [{stage_id: 0}]\n")
    assert list(read_stages(over)) == [0]
    with pytest.raises(errors.ConfigError, match="no stage 1; the stages of its base_config, b.yaml, are not read"):
        stage_of(over, 1)
    assert list(read_stages(write("base_config: b.yaml\nengine_args: {}\n"))) == [None]


def config(**more: object) -> str:
    """An enabled one as it stands in a file."""
    templates = {"hidden_states": "{rid}-{layer_id}", "ids": "{rid}-{id_type}"}
    return json.dumps({"enabled": True, "items": [], "key_templates": templates} | more)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("null", "hands nothing on and knows no key: it has no transfer_config"),
        ("{enabled: false, items: [ids]}", "hands nothing on and knows no key: enabled: false"),
        (config(), "hands nothing on: items: []"),
        (config(items=["ids"], id_types=[]), "hands nothing on: id_types: []"),
        (config(items=["ids"]), "hands on all id types"),
        (config(items=["hidden_states", "ids"], id_types=["a", "b.c"]), "hands on all layers; id types a, b.c"),
        (config(items=["ids", "hidden_states"], id_types=[], hidden_state_layers=[24, 0]), "hands on layers 24, 0"),
    ],
)
def test_what_a_stage_hands_on_is_said_in_words(write: Write, section: str, told: str) -> None:
    stage = stage_of(write(f"engine_args: {{transfer_config: {section}}}\n"))
    assert handed_on(stage) == told
    assert stage.transfer.sends is told.startswith("hands on")


@pytest.mark.parametrize("path", [3, None, b"s.yaml", ["s.yaml"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(errors.UsageError, match="a stage file is named by its path"):
        TransferConfig.from_yaml(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="there is no such file"):
        TransferConfig.from_yaml(tmp_path / "absent.yaml")
    with pytest.raises(errors.ConfigError, match="this is no path: .*null"):
        TransferConfig.from_yaml("a\0b")


@pytest.mark.parametrize(
    ("file", "sends"),
    [
        ("qwen3-omni", {0: (True, ["r-0", "r-24", "r-thinker_input_ids", "r-thinker_output_token_ids"]),
                        1: (True, ["r-code_predictor_codes"]), 2: (True, [])}),
        ("qwen2.5-omni", {0: (True, ["r-0", "r-28", "r-thinker_input_ids", "r-thinker_output_token_ids"]),
                          1: (True, ["r-codes.audio"]), 2: (True, [])}),
        ("qwen3-tts", {0: (True, ["r-codes.audio"]), 1: (True, [])}),
        ("transfer-minimal", {None: (True, ["r-0", "r-24", "r-thinker_input_ids", "r-code_predictor_codes"])}),
    ],
)  # fmt: skip
def test_the_files_that_are_shipped(file: str, sends: dict[int | None, tuple[bool, list[str]]]) -> None:
    """What each stage sends, by key; and every stage knows every key that the file's stages send."""
    found = load_stages(ROOT / "configs" / f"{file}.yaml")
    told = {}
    for stage_id, config in found.items():
        keys = [config.hidden_state_key("r", layer) for layer in config.hidden_state_layers or ()]
        keys += [config.id_key("r", id_type) for id_type in config.id_types or ()]
        told[stage_id] = (config.enabled, [key for key in keys if config.allows(*config.parse_key(key)[1:])])
        assert all(reader.parse_key(key, "r") for reader in found.values() for key in keys)
    assert told == sends


ELSEWHERE = {
    "engine_extras": "stages: [{stage_id: 0, engine_extras: HERE}]",
    "platforms": "stages: [{stage_id: 0}]\nplatforms: {npu: {stages: [{engine_args: HERE}]}}",
}


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_section_where_it_is_not_read_is_refused(tmp_path: Path, place: str) -> None:
    """vLLM-Omni merges these into a stage's engine_args, and its adapter would find nothing."""
    path = tmp_path / "stages.yaml"
    path.write_text(place.replace("HERE", "{transfer_config: {enabled: false}}") + "\n")
    with pytest.raises(errors.ConfigError, match="transfer_config: it is not read here: it stands under the stage's"):
        read_stages(path)
