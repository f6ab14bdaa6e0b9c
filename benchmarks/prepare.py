"""`paceline prepare` against `datasets.map`: rows/s and peak memory, from a chat file to tokens and masks on disk.

    python benchmarks/prepare.py [--rows 20000] [--rounds 2] [--processes N] [--target PATH] [--check]

All arms use one tokenizer (default: SmolLM2's, from the demo's target) and one chat template with generation markers,
which `datasets.map` needs for a mask; one arm is paceline with the same template's markers taken out. The rows are the
demo's conversations over and over, each with a number of its own. `map` calls `apply_chat_template`, with one
conversation at a time or 256, in as many processes. paceline does more: it checks that the supervised tokens decode to
the answers. All arms must give the same rows.

Arms take turns, each in a process of its own, once with all rows and once with 3,400 of them: rows/s is what the
others take, so imports, the tokenizer's loading and the start of processes don't count. The best round counts. CPU
time, of all processes of an arm, says more than the clock on a machine with other work. Memory is the highest PSS.

`--check` exits 1 unless paceline's rows/s are at least those of the better `map`.
"""

import argparse
import gzip
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from paceline.common.forms import Encoded
from paceline.common.rows import Rows
from paceline.producer.chat import cut_after_supervised
from paceline.producer.prepare import prepare
from rich.console import Console
from rich.table import Table

BODY = "message['content'] + '<|im_end|>'"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ BODY }}{% endgeneration %}"
    "{% else %}{{ BODY }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace("BODY", BODY)
BATCH = 256
FEW = 3400  # as many as paceline starts its processes for
ARMS = {
    "paceline": "paceline prepare",
    "paceline-unmarked": "the same, markers taken out",
    "map": "datasets.map, one at a time",
    "map-batched": "datasets.map, batched",
}


def digest(rows: Iterable[Encoded]) -> tuple[int, str]:
    """Tokens of all rows, and a hash over tokens and masks."""
    count, found = 0, hashlib.sha256()
    for tokens, mask in rows:
        count += len(tokens)
        found.update(tokens.astype("<i4").tobytes() + mask.astype(np.uint8).tobytes())
    return count, found.hexdigest()


def run_paceline(folder: Path, tokenizer: str, processes: int) -> Path:
    return prepare(
        [folder / "chats.jsonl"], target=tokenizer, out=folder / "out", cache=folder / "cache", processes=processes
    ).folder


def run_map(folder: Path, tokenizer: str, processes: int, batched: bool) -> Path:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        made = loaded.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        return {"input_ids": made["input_ids"], "assistant_masks": made["assistant_masks"]}

    chats: Any = datasets.load_dataset(
        "json", data_files=str(folder / "chats.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    made = chats.map(encode, batched=batched, batch_size=BATCH, num_proc=processes, remove_columns=chats.column_names)
    (folder / "files.json").write_text(json.dumps([file["filename"] for file in made.cache_files]))
    return folder / "files.json"


def run_arm(arm: str, folder: Path, processes: int) -> None:
    """What is timed: an arm's whole process."""
    tokenizer = str(folder.parent / ("unmarked" if arm == "paceline-unmarked" else "marked"))
    if arm.startswith("paceline"):
        run_paceline(folder, tokenizer, processes)
    else:
        run_map(folder, tokenizer, processes, arm == "map-batched")


def rows_of(arm: str, folder: Path) -> Iterator[Encoded]:
    """The rows that an arm has written."""
    if arm.startswith("paceline"):
        rows = Rows.open(folder / "out")
        yield from (Encoded(*rows.row(at)) for at in range(len(rows)))
        return
    for name in json.loads((folder / "files.json").read_text()):
        for batch in pa.ipc.open_stream(pa.memory_map(name)):
            for tokens, mask in zip(batch.column("input_ids"), batch.column("assistant_masks"), strict=True):
                yield cut_after_supervised(np.array(tokens.values), np.array(mask.values, np.uint8))


# The parent


def write_chats(path: Path, count: int) -> None:
    """The demo's conversations, as finished ones, until there are `count`; each question is numbered."""
    from paceline.common.demo import DATA

    with gzip.open(DATA / "answers.jsonl.gz", "rt") as file:
        chats = [json.loads(line)["messages"] for line in file]
    with path.open("w") as out:
        for number, (question, *rest) in enumerate(islice(cycle(chats), count)):
            numbered = question | {"content": f"{number}. {question['content']}"}
            out.write(json.dumps({"messages": [numbered, *rest]}) + "\n")


def write_tokenizers(target: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    path = Path(target)
    source, options = (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (target, {})
    tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    for name, template in (
        ("marked", TEMPLATE),
        ("unmarked", TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def pss_bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0) << 10
    return total


@dataclass
class Measured:
    seconds: float
    cpu_seconds: float
    peak: int  # bytes

    def less(self, other: "Measured") -> "Measured":
        return Measured(self.seconds - other.seconds, self.cpu_seconds - other.cpu_seconds, self.peak)


def measure(arm: str, folder: Path, processes: int) -> Measured:
    """Runs an arm in a process of its own and watches it."""
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder), "--processes", str(processes)]
    before, start, peak = cpu_seconds(), time.perf_counter(), 0
    with subprocess.Popen(command, env=environment) as child:
        while child.poll() is None:
            peak = max(peak, pss_bytes(tree(child.pid)))
            time.sleep(0.25)
    if child.returncode:
        raise SystemExit(f"{arm} ended with {child.returncode}; datasets.map needs `pip install datasets`")
    return Measured(time.perf_counter() - start, cpu_seconds() - before, peak)


def cpu_seconds() -> float:
    """Of all processes that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(rows: int, rounds: int, processes: int, target: str, check: bool) -> int:
    results: dict[str, list[Measured]] = {arm: [] for arm in ARMS}
    made = set()
    with tempfile.TemporaryDirectory(prefix="paceline-prepare-") as scratch:
        root = Path(scratch)
        write_tokenizers(target, root)
        write_chats(root / "all.jsonl", rows)
        write_chats(root / "few.jsonl", FEW)
        for number, arm in product(range(rounds), ARMS):
            folders = {name: root / f"{arm}-{name}-{number}" for name in ("few", "all")}
            for name, folder in folders.items():
                folder.mkdir()
                (folder / "chats.jsonl").symlink_to(root / f"{name}.jsonl")
            few, whole = (measure(arm, folder, processes) for folder in folders.values())
            results[arm].append(whole.less(few))
            if results[arm][-1].seconds <= 0:
                raise SystemExit(f"{arm}: {rows} rows took less time than {FEW}: the machine is too busy to measure")
            made.add(digest(rows_of(arm, folders["all"])))
    tokens = max(count for count, _ in made)
    Console().print(table(results, rows - FEW, f"{rows:,} rows, {tokens:,} tokens, {processes} processes"))
    if len(made) != 1:
        print("the arms' rows differ")
        return 1
    best = {arm: min(one.seconds for one in found) for arm, found in results.items()}
    return int(check and best["paceline"] > min(best["map"], best["map-batched"]))


def table(results: Mapping[str, list[Measured]], rows: int, title: str) -> Table:
    """Rates are those of the best round."""
    made = Table(title=title)
    for name in ("", "rows/s", "ratio", "rows/CPU s", "ratio", "peak MiB"):
        made.add_column(name, justify="left" if not name else "right", no_wrap=True)
    clock = {arm: rows / min(one.seconds for one in found) for arm, found in results.items()}
    cpu = {arm: rows / min(one.cpu_seconds for one in found) for arm, found in results.items()}
    for arm, name in ARMS.items():
        ratios = (f"{rates[arm] / max(rates['map'], rates['map-batched']):.2f}" for rates in (clock, cpu))
        peak = max(one.peak for one in results[arm])
        made.add_row(name, f"{clock[arm]:,.0f}", next(ratios), f"{cpu[arm]:,.0f}", next(ratios), f"{peak >> 20:,}")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--target", help="folder, GGUF file or hub id whose tokenizer is used")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        run_arm(given.arm, given.folder, given.processes)
        return 0
    from paceline.common.demo import find_target

    if given.rows < 2 * FEW:
        parser.error(f"give at least {2 * FEW} rows")
    return compare(given.rows, given.rounds, given.processes, given.target or str(find_target()), given.check)


if __name__ == "__main__":
    sys.exit(main())
