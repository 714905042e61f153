"""Parts from other packages are loaded in the same way as ours; tested with real packages and real processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright import AsyncBatchwright
from batchwright.cli.commands.check import _check_part
from batchwright.db.check import Finding, Level
from batchwright.engine.worker.duty import Duties
from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.files.part import FilesPart
from batchwright.part import Part
from batchwright.plugins import load, part_kinds
from batchwright.settings import _adapter, _replaced_whole, load_settings, settings_class
from tests.cli.conftest import SAMPLE, Cli
from tests.examples.test_docs import example
from tests.support import OneDuty

OTHERS = Path(__file__).with_name("parts")
SECONDS_MAX = 45.0


def install(site: Path, name: str, places: dict[str, str], files: dict[str, str]) -> None:
    """A package as pip installs it: its files, and metadata with its entry points."""
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {place}" for entry, place in places.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[batchwright.parts]", *lines, ""]))
    for file, text in files.items():
        (site / file).write_text(text)


def install_letters(site: Path) -> None:
    install(site, "letters", {"letters": "letters:LettersPart"}, {"letters.py": example("letters.py")})


def install_parcels(site: Path) -> None:
    files = {path.name: path.read_text() for path in OTHERS.glob("*.py")}
    install(site, "parcels", {"parcels": "parcels:ParcelsPart"}, files)


# Real processes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(tmp_path: Path, database_url: str) -> Cli:
    cli = Cli(tmp_path, database_url)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        cli.environment["BATCHWRIGHT_API_PORT"] = str(probe.getsockname()[1])
    cli.environment |= {"PYTHONPATH": str(tmp_path / "site"), "BATCHWRIGHT_DATABASE_FOLDER": str(tmp_path)}
    return cli


def get(cli: Cli, path: str) -> str:
    """GET a path of the server of this test; wait until the server is up."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            url = f"http://127.0.0.1:{cli.environment['BATCHWRIGHT_API_PORT']}{path}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.05)


def submit(cli: Cli, job_type: str, payload: dict[str, Any]) -> Any:
    id = cli("job", "submit", job_type, "-p", json.dumps(payload)).stdout.strip()
    ended = "SELECT result FROM batchwright.job WHERE id = %s AND finished_at IS NOT NULL"
    return cli.until(ended, id)[0][0]


LETTER = "Hello Ada! Yours, Bob"


@pytest.fixture
def letters(cli: Cli) -> Cli:
    """With one setting from the file, and another one from the environment."""
    install_letters(cli.folder / "site")
    (cli.folder / "batchwright.toml").write_text('[letters]\ngreeting = "Hello"\n')
    cli.environment["BATCHWRIGHT_LETTERS_SIGNATURE"] = "Bob"
    return cli


def test_a_package_of_one_file_brings_an_operation_a_route_and_settings(letters: Cli) -> None:
    with letters.start("up") as up:
        up.until(r"worker .* runs .*letter\.write")
        assert submit(letters, "letter.write", {"name": "Ada"}) == LETTER
        assert json.loads(get(letters, "/v1/letters/Ada")) == {"letter": LETTER}
        assert "/v1/letters/{name}" in json.loads(get(letters, "/openapi.json"))["paths"]


@pytest.mark.thorough
def test_the_same_file_brings_a_command_and_a_check(letters: Cli) -> None:
    assert letters("letter", "Ada").stdout == f"{LETTER}\n"
    assert "Print a letter." in letters("--help").stdout
    assert "they begin with 'Hello'" in letters("check").stdout


@pytest.mark.thorough
def test_a_part_brings_services_demand_rounds_metrics_and_pages_beside_ours(cli: Cli) -> None:
    """With a gateway configured, so that batches and webhooks have their own demand in the same worker."""
    install_parcels(cli.folder / "site")
    cli.environment |= {
        "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL": "http://127.0.0.1:9",
        "BATCHWRIGHT_WORKER_CONCURRENCY": "1",
    }
    with cli.start("worker", SAMPLE) as worker:
        worker.until(r"worker .* runs .*parcel\.carry")
        assert submit(cli, "parcel.weigh", {"grams": 21}) == 42, "the command's process has the operation too"
        busy = cli("job", "submit", "sample.linger").stdout.strip()
        cli.begun(busy, "linger.began")
        assert submit(cli, "parcel.carry", {"town": "Ulm"}) == "carried to Ulm", (
            "it runs on demand although every slot is taken"
        )
        ((queues,),) = cli.rows("SELECT on_demand_queues FROM batchwright.worker")
        assert {"parcels", "batches", "webhooks"} <= set(queues)
        worker.signal(signal.SIGTERM)
        assert worker.ended() == 0
        worker.until("the carriers went home")
    with cli.start("api"):
        page = get(cli, "/metrics")
        assert 'batchwright_parcels_total{town="Ulm"} 1.0' in page
        assert "batchwright_parcel_rounds_total 0.0" not in page, "a round has run"
        assert get(cli, "/parcels") == "<h1>Parcels</h1>"
        paths = json.loads(get(cli, "/openapi.json"))["paths"]
        assert ("/parcels" in paths, "/v1/parcels" in paths) == (False, True)


def test_what_a_part_names_by_import_path_is_loaded_only_when_it_is_needed(tmp_path: Path) -> None:
    install_parcels(tmp_path)
    program = """
import sys
from batchwright import AsyncBatchwright
client = AsyncBatchwright(database_url="postgresql://nowhere")
client.add_operations()
print(client.parts[-1].name, [name for name in ("fastapi", "starlette", "parcels_web") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout == "parcels []\n", done.stderr


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on this process's import path. Parts are searched again, and forgotten after the test."""
    caches = (part_kinds, settings_class, _adapter, _replaced_whole)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()
    for name in {"letters", "one"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "environment", "message"),
    [
        ('[letters]\ngreetng = "Hi"\n', {}, "there is no setting letters.greetng; did you mean letters.greeting?"),
        ("", {"BATCHWRIGHT_LETTERS_GREETNG": "Hi"}, "did you mean BATCHWRIGHT_LETTERS_GREETING?"),
        ("[letters]\ngreeting = 7\n", {}, "the setting letters.greeting is 7"),
        ("[letter]\ngreeting = 7\n", {}, "there is no setting letter"),
    ],
)
def test_a_mistake_in_a_setting_of_a_part_is_refused_with_a_hint(
    site: Path, file: str, environment: dict[str, str], message: str
) -> None:
    install_letters(site)
    (site / "batchwright.toml").write_text(file)
    with pytest.raises(ConfigurationError) as refused:
        load_settings(environment=environment, file=site / "batchwright.toml")
    assert message in str(refused.value)


PART = "from batchwright.part import Part\nclass {kind}(Part):\n    name = {name!r}\n"
ONE = {"one": "one:One"}
REFUSED: dict[str, tuple[dict[str, str], str, str]] = {
    "a name of ours": (
        ONE,
        PART.format(kind="One", name="batches"),
        "two parts are called 'batches': batchwright.batches.part:BatchesPart and one:One",
    ),
    "one name for two": (
        {**ONE, "two": "one:Two"},
        PART.format(kind="One", name="post") + PART.format(kind="Two", name="post"),
        "two parts are called 'post': one:One and one:Two",
    ),
    "no module": (
        {"one": "absent:One"},
        "",
        "the part 'one' (absent:One) of an installed package cannot be loaded: ModuleNotFoundError: No module named ",
    ),
    "a module that fails": (
        ONE,
        "raise RuntimeError('no ink')\n",
        "cannot be loaded: RuntimeError: no ink; correct that package, or remove it",
    ),
    "a class that is no part": (
        ONE,
        "class One: pass\n",
        "the part 'one' (one:One) of an installed package is not a part: it must be a subclass of ",
    ),
    "a part without a name": (
        ONE,
        "from batchwright.part import Part\nclass One(Part): pass\n",
        "is not a part: it must be a subclass of batchwright.part.Part, with a name",
    ),
    "a table of the engine": (
        ONE,
        PART.format(kind="One", name="post") + "    tables = {'worker': 'one:One'}\n",
        "the part 'post' adds the table 'worker', which exists already; rename it",
    ),
    "a table of another part": (
        ONE,
        PART.format(kind="One", name="post") + "    tables = {'batches': 'one:One'}\n",
        "the part 'post' adds the table 'batches', which exists already; rename it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_part_that_does_not_fit_is_refused_at_start(site: Path, case: str) -> None:
    places, text, message = REFUSED[case]
    install(site, "post", places, {"one.py": text})
    with pytest.raises(ConfigurationError) as refused:
        load_settings(environment={})
    assert message in str(refused.value)


def test_one_part_that_two_packages_name_is_one_part(site: Path) -> None:
    """This happens when a package was renamed and its old metadata were left behind."""
    install_letters(site)
    install(site, "old-letters", {"letters": "letters:LettersPart"}, {})
    assert [kind.name for kind in part_kinds()].count("letters") == 1
    assert load_settings(environment={}).letters.greeting == "Dear"


# Ours ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", part_kinds(), ids=lambda kind: kind.name)
def test_everything_that_our_parts_name_by_import_path_exists(kind: type[Part]) -> None:
    commands = [command.place for command in kind.commands.values()]
    for place in (*kind.tables.values(), kind.metrics, *kind.operations, *kind.routers, *kind.pages, *commands):
        assert load(place) is not None


async def test_parts_are_closed_in_reverse_order_and_the_database_even_if_one_fails(database_url: str) -> None:
    closed: list[str] = []

    class Closing(Part):
        def __init__(self, name: str) -> None:
            self.label = name

        async def close(self) -> None:
            closed.append(self.label)
            if self.label == "second":
                raise RuntimeError("no ink")

    client = await AsyncBatchwright(database_url=database_url).open()
    client.parts += [Closing("first"), Closing("second"), Closing("third")]
    with pytest.raises(RuntimeError, match="no ink"):
        await client.close()
    assert (closed, client.is_open) == (["third", "second", "first"], False)


async def test_a_part_gets_another_part_by_its_class(database_url: str) -> None:
    class Absent(Part):
        name = "absent"

    client = AsyncBatchwright(database_url=database_url)
    assert client.part(FilesPart).core is client
    with pytest.raises(InvalidInput, match="there is no part 'absent' here"):
        client.part(Absent)


# Duties of several parts --------------------------------------------------------------------------------------------


class Wants:
    """A demand for some queues."""

    def __init__(self, name: str, *queues: str, n: int = 1, broken: str | None = None) -> None:
        self.operations = (f"{name}.run",)
        self.broken = broken
        self.heard: list[Callable[[], None]] = []
        self._queues = queues
        self._n = n

    def queues(self) -> list[str]:
        return list(self._queues)

    def serves(self, queue: str) -> bool:
        return queue in self._queues

    def wanted(self, queue: str, priority: int, running: int) -> int:
        return self._n - running

    def listen(self, on_demand: Callable[[], None]) -> None:
        self.heard.append(on_demand)


class Idle(OneDuty):
    """A part that does nothing in workers."""

    def work(self, site: Any) -> Any:
        return None


def duties(*parts: Any, offers: Any = ()) -> Duties:
    site: Any = None
    return Duties(parts, site, offers)


def test_a_queue_belongs_to_the_first_part_that_serves_it() -> None:
    first, second = Wants("first", "a", "both", n=3), Wants("second", "b", "both", n=5)
    demand = duties(OneDuty(demand=first), Idle(), OneDuty(demand=second)).demand
    assert demand is not None
    assert demand.operations == ["first.run", "second.run"]
    assert [demand.wanted(queue, 5, 1) for queue in ("a", "b", "both")] == [2, 4, 2]
    assert [demand.serves(queue) for queue in ("a", "b", "both", "c")] == [True, True, True, False]
    assert demand.queues() == ["a", "both", "b", "both"]


def test_one_broken_demand_stops_all() -> None:
    first, second = Wants("first", "a"), Wants("second", "b")
    demand = duties(OneDuty(demand=first), OneDuty(demand=second)).demand
    assert demand is not None
    assert demand.broken is None
    second.broken = "one slot too many"
    assert demand.broken == "one slot too many"
    assert demand.wanted("a", 5, 0) == 0


def test_each_demand_can_wake_the_worker_when_it_wants_more() -> None:
    wants = [Wants("first", "a"), Wants("second", "b")]
    demand = duties(*(OneDuty(demand=one) for one in wants)).demand
    assert demand is not None
    demand.listen(print)
    assert [one.heard for one in wants] == [[print], [print]]


def test_parts_without_demand_have_none() -> None:
    assert duties(OneDuty(), Idle()).demand is None


async def test_duties_are_closed_in_reverse_order_even_if_one_fails() -> None:
    closed: list[str] = []

    def part(name: str) -> OneDuty:
        async def close() -> None:
            closed.append(name)
            if name == "last":
                raise ValueError("not this one")

        return OneDuty(close=close)

    with pytest.raises(ValueError, match="not this one"):
        await duties(part("first"), OneDuty(), Idle(), part("last")).close()
    assert closed == ["last", "first"]


async def test_a_check_that_raises_is_a_finding_and_the_checks_of_other_parts_still_run() -> None:
    class Stumbling(Part):
        name = "stumbling"

        async def check(self) -> list[Finding]:
            raise KeyError("nowhere")

    (found,) = await _check_part(Stumbling(None))
    assert (found.name, found.level, found.text) == ("stumbling", Level.ERROR, "its check failed: KeyError: 'nowhere'")


def test_services_of_the_worker_and_of_all_parts_are_found_by_class() -> None:
    found = duties(OneDuty(services=[1, "text"]), OneDuty(services=[2, b"bytes"]), offers=[3.0])
    assert [found.service(kind) for kind in (float, int, str, bytes)] == [3.0, 1, "text", b"bytes"]
    with pytest.raises(InvalidInput, match="this worker has no service list"):
        found.service(list)


def test_rounds_of_all_parts_are_run() -> None:
    assert duties(OneDuty(rounds=[1, 2]), Idle(), OneDuty(rounds=[3])).rounds == [1, 2, 3]
