"""One suite for every adapter, with the contract server: normal behaviour, and behaviour with faults."""

import json
import logging
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from batchwright.errors import Fatal, RateLimited, Transient
from batchwright.inference.http import Http
from batchwright.providers.contract import Cancelled, Ending, InDoubt, Job, Phase
from batchwright.simulator.providers import running
from batchwright.simulator.providers.server import CREDENTIALS
from tests.providers.conformance import ALIKE, FAIL, SECRET, VARIABLE, World, all_cases

CASES = [
    pytest.param(case, marks=pytest.mark.thorough, id=str(case)) if str(case) in ALIKE else case for case in all_cases()
]


@pytest.fixture(params=CASES, ids=str)
async def world(request, tmp_path):
    case = request.param
    test = request.function.__name__.removeprefix("test_")
    for name, reason in case.unsupported.items():
        if test.startswith(name):
            pytest.skip(f"{case}: {reason}")
    async with running() as server, Http() as http:
        yield World(case, server, http, tmp_path)


def since(world):
    return datetime.fromtimestamp(world.server.clock.now(), UTC) - timedelta(seconds=1)


def shown(*values):
    return " ".join(map(repr, values))


async def test_a_job_runs_to_its_end(world, caplog):
    caplog.set_level(logging.DEBUG)
    request = world.request()
    assert list(world.adapter.validate(request)) == []
    assert list(await world.adapter.inspect(request)) == []
    job, staged = await world.submit(request)
    queued = await world.adapter.poll(job)
    assert queued.phase in (Phase.QUEUED, Phase.RUNNING)
    world.server.advance(world.server.settings.queue_seconds + 1)
    running = await world.adapter.poll(job)
    assert (running.phase, running.ending) == (Phase.RUNNING, None)
    status = await world.finish(job)
    assert (status.phase, status.ending) == (Phase.ENDED, Ending.SUCCEEDED)
    results = await world.results(request, job, status)
    assert sorted(result.key for result in results) == world.keys(3)
    assert all(result.value is not None and result.error is None for result in results)
    assert (world.creations, len(world.server.jobs(provider=world.case.name))) == (1, 1)
    for text in (caplog.text, shown(world.adapter, staged, job, status), json.dumps([staged, dict(job.extra)])):
        assert SECRET not in text
        assert "sig=" not in text


async def test_results_can_be_fetched_again(world):
    request, job, status, results = await world.run("ok", FAIL, "ok")
    assert await world.results(request, job, status) == results
    polled = await world.adapter.poll(job)
    assert await world.results(request, Job(external_id=job.external_id, extra={**job.extra, **polled.found}), polled)


async def test_credentials_go_to_the_service_and_nowhere_else(world):
    request, job, _, _ = await world.run()
    await world.adapter.cancel(job)
    await world.adapter.clean_up(request, {}, job)
    assert world.server.leaks == []
    seen = [one for one in world.server.requests(port="api") if one.route.startswith(f"{world.case.name}.")]
    assert seen
    assert all(not one.headers.keys().isdisjoint(CREDENTIALS) for one in seen)


async def test_partial_success_is_reported_item_by_item(world):
    if world.case.items_max < 2:
        pytest.skip("a job has one item")
    _, _, status, results = await world.run("ok", FAIL, "ok")
    assert status.ending is Ending.PARTIAL
    by_key = {result.key: result for result in results}
    assert sorted(by_key) == world.keys(3)
    first, failed, third = (by_key[key] for key in world.keys(3))
    assert first.value is not None
    assert third.value is not None
    assert failed.value is None
    assert {"kind", "code", "message"} <= set(failed.error)


async def test_a_job_of_which_every_item_failed_has_failed(world):
    _, _, status, results = await world.run(FAIL, FAIL)
    assert status.ending is Ending.FAILED
    assert [result.value for result in results] == [None] * len(world.keys(2))


async def test_a_job_that_failed_as_a_whole_says_why(world):
    world.server.put_faults("failed")
    _, _, status, results = await world.run()
    assert status.ending is Ending.FAILED
    assert all(result.error is not None for result in results)
    assert status.error is not None or results
    assert set(status.error or results[0].error) >= {"kind", "code", "message"}


async def test_cancelling_a_job_keeps_what_was_finished(world):
    request = world.request()
    job, _ = await world.submit(request)
    world.server.advance(world.server.settings.queue_seconds + world.server.settings.run_seconds / 2)
    if not world.adapter.abilities.can_cancel:
        assert await world.adapter.cancel(job) is Cancelled.UNSUPPORTED
        return
    assert await world.adapter.cancel(job) is Cancelled.REQUESTED
    world.server.advance(world.server.settings.cancel_seconds)
    status = await world.adapter.poll(job)
    assert (status.phase, status.ending) in (
        (Phase.ENDED, Ending.CANCELLED),
        (Phase.ENDED, Ending.PARTIAL),
    )
    results = await world.results(request, job, status)
    assert sorted(result.key for result in results) == world.keys(3)
    has_some = any(result.value is not None for result in results)
    assert has_some is world.adapter.abilities.keeps_partial_results
    assert await world.adapter.cancel(job) is Cancelled.ENDED_ALREADY


async def test_cancelling_a_job_that_has_ended_says_so(world):
    _, job, _, _ = await world.run()
    expected = Cancelled.ENDED_ALREADY if world.adapter.abilities.can_cancel else Cancelled.UNSUPPORTED
    assert await world.adapter.cancel(job) is expected


@pytest.mark.parametrize(("written", "seconds"), [("7", 7), ("date+30", 30)])
async def test_a_rate_limit_has_a_wait_and_no_job_was_created(world, written, seconds):
    request = world.request()
    staged = await world.stage(request)
    world.server.put_faults(f"429:route={world.case.route('create')}:retry_after={written}:times=1")
    with pytest.raises(RateLimited) as caught:
        await world.adapter.submit(request, staged)
    assert caught.value.retry_after == pytest.approx(seconds, abs=3)
    assert world.server.jobs(provider=world.case.name) == []
    assert await world.adapter.submit(request, staged)
    assert world.creations == 2


async def test_a_rate_limit_while_polling_says_nothing_about_the_job(world):
    job, _ = await world.submit(world.request())
    world.server.put_faults(f"429:route={world.case.route('get')}:retry_after=9")
    with pytest.raises(RateLimited) as caught:
        await world.adapter.poll(job)
    assert caught.value.retry_after == 9


@pytest.mark.parametrize("fault", ["500", "503", "not_json", "truncate", "drop", "hang_up"])
async def test_an_error_while_polling_is_transient(world, fault):
    job, _ = await world.submit(world.request())
    world.server.put_faults(f"{fault}:route={world.case.route('get')}:times=1")
    with pytest.raises(Transient):
        await world.adapter.poll(job)
    assert (await world.adapter.poll(job)).phase in (Phase.QUEUED, Phase.RUNNING)


async def test_an_error_while_results_are_fetched_is_transient(world):
    request = world.request()
    job, _ = await world.submit(request)
    status = await world.finish(job)
    world.server.put_faults("503:times=1")
    with pytest.raises(Transient):
        await world.results(request, job, status)
    assert len(await world.results(request, job, status)) == len(world.keys(3))


@pytest.mark.parametrize("fault", ["auth", "quota"])
async def test_a_refused_credential_stops_the_account_and_no_job_was_created(world, fault):
    request = world.request()
    staged = await world.stage(request)
    world.server.put_faults(f"{fault}:route={world.case.route('create')}")
    with pytest.raises(Fatal) as caught:
        await world.adapter.submit(request, staged)
    assert caught.value.scope == "credential"
    assert SECRET not in str(caught.value)
    assert world.server.jobs(provider=world.case.name) == []


async def test_a_wrong_key_is_found_by_a_check(world):
    assert await world.adapter.check()
    world.environment[VARIABLE] = "wrong"
    with pytest.raises(Fatal) as caught:
        await world.make().check()
    assert caught.value.scope == "credential"
    assert world.creations == 0


async def test_a_missing_key_is_named_and_nothing_is_sent(world):
    assert world.adapter.missing_credentials() is None
    del world.environment[VARIABLE]
    adapter = world.make()
    assert VARIABLE in adapter.missing_credentials()
    with pytest.raises(Fatal, match=VARIABLE) as caught:
        await adapter.check()
    assert (caught.value.scope, caught.value.code) == ("credential", "credentials_missing")
    assert world.server.requests(port="api") == []


IN_DOUBT = ["drop", "truncate", "not_json", "500:accepted=1", "503:accepted=1", "hang_up", "502"]


@pytest.mark.parametrize("fault", IN_DOUBT)
async def test_a_lost_answer_is_in_doubt_and_the_one_job_is_found(world, fault):
    request = world.request()
    staged = await world.stage(request)
    kind, _, rest = fault.partition(":")
    world.server.put_faults(":".join(filter(None, [kind, f"route={world.case.route('create')}", "times=1", rest])))
    began = since(world)
    if world.adapter.abilities.deduplicates:
        pytest.skip("a second submission is harmless")
    with pytest.raises(InDoubt):
        await world.adapter.submit(request, staged)
    assert world.creations == 1
    was_taken = fault not in ("hang_up", "502")
    assert len(world.server.jobs(provider=world.case.name)) == was_taken
    found = await world.adapter.find(request, staged, began)
    assert len(found) == was_taken
    if was_taken:
        status = await world.finish(found[0])
        assert len(await world.results(request, found[0], status)) == len(world.keys(3))
    assert world.creations == 1


async def test_a_job_is_found_when_the_list_shows_it(world):
    request = world.request()
    staged = await world.stage(request)
    world.server.put_faults("lag:seconds=50")
    began = since(world)
    job = await world.adapter.submit(request, staged)
    assert await world.adapter.find(request, staged, began) == []
    world.server.advance(50)
    assert [one.external_id for one in await world.adapter.find(request, staged, began)] == [job.external_id]
    assert world.adapter.abilities.settle_seconds >= 50


async def test_only_the_own_job_is_found_among_many(world):
    began = since(world)
    jobs = {}
    for n in range(3):
        request = world.request(*(["ok"] * (n + 1)), key=f"bw-01k2h5q8tn3v7w9xy{n}-a1")
        staged = await world.stage(request)
        jobs[request.key] = request, staged, await world.adapter.submit(request, staged)
        world.server.advance(1)
    for request, staged, job in jobs.values():
        found = await world.adapter.find(request, staged, began)
        assert [one.external_id for one in found] == [job.external_id]


async def test_two_jobs_of_one_key_are_both_found_the_oldest_first(world):
    request = world.request()
    staged = await world.stage(request)
    began = since(world)
    first = await world.adapter.submit(request, staged)
    world.server.advance(2)
    second = await world.adapter.submit(request, staged)
    found = await world.adapter.find(request, staged, began)
    assert [one.external_id for one in found] == [first.external_id, second.external_id]


async def test_lists_are_read_page_by_page(world):
    object.__setattr__(world.server.settings, "page_max", 2)
    began = since(world)
    request = world.request()
    job, staged = await world.submit(request)
    for n in range(5):
        await world.submit(world.request("ok", key=f"bw-01k2h5q8tn3v7w9xy{n}-a1"))
    assert [one.external_id for one in await world.adapter.find(request, staged, began)] == [job.external_id]


async def test_an_unknown_status_counts_as_running(world, caplog):
    world.server.put_faults("unknown_status")
    job, _ = await world.submit(world.request())
    world.server.advance(world.server.settings.queue_seconds + 1)
    status = await world.adapter.poll(job)
    assert (status.phase, status.ending, status.is_error) == (Phase.RUNNING, None, False)
    assert "SIMULATED_NEW_STATUS" in status.raw_status.upper()
    assert "SIMULATED_NEW_STATUS" in caplog.text.upper()


async def test_a_job_that_the_provider_no_longer_knows_is_an_error_answer(world):
    job, _ = await world.submit(world.request())
    world.server.reset()
    status = await world.adapter.poll(job)
    assert status.is_error
    assert status.phase is not Phase.ENDED


async def test_a_list_and_a_poll_agree_on_a_job(world):
    if not world.adapter.abilities.can_survey:
        assert await world.adapter.survey([]) == {}
        return
    jobs = []
    for n, items in enumerate((["ok", "ok", "ok"], ["ok", FAIL, "ok"], [FAIL, FAIL, FAIL])):
        job, _ = await world.submit(world.request(*items, key=f"bw-01k2h5q8tn3v7w9xy{n}-a1"))
        jobs.append(job)
    said = set()
    settings = world.server.settings
    for seconds in (0, settings.queue_seconds + 1, settings.run_seconds / 2, settings.run_seconds):
        world.server.advance(seconds)
        said |= await compare_list_with_polls(world, jobs)
    assert {Phase.RUNNING} < said or {Phase.QUEUED, Phase.RUNNING} <= said


@pytest.mark.parametrize("fault", ["failed", "expired:share=0.7", "unknown_status", "empty"])
async def test_a_list_and_a_poll_agree_on_a_failed_job(world, fault):
    if not world.adapter.abilities.can_survey:
        return
    world.server.put_faults(fault)
    job, _ = await world.submit(world.request())
    settings = world.server.settings
    for seconds in (settings.queue_seconds + 1, settings.run_seconds):
        world.server.advance(seconds)
        await compare_list_with_polls(world, [job])


async def test_a_list_and_a_poll_agree_on_a_cancelled_job(world):
    abilities = world.adapter.abilities
    if not abilities.can_survey or not abilities.can_cancel:
        return
    job, _ = await world.submit(world.request())
    world.server.advance(world.server.settings.queue_seconds + world.server.settings.run_seconds / 2)
    await world.adapter.cancel(job)
    for _ in range(2):
        await compare_list_with_polls(world, [job])
        world.server.advance(world.server.settings.cancel_seconds)


async def compare_list_with_polls(world, jobs):
    """Compare a list with polls; return the phases in the list, which may leave out only jobs that have ended."""
    polled = {job.external_id: await world.adapter.poll(job) for job in jobs}
    listed = await world.adapter.survey([*jobs, Job(external_id="nobody", extra=jobs[0].extra)])
    for id, status in listed.items():
        assert status == replace(polled[id], next_poll_seconds=None)
    missing = set(polled) - set(listed)
    assert all(polled[id].phase is Phase.ENDED for id in missing)
    return {status.phase for status in listed.values()}


async def test_a_list_of_many_pages_is_read_only_as_far_as_it_saves_calls(world):
    if not world.adapter.abilities.can_survey:
        return
    object.__setattr__(world.server.settings, "page_max", 2)
    jobs = [(await world.submit(world.request("ok", key=f"bw-01k2h5q8tn3v7w9xy{n}-a1")))[0] for n in range(5)]
    assert set(await world.adapter.survey(jobs)) == {job.external_id for job in jobs}
    world.server.seen.clear()
    assert await world.adapter.survey([]) == {}
    assert len(world.server.requests(port="api")) <= 1


@pytest.mark.parametrize("fault", ["500", "not_json", "truncate", "drop"])
async def test_a_list_that_fails_is_a_transient_error(world, fault):
    if not world.adapter.abilities.can_survey:
        return
    job, _ = await world.submit(world.request())
    world.server.put_faults(f"{fault}:route={world.case.route('list')}:times=1")
    with pytest.raises(Transient):
        await world.adapter.survey([job])
    assert job.external_id in await world.adapter.survey([job])


async def test_shuffled_results_are_assigned_to_their_items(world):
    world.server.put_faults("shuffled")
    _, _, _, results = await world.run("ok", FAIL, "ok")
    assert {result.key: result.value is not None for result in results} == dict(
        zip(world.keys(3), (True, False, True), strict=False)
    )


async def test_a_missing_result_is_an_error_of_its_item(world):
    world.server.put_faults("missing")
    _, _, _, results = await world.run()
    assert sorted(result.key for result in results) == world.keys(3)
    (failed,) = [result for result in results if result.error is not None]
    assert failed.error["kind"] == "transient"


async def test_of_two_results_the_first_is_kept(world):
    world.server.put_faults("duplicate")
    _, _, _, results = await world.run()
    assert sorted(result.key for result in results) == world.keys(3)


async def test_a_broken_result_does_not_affect_other_results(world):
    world.server.put_faults("malformed")
    _, _, _, results = await world.run()
    assert sorted(result.key for result in results) == world.keys(3)
    assert len([result for result in results if result.error is not None]) == 1


async def test_a_result_that_nobody_asked_for_is_marked(world):
    world.server.put_faults("stranger")
    _, _, _, results = await world.run()
    strangers = [result for result in results if result.key not in world.keys(3)]
    assert all(result.error["code"] == "unknown_key" for result in strangers)
    assert len(results) - len(strangers) == len(world.keys(3))


async def test_a_job_without_any_results_is_reported_item_by_item(world):
    world.server.put_faults("empty")
    _, _, _, results = await world.run()
    assert sorted(result.key for result in results) == world.keys(3)
    assert all(result.error is not None for result in results)


async def test_an_expired_job_keeps_what_was_finished(world):
    world.server.put_faults("expired:share=0.7")
    _, _, status, results = await world.run()
    assert status.ending in (Ending.EXPIRED, Ending.PARTIAL)
    assert sorted(result.key for result in results) == world.keys(3)
    has_some = any(result.value is not None for result in results)
    assert has_some is world.adapter.abilities.keeps_partial_results
    assert any(result.error is not None for result in results)


class Crash(Exception):
    """The process dies here."""


class Caller:
    """Submits like the durable code that uses adapters, and dies at the n-th critical place."""

    def __init__(self, world, request):
        self.world, self.request = world, request
        self.staged, self.began, self.job = {}, None, None
        self.left = 0

    def may_crash(self):
        self.left -= 1
        if self.left < 0:
            raise Crash

    async def submit(self, places):
        self.left = places
        if self.job is None and self.began is not None:
            self.job = next(iter(await self.world.adapter.find(self.request, self.staged, self.began)), None)
        if self.job is not None:
            return
        async for staged in self.world.adapter.stage(self.request, self.staged):
            self.may_crash()
            self.staged = json.loads(json.dumps(staged))
            self.may_crash()
        self.began = since(self.world)
        self.may_crash()
        job = await self.world.adapter.submit(self.request, self.staged)
        self.may_crash()
        self.job = job


@pytest.mark.parametrize("fault", [None, "drop", "503", "503:accepted=1", "429"])
async def test_a_crash_anywhere_leaves_exactly_one_job(world, fault):
    for places in range(12):
        world.server.reset()
        caller = Caller(world, world.request())
        kind, _, rest = (fault or "").partition(":")
        world.server.put_faults(
            *([":".join(filter(None, [kind, f"route={world.case.route('create')}", "times=1", rest]))] if fault else [])
        )
        crashes = 0
        for left in (places, 99, 99, 99):
            try:
                await caller.submit(left)
                break
            except (Crash, InDoubt, RateLimited):
                crashes += 1
                world.server.advance(1)
        assert len(world.server.jobs(provider=world.case.name)) == 1
        status = await world.finish(caller.job)
        results = await world.results(caller.request, caller.job, status)
        assert all(result.value is not None for result in results)
        if crashes == (fault is not None):
            return
    raise AssertionError("there are more places to crash than were tried")


async def test_staging_resumes_after_a_crash_at_every_step(world):
    request = world.request()
    steps = [staged async for staged in world.adapter.stage(request, {})]
    for staged in steps:
        resumed = [one async for one in world.adapter.stage(request, staged)]
        last = resumed[-1] if resumed else staged
        assert last.keys() == steps[-1].keys()
    assert world.creations == 0
    final = steps[-1] if steps else {}
    uploads = len(world.server.requests(port="api"))
    assert [one async for one in world.adapter.stage(request, final)] == []
    assert len(world.server.requests(port="api")) == uploads


async def test_cleaning_up_can_be_repeated(world):
    request = world.request()
    job, staged = await world.submit(request)
    await world.finish(job)
    for _ in range(2):
        await world.adapter.clean_up(request, staged, job)
    await world.adapter.clean_up(request, {}, None)


async def test_an_unreachable_service_has_created_no_job(world):
    request = world.request()
    staged = await world.stage(request)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(Transient) as caught:
        await world.make(base_url=url).submit(request, staged)
    assert not isinstance(caught.value, InDoubt)


async def test_what_is_wrong_with_a_request_is_found_before_anything_is_sent(world):
    request = world.request()
    object.__setattr__(request, "inputs", [])
    assert world.adapter.validate(request)
    request = world.request()
    others = {"transcription", "completion"} - world.adapter.abilities.task_types
    object.__setattr__(request, "task_type", others.pop())
    assert world.adapter.validate(request)
    assert world.server.requests(port="api") == []
