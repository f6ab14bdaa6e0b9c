"""The target: loading it, finding its parts, and running its decoder for hidden states.

With its own `boundaries.py`, `delta_net.py` and `quantised.py`, the only module of `common` that loads torch. Worker,
trainer ranks and evaluation use it; nothing that the command line, ring, wire or feed import reaches it. It owns no
files and writes to no ring: states go to the caller's `sink`.

`Target` runs the decoder up to the deepest layer asked for, in one of three ways, chosen by `self_check()`:

    packed   all rows end to end in one sequence; attention (`packed_attention`) and Gated DeltaNet (`delta_net.py`)
             are told the boundaries
    padded   rows of like length side by side, padded on the right, where causal rows never look
    alone    one row at a time

Packed rows may also run through compiled layers (`Faster`), after the same check.

A mask or a cache would turn off transformers' own packing in silence, and models with attention sinks or
other recurrent layers leak from row to row. So a way is used only after it reproduced rows run alone by the model's own
attention. No way builds a mask of T x T over a batch.
"""

import contextlib
import importlib.util
import inspect
import io
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import delta_net
from .boundaries import Boundaries, Unpackable, boundaries, current, on_device
from .errors import ConfigError
from .quantised import check_quantisation, quantisation, restore, unrounded
from .target_info import TargetInfo, load_config, random_weights, target_folder, target_info

__all__ = [
    "Faster",
    "FrozenHead",
    "Sink",
    "Target",
    "convert_gguf",
    "first_line",
    "load_causal_lm",
    "packed_attention",
    "stop_tokens",
]

log = logging.getLogger(__name__)

Sink = Callable[[int, Tensor, int], None]  # (plane, states [t, H], index of the first token)
Mode = Literal["packed", "padded", "alone"]

PADDED_TOKENS = 8192  # most tokens, padding included, that run side by side
PADDED_SHARE = 0.8  # a row joins longer ones when it is at least so long, relative to the longest
WINDOW_BLOCK = 512  # queries that share one mask in a sliding-window layer
CHECK_LENGTHS: tuple[int, ...] = (23, 17, 40)  # rows of the self-check; another one is longer than the sliding window
CHECK_WINDOW = {"cpu": 512, "cuda": 4096}  # widest window that the self-check reaches across
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}  # relative error of states, mean of tokens
# How far off quantised layers may be another way, relative to plain ones: roundings of its own are as large and
# independent, so that it is 1 but for chance, and faults of 0.75 of that error are seen. Besides a tenth of the
# tolerance, for roundings of the dtype itself where quantising moves the states by less.
QUANTISED, BESIDES = 1.25, 0.1

_ATTENTION = {"full_attention", "sliding_attention"}  # layer types that `packed_attention` serves
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "embedding_norm")


class Faster(Protocol):
    """A faster way to run a target's layers with packed rows, which `Target.self_check` tries."""

    def install(self, target: "Target") -> None:
        """Changes the layers. May raise anything; ConfigError is the user's and ends the start."""
        ...

    def remove(self, target: "Target") -> None:
        """Undoes `install`, also one that raised."""
        ...


class Pass(NamedTuple):
    """One pass of the decoder, as another process with a share of the target must run it too."""

    mode: Mode
    deepest: int  # layer whose hook ends it
    input_ids: Tensor  # int64 [B, L]
    position_ids: Tensor | None  # int64 [1, T] of packed rows
    cu_seqlens: Sequence[int]  # of packed rows, else empty


class _Reference(NamedTuple):
    """What a way to run the layers is compared with. Of a plane a checked layer: states [t, H] of each row alone, and
    the error allowed."""

    rows: list[Tensor]
    states: list[list[Tensor]]
    limits: list[float]

    def errors(self, states: list[list[Tensor]]) -> list[float]:
        """Of each layer, the largest of its rows."""
        return [
            max(_error(a, b) for a, b in zip(found, wanted, strict=True))
            for found, wanted in zip(states, self.states, strict=True)
        ]


class _LastLayer(Exception):
    """Leaves the decoder's forward once the deepest layer asked for has run."""


# Eight-bit matmuls ---------------------------------------------------------------------------------------------------

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_CAPABILITY = (8, 9)  # first compute capability with fp8 matmuls


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [R, K] and float32 scales [R, 1] of a matrix [R, K]; their product is the matrix, rounded.

    Three passes over the matrix where it is not compiled. Nothing is clamped: the largest value comes out at 448 or a
    float32 rounding beside it, which e4m3 rounds to 448.
    """
    scale = scale_of(torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).float())
    return (x / scale).to(FP8), scale


def scale_of(largest: Tensor) -> Tensor:
    """What values are divided by to be e4m3 ones, from the largest magnitude among them."""
    return largest.clamp_min(1e-12) / FP8_LARGEST


def scaled_matmul(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, fast: bool = True
) -> Tensor:
    """[T, N] of quantised x [T, K] with scales [T, 1] and weight [N, K] with scales [N, 1].

    fast: products are summed in the matrix unit's own 22 bits, as engines do, not in float32 every few steps.
    """
    if not x.is_cuda:
        return plain_scaled_matmul(x, x_scale, weight, weight_scale, dtype)
    product = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return product.to(dtype)


def plain_scaled_matmul(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scaled_matmul` on the values that the quantised ones stand for, in float32."""
    return ((x.float() * x_scale) @ (weight.float() * weight_scale).t()).to(dtype)


# Packed attention --------------------------------------------------------------------------------------------------

PACKED = "paceline_varlen"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed batch; transformers' attention function `paceline_varlen`.

    query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] give [1, T, Hq, Dv]. A query at position t of its row
    sees keys max(0, t-W+1) to t, W being the sliding window. Half precision on CUDA runs torch's varlen kernel;
    elsewhere one SDPA call a row, whose cost is also the sum of squared row lengths. Compiled layers hold it as one
    operator, so their graph knows nothing of the boundaries.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    wanted = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    wanted += ["bidirectional"] * (not causal) + ["mask"] * (attention_mask is not None)
    if wanted:
        raise Unpackable(f"its attention uses {', '.join(wanted)}")
    attend = torch.ops.paceline.packed_attention if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, scaling, sliding_window), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    bounds = current()
    bounds.windows.add(window)
    if (output := _varlen(query, key, value, bounds, scaling, window)) is not None:
        return output.contiguous()  # the kernel lays it out as the query, compiled layers count on `_attended`
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for start, end in pairwise(bounds.cu_seqlens):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        output[:, start:end] = _row_attention(q, k, v, scaling, window).transpose(1, 2)
    return output


_operator = torch.library.custom_op(
    "paceline::packed_attention",
    _attend,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float? scaling, int? window) -> Tensor",
)


@_operator.register_fake
def _attended(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    """torch's varlen attention with scale and window, called as `(q, k, v, offsets, longest, scale, window, grouped)`.

    None where this torch has none. Versions before `enable_gqa` group queries unasked.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= set(known):
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: Any, window: int, grouped: bool):
        options: dict[str, Any] = {"enable_gqa": grouped} if "enable_gqa" in known else {}
        lengths = (offsets, offsets, longest, longest)
        return varlen_attn(q, k, v, *lengths, scale=scale, window_size=(window, 0), **options)

    return run


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Boundaries, scaling: float | None, window: int | None
) -> Tensor | None:
    """`packed_attention` by torch's varlen kernel, [1, T, Hq, D]; None where it does not apply."""
    half, width = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    if not (q.is_cuda and half and width == v.shape[-1] and width <= 256 and width % 8 == 0):
        return None
    kernel = _varlen_kernel()
    if kernel is None:
        return None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    left = -1 if window is None else window - 1  # the window counts the query's own position
    return kernel(q, k, v, bounds.offsets, bounds.longest, scaling, left, q.shape[1] != k.shape[1])[None]


def _row_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """One row's causal attention, [1, Hq, t, Dv]; in blocks of queries where a sliding window bites."""
    grouped = q.shape[1] != k.shape[1]
    length = q.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    blocks = []
    for start in range(0, length, WINDOW_BLOCK):
        end, low = min(start + WINDOW_BLOCK, length), max(0, start - window + 1)
        back = torch.arange(start, end, device=q.device)[:, None] - torch.arange(low, end, device=q.device)
        keys, values, seen = k[:, :, low:end], v[:, :, low:end], (back >= 0) & (back < window)
        blocks.append(
            scaled_dot_product_attention(
                q[:, :, start:end], keys, values, attn_mask=seen, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(blocks, dim=2)


# A name without a mask function makes transformers build no mask.
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


# Loading -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Silences transformers' progress bars and load reports, which would end up in the journal."""
    logger = transformers.utils.logging
    before = logger.get_verbosity()
    logger.set_verbosity_error()
    logger.disable_progress_bar()
    try:
        yield
    finally:
        logger.set_verbosity(before)
        logger.enable_progress_bar()


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a run file's dtype name."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def compute_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """The dtype to compute in: `dtype`, or float32 where the CPU has no fast half-precision matmul.

    Without AVX-512 or better, PyTorch's bfloat16 matmul is 5 to 10 times slower than float32 (measured on an EPYC with
    AVX2: 5 against 40 GFLOP/s). Weights keep the values `dtype` gives them; states are rounded to it when recorded.
    """
    dtype, device = as_dtype(dtype), torch.device(device)
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    ops = torch.ops.mkldnn
    fast = ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported()
    return dtype if fast else torch.float32


def _load(
    folder: Path,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    *,
    config: Any = None,
    need_head: bool = True,
    device: str | torch.device = "cpu",
    shards: int = 1,
) -> PreTrainedModel:
    """A causal LM in eval mode and without gradients, on the CPU. Every weight it uses comes from the checkpoint.

    A benchmark's folder that says so (`random_weights`) gets random ones, made on `device`, where it stays.
    """
    config = config if config is not None else load_config(folder, trust_remote_code)
    if shards > 1 and (random_weights(folder) or quantisation(config)):
        raise ConfigError("workers.gpus_per_worker: only for a target whose weights are there, and not quantised")
    if random_weights(folder):
        with torch.device(device):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, dtype=as_dtype(dtype)).eval().requires_grad_(False)
    check_quantisation(folder, config)
    model, report = None, {}
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        remote = trust_remote_code and auto.__name__ in (getattr(config, "auto_map", None) or {})
        if not remote and type(config) not in auto._model_mapping:
            continue
        with quiet_loading():
            try:
                loaded: Any = auto.from_pretrained(
                    folder,
                    config=config,
                    dtype=as_dtype(dtype),
                    trust_remote_code=trust_remote_code,
                    output_loading_info=True,
                    **({"distributed_config": DistributedConfig(tp_plan="auto", tp_size=shards)} if shards > 1 else {}),
                )
            except (OSError, ImportError, RuntimeError) as error:
                raise ConfigError(
                    f"target.path: {folder} does not load: {str(error).strip().splitlines()[0]}"
                ) from error
        model, report = loaded
        break
    if model is None:
        raise ConfigError(f"target.path: {folder}: model type {config.model_type!r} has no causal language model")
    _check_report(folder, model, report, need_head)
    restore(folder, model, config, as_dtype(dtype))
    return model.eval().requires_grad_(False)


def _check_report(folder: Path, model: PreTrainedModel, report: dict[str, Any], need_head: bool) -> None:
    """ConfigError if transformers made up weights that the checkpoint lacks or that have another shape."""
    head = {f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()}
    missing = sorted(set(report["missing_keys"]) - (set() if need_head else head))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "; its config says that the head is not tied to the embedding" if set(missing) <= head else ""
        raise ConfigError(f"target.path: {folder} lacks the weight {missing[0]}{more}{hint}")
    if report["mismatched_keys"]:
        name = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"])[0]
        raise ConfigError(f"target.path: {folder}: the shape of {name} does not fit config.json")


def _check_shards(info: TargetInfo, shards: int) -> None:
    """ConfigError where a target cannot be spread over so many GPUs."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("workers.gpus_per_worker needs accelerate: pip install 'paceline[tensor-parallel]'")
    if info.num_kv_heads % shards or info.num_heads % shards:
        raise ConfigError(
            f"workers.gpus_per_worker: {shards} GPUs cannot share {info.num_heads} heads and {info.num_kv_heads} "
            "key-value heads; give a number that divides both"
        )


# A GGUF file -------------------------------------------------------------------------------------------------------


def convert_gguf(path: Path, out: Path) -> None:
    """Writes a GGUF file into the folder `out` as `gguf.converted` describes it. Raises ConfigError."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        with _one_reader():
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            dtype = _matrix_dtype(path)
            config.dtype = dtype
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(config)
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
                found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)["tensors"]
    except (ValueError, OSError, KeyError, NotImplementedError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"target.path: {path} does not convert: {reason}") from error
    tensors = _by_name(path, skeleton, found)
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name, value in vars(config).items():
        if isinstance(value, float):  # GGUF keeps float32: 1e-5 would be written as 9.99999974e-06
            setattr(config, name, float(str(np.float32(value))))
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(out)
    tokenizer.clean_up_tokenization_spaces = False  # GGUF knows nothing of it, and to clean up is not to give the text
    tokenizer.save_pretrained(out)


@contextlib.contextmanager
def _one_reader() -> Iterator[None]:
    """Parses a GGUF file once. transformers opens it anew for config, tokenizer and weights, and each time goes through
    the vocabulary in Python, which is most of a conversion's time."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(lambda path, *_: reader(str(path)))  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # pyright: ignore[reportPrivateImportUsage]


def _matrix_dtype(path: Path) -> torch.dtype:
    """The dtype to keep: that of the file's matrices if they are all float32 or float16, else bfloat16."""
    from gguf import GGMLQuantizationType, GGUFReader

    kinds = {tensor.tensor_type for tensor in GGUFReader(str(path)).tensors if len(tensor.shape) > 1}
    if GGMLQuantizationType.F32 in kinds and kinds <= {GGMLQuantizationType.F32, GGMLQuantizationType.F16}:
        return torch.float32
    return torch.float16 if kinds == {GGMLQuantizationType.F16} else torch.bfloat16


def _by_name(path: Path, skeleton: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The tensors by the model's own names, tied ones once; ConfigError for one that is missing or misshapen."""
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or {})
    tensors = {}
    for name, parameter in skeleton.state_dict().items():
        tensor = found.get(name)
        if tensor is None and name in tied:
            continue
        if tensor is None or tensor.shape != parameter.shape:
            what = "lacks" if tensor is None else "has another shape for"
            raise ConfigError(f"target.path: {path} {what} the weight {name}")
        tensors[name] = tensor
    return tensors


# The parts of a model ----------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Where a causal LM keeps what paceline needs."""

    decoder: PreTrainedModel
    layers: nn.ModuleList
    norm: nn.Module  # the final norm
    embedding: nn.Embedding
    head: nn.Linear


def find_parts(model: PreTrainedModel) -> Parts:
    """Decoder, its layers, final norm, embedding and head of a causal LM, wrapped (multimodal) ones included.

    Raises ConfigError naming the part that is not found: a guess would train on the wrong states in silence.
    """
    kind = type(model).__name__
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or decoder is model:
        raise ConfigError(f"target: no decoder found in {kind}")
    text = model.config.get_text_config(decoder=True)
    stacks = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    layers = next((stack for stack in stacks if len(stack) == text.num_hidden_layers), None)
    if layers is None:
        raise ConfigError(f"target: no stack of {text.num_hidden_layers} layers found in {type(decoder).__name__}")
    norm = next((module for name in _NORMS if isinstance(module := getattr(decoder, name, None), nn.Module)), None)
    if norm is None:
        raise ConfigError(f"target: no final norm found in {type(decoder).__name__} (looked for {', '.join(_NORMS)})")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise ConfigError(f"target: no token embedding found in {kind}")
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"target: no language-model head found in {kind}")
    return Parts(decoder, layers, norm, embedding, head)


def load_causal_lm(
    path: str, dtype: str | torch.dtype, device: str | torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The whole model, head included, for generation. `path` is a folder, GGUF file or hub id."""
    model = _load(target_folder(path), dtype, trust_remote_code)
    return model.to(device)  # pyright: ignore[reportArgumentType] (its stub takes no torch.device)


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Ids that end an answer: those of the model's generation config and the tokenizer's end token."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


# The frozen head ---------------------------------------------------------------------------------------------------


class FrozenHead(nn.Module):
    """A target's embedding, final norm and head, without gradients; what drafter and losses use of it.

    `embed_weight` and `head_weight` are [V, H] (one tensor when tied), `norm` is the target's final norm.
    """

    def __init__(self, embedding: nn.Embedding, norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = embedding, norm, head
        self.requires_grad_(False)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
    ) -> "FrozenHead":
        """Reads embedding, norm and head (and one decoder layer, dropped again) of a folder, GGUF file or hub id.

        Raises ConfigError when one of them is not in the checkpoint, or the head has a bias.
        """
        folder = target_folder(path)
        config = _first_layers(load_config(folder, trust_remote_code), 1)
        parts = find_parts(_load(folder, dtype, trust_remote_code, config=config, device=device))
        if parts.head.bias is not None:
            raise ConfigError(f"target.path: {folder}: a head with a bias is not supported")
        if parts.head.weight.shape != parts.embedding.weight.shape:
            shapes = f"{list(parts.embedding.weight.shape)} and {list(parts.head.weight.shape)}"
            raise ConfigError(f"target.path: {folder}: embedding and head differ in shape, {shapes}")
        return cls(parts.embedding, parts.norm, parts.head).to(device)

    @property
    def embed_weight(self) -> Tensor:
        return self.embedding.weight

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    @property
    def tied(self) -> bool:
        return self.embedding.weight.data_ptr() == self.head.weight.data_ptr()

    def embed(self, ids: Tensor) -> Tensor:
        """[..., H] input embeddings of token ids, scaled where the target scales them (Gemma)."""
        return self.embedding(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of states [..., H] that have been through a final norm."""
        return self.head(hidden)


def _first_layers(config: Any, count: int) -> Any:
    """A config of only the first `count` decoder layers: their number and every list with an entry a layer are cut.

    transformers then reads no other layer. Not for running: some models share keys and values from the last layers.
    """
    config = type(config).from_dict(config.to_dict())
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == total:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return config


# Running -----------------------------------------------------------------------------------------------------------


class Target:
    """A target's decoder on one device, without the layers that nobody asks for and without its head."""

    def __init__(
        self,
        info: TargetInfo,
        decoder: PreTrainedModel,
        layers: nn.ModuleList,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.info = info
        self.decoder = decoder
        self.layers = layers
        self.device = device
        self.dtype = dtype  # that it computes in, and states come out in
        self.mode: Mode = "alone"
        self.pad_to = 1  # packed token counts are rounded up to a multiple of it
        self.announce: Callable[[Pass], None] = lambda one: None  # told of each pass before it runs
        self._own_attention = str(decoder.config._attn_implementation)
        self._delta_nets = delta_net.delta_nets(layers) if device.type in delta_net.DEVICES else []

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device = "cpu",
        last_layer: int | None = None,
        trust_remote_code: bool = False,
        shards: int = 1,
    ) -> "Target":
        """Loads the decoder of a folder, GGUF file or hub id, with layers 0 to `last_layer` (all of them if None).

        With `shards` above 1 only this process's share of it, by transformers' tensor parallel plan: that many
        processes are joined in torch.distributed's default group, and all of them load and run it together.

        Weights are rounded to `dtype`; it computes in `compute_dtype(dtype, device)`, which states come out in.
        The model is read whole before layers are dropped, since some depend on how many there are. Runs rows alone
        until `self_check()` finds a faster way. Raises ConfigError.
        """
        info = target_info(path, trust_remote_code)
        if shards > 1:
            _check_shards(info, shards)
        model = _load(Path(info.path), dtype, trust_remote_code, need_head=False, device=device, shards=shards)
        parts = find_parts(model)
        if shards > 1 and not any(isinstance(parameter, DTensor) for parameter in parts.layers.parameters()):
            raise ConfigError(f"workers.gpus_per_worker: {info.model_type} has no tensor parallel plan in transformers")
        if last_layer is not None:
            if not 0 <= last_layer < info.num_layers:
                raise ConfigError(
                    f"target: layer {last_layer} is out of range; it has layers 0 to {info.num_layers - 1}"
                )
            del parts.layers[last_layer + 1 :]
        device, computed = torch.device(device), compute_dtype(dtype, device)
        if computed != as_dtype(dtype):  # else never cast: it would also round what the model keeps in float32
            parts.decoder.to(computed)  # pyright: ignore[reportArgumentType]
        try:
            decoder = parts.decoder.to(device)  # pyright: ignore[reportArgumentType]
        except torch.OutOfMemoryError:
            raise ConfigError(f"target.path: {info.path} does not fit into the memory of {device}") from None
        return cls(info, decoder, parts.layers, device, computed)

    def drop_after(self, layer: int) -> None:
        """Forgets the layers after this one."""
        del self.layers[layer + 1 :]

    @property
    def can_pack(self) -> bool:
        """Whether rows run packed: true only after a `self_check()` that proved it."""
        return self.mode == "packed"

    @torch.inference_mode()
    def forward_states(
        self,
        tokens: Tensor,
        cu_seqlens: Sequence[int],
        layer_ids: Sequence[int],
        sink: Sink,
        last_hidden: bool = False,
    ) -> None:
        """Runs rows and hands the asked layers' outputs to `sink(plane, states, first)` from inside each layer's hook.

        tokens int64 [T] (any device), row r at [cu_seqlens[r], cu_seqlens[r+1]). Plane i is layer_ids[i]; with
        `last_hidden` one more holds the last layer's output, before the final norm. `states` is [t, H], of tokens
        first to first+t-1: the whole batch when packed, else one row; it is the caller's to read until the call
        returns. What `sink` raises ends the forward.
        """
        planes = self._planes(layer_ids, last_hidden)
        tokens = on_device(tokens.long(), self.device)
        hidden = self.info.hidden_size
        if self.mode == "packed":
            count, spare = len(tokens), -len(tokens) % self.pad_to
            if spare:  # a row of its own, which nobody is given
                tokens, cu_seqlens = nn.functional.pad(tokens, (0, spare)), [*cu_seqlens, count + spare]
            bounds = Boundaries(cu_seqlens, self.device)
            self._packed(tokens, bounds, planes, lambda plane, out: sink(plane, out.reshape(-1, hidden)[:count], 0))
            return
        for group in _groups(cu_seqlens, self.mode):
            starts = [cu_seqlens[row] for row in group]
            lengths = [cu_seqlens[row + 1] - cu_seqlens[row] for row in group]
            ids = tokens.new_zeros(len(group), max(lengths))
            for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                ids[i, :length] = tokens[start : start + length]

            def deliver(plane: int, out: Tensor, starts: list[int] = starts, lengths: list[int] = lengths) -> None:
                for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                    sink(plane, out[i, :length], start)

            self._run(planes, deliver, input_ids=ids)

    def _planes(self, layer_ids: Sequence[int], last_hidden: bool) -> dict[int, list[int]]:
        """Layer to its planes; ConfigError for a layer that is out of range or was dropped at load."""
        wanted = [*layer_ids, self.info.num_layers - 1] if last_hidden else list(layer_ids)
        planes: dict[int, list[int]] = defaultdict(list)
        for plane, layer in enumerate(wanted):
            if not 0 <= layer < len(self.layers):
                raise ConfigError(f"target: layer {layer} was not loaded; layers 0 to {len(self.layers) - 1} were")
            planes[layer].append(plane)
        return planes

    def _packed(self, tokens: Tensor, bounds: Boundaries, planes: dict[int, list[int]], deliver: Any) -> None:
        lengths = [end - start for start, end in pairwise(bounds.cu_seqlens)]
        positions = on_device(torch.cat([torch.arange(length) for length in lengths]), self.device)
        token = boundaries.set(bounds)
        try:
            self._run(planes, deliver, input_ids=tokens[None], position_ids=positions[None])
        finally:
            boundaries.reset(token)

    def _run(self, planes: dict[int, list[int]], deliver: Callable[[int, Tensor], None], **inputs: Tensor) -> None:
        """One pass of the decoder. Hooks sit only on the layers asked for; the deepest one's ends the pass."""
        deepest = max(planes)
        bounds = boundaries.get() if self.mode == "packed" else None
        offsets = bounds.cu_seqlens if bounds else ()
        self.announce(Pass(self.mode, deepest, inputs["input_ids"], inputs.get("position_ids"), offsets))
        shape = (*inputs["input_ids"].shape, self.info.hidden_size)

        def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def run(module: nn.Module, args: Any, output: Any) -> None:
                states = output[0] if isinstance(output, tuple) else output
                if not isinstance(states, Tensor) or states.shape != shape:
                    raise ConfigError(
                        f"target: layer {layer} ({type(module).__name__}) gives no states of shape {shape}"
                    )
                for plane in planes[layer]:
                    deliver(plane, states)
                if layer == deepest:
                    raise _LastLayer

            return run

        handles = [self.layers[layer].register_forward_hook(hook(layer)) for layer in planes]
        try:
            with contextlib.suppress(_LastLayer):
                self.decoder(**inputs, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def follow(self, one: Pass) -> None:
        """Runs a pass that another process announced; its states go nowhere."""
        if self.mode != one.mode:
            self._use(one.mode)
        inputs = {"input_ids": one.input_ids}
        if one.position_ids is not None:
            inputs["position_ids"] = one.position_ids
        token = boundaries.set(Boundaries(one.cu_seqlens, self.device))
        try:
            self._run({one.deepest: []}, lambda plane, out: None, **inputs)
        finally:
            boundaries.reset(token)

    # Which way is right for this model

    @torch.inference_mode()
    def self_check(
        self,
        *,
        pack: bool = True,
        quantising: Callable[["Target"], object] | None = None,
        faster: Faster | None = None,
    ) -> None:
        """Chooses packed, padded or alone: the first way that gives the states of rows run alone, and logs which.

        The reference is the model's own attention on one row at a time. Packing must also leave later rows unmoved
        when the first row's tokens change. Packed rows then run the `faster` way if that passes the same check.

        quantising: rounds the layers' arithmetic, once the way is chosen, as some checkpoints do by themselves. Then no
        two kernels give the same states any more: what differs by one rounding in bfloat16 is now and then rounded to
        another of fp8's few values, and after some layers the states are about as far from each other as each is from
        the reference. So the reference is not quantised, and `faster` may be about QUANTISED times as far from it as
        plain layers are.
        """
        with unrounded(self.layers) as rounding:
            reference = self._choose(pack)
        if quantising is not None:
            quantising(self)
        if quantising is not None or rounding:
            reference = self._quantised(reference)
        if faster is not None:
            self._speed_up(faster, reference)

    def _choose(self, pack: bool) -> "_Reference":
        started = time.monotonic()
        rows = self._check_rows()
        self._use("alone")
        wanted = self._states(rows)
        reference = _Reference(rows, wanted, [TOLERANCE.get(self.dtype, 1e-3)] * len(wanted))
        for mode in ("packed", "padded") if pack else ("padded",):
            try:
                self._use(mode)
                fault = self._fault(reference)
            except (Unpackable, RuntimeError, ValueError, TypeError) as error:
                fault = first_line(error)
            if fault is None:
                break
            # A hybrid's rows pack where its package is there and works: worth a warning, not only a line.
            level = logging.WARNING if mode == "packed" and self._delta_nets else logging.INFO
            log.log(level, "rows do not run %s: %s", mode, fault)
            self._use("alone")
        log.info("self-check: rows run %s (%.1f s)", self.mode, time.monotonic() - started)
        return reference

    def _quantised(self, reference: "_Reference") -> "_Reference":
        """The reference with what may differ from it, by layer, now that the layers are quantised."""
        errors = reference.errors(self._states(reference.rows))
        told = ", ".join(f"{error:.2g} after layer {n}" for n, error in zip(self._checked, errors, strict=True))
        log.info("quantised, the states are off by %s", told)
        limits = [QUANTISED * error + BESIDES * limit for error, limit in zip(errors, reference.limits, strict=True)]
        return reference._replace(limits=limits)

    def _speed_up(self, faster: Faster, reference: "_Reference") -> None:
        if self.mode != "packed":
            log.warning("the target is not compiled, as its rows run %s", self.mode)
            return
        try:
            faster.install(self)
            fault = self._states_fault(reference)
        except ConfigError:
            raise
        except Exception as error:  # a compiler may raise anything, and the plain way is right without it
            fault = first_line(error)
        if fault is not None:
            faster.remove(self)
            log.warning("the target runs uncompiled: %s", fault)

    def _use(self, mode: Mode) -> None:
        wanted = PACKED if mode == "packed" else self._own_attention
        if str(self.decoder.config._attn_implementation) != wanted:
            with quiet_loading():
                self.decoder.set_attn_implementation(wanted)
        if str(self.decoder.config._attn_implementation) != wanted:
            raise Unpackable("its attention cannot be replaced")
        change = delta_net.pack if mode == "packed" else delta_net.unpack
        change(self._delta_nets)
        self.mode = mode

    def _check_rows(self) -> list[Tensor]:
        lengths = list(CHECK_LENGTHS)
        window = getattr(self._text, "sliding_window", None) or 0
        if 0 < window <= CHECK_WINDOW.get(self.device.type, 512):
            lengths.append(window + 33)
        if self._delta_nets:
            lengths.append(2 * delta_net.CHUNK + 33)
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(self.info.vocab_size, (length,), generator=generator) for length in lengths]

    @property
    def _text(self) -> Any:
        return self.decoder.config.get_text_config(decoder=True)

    @property
    def _checked(self) -> list[int]:
        """Layers whose outputs are compared: the first of each kind, where errors have not yet added up, and the last
        that was loaded."""
        kinds = list(getattr(self._text, "layer_types", None) or [""])[: len(self.layers)]
        return sorted({*map(kinds.index, kinds), len(self.layers) - 1})

    def _states(self, rows: list[Tensor]) -> list[list[Tensor]]:
        """Outputs [t, H] of the checked layers for each row, by layer and row, in the current mode."""
        offsets = [0, *accumulate(map(len, rows))]
        layers = self._checked
        whole = torch.empty(len(layers), offsets[-1], self.info.hidden_size, dtype=self.dtype, device=self.device)

        def keep(plane: int, states: Tensor, first: int) -> None:
            whole[plane, first : first + len(states)] = states

        self.forward_states(torch.cat(rows), offsets, layers, keep)
        return [[plane[start:end] for start, end in pairwise(offsets)] for plane in whole]

    def _fault(self, reference: "_Reference") -> str | None:
        """Why the current mode is wrong for this model; None if it is right."""
        if self.mode == "packed":
            kinds = set(getattr(self._text, "layer_types", None) or ()) - _ATTENTION
            if self._delta_nets and kinds == {"linear_attention"}:
                if (fault := delta_net.fault(self._delta_nets[0], self.device, self.dtype)) is not None:
                    return fault
            elif kinds:
                return f"it has layers of type {', '.join(sorted(kinds))}"
            if (fault := self._window_fault(reference.rows)) is not None:
                return fault
        return self._states_fault(reference)

    def _states_fault(self, reference: "_Reference") -> str | None:
        """What is wrong with the states; None if they are right."""
        rows = reference.rows
        states = self._states(rows)
        for layer, error, limit in zip(self._checked, reference.errors(states), reference.limits, strict=True):
            if not error <= limit:
                return f"states differ from a row's alone by {error:.2g} after layer {layer} (at most {limit:.2g})"
        others = self._states([(rows[0] + 1) % self.info.vocab_size, *rows[1:]])
        limit = TOLERANCE.get(self.dtype, 1e-3)  # also where quantised: a token is rounded by itself
        moved = max(
            _error(a, b) for was, now in zip(states, others, strict=True) for a, b in zip(now[1:], was[1:], strict=True)
        )
        if not moved <= limit:
            return f"the first row's tokens move later rows by {moved:.2g} (at most {limit:g})"
        return None

    def _window_fault(self, rows: list[Tensor]) -> str | None:
        """A window wider than the check's rows cannot be seen in the states, so what layers ask for is compared."""
        tokens = torch.cat(rows[:1]).to(self.device)
        bounds = Boundaries([0, len(tokens)], self.device)
        self._packed(tokens, bounds, {len(self.layers) - 1: [0]}, lambda plane, out: None)
        kinds, window = getattr(self._text, "layer_types", None), getattr(self._text, "sliding_window", None)
        wanted = {window}
        if kinds:
            attentions = [kind for kind in kinds[: len(self.layers)] if kind in _ATTENTION]
            wanted = {window if kind == "sliding_attention" else None for kind in attentions}
        if wanted and not bounds.windows:
            return "its attention does not go through transformers' attention functions"
        if bounds.windows != wanted:
            return f"layers ask for sliding windows {bounds.windows}, the config for {wanted}"
        return None


def first_line(error: Exception) -> str:
    """The first line of an error's text that says something, or else its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _groups(cu_seqlens: Sequence[int], mode: Mode) -> list[list[int]]:
    """Rows that run side by side: of like length, longest first, within PADDED_TOKENS; each alone in mode alone."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    if mode == "alone":
        return [[row] for row in range(len(lengths))]
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        fits = groups and longest * (len(groups[-1]) + 1) <= PADDED_TOKENS
        if fits and lengths[row] >= PADDED_SHARE * longest:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _error(states: Tensor, reference: Tensor) -> float:
    """Relative error of states [t, H]: the largest of the means over the first 4, last 8 and all tokens.

    A leak from the row before shows at the start (a convolution) or everywhere, a wrong sliding window at the end.
    """
    states, reference = states.float(), reference.float()
    each = (states - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)
    return max(float(part.mean()) for part in (each[:4], each[-8:], each))
