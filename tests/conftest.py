"""Small tokenizers, targets and conversations that tests build in seconds: no download, nothing outside tmp."""

import importlib.util
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forking import Forks

PROJECT = Path(__file__).parents[1]
HAS_FLA = importlib.util.find_spec("fla") is not None

# The models of the tests are tiny: a second thread costs them more than it gives, most of all beside other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As workers and ranks have it; code under test that sets it then finds it set, and leaves nothing behind.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# Without a GPU, Triton's kernels run in its interpreter. It looks when it is first imported.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow tests come first in each worker's share, so that none of them is left running alone at the end.

    xdist's worksteal first gives each of its workers an equal run of the list.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = iter([item for item in items if not item.get_closest_marker("slow")])
    bounds = [len(items) * worker // workers for worker in range(workers + 1)]
    shares = [slow[worker::workers] for worker in range(workers)]
    for share, (start, end) in zip(shares, pairwise(bounds), strict=True):
        share += islice(fast, max(0, end - start - len(share)))
    items[:] = [*chain.from_iterable(shares), *fast]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile with a cache folder of its own, one thread, and nothing compiled yet."""
    import torch
    from paceline.common import paths

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for variable in paths.COMPILE_CACHES:
        monkeypatch.setenv(variable, str(tmp_path / variable))
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]  # ids 0 to 3; data never uses <|mask|>
NOUNS = ["river", "garden", "engine", "window", "teacher", "market", "planet", "copper", "letter", "forest", "kitchen"]
VERBS = ["carries", "follows", "repairs", "measures", "paints", "watches", "borrows", "opens", "sells", "remembers"]
ADVERBS = ["today", "again", "well"]
VOCAB = 512


def sentences(seed: int, count: int) -> str:
    """Plain English-like sentences, the same for the same seed."""
    draw = random.Random(seed)
    words = [
        f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)} {draw.choice(ADVERBS)}."
        for _ in range(count)
    ]
    return " ".join(words)


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory) -> Callable[..., Path]:
    """make_tokenizer(template=CHATML) -> folder: a byte-level BPE of 512 tokens with ChatML's special tokens, saved as
    transformers saves one, with the chat template given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [sentences(seed, 20) for seed in range(40)]
    tokenizer.train_from_iterator([*text, "system user assistant You are a helpful assistant."] * 2, trainer)

    def make(template: str = CHATML) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = template
        fast.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(make_tokenizer) -> Path:
    """A saved tokenizer with a ChatML template (system default, no generation markers, like SmolLM2's)."""
    return make_tokenizer()


def tiny_config(kind: str):
    """A configuration of 4 layers, hidden size 64, 4 heads and 2 key-value heads."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.08,  # large enough that tokens and positions tell in the states
        "tie_word_embeddings": kind in ("gemma2", "gemma3"),
    }
    if kind == "llama":
        return transformers.LlamaConfig(**common)
    if kind == "qwen3":
        return transformers.Qwen3Config(**common, head_dim=16)
    if kind == "mistral":
        return transformers.MistralConfig(**common, sliding_window=16)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    if kind == "gemma3":
        return transformers.Gemma3TextConfig(
            **common,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    if kind == "gemma2":
        return transformers.Gemma2Config(**common, head_dim=16, query_pre_attn_scalar=16, sliding_window=16)
    if kind == "phi3":
        return transformers.Phi3Config(
            **common,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
            },
        )
    if kind == "gpt_oss":
        return transformers.GptOssConfig(
            **common,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        )
    hybrid: dict[str, Any] = {
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
    if kind == "qwen3_5":
        from transformers.models.qwen3_5 import Qwen3_5TextConfig

        return Qwen3_5TextConfig(**common, **hybrid, linear_value_head_dim=16)
    if kind == "qwen3_next":
        return transformers.Qwen3NextConfig(
            **common,
            **hybrid,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    raise ValueError(kind)


@pytest.fixture(scope="session")
def make_tiny_target(tmp_path_factory, tiny_tokenizer_dir) -> Callable[[str], Path]:
    """make_tiny_target(kind) -> folder of a random float32 target with its tokenizer; kind is llama, qwen3,
    mistral, qwen3_moe, gemma2, gemma3, gpt_oss, phi3, qwen3_5 or qwen3_next. Made once a session."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            folder = tmp_path_factory.mktemp(f"target-{kind}")
            with torch.random.fork_rng():
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(tiny_config(kind)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return make


@pytest.fixture(autouse=HAS_FLA)
def plain_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' hybrids run plain torch. Where flash-linear-attention is installed they would call its kernels, and
    do so on a CPU too if there is a GPU beside it."""
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_next import modeling_qwen3_next

    for module in (modeling_qwen3_5, modeling_qwen3_next):
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
            monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))


@pytest.fixture(scope="session")
def tiny_target_dir(make_tiny_target) -> Path:
    """A random Llama (hidden 64, 4 layers, 4 heads, 2 key-value heads, vocabulary 512) with its tokenizer."""
    return make_tiny_target("llama")


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory) -> Path:
    """200 short conversations as JSONL: one or two turns, some with a system message, some unfinished."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    draw = random.Random(0)
    with path.open("w") as file:
        for index in range(200):
            messages = [{"role": "system", "content": sentences(index, 1)}] if index % 7 == 0 else []
            for turn in range(1 + index % 2):
                messages.append({"role": "user", "content": sentences(1000 * turn + index, draw.randint(1, 2))})
                messages.append({"role": "assistant", "content": sentences(9000 + index + turn, draw.randint(1, 4))})
            file.write(json.dumps({"id": index, "finished": index % 5 != 0, "messages": messages}) + "\n")
    return path


@pytest.fixture(scope="session")
def fork_server() -> "Iterator[Callable[[str], Forks]]":
    """fork_server(script) -> what starts processes by a script of this folder that serves them. Each starts once."""
    from forking import Forks

    made: dict[str, Forks] = {}

    def server(script: str) -> Forks:
        if script not in made:
            made[script] = Forks(Path(__file__).with_name(script))
        return made[script]

    yield server
    for forks in made.values():
        forks.close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy of the tree: a build leaves files behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    for name in ("common", "producer", "consumer", "systemd"):
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, check=True, capture_output=True)
    return next(out.glob("*.whl"))
