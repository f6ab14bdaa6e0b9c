"""Kernels are compiled once: what differs from call to call does not decide what is compiled."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Sizes of the model, and memory that a call allocates for itself or that begins where an allocation does.
STEADY = {
    *("q", "keys", "values", "own_keys", "own_values", "out", "lse", "delta", "dq", "dk", "dv", "slope"),
    *(f"{name}_{part}" for name in ("q", "k", "v", "ok", "ov", "o", "s", "d") for part in ("head", "row")),
    *("group", "scale", "unit", "logits", "target", "size", "stride", "total", "part"),
    *("both", "inner", "slopes", "slopes_stride", "mixed"),
    *("weight", "turned", "row_scale", "column_scale", "rows", "columns"),
}  # fmt: skip

SHOW = """
import json
from paceline.consumer import attention_kernels, kernels
from triton.runtime.jit import JITFunction
found = {}
for module in (attention_kernels, kernels):
    for name, kernel in vars(module).items():
        if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
            given = [p for p in kernel.params if not p.is_constexpr]
            found[name] = [(p.name, p.do_not_specialize or p.do_not_specialize_on_alignment) for p in given]
print(json.dumps([found, kernels.variants()]))
"""


def test_nothing_that_varies_is_compiled_for():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env=environment)
    kernels, variants = json.loads(result.stdout)
    assert variants == 0
    assert {"forward_kernel", "queries_kernel", "keys_kernel", "_cross_entropy_kernel"} <= set(kernels)
    for name, parameters in kernels.items():
        for parameter, free in parameters:
            assert free != (parameter in STEADY), f"{name}: {parameter}"
