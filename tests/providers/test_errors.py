"""Refusals in all formats, and their classes."""

import orjson
import pytest

from batchwright.errors import Fatal, RateLimited, SchemaInvalid, Transient
from batchwright.inference.answers import Failure
from batchwright.inference.http import NoAnswer, Response
from batchwright.providers.contract import InDoubt
from batchwright.providers.errors import ErrorTable, Kind, describe, error_of, read_error, submit_once

TABLE = ErrorTable(
    by_text={"credit balance is too low": Kind.CREDENTIAL},
    by_code={"insufficient_quota": Kind.CREDENTIAL},
    by_status={404: Kind.TRANSIENT},
)


def response(status, document=None, **headers):
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    return Response(status=status, headers=headers, body=body)


@pytest.mark.parametrize(
    ("document", "codes", "message"),
    [
        ({"error": {"code": "c", "type": "t", "message": "m"}}, ("c", "t"), "m"),
        ({"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "m"}}, ("429", "RESOURCE_EXHAUSTED"), "m"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "m"}}, ("overloaded_error",), "m"),
        (
            {"error": {"code": 400, "status": "S", "message": "m", "details": [{"reason": "R"}, {"a": 1}]}},
            ("R", "400", "S"),
            "m",
        ),
        ({"error": "m"}, (), "m"),
        ({"code": "c", "message": "m", "innerError": {"code": "i", "message": "n"}}, ("i", "c"), "m"),
        ({"object": "error", "message": "m", "type": "t", "code": None}, ("t",), "m"),
        ({"detail": [{"loc": ["body"]}]}, (), '[{"loc":["body"]}]'),
        ([{"error": {"code": 400, "message": "m"}}], ("400",), "m"),
        (None, (), ""),
        ({}, (), ""),
        ([], (), ""),
    ],
)
def test_errors_are_read_in_every_shape(document, codes, message):
    said = read_error(document)
    assert (said.codes, said.message) == (codes, message)


@pytest.mark.parametrize(
    ("status", "document", "kind"),
    [
        (429, {}, RateLimited),
        (408, {}, Transient),
        (425, {}, Transient),
        (500, {}, Transient),
        (529, {}, Transient),
        (400, {}, SchemaInvalid),
        (413, {}, SchemaInvalid),
        (415, {}, SchemaInvalid),
        (422, {}, SchemaInvalid),
        (409, {}, Fatal),
        (302, {}, Fatal),
        (404, {}, Transient),
        (401, b"<html>", Fatal),
        (429, {"error": {"code": "insufficient_quota"}}, Fatal),
        (400, {"error": {"message": "Your Credit balance is too low."}}, Fatal),
    ],
)
def test_each_status_has_its_class(status, document, kind):
    assert type(error_of(TABLE, response(status, document), now=0)) is kind


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_refused_credential_says_so(status):
    error = error_of(TABLE, response(status, {"error": {"code": "no", "message": "m"}}), now=0)
    assert (error.scope, error.code, str(error)) == ("credential", "no", f"{status}: m")


@pytest.mark.parametrize("given", ["7", "Thu, 01 Jan 1970 00:01:47 GMT"])
def test_the_providers_retry_after_is_kept(given):
    assert error_of(TABLE, response(429, {}, **{"retry-after": given}), now=100).retry_after == 7


def test_long_messages_are_cut():
    assert len(read_error({"error": "x" * 5000}).message) == 500


def test_an_error_of_a_result_is_described():
    document = {"error": {"code": "insufficient_quota", "message": "m"}}
    assert describe(TABLE, document, 429) == {"kind": "credential", "code": "insufficient_quota", "message": "m"}
    assert describe(TABLE, {}, 503)["kind"] == "transient"
    assert describe(TABLE, None) == {"kind": "fatal", "code": "failed", "message": ""}


async def submit(answered):
    async def asking():
        if isinstance(answered, Exception):
            raise answered
        return answered

    return await submit_once(TABLE, asking(), now=lambda: 0.0)


async def test_a_submission_has_its_answer():
    assert await submit(response(201, {"id": 1})) == {"id": 1}


@pytest.mark.parametrize(
    "answered",
    [
        response(500),
        response(503),
        response(529),
        response(200, b"<html>"),
        NoAnswer(Failure.LOST, "lost"),
        NoAnswer(Failure.TIMEOUT, "late"),
        NoAnswer(Failure.TOO_LARGE, "long"),
    ],
)
async def test_an_error_that_leaves_the_outcome_open_puts_the_submission_in_doubt(answered):
    with pytest.raises(InDoubt):
        await submit(answered)


@pytest.mark.parametrize(
    "answered",
    [response(400, {}), response(429, {}), response(302, {}), response(401, {}), NoAnswer(Failure.CONNECT, "refused")],
)
async def test_a_submission_that_certainly_created_no_job_is_not_in_doubt(answered):
    with pytest.raises(Exception) as caught:
        await submit(answered)
    assert not isinstance(caught.value, InDoubt)
