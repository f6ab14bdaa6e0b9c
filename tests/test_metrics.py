"""`paceline metrics`: scraped over HTTP as Prometheus would, from real rings and a real status.json."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paceline.common import metrics, paths
from paceline.common.errors import ConfigError
from paceline.common.fingerprint import Fingerprint
from paceline.common.locks import FileLock
from paceline.common.ring import Ring
from paceline.common.telemetry import write_status
from prometheus_client.parser import text_string_to_metric_families

STATUS = {
    "state": "training",
    "step": 5,
    "total_steps": 10,
    "loss": 1.5,
    "trained_tokens": 12_345,
    "trained_records": 9,
}
STATUS |= {"wait_data": 0.25, "tau": 2.5, "eta_s": 60.0, "ranks": 1, "refused": 0, "listed": 2, "lr": 6e-4}

Samples = dict[tuple[str, ...], float]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", tmp_path / "no-system-runs")


@pytest.fixture
def scrape(tmp_path: Path) -> Iterator[Callable[[], Samples]]:
    """scrape() -> {(name, label values...): value} of what is served just then."""
    httpd = metrics.server(None, tmp_path / "rings", "127.0.0.1", 0)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def scrape() -> Samples:
        with urllib.request.urlopen(f"http://127.0.0.1:{httpd.server_port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return {(s.name, *_values(s.labels)): s.value for family in families for s in family.samples}

    yield scrape
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def _values(labels: dict[str, str]) -> list[str]:
    return [labels[name] for name in ("run", "worker", "state", "device", "pid", "version") if name in labels]


def open_ring(tmp_path: Path, worker: str) -> Ring:
    path = tmp_path / f"rings/demo/{worker}.ring"
    return Ring.open(path, worker=worker, fingerprint=Fingerprint({"seed": 0}), slots=4, slot_bytes=4096, device="cpu")


def test_rings_and_trainer(tmp_path: Path, scrape: Callable[[], Samples]) -> None:
    ring = open_ring(tmp_path, "w0")
    slot = ring.claim(1)
    assert slot is not None
    ring.commit(slot, 100, 0)
    folder = paths.run_dir("demo")
    write_status(folder / "status.json", STATUS | {"updated": time.time()})
    with FileLock(folder / "consumer.lock", "trainer of run demo") as lock:
        assert lock.acquire()
        found = scrape()
    assert found["paceline_trainer_up", "demo"] == 1 and found["paceline_worker_up", "demo", "w0"] == 1
    assert found["paceline_ring_slots", "demo", "w0", "ready"] == 1
    assert found["paceline_ring_slots", "demo", "w0", "free"] == 3
    assert found["paceline_ring_records_produced_total", "demo", "w0"] == 1
    assert found["paceline_ring_records_consumed_total", "demo", "w0"] == 0
    assert 0 <= found["paceline_ring_oldest_ready_seconds", "demo", "w0"] < 60
    assert found["paceline_worker_info", "demo", "w0", "cpu", str(os.getpid())] == 1
    assert found["paceline_trained_tokens_total", "demo"] == 12_345 and found["paceline_step", "demo"] == 5
    assert found["paceline_rank_data_wait_ratio", "demo"] == 0.25 and found["paceline_listed_batches", "demo"] == 2
    assert ("paceline_tau_chain_tokens", "demo") not in found, "not known yet"

    found = scrape()  # the trainer is gone: what it said last is nobody's present state
    assert found["paceline_trainer_up", "demo"] == 0
    assert not [names for names in found if names[0] in ("paceline_step", "paceline_trained_tokens_total")]
    ring.close()
    assert scrape()["paceline_worker_up", "demo", "w0"] == 0


def test_series_vanish_with_their_worker(tmp_path: Path, scrape: Callable[[], Samples]) -> None:
    rings = [open_ring(tmp_path, worker) for worker in ("w0", "w1")]
    assert {names[2] for names in scrape() if names[0] == "paceline_ring_slots"} == {"w0", "w1"}
    rings[1].close()
    rings[1].path.unlink()
    assert {names[2] for names in scrape() if names[0].startswith(("paceline_ring_s", "paceline_worker"))} == {"w0"}
    rings[0].path.write_bytes(b"not a ring" * 1000)
    found = scrape()
    assert found["paceline_ring_unreadable", "demo"] == 1
    assert not [names for names in found if "w0" in names]
    rings[0].close()


def test_nothing_to_show_is_no_error(scrape: Callable[[], Samples]) -> None:
    assert [name for name, *_ in scrape()] == ["paceline_build_info"]


def test_names_follow_the_conventions_and_are_documented() -> None:
    """Base units, `_total` on counters alone; docs/metrics.md lists exactly these."""
    root = Path(__file__).parents[1]
    listed = set(re.findall(r"^\| `(paceline_\w+)", (root / "docs/metrics.md").read_text(), re.MULTILINE))
    gauges = {"paceline_build_info", "paceline_trainer_up", "paceline_checkpoint_age_seconds", "paceline_ring_slots"}
    gauges |= {"paceline_worker_info", "paceline_ring_unreadable", *metrics.RING_GAUGES, *metrics.TRAINER_GAUGES}
    counters = {f"{name}_total" for name in (*metrics.RING_COUNTERS, *metrics.TRAINER_COUNTERS)}
    assert listed == gauges | counters
    for name in gauges:
        assert re.fullmatch(r"paceline_[a-z_]+", name) and not name.endswith(("_total", "_count", "_ms", "_percent"))


@pytest.mark.parametrize(
    ("address", "port"), [("127.0.0.1", -1), ("no-such-host.invalid", 0), ("192.0.2.1", 0), ("127.0.0.1", 70_000)]
)
def test_an_address_that_cannot_be_had(tmp_path: Path, address: str, port: int) -> None:
    with socket.socket() as other:
        if port == -1:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen on"):
            metrics.server(None, tmp_path, address, port)


def test_a_silent_client_holds_up_no_other(tmp_path: Path) -> None:
    httpd = metrics.server(None, tmp_path, "127.0.0.1", 0)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    silent = socket.create_connection(("127.0.0.1", httpd.server_port))
    with silent, urllib.request.urlopen(f"http://127.0.0.1:{httpd.server_port}/metrics", timeout=60) as answer:
        assert answer.status == 200
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_the_command(tmp_path: Path, address: str, number: int) -> None:
    """Loopback unless another address is asked for; what others can reach is said."""
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6")
    listen = [] if address == "127.0.0.1" else ["--listen", address]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.common.cli", "metrics", "--port", "0", *listen],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    if address == "::1" and "cannot listen" in first:
        process.wait()
        pytest.skip("no IPv6 loopback here")
    found = re.search(r"on http://(.*):(\d+)/metrics", first)
    assert found, first
    host = {"0.0.0.0": "127.0.0.1", "::1": "[::1]"}.get(address, address)
    assert found[1] == ("[::1]" if address == "::1" else address)
    with urllib.request.urlopen(f"http://{host}:{found[2]}/metrics", timeout=60) as answer:
        assert b"paceline_build_info" in answer.read()
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(60) == 0
    assert ("no loopback address" in rest) == (address == "0.0.0.0") and "Traceback" not in rest
