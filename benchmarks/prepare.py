"""`paceline prepare` against `datasets.map`: rows/s and peak memory, from a chat file to tokens and masks on disk.

    python benchmarks/prepare.py [--rows 20000] [--rounds 2] [--processes N] [--target PATH] [--check]

All arms use one tokenizer (default: SmolLM2's, from the demo's target) and one chat template with generation markers,
which `datasets.map` needs for a mask; one arm is paceline with the same template's markers taken out. The rows are the
demo's conversations over and over, each with a number of its own. `map` calls `apply_chat_template`, with one
conversation at a time or 256, in as many processes. paceline does more: it checks that the supervised tokens decode to
the answers. Arms take turns, each in a process of its own; the time is that of the work, without imports, and each arm
is judged by its best round. Memory is the highest sum of PSS over an arm's processes. All arms must give the same rows.

`--check` exits 1 unless paceline's rows/s are at least those of the better `map`.
"""

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
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
ARMS = {
    "paceline": "paceline prepare",
    "paceline-unmarked": "the same, no generation markers",
    "map": "datasets.map, one at a time",
    "map-batched": f"datasets.map, batches of {BATCH}",
}


def digest(rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> str:
    """Over tokens and masks of all rows."""
    found = hashlib.sha256()
    for tokens, mask in rows:
        found.update(tokens.astype("<i4").tobytes() + mask.astype(np.uint8).tobytes())
    return found.hexdigest()


def run_paceline(folder: Path, tokenizer: str, processes: int) -> dict[str, Any]:
    start = time.perf_counter()
    report = prepare(
        [folder / "chats.jsonl"], target=tokenizer, out=folder / "out", cache=folder / "cache", processes=processes
    )
    seconds = time.perf_counter() - start
    rows = Rows.open(report.folder)
    return {"seconds": seconds, "tokens": report.tokens, "digest": digest(rows.row(at) for at in range(len(rows)))}


def run_map(folder: Path, tokenizer: str, processes: int, batched: bool) -> dict[str, Any]:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        made = loaded.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        return {"input_ids": made["input_ids"], "assistant_masks": made["assistant_masks"]}

    start = time.perf_counter()
    chats: Any = datasets.load_dataset(
        "json", data_files=str(folder / "chats.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    made = chats.map(encode, batched=batched, batch_size=BATCH, num_proc=processes, remove_columns=chats.column_names)
    seconds = time.perf_counter() - start
    arrays = ((np.array(row["input_ids"]), np.array(row["assistant_masks"], np.uint8)) for row in made)
    rows = [cut_after_supervised(*row) for row in arrays]
    return {"seconds": seconds, "tokens": sum(len(row.tokens) for row in rows), "digest": digest(rows)}


def run_arm(arm: str, folder: Path, processes: int) -> dict[str, Any]:
    tokenizer = str(folder.parent / ("unmarked" if arm == "paceline-unmarked" else "marked"))
    if arm.startswith("paceline"):
        return run_paceline(folder, tokenizer, processes)
    return run_map(folder, tokenizer, processes, arm == "map-batched")


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


def measure(arm: str, folder: Path, processes: int) -> dict[str, Any]:
    """Runs an arm in a process of its own and watches its memory."""
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder), "--processes", str(processes)]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
        while child.poll() is None:
            peak = max(peak, pss_bytes(tree(child.pid)))
            time.sleep(0.25)
        assert child.stdout is not None
        lines = child.stdout.read().splitlines()
    if child.returncode:
        raise SystemExit(f"{arm} ended with {child.returncode}; datasets.map needs `pip install datasets`")
    return json.loads(lines[-1]) | {"peak": peak}


def compare(rows: int, rounds: int, processes: int, target: str, check: bool) -> int:
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="paceline-prepare-") as scratch:
        root = Path(scratch)
        write_tokenizers(target, root)
        write_chats(root / "chats.jsonl", rows)
        for number in range(rounds):
            for arm in ARMS:
                folder = root / f"{arm}-{number}"
                folder.mkdir()
                (folder / "chats.jsonl").symlink_to(root / "chats.jsonl")
                results[arm].append(measure(arm, folder, processes))
    best = {arm: min(found, key=lambda one: one["seconds"]) for arm, found in results.items()}
    table = Table(title=f"{rows:,} rows, {best['paceline']['tokens']:,} tokens, {processes} processes")
    for name in ("", "rows/s", "tokens/s", "of the better map", "peak memory", "a million rows"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    fastest = min(best["map"]["seconds"], best["map-batched"]["seconds"])
    for arm, name in ARMS.items():
        seconds, peak = best[arm]["seconds"], max(one["peak"] for one in results[arm])
        speed = f"{rows / seconds:,.0f}", f"{best[arm]['tokens'] / seconds:,.0f}", f"{fastest / seconds:.2f}"
        table.add_row(name, *speed, f"{peak / 2**20:,.0f} MiB", f"{seconds / rows * 1e6 / 60:.1f} min")
    Console().print(table)
    if len({one["digest"] for found in results.values() for one in found}) != 1:
        print("the arms' rows differ")
        return 1
    return int(check and best["paceline"]["seconds"] > fastest)


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
        print(json.dumps(run_arm(given.arm, given.folder, given.processes)))
        return 0
    from paceline.common.demo import find_target

    return compare(given.rows, given.rounds, given.processes, given.target or str(find_target()), given.check)


if __name__ == "__main__":
    sys.exit(main())
