"""A form made from a JSON Schema gives the payload that the operation wants."""

from __future__ import annotations

from batchwright.web.schema_form import WHOLE, fields_of, fill

SCHEMA = {
    "type": "object",
    "required": ["name", "tags"],
    "properties": {
        "times": {"type": "integer", "default": 3},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        "loud": {"type": "boolean", "default": False},
        "style": {"$ref": "#/$defs/Style"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "name": {"type": "string", "description": "Who is greeted."},
    },
    "$defs": {"Style": {"enum": ["formal", "casual"]}},
}


def filled(schema: dict, **given: str):
    fields = fields_of(schema)
    return fill(fields, lambda name: given.get(name.removeprefix("p."), ""))


def test_each_property_has_a_field_of_its_kind_and_required_ones_come_first():
    fields = {field.label: field for field in fields_of(SCHEMA)}
    assert list(fields)[:2] == ["name", "tags"]
    assert {name: field.kind for name, field in fields.items()} == {
        "name": "text",
        "tags": "json",
        "loud": "choice",
        "ratio": "number",
        "style": "choice",
        "times": "integer",
    }
    assert fields["times"].default == "3"
    assert fields["style"].options == (("", ""), ('"formal"', "formal"), ('"casual"', "casual"))
    assert fields["name"].help == "Who is greeted."


def test_filled_fields_become_a_payload_with_the_right_types():
    done = filled(SCHEMA, name="Ada", tags='["a"]', times="7", ratio="0.5", loud="true", style='"formal"')
    assert done.problems == {}
    assert done.payload == {"name": "Ada", "tags": ["a"], "times": 7, "ratio": 0.5, "loud": True, "style": "formal"}


def test_empty_fields_get_their_defaults():
    assert filled(SCHEMA, name="Ada", tags="[]").payload == {"name": "Ada", "tags": []}


def test_an_error_is_shown_beside_its_field():
    problems = filled(SCHEMA, name="Ada", tags="[1,", times="many").problems
    assert set(problems) == {"p.tags", "p.times"}
    assert "not JSON" in problems["p.tags"]
    assert set(filled(SCHEMA, name="Ada").problems) == {"p.tags"}


def test_a_schema_without_properties_is_one_field_of_json():
    (field,) = fields_of({"type": "array"})
    assert field.name == WHOLE
    assert fill([field], lambda _: "[1, 2]").payload == [1, 2]
    assert fill([field], lambda _: "").payload == {}
