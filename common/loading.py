"""Loading a target, whole or in part: its dtype, its weights' completeness, GGUF files, and where its parts are.

    load_model       a causal LM from a folder, every weight accounted for
    load_causal_lm   the same from anything that names a target, for generation
    FrozenHead       embedding, final norm and head alone, for drafter and losses
    convert_gguf     a GGUF file to such a folder

Owned here: what is read, and that nothing of it is made up in silence. Not here: running layers (target.py), and where
a converted file is kept (gguf.py).
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.distributed.configuration_utils import DistributedConfig

from .errors import ConfigError, first_line
from .quantised import check_quantisation, quantisation, restore
from .target_info import TargetInfo, load_config, random_weights, target_folder

_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "embedding_norm")


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


def load_model(
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
                raise ConfigError(f"target.path: {folder} does not load: {first_line(error)}") from error
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


def check_shards(info: TargetInfo, shards: int) -> None:
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
        raise ConfigError(f"target.path: {path} does not convert: {first_line(error)}") from error
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
    model = load_model(target_folder(path), dtype, trust_remote_code)
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
        parts = find_parts(load_model(folder, dtype, trust_remote_code, config=config, device=device))
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
