"""@operation, the registry, and the sources of operations."""

import dataclasses
import subprocess
import sys

import pydantic
import pytest
from typing_extensions import TypedDict

from batchwright import Context, operation
from batchwright.engine.catalog import MARK
from batchwright.errors import ConfigurationError, PayloadInvalid
from batchwright.operations.registry import Registry


class Order(pydantic.BaseModel):
    number: int
    lines: list[str] = []


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Named(TypedDict):
    name: str


@operation("by_fields")
async def by_fields(ctx: Context, number: int, note: str | None = None) -> None:
    """Takes fields."""


@operation("by_model")
def by_model(order: Order) -> None: ...


@operation("by_dataclass", cpu=True)
def by_dataclass(ctx: Context, point: Point) -> None: ...


@operation("by_typed_dict")
async def by_typed_dict(named: Named) -> None: ...


@operation("by_nothing")
async def by_nothing() -> None: ...


def of(function):
    return getattr(function, MARK)


@pytest.mark.parametrize(
    ("function", "payload", "stored"),
    [
        (by_fields, {"number": 1}, {"number": 1, "note": None}),
        (by_model, Order(number=1), {"number": 1, "lines": []}),
        (by_model, {"number": 1, "lines": ["a"]}, {"number": 1, "lines": ["a"]}),
        (by_dataclass, Point(1, 2), {"x": 1, "y": 2}),
        (by_typed_dict, {"name": "Ada"}, {"name": "Ada"}),
        (by_nothing, None, {}),
        (by_nothing, {}, {}),
    ],
)
def test_a_payload_is_checked_and_stored_as_plain_json(function, payload, stored):
    assert of(function).encode(payload) == stored


def test_a_stored_payload_becomes_typed_arguments():
    assert of(by_fields).arguments({"number": 1, "note": "x"}) == {"number": 1, "note": "x"}
    assert of(by_model).arguments({"number": 1}) == {"order": Order(number=1)}
    assert of(by_dataclass).arguments({"x": 1}) == {"point": Point(1)}


@pytest.mark.parametrize(
    ("function", "payload", "message"),
    [
        (by_fields, {}, "by_fields: number: Field required"),
        (by_fields, {"number": "x"}, "by_fields: number: Input should be a valid integer"),
        (by_fields, {"number": 1, "nmae": 2}, "by_fields: nmae: Extra inputs are not permitted"),
        (by_fields, [1], "by_fields: the payload is a list; write a dict with a key for each field"),
        (by_model, {"lines": 3}, "(and 1 more)"),
        (by_nothing, {"x": 1}, "by_nothing: x: Extra inputs"),
    ],
)
def test_a_payload_of_the_wrong_shape_names_the_field(function, payload, message):
    with pytest.raises(PayloadInvalid) as refused:
        of(function).encode(payload)
    assert message in str(refused.value)


def test_the_kind_of_an_operation_depends_on_the_function():
    assert [of(f).kind for f in (by_fields, by_model, by_dataclass)] == ["async", "thread", "process"]
    assert [of(f).takes_context for f in (by_fields, by_model, by_dataclass)] == [True, False, True]
    assert of(by_fields).description == "Takes fields."


def test_the_schema_is_published_with_the_defaults():
    assert of(by_fields).payload_schema["required"] == ["number"]
    assert of(by_fields).defaults()["max_attempts"] == 3


@pytest.mark.parametrize("name", ["", "a b", "1st", "x" * 101, "a..b"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(ConfigurationError, match="is not an operation name"):
        operation(name)


def test_signatures_that_cannot_be_a_payload_are_refused():
    with pytest.raises(ConfigurationError, match="needs a type"):

        @operation("untyped")
        def untyped(x): ...

    with pytest.raises(ConfigurationError, match="cannot be a payload field"):

        @operation("starred")
        def starred(*args: int) -> None: ...

    with pytest.raises(ConfigurationError, match="cpu=True is for plain functions"):

        @operation("both", cpu=True)
        async def both() -> None: ...

    with pytest.raises(ConfigurationError, match="exclusive_key names 'year'"):

        @operation("keyed", exclusive_key=["year"])
        def keyed(month: int) -> None: ...


def test_an_operation_stays_a_function():
    assert by_model(Order(number=1)) is None


def test_two_functions_of_one_name_are_refused_with_both_places():
    @operation("by_model")
    def twin() -> None: ...

    with pytest.raises(ConfigurationError, match=r"by_model.*test_operations\.py:\d+ and .*test_operations\.py:\d+"):
        Registry([by_model, twin])


def test_operations_come_from_modules_files_and_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "one.py").write_text("from batchwright import operation\n@operation('one')\ndef one() -> None: ...\n")
    (tmp_path / "sub" / "two.py").write_text(
        "from batchwright import operation\n@operation('two')\ndef two() -> None: ...\n"
    )
    (tmp_path / "_hidden.py").write_text("raise RuntimeError\n")
    assert Registry.load([str(tmp_path)]).names() == ["one", "two"]
    assert Registry.load([str(tmp_path / "one.py")]).names() == ["one"]
    assert Registry.load([__name__]).names() == ["by_dataclass", "by_fields", "by_model", "by_nothing", "by_typed_dict"]


@pytest.mark.parametrize(
    ("source", "message"),
    [("no.such.module", "there is no module"), ("absent.py", "there is no file"), ("empty", "has no Python files")],
)
def test_a_source_that_is_not_there_is_named(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=message):
        Registry.load([source])


def test_an_import_error_inside_a_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "needy_module.py").write_text("import something_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_absent"):
        Registry.load(["needy_module"])


def test_an_installed_package_is_found_by_its_entry_point(tmp_path):
    package = tmp_path / "site"
    info = package / "shop-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "shop_jobs.py").write_text(
        "from batchwright import operation\n@operation('sell')\ndef sell() -> None: ...\n"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[batchwright.operations]\nshop = shop_jobs\n")
    program = "from batchwright.operations.registry import Registry; print(Registry.load([]).names())"
    found = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(package)}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "['sell']"
