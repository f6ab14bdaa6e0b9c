"""What the trainer says about itself while it runs: log line, metrics and status.json, from what rank 0 reports of each
phase and from what the feed sees of the workers."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.batch import Kind
from ..common.plan import Plan
from ..common.telemetry import Metrics, log_line, write_status
from .feeder import FeedSnapshot

_AVERAGED = ("loss", "acc", "tau", "wait_data", "wait_gpu", "wait_ranks", "reduce_share")
_REMEMBER_S = 300.0  # rates and the time left are of so many seconds
_WAITS_S = 60.0  # what the workers wait is of so many: it says who is the bottleneck now, whoever was here before


class Progress:
    """Sums up phases. `say` prints a line; `status_path` is replaced each second by the caller's `write`."""

    def __init__(
        self,
        plan: Plan,
        *,
        name: str,
        ranks: int,
        step: int,
        listed: int,
        slots: int,
        metrics: Metrics,
        status_path: Path,
    ):
        self._plan, self._metrics, self._path = plan, metrics, status_path
        self._began = self._ended = time.monotonic()
        self._window: list[tuple[float, dict[str, Any]]] = []  # training phases of late, with when they ended
        self._since_line: list[dict[str, Any]] = []
        self._made: list[tuple[float, int]] = []  # when, records produced
        self._waits: list[tuple[float, float, float]] = []  # when, worker seconds waited, worker seconds
        self._produced: dict[str, int] = {}
        self._waited: dict[str, float] = {}
        self._total_made, self._total_waited, self._total_present = 0, 0.0, 0.0
        self.status: dict[str, Any] = {
            "run": name,
            "ranks": ranks,
            "step": step,
            "total_steps": plan.total_steps,
            "epochs": plan.epochs,
            "epoch": self._epoch(step),
            "slots": slots,
            "listed": listed,
            "trained_records": 0,
            "trained_tokens": 0,
            "pid": os.getpid(),
            "state": "starting",
            "message": "",
        }

    def _epoch(self, step: int) -> float:
        """Passes over the data after `step` steps."""
        if step >= self._plan.total_steps:
            return float(self._plan.epochs)
        epoch = self._plan.epoch_of(step)
        first, past = self._plan.first_step(epoch), self._plan.first_step(epoch + 1)
        return epoch + (step - first) / (past - first)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last phase ended, or since the start."""
        return time.monotonic() - self._ended

    def phase(self, kind: Kind, number: int, values: dict[str, Any], listed: Mapping[str, str]) -> None:
        """Note a complete phase: metrics.jsonl gets all of it."""
        now = self._ended = time.monotonic()
        values = {"epoch": self._epoch(number + (kind is Kind.TRAIN)), **values, "listed": len(listed)}
        if listed:
            values["listed_batches"] = [f"{batch}: {reason}" for batch, reason in listed.items()]
        self.status["listed"] += len(listed) if kind is Kind.TRAIN else 0
        if kind is Kind.EVAL:
            self._metrics.write(number, values, kind="eval")
            self.status.pop("tau_chain", None)
            self.status |= {key: values[key] for key in ("tau_chain",) if key in values}
            return
        self._metrics.write(number + 1, values)
        self.status |= {"step": number + 1, "epoch": values["epoch"]}
        self.status["trained_records"] += values["records"]
        self.status["trained_tokens"] += values["tokens"]
        self._window = [(at, old) for at, old in self._window if now - at <= _REMEMBER_S] + [(now, values)]
        self._since_line.append(values)

    def feed(self, snapshot: FeedSnapshot) -> None:
        """Note what the workers do now."""
        now = time.monotonic()
        since = now - self._waits[-1][0] if self._waits else 0.0
        for worker in snapshot.workers:
            # A ring made anew counts from 0 again, and so does a restarted worker's waiting.
            made = self._produced.get(worker.worker, worker.produced)
            self._total_made += max(0, worker.produced - made)
            self._produced[worker.worker] = worker.produced
            before = self._waited.get(worker.worker)
            if worker.alive and worker.waited is not None and before is not None:
                self._total_waited += max(0.0, worker.waited - before)
                self._total_present += since
        # What a worker waited before it spoke to this trainer is none of this trainer's.
        self._waited = {one.worker: one.waited for one in snapshot.workers if one.waited is not None}
        self._made = [one for one in self._made if now - one[0] <= _REMEMBER_S]
        self._made.append((now, self._total_made))
        self._waits = [one for one in self._waits if now - one[0] <= _WAITS_S]
        self._waits.append((now, self._total_waited, self._total_present))
        alive = sum(worker.alive for worker in snapshot.workers)
        self.status |= {
            "workers": alive,
            "names": [worker.worker for worker in snapshot.workers],
            "q_pre": snapshot.q_pre,
            "q_hs": snapshot.q_hs,
            "refused": snapshot.counters["refused"],
        }
        first, seconds = self._made[0], now - self._made[0][0]
        if seconds > 1:
            self.status["target_bps"] = (self._total_made - first[1]) / seconds
        _, waited, present = self._waits[0]
        if self._total_present - present > 1:
            self.status["worker_wait"] = min(1.0, (self._total_waited - waited) / (self._total_present - present))
        else:
            self.status.pop("worker_wait", None)

    def _rates(self) -> None:
        """Rates and time left over the last minutes; one phase gives them too."""
        if not self._window:
            return
        now = time.monotonic()
        first_at, first = self._window[0]
        span = max(1e-9, now - first_at + first["seconds"])
        phases = [values for _, values in self._window]
        left = self._plan.total_steps - self.status["step"]
        self.status |= {
            "drafter_bps": sum(values["records"] for values in phases) / span,
            "tokens_per_s": sum(values["tokens"] for values in phases) / span,
            "eta_s": left * span / len(phases),
        }

    def due_line(self, every: int) -> bool:
        """Whether the step that was just noted gets a log line: each `every`, the first and the last."""
        step = self.status["step"]
        first = len(self._since_line) == 1 and len(self._window) == 1
        return step % every == 0 or first or step == self._plan.total_steps

    def line(self) -> str:
        """The log line: means since the last one, rates of the last minutes."""
        self._rates()
        phases, self._since_line = self._since_line, []
        means = {}
        for key in _AVERAGED:
            found = [values[key] for values in phases if key in values]
            means |= {key: sum(found) / len(found)} if found else {}
        self.status |= means
        if phases and "lr" in phases[-1]:
            self.status["lr"] = phases[-1]["lr"]
        return log_line(self.status | {"elapsed_s": time.monotonic() - self._began})

    def write(self, state: str, message: str = "") -> None:
        """Replace status.json. A full run directory must not end the run: the next second tries again."""
        self._rates()
        if self._since_line:  # between two log lines the newest step's values are shown
            newest = self._since_line[-1]
            self.status |= {key: newest[key] for key in (*_AVERAGED, "lr") if key in newest}
        self.status |= {
            "state": state,
            "message": message,
            "updated": time.time(),
            "elapsed_s": time.monotonic() - self._began,
        }
        try:
            write_status(self._path, self.status)
        except OSError:
            return
