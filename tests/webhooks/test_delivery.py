"""Signed events of a batch's four endings, to a real server on the loopback and checked by OpenAI's own client."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import random
import re
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest

from batchwright import Context, Done, Fatal, JobStatus, NewJob, RateLimited, Transient, operation
from batchwright.engine.catalog import MARK
from batchwright.engine.policy import backoff
from batchwright.engine.worker.worker import Worker, WorkerSettings
from batchwright.errors import ConfigurationError, PayloadInvalid
from batchwright.inference import gateway as gateway_module
from batchwright.operations.registry import Registry
from batchwright.webhooks.delivery import PATIENCE_SECONDS, Event, Webhooks, deliver_webhook, deliveries, sign
from batchwright.webhooks.settings import EVENT_TYPES, WebhookSettings
from tests.inference.server import RawServer, answer
from tests.support import OneDuty, event_names, listed, put, raw

PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OLD_SECRET = "whsec_" + base64.b64encode(bytes(range(100, 140))).decode()
BATCH = "batch_0198c0ffee"
QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobStatus


@pytest.fixture
async def receiver():
    async with RawServer() as server:
        yield server


def endpoint(server, path="/hook", **options):
    return WebhookSettings(url=server.url + path, secret_env="HOOK", **options)


def make(*endpoints, secret=SECRET, clock=time.time):
    return Webhooks({"default": endpoints}, environment={"HOOK": secret}, clock=clock)


def event(type="batch.completed", ended_at=None):
    return Event.of(BATCH, type, ended_at or datetime.now(UTC))


async def deliver(webhooks, server, path="/hook", what=None):
    return await webhooks.deliver("default", endpoint(server, path).name, what or event())


def unwrap(body, headers, secret=SECRET):
    with openai.OpenAI(api_key="none") as client:
        return client.webhooks.unwrap(body, headers, secret=secret)


# What is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", EVENT_TYPES)
async def test_openais_client_accepts_each_ending(receiver, type):
    webhooks = make(endpoint(receiver))
    ended_at = datetime(2026, 8, 1, 12, 0, 0, 900_000, tzinfo=UTC)
    assert await deliver(webhooks, receiver, what=event(type, ended_at)) == 200
    found = unwrap(receiver.bodies[0], receiver.heads[0])
    assert (found.object, found.type, found.data.id) == ("event", type, BATCH)
    assert found.created_at == int(ended_at.timestamp())
    assert found.id == receiver.heads[0]["webhook-id"]
    await webhooks.close()


async def test_a_delivery_has_these_headers_and_no_others(receiver):
    webhooks = make(endpoint(receiver, "/hooks/v1?team=a%20b"), clock=lambda: 1_785_585_600.9)
    ended_at = datetime(2026, 8, 1, 12, tzinfo=UTC)
    assert await deliver(webhooks, receiver, "/hooks/v1?team=a%20b", event(ended_at=ended_at)) == 200
    assert receiver.lines == ["POST /hooks/v1?team=a%20b HTTP/1.1"]
    (head,) = receiver.heads
    assert head["webhook-timestamp"] == "1785585600"
    assert re.fullmatch(r"evt_[0-9a-f]{32}", head["webhook-id"])
    assert re.fullmatch(r"v1,[A-Za-z0-9+/]{43}=", head["webhook-signature"])
    assert head["content-type"] == "application/json"
    usual = {"accept", "accept-encoding", "content-length", "content-type", "host", "user-agent", "x-request-id"}
    assert set(head) - usual == {"webhook-id", "webhook-timestamp", "webhook-signature"}
    assert json.loads(receiver.bodies[0]) == {
        "id": head["webhook-id"],
        "object": "event",
        "created_at": 1785585600,
        "type": "batch.completed",
        "data": {"id": BATCH},
    }
    await webhooks.close()


async def test_openais_client_refuses_a_changed_byte_another_secret_and_an_old_timestamp(receiver):
    fresh, stale = make(endpoint(receiver)), make(endpoint(receiver), clock=lambda: time.time() - 301)
    await deliver(fresh, receiver)
    await deliver(stale, receiver)
    body, head = receiver.bodies[0], receiver.heads[0]
    assert unwrap(body, head)
    refused = openai.InvalidWebhookSignatureError
    with pytest.raises(refused, match="does not match"):
        unwrap(body.replace(b"completed", b"completeD"), head)
    with pytest.raises(refused, match="does not match"):
        unwrap(body, {**head, "webhook-id": head["webhook-id"][:-1] + "x"})
    with pytest.raises(refused, match="does not match"):
        unwrap(body, head, secret=OLD_SECRET)
    with pytest.raises(refused, match="too old"):
        unwrap(receiver.bodies[1], receiver.heads[1])
    await fresh.close()
    await stale.close()


def test_the_published_example_of_the_standard_gets_the_same_signature():
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = sign([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_while_a_secret_is_rotated_both_are_accepted(receiver):
    webhooks = make(endpoint(receiver), secret=f"{SECRET},{OLD_SECRET}")
    await deliver(webhooks, receiver)
    assert unwrap(receiver.bodies[0], receiver.heads[0], secret=SECRET)
    assert unwrap(receiver.bodies[0], receiver.heads[0], secret=OLD_SECRET)
    assert len(receiver.heads[0]["webhook-signature"].split(" ")) == 2
    await webhooks.close()


def test_an_ending_has_one_event_id_however_often_it_is_made():
    ended_at = datetime(2026, 8, 1, tzinfo=UTC)
    ids = {Event.of(batch, type, ended_at).id for batch in (BATCH, "batch_2") for type in EVENT_TYPES for _ in "ab"}
    assert len(ids) == 2 * len(EVENT_TYPES)


def test_the_request_of_the_docs_is_what_is_sent():
    shown = event(ended_at=datetime.fromtimestamp(1785585600, UTC))
    page = PAGE.read_text(encoding="utf-8")
    assert f"webhook-id: {shown.id}" in page
    assert f"webhook-signature: {sign([bytes(range(32))], shown.id, 1785585600, shown.body())}" in page
    assert shown.body().decode() in page


@pytest.mark.parametrize("id", ["evt_1.2", "evt_" + "0" * 31 + "\n", "batch_1"])
def test_an_event_id_that_could_change_the_signature_or_a_header_is_refused(id):
    payload = {"endpoint": "a-1", "event": {**dataclasses.asdict(event()), "id": id}}
    with pytest.raises(PayloadInvalid, match=r"event\.id"):
        getattr(deliver_webhook, MARK).arguments(payload)


async def test_the_receiver_of_the_docs_accepts_an_event_once(receiver):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    exec(compile(code, PAGE.name, "exec"), namespace)
    webhooks = make(endpoint(receiver))
    await deliver(webhooks, receiver)
    with openai.OpenAI(api_key="none") as client:
        found = [namespace["receive"](client, receiver.bodies[0], receiver.heads[0], SECRET) for _ in range(2)]
    assert found == [BATCH, None]
    await webhooks.close()


# What an answer means ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [answer(b"", "204 No Content"), answer(b"thanks", "202 Accepted"), answer(b"<p>")])
async def test_any_2xx_is_delivered_whatever_the_body_says(receiver, reply):
    receiver.replies["/hook"] = reply
    webhooks = make(endpoint(receiver))
    assert await deliver(webhooks, receiver) == int(reply.split()[1])
    await webhooks.close()


async def test_a_2xx_counts_although_its_body_breaks_off_or_does_not_end(receiver):
    receiver.replies["/short"] = b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}"
    receiver.then_close.add("/short")
    endless = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536 + b"\r\n2\r\nxx\r\n"
    )
    receiver.replies["/endless"] = endless
    receiver.replies["/stuck"] = b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n"
    webhooks = make(
        endpoint(receiver, "/short"), endpoint(receiver, "/endless"), endpoint(receiver, "/stuck", timeout_seconds=0.3)
    )
    started = time.monotonic()
    assert [await deliver(webhooks, receiver, path) for path in ("/short", "/endless", "/stuck")] == [200, 200, 200]
    assert time.monotonic() - started < 5, "the body is read up to 64 KiB, and the time limit of a delivery is kept"
    assert len(receiver.lines) == 3
    await webhooks.close()


@pytest.mark.parametrize("status", [400, 401, 404, 408, 429, 500, 502, 503])
async def test_other_statuses_are_failed_attempts(receiver, status):
    receiver.replies["/hook"] = answer(b"private words", f"{status} No")
    webhooks = make(endpoint(receiver))
    with pytest.raises(Transient, match=f"answered with {status}") as failed:
        await deliver(webhooks, receiver)
    assert failed.value.code == f"http_{status}"
    assert "private words" not in str(failed.value)
    await webhooks.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_refused_and_not_followed(receiver, status):
    async with RawServer() as other:
        receiver.replies["/hook"] = answer(b"", f"{status} Moved", f"location: {other.url}/elsewhere")
        webhooks = make(endpoint(receiver))
        with pytest.raises(Transient, match="redirects are not followed, correct its url") as failed:
            await deliver(webhooks, receiver)
        assert failed.value.code == "redirect_refused"
        assert (len(receiver.lines), other.connections) == (1, 0)
        await webhooks.close()


async def test_gone_is_final(receiver):
    receiver.replies["/hook"] = answer(b"", "410 Gone")
    webhooks = make(endpoint(receiver))
    with pytest.raises(Fatal, match="remove it from the configuration") as failed:
        await deliver(webhooks, receiver)
    assert failed.value.code == "endpoint_gone"
    await webhooks.close()


@pytest.mark.parametrize(
    ("status", "asked", "waits"),
    [(429, "30", 30.0), (503, "30", 30.0), (429, "0", 5.0), (429, "86400", 300.0)],
)
async def test_retry_after_of_a_receiver_is_respected_up_to_a_day(receiver, status, asked, waits):
    receiver.replies["/hook"] = answer(b"", f"{status} Later", f"retry-after: {asked}")
    now = 1_785_585_600.0
    webhooks = make(endpoint(receiver), clock=lambda: now)
    young = event(ended_at=datetime.fromtimestamp(now - PATIENCE_SECONDS + 1, UTC))
    with pytest.raises(RateLimited) as told:
        await deliver(webhooks, receiver, what=young)
    assert told.value.retry_after == waits
    old = event(ended_at=datetime.fromtimestamp(now - PATIENCE_SECONDS, UTC))
    with pytest.raises(Transient, match=f"answered with {status}"):
        await deliver(webhooks, receiver, what=old)
    await webhooks.close()


async def test_a_receiver_that_is_unreachable_silent_or_disconnects_is_a_failed_attempt(receiver):
    receiver.replies |= {"/silent": None, "/hangs-up": b""}
    silent, hangs_up = endpoint(receiver, "/silent", timeout_seconds=0.2), endpoint(receiver, "/hangs-up")
    async with RawServer() as gone:
        away = endpoint(gone)
    webhooks = make(silent, hangs_up, away)
    failures = {}
    for one in (silent, hangs_up, away):
        with pytest.raises(Transient) as failed:
            await webhooks.deliver("default", one.name, event())
        failures[one] = (failed.value.code, str(failed.value).partition(" was not delivered: ")[2])
    assert failures[silent][0] == "request_timeout"
    assert failures[hangs_up][0] == "connection_lost"
    assert failures[away] == ("connection_failed", "the server could not be reached: connection refused")
    await webhooks.close()


# As jobs ----------------------------------------------------------------------------------------------------------


def jobs_of(webhooks, tenant, type="batch.completed"):
    settings = [one.settings for one in webhooks._endpoints.get(tenant, {}).values()]
    return deliveries(settings, tenant, BATCH, type, datetime.now(UTC))


@operation("end_batch")
async def end_batch(ctx: Context, type: str, fails: bool = False) -> Done:
    """Ends a batch as its coordinator does: the deliveries are part of the same commit."""
    jobs = jobs_of(ctx.service(Webhooks), ctx.tenant, type)

    async def write(connection) -> None:
        if fails:
            raise Fatal("the ending was refused")

    return Done(then=jobs, write=write)


OPERATIONS = Registry([end_batch, deliver_webhook])


def working_with(pool, queue, webhooks):
    settings = WorkerSettings(stop_grace_seconds=2.0)
    return Worker(pool, OPERATIONS, parts=[OneDuty(services=[webhooks])], settings=settings, queue=queue)


async def end(queue, worker, type="batch.completed", *, tenant="default", fails=False):
    """End a batch, and return the deliveries."""
    await put(queue, NewJob(end_batch, {"type": type, "fails": fails}, tenant=tenant), operations=OPERATIONS)
    assert await worker.run_once() == 1
    return await listed(queue, job_type="batch.webhook")


async def test_500_then_200_is_one_done_job_and_both_tries_carry_the_same_id(pool, queue, clock, receiver):
    receiver.replies["/hook"] = answer(b"", "500 Broken")
    moment = time.time() - 100
    webhooks = make(endpoint(receiver), clock=lambda: moment)
    worker = working_with(pool, queue, webhooks)
    (job,) = await end(queue, worker)
    assert (job.queue, job.tenant, job.max_attempts) == ("webhooks", "default", 34)
    assert await worker.run_once() == 1
    assert (await queue.get(job.id)).status is QUEUED
    del receiver.replies["/hook"]
    moment += 60
    await clock.advance(queue, 10)
    assert await worker.run_once() == 1
    await clock.advance(queue, 86_400)
    assert await worker.run_once() == 0
    job = await queue.get(job.id)
    assert (job.status, job.attempts, job.result) == (SUCCEEDED, 2, {"status": 200})
    assert (await event_names(queue, job.id)).count("job.retried") == 1
    first, second = receiver.heads
    assert receiver.bodies[0] == receiver.bodies[1]
    assert first["webhook-id"] == second["webhook-id"]
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == 60
    assert first["webhook-signature"] != second["webhook-signature"]
    assert all(unwrap(body, head) for body, head in zip(receiver.bodies, receiver.heads, strict=True))
    await worker.close()
    await webhooks.close()


async def test_an_ending_that_is_not_committed_sends_no_webhook(pool, queue, receiver):
    webhooks = make(endpoint(receiver))
    worker = working_with(pool, queue, webhooks)
    assert await end(queue, worker, fails=True) == []
    assert len(await end(queue, worker)) == 1
    await worker.close()
    await webhooks.close()


async def test_each_endpoint_that_wants_the_ending_gets_it_with_the_same_event_id(pool, queue, receiver):
    every, only = endpoint(receiver, "/every"), endpoint(receiver, "/failed", events=("batch.failed",))
    webhooks = make(every, only)
    worker = working_with(pool, queue, webhooks)
    assert len(await end(queue, worker, "batch.expired")) == 1
    assert await worker.run_once() == 1
    assert len(await end(queue, worker, "batch.failed")) == 3
    assert await worker.run_once() == 2
    assert sorted(line.split()[1] for line in receiver.lines) == ["/every", "/every", "/failed"]
    assert len({head["webhook-id"] for head in receiver.heads[1:]}) == 1
    assert receiver.heads[0]["webhook-id"] != receiver.heads[1]["webhook-id"]
    await worker.close()
    await webhooks.close()


async def test_a_tenant_gets_webhooks_only_for_its_own_batches(pool, queue, receiver):
    settings = {"default": (endpoint(receiver, "/default"),), "other": (endpoint(receiver, "/other"),)}
    webhooks = Webhooks(settings, environment={"HOOK": SECRET})
    worker = working_with(pool, queue, webhooks)
    (job,) = await end(queue, worker, tenant="other")
    assert job.tenant == "other"
    assert await worker.run_once() == 1
    assert [line.split()[1] for line in receiver.lines] == ["/other"]
    assert jobs_of(webhooks, "third") == []
    with pytest.raises(Transient, match=r"no webhook .* is configured for the tenant 'other'"):
        await webhooks.deliver("other", endpoint(receiver, "/default").name, event())
    await worker.close()
    await webhooks.close()


async def test_gone_fails_the_job_and_a_rerun_delivers_it_under_the_same_id(pool, queue, receiver):
    receiver.replies["/hook"] = answer(b"", "410 Gone")
    webhooks = make(endpoint(receiver))
    worker = working_with(pool, queue, webhooks)
    (job,) = await end(queue, worker)
    assert await worker.run_once() == 1
    failed = await queue.get(job.id)
    assert (failed.status, failed.attempts, failed.error["code"]) == (FAILED, 1, "endpoint_gone")
    del receiver.replies["/hook"]
    await queue.rerun(job.id)
    assert await worker.run_once() == 1
    assert (await queue.get(job.id)).status is SUCCEEDED
    assert receiver.heads[0]["webhook-id"] == receiver.heads[1]["webhook-id"]
    await worker.close()
    await webhooks.close()


async def test_a_retry_after_uses_no_attempt(pool, queue, clock, receiver):
    receiver.replies["/hook"] = answer(b"", "429 Later", "retry-after: 120")
    webhooks = make(endpoint(receiver))
    worker = working_with(pool, queue, webhooks)
    (job,) = await end(queue, worker)
    assert await worker.run_once() == 1
    assert (await queue.get(job.id)).attempts == 0
    await clock.advance(queue, 119)
    assert await worker.run_once() == 0
    await clock.advance(queue, 32)
    assert await worker.run_once() == 1
    assert len(receiver.lines) == 2
    await worker.close()
    await webhooks.close()


# Changes between enqueue and delivery -----------------------------------------------------------------------------


async def test_an_added_endpoint_before_it_and_a_new_secret_do_not_confuse_a_delivery(pool, queue, receiver):
    before = make(endpoint(receiver, "/mine"), secret=OLD_SECRET)
    worker = working_with(pool, queue, before)
    await end(queue, worker)
    await worker.close()
    after = make(endpoint(receiver, "/new"), endpoint(receiver, "/mine", events=("batch.failed",)))
    worker = working_with(pool, queue, after)
    assert await worker.run_once() == 1
    assert [line.split()[1] for line in receiver.lines] == ["/mine"]
    assert unwrap(receiver.bodies[0], receiver.heads[0], secret=SECRET)
    await worker.close()
    await before.close()
    await after.close()


async def test_a_worker_that_does_not_know_the_endpoint_leaves_it_for_one_that_does(pool, queue, clock, receiver):
    new, old = make(endpoint(receiver)), make(endpoint(receiver, "/elsewhere"))
    first = working_with(pool, queue, new)
    (job,) = await end(queue, first)
    await first.close()
    second = working_with(pool, queue, old)
    assert await second.run_once() == 1
    await second.close()
    assert (await queue.get(job.id)).status is QUEUED
    assert receiver.lines == []
    await clock.advance(queue, 10)
    third = working_with(pool, queue, new)
    assert await third.run_once() == 1
    assert (await queue.get(job.id)).status is SUCCEEDED
    await third.close()
    await new.close()
    await old.close()


async def test_a_delivery_to_a_removed_endpoint_is_not_sent_and_ends_in_the_inbox(pool, queue, receiver):
    before, after = make(endpoint(receiver)), Webhooks({})
    worker = working_with(pool, queue, before)
    (job,) = await end(queue, worker)
    await worker.close()
    await raw(queue, "UPDATE batchwright.job SET max_attempts = 1 WHERE job_type = 'batch.webhook'")
    worker = working_with(pool, queue, after)
    assert await worker.run_once() == 1
    failed = await queue.get(job.id)
    assert (failed.status, failed.error["code"]) == (FAILED, "endpoint_unknown")
    assert "its url was changed or removed" in failed.error["message"]
    assert receiver.lines == []
    await worker.close()
    await before.close()


async def test_a_secret_that_became_unusable_is_waited_for(receiver, tmp_path, monkeypatch):
    monkeypatch.setattr(gateway_module, "KEY_SECONDS", 0.0)
    file = tmp_path / "hook"
    file.write_text(OLD_SECRET)
    settings = WebhookSettings(url=f"{receiver.url}/hook", secret_name="hook")
    webhooks = Webhooks({"default": (settings,)}, secrets=tmp_path)
    file.write_text("not-a-secret")
    with pytest.raises(Transient, match="which is not whsec_") as failed:
        await deliver(webhooks, receiver)
    assert (failed.value.code, receiver.lines) == ("secret_invalid", [])
    assert "not-a-secret" not in str(failed.value)
    file.write_text(SECRET + "\n")
    assert await deliver(webhooks, receiver) == 200
    assert unwrap(receiver.bodies[0], receiver.heads[0])
    await webhooks.close()


# Secrets stay secret ----------------------------------------------------------------------------------------------


async def test_no_output_shows_the_secret_or_the_path(pool, queue, clock, receiver, caplog):
    caplog.set_level(logging.DEBUG)
    receiver.replies["/token-in-path"] = answer(b"private words", "500 Broken")
    settings = endpoint(receiver, "/token-in-path")
    webhooks = make(settings)
    worker = working_with(pool, queue, webhooks)
    (job,) = await end(queue, worker)
    assert await worker.run_once() == 1
    (rows,) = await raw(queue, "SELECT jsonb_agg(to_jsonb(job))::text FROM batchwright.job")
    (events,) = await raw(queue, "SELECT jsonb_agg(to_jsonb(event))::text FROM batchwright.job_event event")
    inner = webhooks._endpoints["default"][settings.name]
    seen = [caplog.text, *rows, *events, *(repr(one) for one in (webhooks, job, event()))]
    assert all(word in rows[0] for word in ("http_500", settings.name))
    assert all(word not in text for text in seen for word in ("token-in-path", "private words"))
    plain, key = SECRET.removeprefix("whsec_"), str(bytes(range(32)))
    shown = [*seen, repr(settings), repr(inner), str(dataclasses.asdict(settings))]
    assert all(word not in text for text in shown for word in (plain, key))
    await worker.close()
    await webhooks.close()


@pytest.mark.parametrize(
    "secret",
    [
        "",
        SECRET.removeprefix("whsec_"),
        "whsec_",
        "whsec_!" + "A" * 40,
        SECRET[:-1],
        "whsec_" + base64.b64encode(b"x" * 23).decode(),
        "whsec_" + base64.b64encode(b"x" * 65).decode(),
        f"{SECRET},",
        f"{SECRET} {OLD_SECRET}",
        ",".join([SECRET] * 5),
    ],
)
def test_an_invalid_secret_is_refused_at_start_and_not_repeated(receiver, secret):
    with pytest.raises(
        ConfigurationError, match=r"the secret of the webhook 127\.0\.0\.1.* the environment variable HOOK"
    ) as no:
        make(endpoint(receiver), secret=secret)
    assert len(secret) < 8 or secret[7:] not in str(no.value)


def test_a_secret_file_that_is_not_text_is_refused_and_not_repeated(tmp_path):
    file = tmp_path / "hook"
    file.write_bytes(SECRET.encode() + b"\xff")
    settings = WebhookSettings(url="http://a:1/x", secret_file=file)
    with pytest.raises(ConfigurationError, match="cannot be read: UnicodeDecodeError") as refused:
        Webhooks({"default": (settings,)})
    assert SECRET[6:20] not in str(refused.value)


# Retries ------------------------------------------------------------------------------------------------------------


def test_the_attempts_of_a_delivery_span_about_a_day():
    made = getattr(deliver_webhook, MARK)
    random.seed(7)
    hours = sorted(sum(backoff(n, made) for n in range(1, made.max_attempts)) / 3600 for _ in range(2000))
    assert 23 < statistics.mean(hours) < 26
    assert 15 < hours[20] < hours[-20] < 36
    assert backoff(1, made) <= 10, "the first retry comes soon"
