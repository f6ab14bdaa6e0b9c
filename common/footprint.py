"""Bytes that a run will take: of each GPU by part, of the rings. Arithmetic on the run file and the target's config.

A rank holds one micro-batch whatever waits in the rings, so what it needs follows from `trainer.micro_tokens`, the
drafter's shape and the head's chunk, and is the same at the first step and at the last. Activations are what autograd
keeps for backward, counted tensor by tensor in the compute dtype; they are those of the micro-batch with most anchors
(`Densest`). On top comes what is there at the widest moment: a chunk of logits, or the slopes inside the last layer's
MLP, where backward begins.

CUDA's own context, and what the allocator keeps in reserve, come on top (`CONTEXT`, `RANK_CONTEXT`).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .densest import Densest
from .record import IN_THE_MAKING, ITEM_BYTES, max_rows, slot_bytes
from .ring_layout import SLOT_WORDS, TABLE_OFFSET, pages

if TYPE_CHECKING:
    from .runfile import RunFile
    from .target_info import TargetInfo

HEAD_CHUNK = {"cpu": 2**26, "cuda": 5 * 2**28}  # bytes of float32 logits at a time; half of it in bfloat16
CONTEXT = 700 * 2**20  # of a worker: CUDA's context, its libraries' workspaces and the allocator's slack
RANK_CONTEXT = 1024 * 2**20  # of a rank, which has more kernels: 820 MiB were measured, and 220 of slack
LANDING_TOKENS = 1024  # landing buffers grow in steps of so many tokens
MUON_SHARED = 2**27  # weights in matrices from which ranks share Muon's work
WIDE = 4  # bytes of float32: masters, gradients, moments


@dataclass(frozen=True)
class Parts:
    """Bytes by part, in the order they are shown."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Shape:
    """A drafter's shape, from the run file and the target."""

    hidden: int
    inner: int
    layers: int
    queries: int  # heads x head_dim
    keys: int
    planes: int
    vocabulary: int
    block: int
    tied: bool

    @classmethod
    def of(cls, run: "RunFile", info: "TargetInfo", planes: int) -> "Shape":
        return cls(
            hidden=info.hidden_size,
            inner=run.drafter.intermediate_size or info.intermediate_size,
            layers=run.drafter.layers,
            queries=info.num_heads * info.head_dim,
            keys=info.num_kv_heads * info.head_dim,
            planes=planes,
            vocabulary=info.vocab_size,
            block=run.drafter.block_size,
            tied=info.tie_word_embeddings,
        )

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """Sides of the matrices of one draft layer: q and o, k and v, gate, up and down."""
        return [(self.hidden, side) for side in (*2 * [self.queries], *2 * [self.keys], *3 * [self.inner])]

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Of all layers, and of fc."""
        return self.layers * self.layer_matrices + [(self.hidden, self.planes * self.hidden)]

    @property
    def layer_weights(self) -> int:
        return sum(math.prod(sides) for sides in self.layer_matrices)

    @property
    def weights(self) -> int:
        return sum(math.prod(sides) for sides in self.matrices)


def micro_tokens(run: "RunFile", densest: Densest | None = None) -> int:
    """Tokens of the largest micro-batch that can come: a row is never parted."""
    longest = (densest or Densest(run)).longest
    return min(max(run.trainer.micro_tokens, longest), run.stream.token_budget)


def slots_of(run: "RunFile", tokens: int, densest: Densest | None = None) -> int:
    """Most draft positions (slot 0 included) of a micro-batch of so many context tokens."""
    return (densest or Densest(run)).anchors(tokens) * run.drafter.block_size


def rank_parts(
    run: "RunFile", shape: Shape, tokens: int, device: str = "cuda", densest: Densest | None = None
) -> Parts:
    """What one rank's device holds at its peak, with micro-batches of `tokens` context tokens."""
    item, eight = ITEM_BYTES[run.trainer.dtype], run.trainer.fp8
    slots = slots_of(run, tokens, densest)
    scored = slots * (shape.block - 1) // shape.block
    heads = shape.vocabulary * shape.hidden * item * (1 if shape.tied else 2)
    landing = 2 * (shape.planes + run.target.last_hidden) * -(-tokens // LANDING_TOKENS) * LANDING_TOKENS * shape.hidden
    chunk_rows = min(scored, HEAD_CHUNK[device] // (4 * shape.vocabulary))
    logits = chunk_rows * shape.vocabulary * (item * (2 if run.objective.target_terms else 1) + eight)
    through_head = 3 * scored * shape.hidden * item  # the scored slots' states, their gradient, its copy in backward
    in_mlp = 4 * scored * shape.inner * item  # slopes of its product, of gate and up, and the product once more
    return Parts(
        {
            "target's embedding and head": heads,
            "drafter, compute copy": shape.weights * item,
            # Twice: backward's products take them turned round.
            **({"drafter and head in fp8": 2 * (shape.weights + shape.vocabulary * shape.hidden)} if eight else {}),
            "drafter, float32 masters": shape.weights * WIDE,
            "gradients, float32": shape.weights * WIDE,
            f"{run.optimizer.name} state": _moments(run) * shape.weights * WIDE,
            **({"muon's updates between ranks": shape.weights * item} if muon_shared(run, shape) else {}),
            "micro-batch of hidden states": landing * ITEM_BYTES[run.record_dtype]
            + tokens * shape.planes * shape.hidden * item,
            "activations": activation_bytes(shape, slots, tokens) * item,
            ("logits chunk" if logits >= in_mlp else "slopes in the last layer's MLP"): max(logits, in_mlp),
            "states through the head": through_head,
            "CUDA context": RANK_CONTEXT if device == "cuda" else 0,
        }
    )


def checkpoint_bytes(run: "RunFile", shape: Shape) -> int:
    """Of one checkpoint: float32 masters and moments. Rank 0 keeps a copy of as much in host memory while it writes."""
    return shape.weights * WIDE * (1 + _moments(run))


def checkpoints_kept(run: "RunFile") -> int:
    """At most: the newest ones, the best one, and one that is being written."""
    return run.checkpoint.keep_last + run.checkpoint.keep_best + 1


def _moments(run: "RunFile") -> int:
    """Float32 moments of a weight."""
    return 1 if run.optimizer.name == "muon" else 2


def muon_shared(run: "RunFile", shape: Shape) -> bool:
    """Whether ranks share the work of Muon's update."""
    return run.optimizer.name == "muon" and run.trainer.ranks > 1 and shape.weights >= MUON_SHARED


def muon_flops(rows: int, columns: int) -> int:
    """Of a matrix's update: five iterations, each with two products of [r, r] by [r, c] and one of [r, r] by itself, r
    being the shorter side."""
    short, long = sorted((rows, columns))
    return 5 * (4 * short**2 * long + 2 * short**3)


def activation_bytes(shape: Shape, slots: int, tokens: int) -> int:
    """Elements that backward needs: of the draft layers for each slot, of the context's projections for each token.

    A slot in a layer: the residual and its normed copy twice (4H), queries before and after norm and RoPE and the
    attention's output (3Q), keys and values likewise (4K), gate and up (2I). A context token: fc's
    output and its normed copy (2H) once, keys and values (4K) in each layer.
    """
    slot = 4 * shape.hidden + 3 * shape.queries + 4 * shape.keys + 2 * shape.inner
    return shape.layers * (slots * slot + tokens * 4 * shape.keys) + tokens * 2 * shape.hidden


def worker_parts(run: "RunFile", info: "TargetInfo", last_layer: int, planes: int, device: str = "cuda") -> Parts:
    """What each device of a worker holds: the layers up to the last recorded one, the forward of a full batch, and the
    recorded planes until they are copied, of each record in the making (one alone where devices share the target)."""
    tokens, item = run.stream.token_budget, ITEM_BYTES[run.target.dtype]
    weights = target_weights(info, last_layer) * item
    if run.target.fp8:
        weights -= layer_weights(info, last_layer) * (item - 1)
    shards = run.workers.gpus_per_worker
    weights -= layer_weights(info, last_layer) * item * (shards - 1) // shards
    # The widest moment is inside an MLP: residual, normed input, gate, up and their product, of all tokens; in a
    # mixture once for each of a token's experts, with their input and output.
    inside = 3 * info.intermediate_size
    if info.experts:
        inside = info.experts_per_token * (3 * info.expert_size + 2 * info.hidden_size)
    activations = tokens * (4 * info.hidden_size + inside // shards) * item
    making = min(run.stream.slots, IN_THE_MAKING) if shards == 1 else 1
    on_their_way = making * planes * tokens * info.hidden_size * ITEM_BYTES[run.record_dtype]
    return Parts(
        {
            "target's weights": weights,
            "activations": activations,
            "states on their way to the ring": on_their_way if device == "cuda" else 0,
            "CUDA context": CONTEXT if device == "cuda" else 0,
        }
    )


def target_weights(info: "TargetInfo", last_layer: int) -> int:
    """Weights of embedding and layers up to `last_layer`: from the safetensors' headers, or from a dense shape."""
    found = dict(_safetensors(Path(info.path)))
    if not found:
        return info.vocab_size * info.hidden_size + sum(_layer_weights(info, last_layer))
    return sum(count for name, count in found.items() if _is_loaded(name, last_layer))


def layer_weights(info: "TargetInfo", last_layer: int) -> int:
    """Weights of the layers up to `last_layer` alone, but for the experts of a mixture."""
    return _layer_weights(info, last_layer)[0]


def active_weights(info: "TargetInfo", last_layer: int) -> float:
    """Of the weights of the layers up to `last_layer`, those that a token passes: of a mixture's experts its own."""
    common, experts = _layer_weights(info, last_layer)
    return common + experts * info.expert_share


def attention_layers(info: "TargetInfo", last_layer: int) -> int:
    """How many of the layers up to `last_layer` attend, where a hybrid's others are recurrent."""
    return last_layer + 1 - info.layer_types[: last_layer + 1].count("linear_attention")


def _layer_weights(info: "TargetInfo", last_layer: int) -> tuple[int, int]:
    """Weights of the layers up to `last_layer`: of experts, and of all else before them."""
    found = dict(_safetensors(Path(info.path)))
    if not found:
        keys, queries = info.num_kv_heads * info.head_dim, info.num_heads * info.head_dim
        attention = info.hidden_size * ((3 if info.gated_attention else 2) * queries + 2 * keys)
        attending = attention_layers(info, last_layer)
        mixers = attending * attention + (last_layer + 1 - attending) * info.linear_attention
        dense = 0 if info.experts else 3 * info.intermediate_size
        layers = (last_layer + 1) * info.hidden_size
        return mixers + layers * dense, layers * 3 * info.expert_size * info.experts
    inside = {n: count for n, count in found.items() if _layer(n) is not None and _is_loaded(n, last_layer)}
    experts = sum(count for name, count in inside.items() if ".experts." in name)
    return sum(inside.values()) - experts, experts


def _is_loaded(name: str, last_layer: int) -> bool:
    parts = name.split(".")
    if "lm_head" in parts or "visual" in parts or "vision_tower" in parts:
        return False
    return (_layer(name) or 0) <= last_layer


def _layer(name: str) -> int | None:
    """The layer that a tensor belongs to, by its name; None for embedding, norm and head."""
    numbers = (int(b) for a, b in pairwise(name.split(".")) if a == "layers" and b.isdigit())
    return next(numbers, None)


def _safetensors(folder: Path) -> Iterator[tuple[str, int]]:
    """(tensor name, elements) of the safetensors files of a folder, from their headers alone. Of packed integers, the
    weights that they are unpacked to: MXFP4's, two in a byte, have their scales beside them."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length)) if length < 2**28 else {}
        for name, about in header.items():
            if name != "__metadata__":
                each = _packed(folder, about["dtype"]) if name.endswith(".weight_packed") else 1
                if about["dtype"] == "U8" and name.endswith(("_blocks", "_scales")):
                    each = 2 if name.endswith("_blocks") else 0
                yield name, each * math.prod(about["shape"])


def _packed(folder: Path, container: str) -> int:
    """Weights in one integer of a type (as safetensors names it), of a model that keeps several in one."""
    config = json.loads((folder / "config.json").read_text())
    quantised = config.get("quantization_config") or config["text_config"]["quantization_config"]
    bits = max(group["weights"]["num_bits"] for group in quantised["config_groups"].values())
    return {"I32": 32, "U8": 8}.get(container, bits) // bits


def ring_bytes(run: "RunFile", planes: int, hidden_size: int) -> int:
    """Bytes of one worker's ring file."""
    budget = run.stream.token_budget
    slot = slot_bytes(budget, max_rows(budget), planes, hidden_size, run.record_dtype)
    return TABLE_OFFSET + pages(run.stream.slots * SLOT_WORDS * 8) + run.stream.slots * slot


def largest_micro_batch(
    run: "RunFile", shape: Shape, memory: int, device: str = "cuda", densest: Densest | None = None
) -> int:
    """Most `trainer.micro_tokens`, in steps of 256, with which a rank fits into `memory` bytes; 0 if none does.

    A row is never parted, so a micro-batch has at least the longest row's tokens.
    """
    densest, most = densest or Densest(run), run.stream.token_budget
    sizes = [size for size in range(256, most + 256, 256) if size >= min(densest.longest, most)]
    fitting = [size for size in sizes if rank_parts(run, shape, min(size, most), device, densest).total <= memory]
    return min(max(fitting), most) if fitting else 0
