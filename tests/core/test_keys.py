"""Key templates: format and parse are inverse, and what cannot be told apart is refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from connector.core.errors import ConfigError, InvalidPayload, UsageError
from connector.core.keys import MAX_LAYER_ID, KeyTemplate, TemplateSet
from connector.core.names import MAX_KEY_BYTES

HIDDEN, IDS = "{rid}-{layer_id}", "{rid}-{id_type}"
HOSTILE = ["x-24", "x-24-", "-", "--", "24", "-24", "0", "a.b_c", "x\n-1", "{rid}-{layer_id}", "日本-語", "\0", "x-ids"]
RIDS = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
RIDS |= st.text("-ab01_.", min_size=1, max_size=8)
LAYERS = st.integers(0, 10**6).map(str)
ID_TYPES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,6}", fullmatch=True)
LITERALS = st.text("-:a1_.", max_size=3)
RID_AND_NAME = [("{rid}", "{layer_id}"), ("{rid}", "{id_type}"), ("{layer_id}", "{rid}"), ("{id_type}", "{rid}")]


@st.composite
def templates(draw: st.DrawFn) -> KeyTemplate:
    """Any template of a small alphabet that can be parsed back."""
    first, last = draw(st.sampled_from(RID_AND_NAME))
    some = st.text("-:a1_.", max_size=1)
    head, between, tail = draw(LITERALS), draw(some) + draw(st.sampled_from("-:")) + draw(some), draw(LITERALS)
    return KeyTemplate(head + first + between + last + tail)


def make(template: KeyTemplate, rid: str, layer: str, id_type: str) -> tuple[str, dict[str, str]]:
    parts = {"rid": rid, template.field: layer if template.field == "layer_id" else id_type}
    return template.format(**parts), parts


@given(templates(), RIDS, LAYERS, ID_TYPES)
@example(KeyTemplate(HIDDEN), "x-24", "24", "ids")
@example(KeyTemplate("{layer_id}-{rid}"), "24-24", "24", "ids")
@example(KeyTemplate("a{rid}a-a{id_type}a"), "a-a", "0", "a")
def test_parse_undoes_format(template: KeyTemplate, rid: str, layer: str, id_type: str) -> None:
    key, parts = make(template, rid, layer, id_type)
    assert template.parse(key) == parts


@pytest.mark.parametrize("rid", HOSTILE)
@pytest.mark.parametrize("text", [HIDDEN, IDS, "{layer_id}-{rid}", "{id_type}:{rid}", "(?x){rid}-*{layer_id}$"])
def test_a_hostile_rid_comes_back(rid: str, text: str) -> None:
    template = KeyTemplate(text)
    key, parts = make(template, rid, "24", "ids")
    assert template.parse(key) == parts


@given(RIDS, LAYERS, ID_TYPES)
def test_a_set_tells_category_and_parts_of_a_key(rid: str, layer: str, id_type: str) -> None:
    both = TemplateSet({"hidden_states": HIDDEN, "ids": IDS})
    for category, name in (("hidden_states", layer), ("ids", id_type)):
        key = both.format(rid, category, name)
        assert key == f"{rid}-{name}"
        assert both.parse(key) == both.parse(key, rid) == (rid, category, name)


@given(templates(), templates(), RIDS, RIDS, LAYERS, ID_TYPES)
def test_templates_meet_exactly_if_they_say_so(
    one: KeyTemplate, two: KeyTemplate, rid: str, other_rid: str, layer: str, id_type: str
) -> None:
    """A collision is proven by a key of both; without one, no key of either parses with the other."""
    shared = one.collision(two)
    if shared is not None:
        assert one.format(**one.parse(shared)) == two.format(**two.parse(shared)) == shared
        return
    for mine, other, some_rid in ((one, two, rid), (two, one, other_rid)):
        key, _ = make(mine, some_rid, layer, id_type)
        with pytest.raises(InvalidPayload):
            other.parse(key)


@given(RIDS, RIDS, LAYERS, ID_TYPES)
def test_rids_and_names_never_meet_in_one_key(rid: str, other: str, layer: str, id_type: str) -> None:
    assume(rid != other)
    keys = {KeyTemplate(HIDDEN).format(rid=r, layer_id=layer) for r in (rid, other)}
    keys |= {KeyTemplate(IDS).format(rid=r, id_type=id_type) for r in (rid, other)}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (HIDDEN, HIDDEN),
        (HIDDEN, "{rid}-x-{layer_id}"),
        (IDS, "{rid}.{layer_id}"),
        (IDS, "{rid}-{id_type}s"),
        ("{rid}-{layer_id}", "{rid}-1{layer_id}"),
        ("{layer_id}-{rid}", "{rid}-{layer_id}"),
        ("h:{rid}-{layer_id}", "{rid}-{layer_id}"),
        ("{rid}-{id_type}", "{rid}-a.{id_type}"),
    ],
)
def test_templates_that_make_one_key_are_refused_with_that_key(one: str, two: str) -> None:
    with pytest.raises(ConfigError, match="collide") as caught:
        TemplateSet({"first": one, "second": two})
    key = caught.value.facts["key"]
    assert KeyTemplate(one).parse(key)
    assert KeyTemplate(two).parse(key)
    assert caught.value.facts["categories"] == ["first", "second"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (HIDDEN, IDS),
        ("{layer_id}:{rid}", "{id_type}:{rid}"),
        ("h:{rid}-{layer_id}", "i:{rid}-{layer_id}"),
        ("{rid}-{layer_id}-h", "{rid}-{layer_id}-i"),
        ("{rid}-{layer_id}", "{rid}-{id_type}5"),
        ("{rid}-{layer_id}", "{rid}-0{layer_id}"),
    ],
)
def test_templates_that_no_key_joins_are_accepted(one: str, two: str) -> None:
    assert len(TemplateSet({"first": one, "second": two}).templates) == 2


@pytest.mark.parametrize(
    "text",
    [
        "{rid}{layer_id}",
        "{rid}24{layer_id}",
        "{layer_id}{rid}",
        "{rid}_{id_type}",
        "{rid}.x{id_type}",
        "{id_type}a{rid}",
    ],
)
def test_a_separator_that_the_name_can_hold_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be parsed back"):
        KeyTemplate(text)


@pytest.mark.parametrize("text", ["{rid}_{layer_id}", "{rid}layer{layer_id}", "{rid}a-b{id_type}", "{id_type} {rid}"])
def test_a_separator_with_one_character_outside_the_name_is_enough(text: str) -> None:
    template = KeyTemplate(text)
    key, parts = make(template, "a-b_layer3 x", "12", "a_b.c")
    assert template.parse(key) == parts


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("{rid}-{layerid}", "layer_id"),
        ("{rid}-{id_typ}", "id_type"),
        ("{ri}-{layer_id}", "rid"),
        ("{rid!r}-{layer_id}", "rid"),
        ("{rid:x}-{layer_id}", "rid"),
        ("{rid:}-{layer_id}", "rid"),
        ("{rid}-{layer_id[0]}", "layer_id"),
        ("{0}-{layer_id}", None),
        ("{}-{layer_id}", None),
    ],
)
def test_an_unknown_placeholder_is_refused_with_the_nearest_valid_one(text: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError, match="unknown placeholder") as caught:
        KeyTemplate(text)
    assert caught.value.facts.get("nearest") == nearest
    assert caught.value.facts["valid"] == ["rid", "layer_id", "id_type"]
    assert caught.value.facts["template"] == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "{rid}",
        "{layer_id}",
        "{rid}-{rid}-{layer_id}",
        "{rid}-{layer_id}-{id_type}",
        "{rid}-{layer_id}-{layer_id}",
        "{{rid}}-{layer_id}",
        "{rid}-{layer_id}}",
        "{rid}-{{}-{layer_id}",
        "\ud800{rid}-{layer_id}",
        "x" * MAX_KEY_BYTES + "{rid}-{layer_id}",
        None,
        7,
    ],
)
def test_what_is_no_template_is_refused(text: object) -> None:
    with pytest.raises(ConfigError):
        KeyTemplate(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layer", ["", "01", "+1", "-1", " 1", "1.0", "٣", "1\n", -1, True, 1.0, MAX_LAYER_ID + 1, b"1"]
)
def test_a_layer_id_outside_its_grammar_is_refused(layer: object) -> None:
    with pytest.raises(InvalidPayload):
        KeyTemplate(HIDDEN).format(rid="r", layer_id=layer)  # type: ignore[arg-type]


@pytest.mark.parametrize("id_type", ["", "1a", "a-b", ".a", "a b", "é", "a\n", 3])
def test_an_id_type_outside_its_grammar_is_refused(id_type: object) -> None:
    with pytest.raises(InvalidPayload):
        KeyTemplate(IDS).format(rid="r", id_type=id_type)  # type: ignore[arg-type]


def test_a_layer_id_is_an_int_or_its_decimal_text() -> None:
    template = KeyTemplate(HIDDEN)
    assert template.format(rid="r", layer_id=24) == template.format(rid="r", layer_id="24") == "r-24"
    assert template.format(rid="r", layer_id=0) == "r-0"


@pytest.mark.parametrize("names", [{}, {"id_type": "a"}, {"layer_id": 1, "id_type": "a"}])
def test_format_takes_the_name_of_its_template_and_no_other(names: dict[str, str]) -> None:
    with pytest.raises(InvalidPayload, match="takes rid and layer_id"):
        KeyTemplate(HIDDEN).format(rid="r", **names)


def test_a_bad_rid_and_a_key_that_grows_too_long_are_refused() -> None:
    template = KeyTemplate(HIDDEN)
    with pytest.raises(InvalidPayload, match="rid must not be empty"):
        template.format(rid="", layer_id=1)
    assert template.format(rid="r" * (MAX_KEY_BYTES - 2), layer_id=1)
    with pytest.raises(InvalidPayload, match="key is too long") as caught:
        template.format(rid="r" * (MAX_KEY_BYTES - 1), layer_id=1)
    assert (caught.value.facts["size"], caught.value.facts["limit"]) == (MAX_KEY_BYTES + 1, MAX_KEY_BYTES)


@pytest.mark.parametrize("key", ["", "r", "r-", "-24", "r-01", "r-a-", "r-²", "r_24", "r-24\n"])
def test_a_key_of_no_template_is_refused_with_key_templates_and_rid(key: str) -> None:
    both = TemplateSet({"hidden_states": HIDDEN, "ids": IDS})
    with pytest.raises(InvalidPayload, match="matches no template") as caught:
        both.parse(key, rid="r")
    told = {"rid": "r", "key": key, "templates": [f"hidden_states: {HIDDEN}", f"ids: {IDS}"]}
    assert caught.value.facts == told
    with pytest.raises(InvalidPayload) as caught:
        KeyTemplate(HIDDEN).parse(key)
    assert caught.value.facts == {"key": key, "template": HIDDEN}


def test_a_key_of_another_rid_is_refused_when_the_rid_is_given() -> None:
    both = TemplateSet({"hidden_states": HIDDEN, "ids": IDS})
    assert both.parse("x-24-24") == ("x-24", "hidden_states", "24")
    with pytest.raises(InvalidPayload, match="another rid") as caught:
        both.parse("x-24-24", rid="x")
    assert caught.value.facts["key_rid"] == "x-24"


def test_the_known_categories_hold_their_own_name() -> None:
    with pytest.raises(ConfigError, match="layer_id") as caught:
        TemplateSet({"hidden_states": IDS})
    assert caught.value.facts["category"] == "hidden_states"
    with pytest.raises(ConfigError, match="id_type"):
        TemplateSet({"ids": HIDDEN})


def test_a_refused_template_names_its_category() -> None:
    with pytest.raises(ConfigError, match="unknown placeholder") as caught:
        TemplateSet({"ids": "{rid}-{id_tipe}"})
    assert caught.value.facts["category"] == "ids"
    assert caught.value.facts["nearest"] == "id_type"


@pytest.mark.parametrize("templates", [{}, None, [HIDDEN], {"hidden_states": None}, {3: HIDDEN}])
def test_what_is_no_set_of_templates_is_refused(templates: object) -> None:
    with pytest.raises(ConfigError):
        TemplateSet(templates)  # type: ignore[arg-type]


def test_formatting_for_an_unknown_category_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        TemplateSet({"hidden_states": HIDDEN}).format("r", "hidden_state", 1)
    assert caught.value.facts["nearest"] == "hidden_states"


def test_templates_compare_by_their_text() -> None:
    assert len({KeyTemplate(HIDDEN), KeyTemplate(HIDDEN), KeyTemplate(IDS)}) == 2
    assert repr(KeyTemplate(IDS)) == f"KeyTemplate({IDS!r})"
