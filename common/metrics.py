"""`paceline metrics`: runs' rings and status.json as Prometheus metrics, over HTTP, on request only.

Everything is read anew at each scrape (ring headers with pread, status.json, locks) and nothing is kept, so a series
vanishes with its worker and a value is never older than the scrape. Names and units are listed in docs/metrics.md.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from . import __version__, paths
from .errors import ConfigError, PacelineError
from .inspect import STATES, RingInfo
from .status import RunState, run_states
from .telemetry import STALE_SECONDS

DEFAULT_PORT = 9478
DEFAULT_ADDRESS = "127.0.0.1"

# Of a ring: name, what it is, value of a RingInfo (None: no sample).
RING_GAUGES: dict[str, tuple[str, Callable[[RingInfo], float | None]]] = {
    "paceline_ring_slot_bytes": ("Bytes of one slot.", lambda ring: ring.slot_bytes),
    "paceline_ring_oldest_ready_seconds": (
        "Age of the oldest record that waits in the ring; absent while none waits.",
        lambda ring: ring.oldest_ready_s,
    ),
    "paceline_worker_up": ("1 while the ring's owner holds its lock.", lambda ring: ring.alive),
    "paceline_worker_retired": ("1 once the worker is told to drain and leave.", lambda ring: ring.retired),
}
RING_COUNTERS: dict[str, tuple[str, Callable[[RingInfo], float]]] = {
    "paceline_ring_records_produced": ("Records committed since the ring was made.", lambda ring: ring.produced),
    "paceline_ring_records_consumed": ("Records freed since the ring was made.", lambda ring: ring.consumed),
}

# Of a run's trainer, present while it is up: name, what it is, key of status.json.
TRAINER_GAUGES: dict[str, tuple[str, str]] = {
    "paceline_step": ("Optimiser steps done.", "step"),
    "paceline_steps_planned": ("Optimiser steps of the whole run.", "total_steps"),
    "paceline_epoch": ("Passes over the data so far.", "epoch"),
    "paceline_eta_seconds": ("Time left at the rate of the last minutes.", "eta_s"),
    "paceline_ranks": ("Trainer ranks.", "ranks"),
    "paceline_loss": ("Loss of the newest step.", "loss"),
    "paceline_accuracy_ratio": ("Share of masked slots predicted right in the newest step.", "acc"),
    "paceline_tau_tokens": ("Expected acceptance length in the newest step.", "tau"),
    "paceline_tau_chain_tokens": ("Acceptance length on the held-out rows in the newest evaluation.", "tau_chain"),
    "paceline_learning_rate": ("Learning rate of the newest step.", "lr"),
    "paceline_rank_data_wait_ratio": ("Share of the ranks' time spent waiting for records.", "wait_data"),
    "paceline_rank_compute_ratio": ("Share of the ranks' time spent computing.", "wait_gpu"),
    "paceline_rank_idle_ratio": ("Share of the ranks' time spent waiting for the slowest of them.", "wait_ranks"),
    "paceline_rank_reduction_ratio": ("Share of the time spent adding gradients up over ranks.", "reduce_share"),
    "paceline_worker_wait_ratio": ("Share of the workers' time without a free slot or without work.", "worker_wait"),
    "paceline_listed_batches": ("Batches refused or skipped so far in the surviving timeline.", "listed"),
}
TRAINER_COUNTERS: dict[str, tuple[str, str]] = {
    "paceline_trained_records": ("Records trained by this trainer process.", "trained_records"),
    "paceline_trained_tokens": ("Context tokens trained by this trainer process.", "trained_tokens"),
    "paceline_refused_records": ("Records that ranks refused since this trainer process started.", "refused"),
}


class RunCollector:
    """Reads run `name` (None: every run) at each scrape."""

    def __init__(self, name: str | None, ring_folder: Path) -> None:
        self._name, self._ring_folder = name, ring_folder

    def describe(self) -> list[Metric]:
        """Nothing is read to register."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            states = run_states(self._name, self._ring_folder)
        except PacelineError:  # a named run that is not there yet, or no longer
            states = []
        info = GaugeMetricFamily("paceline_build_info", "1; the version is in the label.", labels=["version"])
        info.add_metric([__version__], 1.0)
        yield info
        yield from _run_families(states)
        yield from _ring_families(states)


def _run_families(states: list[RunState]) -> Iterator[Metric]:
    up = GaugeMetricFamily("paceline_trainer_up", "1 while a trainer holds the run's lock.", labels=["run"])
    age = GaugeMetricFamily(
        "paceline_checkpoint_age_seconds", "Time since the newest complete checkpoint.", labels=["run"]
    )
    for state in states:
        up.add_metric([state.name], float(state.alive))
        if state.checkpoint_age_s is not None:
            age.add_metric([state.name], state.checkpoint_age_s)
    yield from (up, age)
    speaking = [(s.name, s.status) for s in states if s.alive and s.age_s is not None and s.age_s <= STALE_SECONDS]
    for name, (text, key) in TRAINER_GAUGES.items():
        yield _filled(GaugeMetricFamily(name, text, labels=["run"]), speaking, key)
    for name, (text, key) in TRAINER_COUNTERS.items():
        yield _filled(CounterMetricFamily(name, text, labels=["run"]), speaking, key)


def _filled(family: Any, runs: list[tuple[str, Any]], key: str) -> Metric:
    for run, status in runs:
        values: Mapping[str, Any] = status
        if values.get(key) is not None:
            family.add_metric([run], float(values[key]))
    return family


def _ring_families(states: list[RunState]) -> Iterator[Metric]:
    labels = ["run", "worker"]
    rings = [([state.name, ring.worker], ring) for state in states for ring in state.rings if ring.problem is None]
    slots = GaugeMetricFamily(
        "paceline_ring_slots", "Slots of the ring by state: ready, taken, writing, free.", labels=[*labels, "state"]
    )
    worker = GaugeMetricFamily(
        "paceline_worker_info", "1; device and pid are labels.", labels=[*labels, "device", "pid"]
    )
    for names, ring in rings:
        for state in STATES:
            slots.add_metric([*names, state], ring.count(state))
        worker.add_metric([*names, ring.device, str(ring.pid)], 1.0)
    yield from (slots, worker)
    for name, (text, value) in RING_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for names, ring in rings:
            if (found := value(ring)) is not None:
                gauge.add_metric(names, float(found))
        yield gauge
    for name, (text, count) in RING_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=labels)
        for names, ring in rings:
            counter.add_metric(names, float(count(ring)))
        yield counter
    broken = GaugeMetricFamily(
        "paceline_ring_unreadable", "Files in the ring folder that are no whole ring.", labels=["run"]
    )
    for state in states:
        broken.add_metric([state.name], float(sum(ring.problem is not None for ring in state.rings)))
    yield broken


# Serving


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = 10  # seconds until a client that says nothing is dropped

    def log_message(self, format: str, *args: Any) -> None:
        pass


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def server(name: str | None, ring_folder: Path, address: str, port: int) -> WSGIServer:
    """A server of /metrics that is bound and not yet serving. `port` 0 takes a free one.

    Raises:
        ConfigError: the address or port cannot be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(name, ring_folder))
    kind = _Server6 if ":" in address else _Server
    try:
        return make_server(address, port, make_wsgi_app(registry), server_class=kind, handler_class=_Quiet)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {address} port {port}: {reason} (--listen, --port)") from None


def serve(name: str | None, ring_folder: Path, address: str, port: int, say: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; `say` tells where, and warns where others can read."""
    import signal

    httpd = server(name, ring_folder, address, port)

    def stop(*_: object) -> None:
        threading.Thread(target=httpd.shutdown, daemon=True).start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        host = f"[{address}]" if ":" in address else address
        if name is not None and not paths.find_run_dirs(name):
            say(f"there is no run {name} here yet: its figures come once it is up")
        say(f"metrics of {name or 'every run'} on http://{host}:{httpd.server_port}/metrics")
        if not is_loopback(address):
            say("this is no loopback address: whoever reaches it can read names, rates and losses")
        httpd.serve_forever(poll_interval=0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        httpd.server_close()
