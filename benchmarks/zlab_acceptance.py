"""Acceptance length of an exported drafter in z-lab's own decoding loop (PyPI `dflash`), greedy.

    python benchmarks/zlab_acceptance.py EXPORT --target PATH --prompts FILE.jsonl [--limit N] [--max-new-tokens 128]

The same prompts, chat template, dtype and stop tokens as `paceline eval`, so that the two can be compared. Both count
the bonus token. Only `dflash.model` is imported; its timer wants CUDA and is replaced on a CPU.
"""

import argparse
import time
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from dflash import model as zlab
from paceline.common.loading import load_causal_lm, stop_tokens
from paceline.common.target_info import target_info
from paceline.consumer.prompts import prompt_ids, read_prompts
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        cast(Any, zlab)._cuda_time = time.perf_counter
    folder = target_info(options.target).path
    target = load_causal_lm(folder, options.dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    drafter = cast(Any, zlab.DFlashDraftModel.from_pretrained(options.export, dtype=target.dtype)).to(device).eval()
    means, blocks, tokens = [], 0, 0
    for ids in prompt_ids(tokenizer, read_prompts(options.prompts, options.limit)):
        found = cast(Any, zlab.dflash_generate)(
            drafter,
            target,
            torch.tensor([ids], device=device),
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=stop_tokens(target, tokenizer),
            return_stats=True,
        )
        lengths = found.acceptance_lengths
        means.append(mean(lengths))
        blocks += len(lengths)
        tokens += sum(lengths)
    print(
        f"{len(means)} prompts in z-lab's loop: acceptance length (bonus token counted) {tokens / blocks:.3f} pooled, "
        f"{mean(means):.3f} mean of requests"
    )


if __name__ == "__main__":
    main()
