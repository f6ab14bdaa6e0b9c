"""A GGUF file as a transformers folder: config, tokenizer and safetensors, converted once into the user's cache.

Everything that reads a target then reads a folder. What a converted folder holds is `loading.convert_gguf`'s business.
"""

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

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
        from .loading import convert_gguf  # torch, which a folder that is there does not need

        log.info("converting %s into %s", path, folder)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            convert_gguf(path, scratch)
            (scratch / CONVERTED).write_text(json.dumps({"identity": identity, "source": path.name}) + "\n")
            os.rename(scratch, folder)  # noqa: PTH104 (a rename over an existing folder must fail)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    finally:
        lock.release()
    return folder
