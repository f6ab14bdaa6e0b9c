"""What a GPU and its copies did in a few steps: recorded with torch's profiler, drawn per stream, summed up by kernel.

    record    `profiled` around some work, or `Steps` inside a loop: a Chrome trace NAME.json.gz, nothing else
    look      `python -m paceline.common.timeline TRACE.json.gz ...`: a PNG beside each trace, and the largest kernels

With PACELINE_PROFILE=FOLDER in the environment, every worker and rank records its 20th to 23rd record or step there
(`Steps.from_environment`). Only recording needs torch, and only where it is loaded anyway.
"""

import contextlib
import gzip
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .errors import ConfigError, UsageError

ENVIRONMENT = "PACELINE_PROFILE"
FIRST, COUNT = 20, 4  # steps that are recorded, counted from 0 in each process
TOP = 15

KINDS: Mapping[str, tuple[str, str]] = {  # kind: (colour, what its names look like); the first that fits
    "copy to GPU": ("#d9480f", r"memcpy htod"),
    "copy from GPU": ("#862e9c", r"memcpy dtoh"),
    "copy inside": ("#e0a100", r"memcpy|memset|aten::copy_|aten::_to_copy|aten::clone"),
    "communication": ("#c2255c", r"nccl|gloo"),
    "attention": ("#2b8a3e", r"flash|fmha|attention|attn|varlen|triton_tem"),
    "optimiser": ("#0b7285", r"adam|multi_tensor|foreach|muon"),
    "loss": ("#e64980", r"cross_entropy|_stats_kernel|_slopes_kernel|softmax|logsumexp"),
    "matmul": ("#1f6feb", r"gemm|nvjet|cutlass|cublas|xmma|matmul|scaled_mm|\b(?:add|b|badd)?mm\b"),
    "other": ("#9aa5b1", r""),
}
COPIES = ("copy to GPU", "copy from GPU")


class Span(NamedTuple):
    """A kernel, copy or operator; times in microseconds."""

    lane: str  # its stream, or its thread
    name: str
    kind: str
    start: float
    end: float
    call: bool = True  # False: a further piece of a call that was interrupted


# Recording


@contextlib.contextmanager
def profiled(folder: Path, name: str) -> Iterator[None]:
    """Records what runs inside as FOLDER/NAME.json.gz. GPU work has to be waited for before the block ends."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    folder.mkdir(parents=True, exist_ok=True)
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))


class Steps:
    """Records steps FIRST to FIRST + COUNT - 1 of a loop that calls `step_done` after each."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._done = 0
        self._stack = contextlib.ExitStack()

    @classmethod
    def from_environment(cls, name: str) -> "Steps | None":
        """Named after the process; None unless PACELINE_PROFILE names a folder."""
        folder = os.environ.get(ENVIRONMENT)
        return cls(Path(folder), f"{name}-{os.getpid()}") if folder else None

    def step_done(self) -> None:
        """To be called when the step's GPU work is complete. Later work that is under way is in the trace too, and is
        waited for where recording ends."""
        self._done += 1
        if self._done == FIRST:
            self._stack.enter_context(profiled(self._folder, self._name))
        elif self._done == FIRST + COUNT:
            self._stack.close()


# Looking


def read_spans(path: Path) -> list[Span]:
    """GPU work of a trace by stream; of a trace without any, its operators by thread. ConfigError."""
    try:
        data = path.read_bytes()
        events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ConfigError(f"{path}: no trace of torch's profiler ({type(error).__name__})") from None
    whole = [event for event in events if event.get("ph") == "X"]
    spans = [_gpu_span(event) for event in whole if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(spans or _operators(whole), key=lambda span: span.start)


def _gpu_span(event: Mapping[str, Any]) -> Span:
    where = event["args"]
    return _span(f"GPU {where.get('device', 0)}, stream {where.get('stream', 0)}", event)


def _span(lane: str, event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(lane, event["name"], kind_of(event["name"]), start, start + float(event["dur"]))


def _operators(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Every operator less the operators that it calls."""
    threads: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["tid"]].append(_span("", event))
    return [
        span._replace(lane=f"thread {number}") for number, spans in enumerate(threads.values()) for span in own(spans)
    ]


def own(spans: Iterable[Span]) -> Iterator[Span]:
    """Of nested spans, the pieces in which none inside it runs; the first piece of each stands for the call."""
    stack: list[Span] = []  # open spans, each from where its next piece begins

    def piece(end: float) -> Iterator[Span]:
        top = stack[-1]
        if end > top.start:
            yield top._replace(end=end)
            top = top._replace(call=False)
        stack[-1] = top._replace(start=max(top.start, end))

    def close() -> Iterator[Span]:
        end = stack[-1].end
        yield from piece(end)
        stack.pop()
        if stack:
            stack[-1] = stack[-1]._replace(start=max(stack[-1].start, end))

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stack and stack[-1].end <= span.start:
            yield from close()
        if stack:
            yield from piece(span.start)
        stack.append(span)
    while stack:
        yield from close()


def kind_of(name: str) -> str:
    low = name.lower()
    return next(kind for kind, (_, pattern) in KINDS.items() if re.search(pattern, low))


@dataclass(frozen=True)
class Summary:
    """Seconds and shares of a trace."""

    seconds: float  # from the first span's start to the last one's end
    computing: float  # share of it in which something other than a copy between host and GPU ran
    copies: Mapping[str, tuple[float, float]]  # by direction: seconds, share of them under computation
    by_kind: Mapping[str, float]  # seconds
    kernels: Sequence[tuple[str, int, float]]  # name, calls, seconds; largest first


def summarise(spans: Sequence[Span]) -> Summary:
    """Of a trace's spans, at least one."""
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    computing = union((span.start, span.end) for span in spans if span.kind not in COPIES)
    copies: dict[str, tuple[float, float]] = {}
    for kind in COPIES:
        if times := union((span.start, span.end) for span in spans if span.kind == kind):
            total = _length(times)
            copies[kind] = (total / 1e6, _length(_overlap(times, computing)) / total if total else 0.0)
    by_kind: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    by_name: dict[str, float] = defaultdict(float)
    for span in spans:
        by_kind[span.kind] += (span.end - span.start) / 1e6
        by_name[span.name] += (span.end - span.start) / 1e6
        calls[span.name] += span.call
    kernels = sorted(((name, calls[name], seconds) for name, seconds in by_name.items()), key=lambda one: -one[2])
    share = _length(computing) / (end - start) if end > start else 0.0
    return Summary((end - start) / 1e6, share, copies, dict(by_kind), kernels)


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points as ascending intervals that do not meet."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What two ascending lists have in common."""
    found: list[tuple[float, float]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def draw_timeline(spans: Sequence[Span], path: Path, title: str) -> None:
    """One lane a stream or thread, coloured by kind; white is idle."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begun = min(span.start for span in spans)
    lanes = sorted({span.lane for span in spans})
    figure = Figure(figsize=(16, 1.6 + 0.7 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, lane in enumerate(lanes):
        for kind, (colour, _) in KINDS.items():
            bars = [
                ((span.start - begun) / 1e3, (span.end - span.start) / 1e3)
                for span in spans
                if (span.lane, span.kind) == (lane, kind)
            ]
            axes.broken_barh(bars, (number - 0.4, 0.8), color=colour, linewidth=0)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlabel="ms", title=title)
    axes.invert_yaxis()
    seen = {span.kind for span in spans}
    patches = [Patch(color=colour, label=kind) for kind, (colour, _) in KINDS.items() if kind in seen]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def kernel_table(found: Summary) -> Table:
    table = Table("kernel", title=f"{sum(found.by_kind.values()) * 1e3:.1f} ms of kernels, operators and copies")
    for column in ("calls", "ms", "share"):
        table.add_column(column, justify="right")
    total = sum(found.by_kind.values()) or 1.0
    for name, calls, seconds in found.kernels[:TOP]:
        table.add_row(name[:90], str(calls), f"{seconds * 1e3:.2f}", f"{seconds / total:.1%}")
    return table


def show(traces: Sequence[Path], console: Console) -> list[Path]:
    """Draws each trace as a PNG beside it and prints what took longest; the pictures' paths."""
    pictures: list[Path] = []
    for trace in traces:
        spans = read_spans(trace)
        if not spans:
            console.print(f"{trace}: nothing ran")
            continue
        found = summarise(spans)
        picture = trace.with_name(trace.name.removesuffix(".gz").removesuffix(".json") + ".png")
        draw_timeline(spans, picture, f"{picture.stem}: {found.seconds * 1e3:.1f} ms, computing {found.computing:.1%}")
        pictures.append(picture)
        console.print(f"{picture}: {found.seconds * 1e3:.1f} ms, computing {found.computing:.1%} of it")
        for kind, (seconds, hidden) in found.copies.items():
            console.print(f"  {kind}: {seconds * 1e3:.1f} ms, {hidden:.1%} of it under computation")
        console.print(kernel_table(found))
    return pictures


if __name__ == "__main__":
    try:
        if not sys.argv[1:]:
            raise UsageError("give traces: python -m paceline.common.timeline TRACE.json.gz ...")
        show([Path(argument) for argument in sys.argv[1:]], Console(highlight=False))
    except (ConfigError, UsageError) as mistake:
        sys.exit(f"paceline: {mistake}")
