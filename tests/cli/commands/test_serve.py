"""`batchwright up` and `batchwright worker` as operators use them: signals, dead children, dead supervisors."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.cli.conftest import SAMPLE, SECONDS_MAX, Cli, Inside

READY = "runs .*sample.block"
WORKERS = "SELECT pid FROM batchwright.worker WHERE left_at IS NULL"


def submit(cli: Cli, job_type: str) -> str:
    return cli("job", "submit", job_type).stdout.strip()


def stands(cli: Cli, id: str) -> tuple[str, int, str]:
    """The status, attempts and last event of a job."""
    (row,) = cli.rows(
        "SELECT status::text, attempts, (SELECT event FROM batchwright.job_event WHERE job_id = job.id "
        "ORDER BY id DESC LIMIT 1) FROM batchwright.job WHERE id = %s",
        id,
    )
    return row


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_up_migrates_runs_jobs_and_releases_them_at_sigterm_without_using_an_attempt(empty_cli: Cli) -> None:
    (empty_cli.folder / "hello.py").write_text(
        "from batchwright import operation\n@operation('hello')\nasync def hello() -> str:\n    return 'from here'\n"
    )
    with empty_cli.start("up", SAMPLE, "hello") as up:
        up.until("runs .*hello, .*provider.task, sample.block")
        assert empty_cli("job", "submit", "hello", "--wait").stdout.endswith('"from here"\n')
        id = submit(empty_cli, "sample.linger")
        empty_cli.begun(id, "linger.began")
        up.signal(signal.SIGTERM)
        up.until("stopping: running jobs have 0.3 s to end")
        assert up.ended() == 0
    assert stands(empty_cli, id) == ("QUEUED", 0, "job.released")
    assert empty_cli.rows(WORKERS) == []


@pytest.mark.thorough
def test_a_thread_that_does_not_end_does_not_keep_the_process_alive(cli: Cli) -> None:
    with cli.start("worker", SAMPLE) as worker:
        worker.until(READY)
        id = submit(cli, "sample.sulk")
        cli.begun(id, "sulk.began")
        worker.signal(signal.SIGINT)
        assert worker.ended() == 0
    assert stands(cli, id) == ("QUEUED", 0, "job.released")


@pytest.mark.thorough
@pytest.mark.parametrize("job_type", ["sample.linger", "sample.block"])
def test_a_second_sigterm_ends_the_process_at_once_even_if_the_event_loop_is_blocked(cli: Cli, job_type: str) -> None:
    cli.environment["BATCHWRIGHT_WORKER_STOP_GRACE_SECONDS"] = "60"
    with cli.start("worker", SAMPLE) as worker:
        worker.until(READY)
        id = submit(cli, job_type)
        worker.until("the job has begun")
        began = time.monotonic()
        while worker.process.poll() is None and time.monotonic() < began + SECONDS_MAX:
            worker.signal(signal.SIGTERM)
            time.sleep(0.2)  # two signals that arrive together are one
        assert worker.ended() == 128 + signal.SIGTERM
    assert stands(cli, id)[0] == "RUNNING"


@pytest.mark.thorough
def test_a_dead_child_is_replaced_and_sigterm_reaches_all(cli: Cli) -> None:
    with cli.start("worker", "--processes", "2", "--concurrency", "3", SAMPLE) as supervisor:
        cli.until("SELECT FROM batchwright.worker HAVING count(*) = 2")
        first, second = sorted(pid for (pid,) in cli.rows(WORKERS))
        os.kill(first, signal.SIGKILL)
        supervisor.until("a worker process ended .killed by SIGKILL.")
        ((third,),) = cli.until("SELECT pid FROM batchwright.worker WHERE pid NOT IN (%s, %s)", first, second)
        assert cli.rows("SELECT DISTINCT concurrency FROM batchwright.worker") == [(3,)]
        id = submit(cli, "sample.linger")
        cli.begun(id, "linger.began")
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ended() == 0
    assert is_gone(second)
    assert is_gone(third)
    assert stands(cli, id) == ("QUEUED", 0, "job.released")
    assert cli.rows(WORKERS) == [(first,)]


@pytest.mark.thorough
def test_children_exit_when_their_supervisor_is_killed(cli: Cli) -> None:
    with cli.start("up", "--processes", "2", SAMPLE) as supervisor:
        cli.until("SELECT FROM batchwright.worker HAVING count(*) = 2")
        pids = [pid for (pid,) in cli.rows(WORKERS)]
        id = submit(cli, "sample.linger")
        cli.begun(id, "linger.began")
        supervisor.signal(signal.SIGKILL)
        supervisor.ended()
        cli.until("SELECT WHERE NOT EXISTS (SELECT FROM batchwright.worker WHERE left_at IS NULL)")
    assert stands(cli, id) == ("QUEUED", 0, "job.released")
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=SECONDS_MAX)
    assert all(map(is_gone, pids))


@pytest.mark.thorough
def test_a_second_sigterm_ends_the_children_too(cli: Cli) -> None:
    cli.environment["BATCHWRIGHT_WORKER_STOP_GRACE_SECONDS"] = "60"
    with cli.start("worker", "--processes", "2", SAMPLE) as supervisor:
        cli.until("SELECT FROM batchwright.worker HAVING count(*) = 2")
        pids = [pid for (pid,) in cli.rows(WORKERS)]
        id = submit(cli, "sample.linger")
        cli.begun(id, "linger.began")
        supervisor.signal(signal.SIGTERM)
        supervisor.until("stopping 2 worker processes")
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ended() == 128 + signal.SIGTERM
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=SECONDS_MAX)
    assert all(map(is_gone, pids))


@pytest.mark.thorough
def test_a_signal_to_the_whole_group_counts_once_and_running_jobs_are_released(cli: Cli) -> None:
    """By default, systemd signals the whole group: the children get the signal from there and from their supervisor."""
    with cli.start("up", "--processes", "2", SAMPLE) as supervisor:
        cli.until("SELECT FROM batchwright.worker HAVING count(*) = 2")
        pids = [pid for (pid,) in cli.rows(WORKERS)]
        id = submit(cli, "sample.linger")
        cli.begun(id, "linger.began")
        for pid in (*pids, supervisor.pid):
            os.kill(pid, signal.SIGTERM)
        assert supervisor.ended() == 0
    assert stands(cli, id) == ("QUEUED", 0, "job.released")


@pytest.mark.thorough
def test_children_that_cannot_start_end_their_supervisor(cli: Cli) -> None:
    said = cli("worker", "--processes", "2", "nowhere", code=1).stderr
    assert "error: there is no module 'nowhere'" in said
    assert "stopping 0" not in said


@pytest.mark.thorough
def test_up_without_a_worker_only_keeps_the_database(empty_cli: Cli) -> None:
    empty_cli.environment["BATCHWRIGHT_WORKER_RUN_BACKGROUND_POLLER"] = "false"
    with empty_cli.start("up", SAMPLE) as up:
        empty_cli.until("SELECT WHERE to_regclass('batchwright.worker') IS NOT NULL")
        assert empty_cli.rows(WORKERS) == []
        up.signal(signal.SIGTERM)
        assert up.ended() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["broken.py"], 1, "the operations cannot be loaded: ZeroDivisionError: division by zero"),
        (["--queue-limit", "gpu"], 2, "--queue-limit 'gpu' is invalid: write NAME=N, such as gpu=1."),
        (["--processes", "0"], 2, "--processes"),
        (["--config", "nowhere.toml"], 1, "there is no configuration file nowhere.toml"),
    ],
)
def test_a_worker_that_cannot_start_says_why(inside: Inside, tmp_path, arguments, code, complaint) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    left, _, err = inside("worker", *arguments)
    assert left == code
    assert err.splitlines()[-1].startswith("error: ")
    assert complaint in err.splitlines()[-1]
    assert ('broken.py", line 1' in err) == (arguments == ["broken.py"])
    assert "plugins.py" not in err, "the traceback begins in the user's file"
