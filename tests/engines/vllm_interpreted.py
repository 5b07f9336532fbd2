"""As `vllm_count.py`, by the runner that has DSpark and DFlash-2 and asks for a GPU's kernels.

These are interpreted, by triton in the folder `triton` of vLLM's environment, which is on no path
otherwise.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
sys.path.insert(0, str(Path(sys.prefix) / "triton"))

import numpy as np
from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# vLLM takes triton for missing unless it names one device that is there.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def boolean(mask: TensorHandle) -> TensorHandle:
    """The interpreter takes no mask of integers, as a kernel may have it."""
    return TensorHandle(np.asarray(mask.data).astype(np.bool_), mask.dtype)


def loaded(builder, pointers, mask, *rest):
    return load(builder, pointers, boolean(mask), *rest)


def stored(builder, pointers, values, mask, *rest):
    return store(builder, pointers, values, boolean(mask), *rest)


InterpreterBuilder.create_masked_load = loaded
InterpreterBuilder.create_masked_store = stored

from vllm_count import main

if __name__ == "__main__":
    main()
