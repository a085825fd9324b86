"""The broker's configuration: what is taken, what is refused and where the refusal points, and which source wins."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.broker import config_docs
from connector.broker.config import Loaded, load, variable
from connector.broker.config_schema import BrokerConfig, EdgeConfig, format_size, parse_size
from connector.core.endpoint import default_run_dir
from connector.core.errors import ConfigError
from connector.core.names import Edge

ROOT = Path(__file__).parents[2]
MIB, GIB = 1 << 20, 1 << 30

Load = Callable[..., Loaded]


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    """Loads a configuration from text, with an environment and a command line."""

    def loads(text: str | bytes, env: Mapping[str, str] | None = None, **overrides: object) -> Loaded:
        file = tmp_path / "c.yaml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return load(file, env or {}, overrides)

    return loads


def refused(load_text: Load, text: str | bytes, env: Mapping[str, str] | None = None, **overrides: object) -> str:
    """The text of the refusal."""
    with pytest.raises(ConfigError) as refusal:
        load_text(text, env, **overrides)
    return str(refusal.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "{}\n"])
def test_an_empty_file_is_all_defaults(load_text: Load, text: str) -> None:
    """Nothing set, nothing changed."""
    loaded = load_text(text)
    assert loaded.config == BrokerConfig(run_dir=default_run_dir(os.getuid(), {}))
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.warnings == ()


def test_the_example_sets_every_field_to_its_default() -> None:
    """configs/broker.yaml tells the truth, and all of it."""
    file = ROOT / "configs" / "broker.yaml"
    loaded = load(file, {}, {})
    assert loaded.config == BrokerConfig(run_dir="/run/tensor-connector")
    assert set(loaded.sources) == set(BrokerConfig.model_fields)
    assert all(source.startswith(f"file {file}:") for source in loaded.sources.values())


def test_the_minimal_example_loads() -> None:
    """configs/minimal.yaml is a configuration."""
    assert load(ROOT / "configs" / "minimal.yaml", {}, {}).config.pool == 4 * GIB


def test_the_page_is_the_one_that_the_schema_makes() -> None:
    """docs/config.md: `python -m connector.broker.config_docs > docs/config.md` when this fails."""
    assert (ROOT / "docs" / "config.md").read_text() == config_docs.render()


def test_every_field_says_what_it_means() -> None:
    """No field without a description, so that the page has no empty row."""
    for model in (BrokerConfig, EdgeConfig):
        assert [name for name, info in model.model_fields.items() if not info.description] == []


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("pool: 1GiB", "pool", GIB),
        ("pool: 64 MiB", "pool", 64 * MIB),
        ("pool: 2097152", "pool", 2 * MIB),
        ("max_request_bytes: 65536B", "max_request_bytes", 65536),
        ("ahead_session: null", "ahead_session", None),
        ("ahead_session: 512KiB", "ahead_session", 512 * 1024),
        ("max_blocks: 7", "max_blocks", 7),
        ("put_timeout: 3", "put_timeout", 3.0),
        ("put_timeout: 1e-3", "put_timeout", 0.001),
        ("group: tensors", "group", "tensors"),
        ("group: yes", "group", "yes"),
        ("run_dir: /srv/x/", "run_dir", "/srv/x"),
        ("edge_guard: 0", "edge_guard", 0.0),
        ("log_level: debug", "log_level", "debug"),
    ],
)
def test_values_that_are_taken(load_text: Load, line: str, field: str, value: object) -> None:
    """Each type as it may be written."""
    assert getattr(load_text(line).config, field) == value


@pytest.mark.parametrize(
    "line",
    [
        "pool: 1023KiB",
        "pool: 5GB",
        "pool: 1.5GiB",
        "pool: -1GiB",
        "pool: '1073741824'",
        "pool: 1e9",
        "pool: 99999999TiB",
        "pool: 99999999999999999999999999999999999999999999999999",
        "pool: true",
        "pool: null",
        "pool: [1GiB]",
        "max_blocks: 0",
        "max_blocks: 1.0",
        "window: true",
        "window: yes",
        "window: 010",
        "window: 1_000",
        "window: '12'",
        "window: 0",
        "max_sessions: 0x10",
        "put_timeout: 0",
        "put_timeout: -1.0",
        "put_timeout: .nan",
        "put_timeout: .inf",
        "put_timeout: 1e999",
        "put_timeout: 1:30",
        "put_timeout: true",
        "put_timeout: '30'",
        "put_timeout: 30s",
        "ahead_total: 0",
        "ahead_total: 1.01",
        "edge_guard: 1",
        "group: ''",
        "group: 12",
        "log_level: warn",
        "log_level: INFO",
        "log_format: yaml",
        "run_dir: relative/path",
        "run_dir: tcp://127.0.0.1:5555",
        "run_dir: 7",
        "edges: {from: a, to: b}",
        "edges: null",
    ],
)
def test_values_that_are_refused(load_text: Load, line: str) -> None:
    """Nothing is coerced or clipped; the refusal names file, line and field, and shows what was given."""
    field = line.partition(":")[0]
    text = refused(load_text, f"# a line before\n{line}\n")
    assert f"c.yaml:2: {field}: " in text
    assert "given " in text


def test_an_unknown_field_is_answered_with_the_nearest(load_text: Load) -> None:
    """File, line and the valid name."""
    text = refused(load_text, "pool: 1GiB\nput_timout: 3\n")
    assert "c.yaml:2: put_timout: there is no such field; did you mean 'put_timeout'?" in text


def test_an_unknown_field_of_an_edge_is_answered_with_an_edges_field(load_text: Load) -> None:
    """The nearest name is one that could stand there, and the line is the entry's own."""
    text = refused(load_text, "edges:\n  - from: a\n    to: b\n    replica_: 1\n")
    assert "c.yaml:4: edges.0.replica_: there is no such field; did you mean 'replica'?" in text


def test_all_problems_are_told_at_once(load_text: Load) -> None:
    """A line each, so that a file is mended in one go."""
    text = refused(load_text, "window: 0\npol: 1\nedges:\n  - to: b\n")
    assert "c.yaml:1: window: " in text
    assert "c.yaml:2: pol: " in text
    assert "c.yaml:4: edges.0.from: " in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pool: 1GiB\nwindow: 3\npool: 2GiB\n", "c.yaml:3: 'pool' stands twice, first on line 1"),
        ("edges:\n- from: a\n  to: b\n  to: c\n", "c.yaml:4: 'to' stands twice, first on line 3"),
        ("- pool\n", "c.yaml:1: the configuration must be a mapping"),
        ("\n\n17\n", "c.yaml:3: the configuration must be a mapping"),
        ("1: 2\n", "c.yaml:1: a field's name must be text"),
        ("? [a]\n: 2\n", "c.yaml:1: a field's name must be text"),
        ("pool: 1GiB\n---\npool: 2GiB\n", "c.yaml:2: but found another document"),
        ("pool: [1\n", "c.yaml:2: "),
        ("a: b: c\n", "c.yaml:1: mapping values are not allowed here"),
        ("a: 1\nx: !!python/object:os.system {}\n", "c.yaml:2: the tag "),
        ("x: !!python/name:os.system ''\n", "c.yaml:1: the tag "),
        ("window: !!int 'abc'\n", "c.yaml:1: the tag "),
        ("edges: &a [*a]\n", "c.yaml:1: an alias stands inside the value that it names"),
        ("edges: *unknown\n", "c.yaml:1: found undefined alias"),
        ("a: 1\nb: \x01\n", "c.yaml:2: a character that YAML does not allow"),
        (b"a: 1\nb: \xff\n", "c.yaml:2: this is not UTF-8"),
        ("[" * 5000, "c.yaml: lists or mappings are nested too deeply"),
        ("# " + "x" * MIB, "c.yaml: too large to be a configuration"),
    ],
)
def test_files_that_are_no_configuration(load_text: Load, text: str | bytes, told: str) -> None:
    """Every kind of broken file is the same error, with its line."""
    assert told in refused(load_text, text)


def test_aliases_cannot_stand_for_billions(load_text: Load) -> None:
    """Ten lines that would expand to 10^9 values are refused by count."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "too many values" in refused(load_text, "\n".join(lines))


def test_anchors_and_merges_work(load_text: Load) -> None:
    """An edge written once and repeated with another replica; what stands in the entry wins over what is merged."""
    loaded = load_text(
        "edges:\n- &e {from: thinker, to: talker, unclaimed_after: 60}\n- {<<: *e, replica: 1}\n"
        "- {replica: 2, unclaimed_after: null, <<: [*e]}\n"
    )
    assert [(e.edge, e.unclaimed_after) for e in loaded.config.edges] == [
        (Edge("thinker", "talker", 0), 60.0),
        (Edge("thinker", "talker", 1), 60.0),
        (Edge("thinker", "talker", 2), None),
    ]
    assert loaded.config.unclaimed_after_of(Edge("thinker", "talker", 1)) == 60.0
    assert loaded.config.unclaimed_after_of(Edge("thinker", "talker", 2)) == 600.0
    assert loaded.config.unclaimed_after_of(Edge("a", "b")) == 600.0


@pytest.mark.parametrize(
    "entry",
    ["{from: 'a:b', to: c}", "{from: '', to: c}", "{from: a, to: b, replica: -1}", "{from: a, to: b, replica: true}"],
)
def test_edges_that_are_refused(load_text: Load, entry: str) -> None:
    """An edge's names and number have the limits that every room keeps."""
    assert "c.yaml:2: edges.0" in refused(load_text, f"edges:\n- {entry}\n")


def test_rules_between_fields_point_at_the_one_that_was_set(load_text: Load) -> None:
    """Whoever sets one of two fields reads of that one."""
    assert "c.yaml:2: heartbeat: suspect_after (10.0) must be longer" in refused(load_text, "\nheartbeat: 20\n")
    assert "c.yaml:1: suspect_after: " in refused(load_text, "suspect_after: 5\n")
    assert "c.yaml:1: ahead_session: " in refused(load_text, "ahead_session: 2GiB\n")
    assert "command line: suspect_after: " in refused(load_text, "heartbeat: 2\n", suspect_after=1.0)
    assert "c.yaml:3: edges.1: the edge a:b:0 stands twice" in refused(
        load_text, "edges:\n- {from: a, to: b}\n- {from: a, to: b, replica: 0}\n"
    )


def test_rules_between_fields_see_all_sources(load_text: Load) -> None:
    """A file that needs the command line's other half is fine together with it."""
    assert load_text("heartbeat: 20\n", suspect_after=60.0).config.heartbeat == 20.0


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("in_env", [False, True])
@pytest.mark.parametrize("on_line", [False, True])
def test_precedence(load_text: Load, in_file: bool, in_env: bool, on_line: bool) -> None:
    """Command line > environment > file > default, and the source is told, in all eight cases."""
    loaded = load_text(
        "# first\npool: 2GiB\n" if in_file else "",
        {"CONNECTOR_POOL": "3GiB"} if in_env else {},
        pool="4GiB" if on_line else None,
    )
    gibs, source = 1, "default"
    if in_file:
        gibs, source = 2, f"file {loaded.file}:2"
    if in_env:
        gibs, source = 3, "environment CONNECTOR_POOL"
    if on_line:
        gibs, source = 4, "command line"
    assert (loaded.config.pool, loaded.sources["pool"]) == (gibs * GIB, source)
    assert loaded.sources["window"] == "default"


def test_a_wrong_value_is_refused_even_where_a_stronger_source_hides_it(load_text: Load) -> None:
    """Else it would bite on the day that the variable goes away."""
    assert "c.yaml:1: pool: " in refused(load_text, "pool: 5GB\n", {"CONNECTOR_POOL": "1GiB"}, pool="1GiB")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("pool", "2097152", 2 * MIB),
        ("window", "12", 12),
        ("put_timeout", "2.5", 2.5),
        ("max_blocks", "null", None),
        ("group", "null", None),
        ("group", "12", "12"),
        ("group", "a: b", "a: b"),
        ("run_dir", "/srv/a: b", "/srv/a: b"),
        ("log_format", "json", "json"),
        ("edges", "[{from: a, to: b}]", [EdgeConfig.model_validate({"from": "a", "to": "b"})]),
    ],
)
def test_text_of_variables_and_options_is_read_by_the_fields_type(
    load_text: Load, name: str, text: str, value: object
) -> None:
    """Numbers become numbers where the field is one, and stay text where it is text."""
    assert getattr(load_text("", {variable(name): text}).config, name) == value
    assert getattr(load_text("", **{name: text}).config, name) == value


@pytest.mark.parametrize(
    ("name", "text"), [("window", "1x"), ("put_timeout", "yes"), ("edges", "[{from: a,"), ("pool", "2")]
)
def test_a_variable_that_is_refused_is_named(load_text: Load, name: str, text: str) -> None:
    """The place is the variable, as it is the file's line elsewhere."""
    assert f"{variable(name)}:" in refused(load_text, "", {variable(name): text})
    assert f"command line: {name}:" in refused(load_text, "", {}, **{name: text})


def test_an_option_may_have_its_type_already(load_text: Load) -> None:
    """A parsed option is checked as strictly as a file's value; None means not given."""
    loaded = load_text("window: 7\n", window=None, pool=GIB, heartbeat=2.0)
    assert (loaded.config.window, loaded.config.heartbeat) == (7, 2.0)
    assert "command line: window: " in refused(load_text, "", window=True)
    assert "command line: wndow: there is no such field; did you mean 'window'?" in refused(load_text, "", wndow=3)


def test_variables_that_are_not_known_are_reported(load_text: Load) -> None:
    """A typing error in a variable is no silence; names of other programs and of the client are none of ours."""
    env = {
        "CONNECTOR_POOOL": "1GiB",
        "CONNECTOR_ENDPOINT": "/run/x",
        "CONNECTOR_WINDOW": "",
        "CONNECTOR_QQQQQQQQ": "1",
        "PATH": "/bin",
    }
    loaded = load_text("", env)
    assert loaded.config.pool == GIB
    assert loaded.sources["window"] == "default"
    first, second = loaded.warnings
    assert "CONNECTOR_POOOL" in first and "did you mean CONNECTOR_POOL?" in first
    assert "CONNECTOR_QQQQQQQQ" in second and "did you mean" not in second


def test_which_file_is_read(tmp_path: Path) -> None:
    """The argument, else the variable, else the node's file if it exists."""
    files = {}
    for i, name in enumerate(("argument", "variable", "node"), start=1):
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(f"window: {i}\n")
    env = {"CONNECTOR_CONFIG": str(files["variable"])}
    assert load(files["argument"], env, {}, files["node"]).config.window == 1
    assert load(None, env, {}, files["node"]).config.window == 2
    assert load(None, {}, {}, files["node"]).config.window == 3
    absent = load(None, {}, {}, tmp_path / "absent.yaml")
    assert (absent.file, absent.config.window) == (None, 256)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    """Only the node's own file may be missing, and none may be a directory."""
    absent = tmp_path / "absent.yaml"
    with pytest.raises(ConfigError, match="there is no such file"):
        load(absent, {}, {})
    with pytest.raises(ConfigError, match="there is no such file"):
        load(None, {"CONNECTOR_CONFIG": str(absent)}, {})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path, {}, {})


def test_the_run_directory_is_checked_before_anything_starts(load_text: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path and limit, in bytes, for the longest socket name; the default is checked as well."""
    long = "/" + "ü" * 47
    text = refused(load_text, f"run_dir: {long}\n")
    assert "c.yaml:1: run_dir: " in text and "107" in text and "109 bytes" in text and long in text
    monkeypatch.setattr(os, "getuid", lambda: 7)
    text = refused(load_text, "", {"XDG_RUNTIME_DIR": long})
    assert "default: run_dir: " in text and long in text


def test_the_default_run_directory_follows_the_given_environment(load_text: Load) -> None:
    """Not the process's own: `env` is all that counts."""
    env = {"XDG_RUNTIME_DIR": "/run/user/x"}
    assert load_text("", env).config.run_dir == default_run_dir(os.getuid(), env)


@pytest.mark.parametrize(
    ("pool", "blocks", "ahead"),
    [(MIB, 4096, MIB // 16), (GIB, 262_144, 64 * MIB), (64 * MIB, 16_384, 4 * MIB), (8 * GIB, 262_144, 64 * MIB)],
)
def test_what_null_stands_for(pool: int, blocks: int, ahead: int) -> None:
    """Block and reserve limits follow the pool between their ends."""
    config = BrokerConfig(pool=pool, run_dir="/r")
    assert (config.block_limit, config.ahead_limit) == (blocks, ahead)
    own = BrokerConfig(pool=pool, run_dir="/r", max_blocks=9, ahead_session=65_536)
    assert (own.block_limit, own.ahead_limit) == (9, 65_536)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_that_was_printed_is_read_back(size: int) -> None:
    """format_size and parse_size are inverses."""
    assert parse_size(format_size(size)) == size


@given(st.binary(max_size=60))
def test_any_bytes_are_a_configuration_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    """No other exception comes out of `load`, whatever the file holds."""
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(raw)
    try:
        loaded = load(file, {}, {})
    except ConfigError as refusal:
        assert str(file) in str(refusal)
        return
    assert isinstance(loaded.config, BrokerConfig)
