"""How answers affect the work, and how their cost is divided."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import Fatal, RateLimited, SchemaInvalid, Transient
from batchwright.inference.answers import Failure, Reply, Usage, classify
from batchwright.inference.calls import Call, InputRefused, Refused, error_of, share_usage
from batchwright.inference.tokens import share_out

SECRET = "sk-secret and the whole prompt"


def answered(status, error=None, *, body=None, **more):
    body = orjson.dumps({"error": {"message": SECRET, **error}}) if error is not None else body or b"{}"
    return classify(Reply(status=status, body=body, **more), now=0.0)


def said(status, error=None, *, inputs=1, **more):
    found = error_of(answered(status, error, **more), inputs=inputs)
    assert SECRET not in str(found)
    assert "sk-" not in str(found)
    return found


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (401, {"code": "invalid_api_key"}, "invalid_api_key"),
        (401, None, "http_401"),
        (402, {}, "http_402"),
        (403, {"code": "unsupported_country_region_territory"}, "unsupported_country_region_territory"),
        (404, {"code": "model_not_found"}, "model_not_found"),
        (404, {"type": "NotFoundError", "code": 404}, "notfounderror"),
        (400, {"code": "model_not_found"}, "model_not_found"),
        (429, {"code": "insufficient_quota", "type": "insufficient_quota"}, "insufficient_quota"),
        (429, {"code": None, "type": "insufficient_quota"}, "insufficient_quota"),
        (429, {"code": "quota", "type": "insufficient_quota"}, "insufficient_quota"),
        (308, None, "redirect_refused"),
    ],
)
def test_an_error_that_does_not_depend_on_the_input_is_fatal_for_the_credential(status, error, code):
    found = said(status, error)
    assert isinstance(found, Fatal)
    assert (found.scope, found.code) == ("credential", code)
    assert str(status) in str(found)


def test_an_unsendable_request_parks_the_credential_too():
    found = said(None, failure=Failure.UNSENDABLE)
    assert isinstance(found, Fatal)
    assert found.scope == "credential"


def test_too_many_requests_wait_as_long_as_the_server_asks():
    found = said(429, {"code": "rate_limit_exceeded"}, retry_after="7", request_id="req_42")
    assert isinstance(found, RateLimited)
    assert found.retry_after == 7
    assert str(found) == "the model server answered 429 rate_limit_exceeded (request req_42)"


@pytest.mark.parametrize("status", [408, 409, 425, 500, 502, 503, 504, 529])
def test_an_error_of_the_server_is_transient(status):
    found = said(status, {"type": "server_error"})
    assert isinstance(found, Transient)
    assert found.code == "server_error"


@pytest.mark.parametrize("failure", [Failure.CONNECT, Failure.LOST, Failure.TIMEOUT, Failure.DEADLINE, Failure.EXPIRED])
def test_no_answer_is_transient(failure):
    found = said(None, failure=failure, detail=SECRET)
    assert isinstance(found, Transient)
    assert found.code == failure.value


def test_an_answer_that_was_lost_after_its_status_is_transient_whatever_the_status():
    assert isinstance(said(200, failure=Failure.LOST), Transient)
    assert isinstance(said(400, failure=Failure.LOST), Transient)


def test_a_page_of_a_proxy_is_transient():
    assert said(200, body=b"<html>hello").code == "invalid_response"
    assert isinstance(said(200, body=b"<html>hello"), Transient)
    assert isinstance(said(502, body=b"<html>hello"), Transient)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_the_server_refuses_fails_with_the_name_of_the_field(status):
    found = said(status, {"code": "invalid_value", "param": "input"}, inputs=12)
    assert isinstance(found, Refused)
    assert (found.code, found.param) == ("invalid_value", "input")
    assert "12 inputs" in str(found)


@pytest.mark.parametrize("code", ["invalid_request", "redirect_refused", "invalid_response", "response_too_large"])
def test_our_own_error_codes_in_an_answer_of_the_server_are_ignored(code):
    assert isinstance(said(400, {"code": code}), Refused)
    assert isinstance(said(500, {"code": code}), Transient)


@pytest.mark.parametrize(("status", "kind"), [(400, Refused), (418, Fatal), (429, RateLimited), (503, Transient)])
def test_a_web_page_instead_of_an_error_is_classified_by_its_status(status, kind):
    assert isinstance(said(status, body=b"<html>no"), kind)


def test_an_answer_that_is_too_long_is_refused_so_that_halves_are_tried():
    assert isinstance(said(200, failure=Failure.TOO_LARGE), Refused)


def test_an_unknown_4xx_is_fatal_for_the_item_alone():
    found = said(418, {"code": "teapot"})
    assert isinstance(found, Fatal)
    assert (found.scope, found.code) == ("item", "teapot")


def test_an_error_inside_a_200_is_classified_by_the_status_in_it():
    assert isinstance(said(200, {"code": 429}), RateLimited)
    assert isinstance(said(200, {"code": 401}), Fatal)
    assert isinstance(said(200, {"code": "overloaded"}), Transient)


@pytest.mark.parametrize("error", [{"code": SECRET}, {"code": "x" * 65}, {"code": ["a"]}, {"type": "a\nb"}])
def test_an_invalid_code_is_not_repeated(error):
    assert said(400, error).code == "http_400"


@pytest.mark.parametrize("body", [b"[]", b'"words"', b'{"error":"words"}', b"{\xff}", b'{"error":[]}'])
def test_any_body_has_a_category(body):
    assert isinstance(said(400, body=body), SchemaInvalid)


def test_an_invalid_request_id_is_not_repeated():
    assert "request" not in str(said(500, {}, request_id=SECRET))


def test_an_answer_with_a_result_is_not_an_error():
    assert error_of(answered(200, body=b'{"data":[]}'), inputs=1) is None


@given(st.integers(0, 2**31), st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_shares_add_up_to_the_total_and_follow_the_weights(total, weights):
    shares = share_out(total, weights)
    assert sum(shares) == total
    assert len(shares) == len(weights)
    for share, weight in zip(shares, weights, strict=True):
        assert share >= 0
        if sum(weights):
            assert abs(share - total * weight / sum(weights)) <= 1


def test_the_usage_of_each_input_adds_up_to_that_of_the_call():
    call = Call(kind="embedding", model="m", keys=(b"a", b"b", b"c"), tokens_each=(1, 1, 5), tokens_guess=7)
    parts = share_usage(call, Usage(input=100, output=1))
    assert [parts[key].input for key in call.keys] == [14, 14, 72]
    assert sum(one.output for one in parts.values()) == 1
    assert {one.cached for one in parts.values()} == {None}


def test_a_refusal_names_a_few_keys_and_their_causes():
    one = InputRefused("m", {bytes([n]) * 8: "invalid_value" for n in range(7)}, count=9)
    assert str(one).startswith("the model m gave nothing usable for 7 of 9 texts: 0000000000000000 (invalid_value), ")
    assert str(one).endswith(" and 2 more")
    assert one.code == "invalid_value"
    assert InputRefused("m", {b"a": "x", b"b": "y"}, count=2).code == "input_refused"
