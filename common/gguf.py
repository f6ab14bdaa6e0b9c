"""A GGUF file as a transformers folder: config, tokenizer and safetensors, converted once into the user's cache.

Everything that reads a target then reads a folder. Imports torch and transformers only when it converts.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConfigError
from .locks import FileLock
from .paths import cache_dir
from .target_info import CONVERTED, file_identity

log = logging.getLogger(__name__)

VERSION = 1  # of what a converted folder holds


def converted(path: str | Path) -> Path:
    """The folder of a GGUF file, made on first use: config, tokenizer, chat template and dequantised weights.

    Quantised matrices become bfloat16, float16 and float32 ones stay. Several processes convert once: one converts
    under a lock, the others wait for it. The folder appears whole or not at all. Raises ConfigError.
    """
    path = Path(path).expanduser().resolve()
    identity = file_identity(path)
    cache = cache_dir() / "targets"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{path.stem}-{identity[:12]}-v{VERSION}"
    if folder.is_dir():
        return folder
    lock = FileLock(cache / f"{folder.name}.lock", f"conversion of {path.name}")
    lock.acquire(blocking=True)
    try:
        if folder.is_dir():
            return folder
        log.info("converting %s into %s", path, folder)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            _convert(path, scratch)
            (scratch / CONVERTED).write_text(json.dumps({"identity": identity, "source": path.name}) + "\n")
            os.rename(scratch, folder)  # noqa: PTH104 (a rename over an existing folder must fail)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    finally:
        lock.release()
    return folder


def _convert(path: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
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
    tensors = _named(path, skeleton, found)
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
    tokenizer.save_pretrained(out)


def _matrix_dtype(path: Path) -> Any:
    """The dtype to keep: that of the file's matrices if they are all float32 or float16, else bfloat16."""
    import torch
    from gguf import GGMLQuantizationType, GGUFReader

    kinds = {tensor.tensor_type for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1}
    if GGMLQuantizationType.F32 in kinds and kinds <= {GGMLQuantizationType.F32, GGMLQuantizationType.F16}:
        return torch.float32
    return torch.float16 if kinds == {GGMLQuantizationType.F16} else torch.bfloat16


def _named(path: Path, skeleton: Any, found: dict[str, Any]) -> dict[str, Any]:
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
