"""What a run says about itself: the log line, metrics and status.json.

The trainer writes all three from the values below (`Status`); `paceline status` and `paceline up` read status.json.
Metrics always go to <output>/metrics.jsonl, and on request to TensorBoard and Weights & Biases. No sink can stop or
slow a run: each optional one has a thread of its own, and one that fails is turned off with a warning.
"""

import contextlib
import importlib
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, cast, get_args, get_type_hints

from . import faults
from .forecast import advice, live_rates

METRICS_FILE = "metrics.jsonl"
STALE_SECONDS = 10.0  # status.json is written each second; one older than this is nobody's present state


class Status(TypedDict, total=False):
    """status.json. What is not known yet is left out."""

    run: str
    pid: int
    state: str  # "starting", "waiting", "training", "evaluating", "saving", "finished" or "stopped"
    message: str  # what it waits for, or why it stopped
    updated: float  # seconds since the epoch
    elapsed_s: float  # this trainer process's time
    workers: int  # alive
    ranks: int
    step: int  # steps done
    total_steps: int
    epoch: float  # passes over the data so far
    epochs: int
    loss: float
    acc: float
    tau: float
    tau_chain: float
    lr: float
    target_bps: float  # batches/s committed by all workers
    drafter_bps: float  # batches/s trained by all ranks
    tokens_per_s: float  # context tokens/s trained by all ranks
    names: list[str]  # the workers that q_pre and q_hs are of, in their order; w0, w1, ... if left out
    q_pre: list[int]  # per worker: tokenised batches ready
    q_hs: list[int]  # per worker: READY records in its ring
    slots: int  # per ring
    eta_s: float
    wait_data: float  # share of the ranks' time spent waiting for records, 0 to 1
    wait_gpu: float  # share spent computing
    wait_ranks: float  # share spent waiting for the slowest rank before each step
    reduce_share: float  # share of the time in which gradients were added up over the ranks
    worker_wait: float  # share of the workers' time spent waiting for a free slot or for work
    listed: int  # batches refused or skipped so far
    refused: int  # records that ranks refused since this trainer process started
    trained_records: int  # records trained by this trainer process
    trained_tokens: int  # context tokens of them
    ring_dir: str  # where the run's rings are
    checkpoint: str  # newest complete one


_STATUS_TYPES = get_type_hints(Status)


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Replaces status.json at once: readers see the old or the new one. Raises OSError.

    The temporary name is fixed, as the run has one trainer: a kill leaves one file, which the next trainer replaces.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(_finite(status), separators=(",", ":")), encoding="utf-8")
    faults.point("trainer.status-half-written")
    temporary.replace(path)


def read_status(path: Path) -> Status | None:
    """The last status written; None if there is none that can be read.

    Left out is what is unknown (null), and any key of `Status` with a value of another type: another version wrote it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return cast(Status, {key: value for key, value in found.items() if _is_typed(key, value)})


class StatusWatch:
    """status.json as one process follows it: what is written in it is present for STALE_SECONDS of the reader's own
    clock, whatever the system's is set to meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._updated: object = None
        self._until = 0.0  # time.monotonic()
        self.forget()

    def forget(self) -> None:
        """What is there now counts no more: a trainer of before wrote it."""
        self._updated, self._until = (read_status(self._path) or {}).get("updated"), 0.0

    def present(self) -> Status | None:
        """The status, if it has been written anew of late and since `forget`."""
        status, now = read_status(self._path), time.monotonic()
        if status is None:
            return None
        if status.get("updated") != self._updated:
            self._updated, self._until = status.get("updated"), now + STALE_SECONDS
        return status if now < self._until else None


def _is_typed(key: str, value: Any) -> bool:
    kind = _STATUS_TYPES.get(key, object)
    if kind in (list[int], list[str]):
        (item,) = get_args(kind)
        return isinstance(value, list) and all(type(one) is item for one in value)
    if kind is float:
        kind = int | float
    return value is not None and isinstance(value, kind) and not (isinstance(value, bool) and kind is not object)


def _finite(value: Any) -> Any:
    """`value` with NaN and infinities as None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# Text


def duration(seconds: float | None) -> str:
    """A time span in its largest unit: 42s, 12m, 3.5h, 7.9d; "-" if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for size, unit, digits in ((86400, "d", 1), (3600, "h", 1), (60, "m", 0)):
        if seconds >= size:
            return f"{seconds / size:.{digits}f}{unit}" if digits else f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def _number(values: Mapping[str, Any], key: str, form: str) -> str:
    value = values.get(key)
    return "-" if value is None else format(value, form)


def _queue(values: Mapping[str, Any], key: str) -> str:
    return "[" + ",".join(str(depth) for depth in values.get(key) or ()) + "]"


def log_line(values: Mapping[str, Any]) -> str:
    """The trainer's log line from the keys of `Status`; what is missing reads "-".

    `[12m] step=15000 loss=1.234 acc=0.41 tau=3.2 lr=6.0e-04 | tgt=0.24b/s dft=0.24b/s (15.9Ktok/s) |
    q_pre=[4,4,5] q_hs=[1,0,2] | epoch~0.42 ETA=7.9d | wait: data 3% gpu 91%`, on one line.
    """
    speed = values.get("tokens_per_s")
    return (
        f"[{duration(values.get('elapsed_s'))}] step={_number(values, 'step', 'd')}"
        f" loss={_number(values, 'loss', '.3f')} acc={_number(values, 'acc', '.2f')}"
        f" tau={_number(values, 'tau', '.1f')} lr={_number(values, 'lr', '.1e')}"
        f" | tgt={_number(values, 'target_bps', '.2f')}b/s dft={_number(values, 'drafter_bps', '.2f')}b/s"
        f" ({'-' if speed is None else format(speed / 1000, '.1f')}Ktok/s)"
        f" | q_pre={_queue(values, 'q_pre')} q_hs={_queue(values, 'q_hs')}"
        f" | epoch~{_number(values, 'epoch', '.2f')} ETA={duration(values.get('eta_s'))}"
        f" | wait: data {_number(values, 'wait_data', '.0%')} gpu {_number(values, 'wait_gpu', '.0%')}"
    )


def bottleneck(status: Mapping[str, Any]) -> str:
    """Which side waits for which by the trainer's own count, and what would help; empty while that is not known."""
    data, worker = status.get("wait_data"), status.get("worker_wait")
    if status.get("workers") == 0:
        return "no worker is up: the trainer can only use what is in the rings"
    if data is None:
        return ""
    if data >= 0.1 and data >= (worker or 0.0):
        waits = f"targets are the bottleneck: the trainer waits for hidden states {data:.0%} of its time"
        return f"{waits} ({_move(status) or 'add workers'})"
    if worker is not None and worker >= 0.1:
        waits = f"drafters are the bottleneck: the workers wait {worker:.0%} of their time"
        return f"{waits} ({_move(status) or 'add ranks'})"
    return "balanced: neither side waits for the other"


def _move(status: Mapping[str, Any]) -> str:
    rates = live_rates(status) if status.get("gpus", True) else None  # there is none to move
    return "" if rates is None else advice(rates, status["workers"], status["ranks"])


# Metrics


class Sink(Protocol):
    """One place metrics go to."""

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Writes each step's metrics to <output>/metrics.jsonl and to the optional sinks.

    A line is `{"step", "kind", "time", ...values}`; kind is "train", "eval" or "event". `start` (the step a run
    resumes from) writes an event, from which `read_metrics` knows which earlier lines did not survive.
    """

    def __init__(
        self,
        output: str | Path,
        *,
        name: str = "",
        start: int = 0,
        tensorboard: bool = False,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        self._warn = warn or (lambda text: print(text, file=sys.stderr, flush=True))
        self._path = folder / METRICS_FILE
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._broken = False
        if not _ends_with_newline(self._path):
            self._put(b"\n")  # a line cut short by a kill stays alone on its line
        self._sinks: list[_Background] = []
        if tensorboard:
            self._sinks.append(_Background("TensorBoard", lambda: _TensorBoard(folder / "tensorboard"), self._warn))
        if wandb is not None:
            settings = dict(config or {})
            self._sinks.append(_Background("W&B", lambda: _Wandb(wandb, name, folder, settings), self._warn))
        self.write(start, {"event": "start"}, kind="event")

    def write(self, step: int, values: Mapping[str, Any], kind: str = "train") -> None:
        """Records `values` (numbers, texts, or lists of numbers such as accuracy per slot). Never raises."""
        line = {"step": step, "kind": kind, "time": round(time.time(), 3), **values}
        self._put(json.dumps(_finite(line), separators=(",", ":"), default=float).encode() + b"\n")
        for sink in self._sinks:
            sink.put(step, kind, values)

    def _put(self, line: bytes) -> None:
        try:
            os.write(self._fd, line)
        except OSError as error:  # a full disk must not end the run; its checkpoints tell the user louder
            if not self._broken:
                self._warn(f"{self._path}: {error.strerror}; metrics are lost until this is solved")
            self._broken = True
        else:
            self._broken = False

    def close(self, seconds: float = 10.0) -> None:
        """Closes every sink; gives each of the optional ones at most `seconds`."""
        for sink in self._sinks:
            sink.close(seconds)
        os.close(self._fd)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END) if file.seekable() else 0
        file.seek(max(size - 1, 0))
        return not size or file.read(1) == b"\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in the timeline that survives, oldest first.

    A "start" event at step s undoes the lines of later steps written before it: those steps ran after the checkpoint
    that was resumed from. Lines cut short are skipped. `path` is the file or the output folder.
    """
    if path.is_dir():
        path = path / METRICS_FILE
    kept: list[dict[str, Any]] = []
    for line in _json_lines(path):
        if line.get("event") == "start":
            kept = [old for old in kept if old["step"] <= line["step"]]
        kept.append(line)
    return kept


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    yield line


class _Background:
    """Runs a sink in its own daemon thread. A slow one drops its oldest values; one that fails is turned off.

    `except Exception` here is the point of the class: the sinks are other people's code, which may raise anything
    (or hang in the network) and must not touch the run.
    """

    def __init__(self, name: str, make: Callable[[], Sink], warn: Callable[[str], None], size: int = 1000) -> None:
        self._name, self._make, self._warn = name, make, warn
        self._values: queue.Queue[tuple[int, str, Mapping[str, Any]] | None] = queue.Queue(size)
        self._off = False
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        self._enqueue((step, kind, values))

    def _enqueue(self, item: tuple[int, str, Mapping[str, Any]] | None) -> None:
        while not self._off:
            try:
                return self._values.put_nowait(item)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._values.get_nowait()

    def _run(self) -> None:
        try:
            sink = self._make()
            while (item := self._values.get()) is not None:
                sink.write(*item)
            sink.close()
        except Exception as error:
            self._off = True
            self._warn(f"{self._name} is off for the rest of this run: {type(error).__name__}: {error}")

    def close(self, seconds: float) -> None:
        self._enqueue(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._off = True
            self._warn(f"{self._name} did not finish within {seconds:.0f} s; its last values may be missing")


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only; a list becomes one number per place, `acc_slot/1` and so on."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        items: Sequence[Any] = value if isinstance(value, (list, tuple)) else ()
        flat.update({f"{key}/{place}": float(item) for place, item in enumerate(items, 1)})
        if isinstance(value, (int, float)):
            flat[key] = float(value)
    return flat


class _TensorBoard:
    """Event files by tensorboard's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path) -> None:
        # Optional packages, imported by name: without them this sink alone is off.
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder))

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        numbers = _scalars(values).items()
        if numbers:
            items = [self._summary.Value(tag=f"{kind}/{key}", simple_value=number) for key, number in numbers]
            event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=items))
            self._writer.add_event(event)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A Weights & Biases run; its id is kept in the output folder, so that a resumed run continues it."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        kept = folder / "wandb-run-id"
        identity = kept.read_text().strip() if kept.exists() else wandb.util.generate_id()
        kept.write_text(identity + "\n")
        self._run = wandb.init(
            project=project, name=name or None, dir=str(folder), id=identity, resume="allow", config=dict(config)
        )

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        if numbers := _scalars(values):
            self._run.log({f"{kind}/{key}": number for key, number in numbers.items()} | {"step": step})

    def close(self) -> None:
        self._run.finish()
