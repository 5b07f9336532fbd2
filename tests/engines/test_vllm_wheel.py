"""What vLLM's newest release reads, by the Python files of its wheel: no build of it runs on a CPU.

Nothing of vLLM is imported. A rename on either side, in an export or in vLLM, is a difference here.
"""

import ast
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from commands import ROOT
from environments import VLLM_WHEEL, needs
from exports import HEADS, made

from conf.settings.export import ExportFormat
from heads.export.versions import CHECKS
from heads.medusa import LAST_VERSIONS

MODELS, SPECULATORS = "vllm/model_executor/models/", "vllm/transformers_utils/configs/speculators/"
EAGLE_CONFIG, SETTINGS = "vllm/transformers_utils/configs/eagle.py", "vllm/config/speculative.py"
RUNNER = "vllm/v1/worker/gpu/spec_decode/"
# Of every model: helpers for weights, and interfaces.
SHARED = ("utils", "interfaces", "adapters")
ELSEWHERE = {
    EAGLE_CONFIG: ("architectures",),
    "vllm/transformers_utils/config.py": (
        "dtype", "model_type", "rope_type", "rope_theta", "type",
    ),
    "vllm/model_executor/layers/rotary_embedding/__init__.py": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    f"{RUNNER}eagle/eagle3_utils.py": ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"),
    f"{RUNNER}utils.py": ("mask_token_id",),
    f"{RUNNER}dspark/speculator.py": ("sample_from_anchor",),
}  # fmt: skip
"""Keys that vLLM reads outside the loader, by the file that does."""
OF_OTHERS = {
    "rope_scaling": "transformers, which makes rope_parameters of it",
    "use_sliding_window": "transformers, which drops sliding_window without it",
    "torch_dtype": "TensorRT-LLM",
    "return_hidden_post_norm": "TensorRT-LLM",
    "block_size": "SGLang, and for a block's tokens vLLM, which the command names",
    "markov_head_type": "SGLang; vLLM has one type alone",
    "num_target_layers": "SGLang",
    "base_model_name_or_path": "this project",
    "num_depths": "this project",
    "speculators_version": "speculators",
    "algorithm": "speculators",
    "default_proposal_method": "speculators",
}
"""Keys of exports that vLLM need not read, and who does."""
KNOWN = OF_OTHERS.keys() | {key for keys in ELSEWHERE.values() for key in keys}
LAYERS = "transformer_layer_config"
CELLS = [
    (name, engine)
    for name, row in HEADS.items()
    for engine in row[0].split()
    if engine in ("vllm", "speculators") and name != "medusa"
]

pytestmark = [pytest.mark.engine, needs(VLLM_WHEEL)]


@cache
def wheel() -> ZipFile:
    return ZipFile(os.environ[VLLM_WHEEL])


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse(wheel().read(path))


@cache
def assigned(path: str, name: str) -> Any:
    """The value that a file gives to a name: a table, or the words of a `Literal`."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            if not isinstance(node.value, ast.Subscript):
                return ast.literal_eval(node.value)
            items = node.value.slice
            parts = items.elts if isinstance(items, ast.Tuple) else [items]
            words: set[str] = set()
            for part in parts:
                inner = isinstance(part, ast.Name)
                words |= assigned(path, part.id) if inner else {ast.literal_eval(part)}
            return words
    raise AssertionError(f"{path} has no {name}")


@cache
def fields(name: str) -> set[str]:
    """The fields of a class of `SETTINGS`."""
    (found,) = (n for n in parsed(SETTINGS).body if isinstance(n, ast.ClassDef) and n.name == name)
    return {ast.unparse(each.target) for each in found.body if isinstance(each, ast.AnnAssign)}


def words_of(tree: ast.AST) -> set[str]:
    """Strings but docstrings, and what is read of an object whose name ends with `config`."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                found.add(node.value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
            found.add(node.attr)
    return found


def files_of(module: str) -> set[str]:
    """A loader's file, and those of the models that it is made of."""
    found, waiting = set(), [f"{MODELS}{module}.py"]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                name = node.module.removeprefix("vllm.model_executor.models.")
                if (node.level == 1 or name != node.module) and name not in SHARED:
                    waiting.append(f"{MODELS}{name}.py")
    return found


@cache
def words_of_loader(module: str) -> set[str]:
    return set().union(*(words_of(parsed(path)) for path in files_of(module)))


@cache
def registered() -> dict[str, tuple[str, str]]:
    """Module and class of each architecture of a draft."""
    return assigned(f"{MODELS}registry.py", "_SPECULATIVE_DECODING_MODELS")


@cache
def converters() -> dict[str, ast.FunctionDef]:
    """The function that converts a config of speculators, by the kind of head."""
    tree, found = parsed(f"{SPECULATORS}algos.py"), {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            (decorator,) = node.decorator_list
            assert isinstance(decorator, ast.Call)
            found[ast.literal_eval(decorator.args[0])] = node
    return found


def words_of_converter(kind: str) -> set[str]:
    """Those of the function and of the converters that it calls."""
    functions = {each.name: name for name, each in converters().items()}
    called = {
        functions[node.func.id]
        for node in ast.walk(converters()[kind])
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in functions
    }
    return words_of(converters()[kind]).union(*map(words_of_converter, called))


def config_of(name: str, engine: str) -> dict[str, Any]:
    return made(name).plan_export(ExportFormat(engine)).files().config


def class_of(config: dict[str, Any], method: str) -> str:
    """The architecture of a draft under which vLLM looks for its class."""
    (named,) = config["architectures"]
    if named in registered():
        return named
    prefixes = {
        node.values[0].value
        for node in ast.walk(parsed(EAGLE_CONFIG))
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant)
    }
    (prefix,) = (each for each in prefixes if each.lower() == method)
    return prefix + named


def class_of_converted(config: dict[str, Any]) -> str:
    """The same for a config of speculators: a name in its converter, if several that of a type."""
    known = words_of(converters()[config["speculators_model_type"]]) & registered().keys()
    ending = re.compile(config[LAYERS]["model_type"] + "(ForCausalLM|DSparkModel)$", re.I)
    (found,) = [each for each in known if len(known) == 1 or ending.search(each)]
    return found


def speculative(text: str) -> list[dict[str, Any]]:
    """The speculative configs of the commands in a text."""
    return [json.loads(each) for each in re.findall(r"--speculative-config '(\{.*?\})'", text)]


def keys_of(config: dict[str, Any]) -> set[str]:
    """Keys at every depth, but those that say no: without them vLLM does the same."""
    inner = (keys_of(value) for value in config.values() if isinstance(value, dict))
    return {key for key, value in config.items() if value}.union(*inner)


def test_the_wheel_is_the_version_of_the_table() -> None:
    newest = next(check for check in CHECKS if check.engine == "vLLM")
    assert Path(os.environ[VLLM_WHEEL]).name.split("-")[1] == newest.version
    assert newest.how == "read"


@pytest.mark.parametrize("name", [name for name, engine in CELLS if engine == "vllm"])
def test_a_start_command_is_one_that_vllm_takes(name: str) -> None:
    (config,) = speculative(made(name).plan_export(ExportFormat.vllm).command)
    assert config["method"] in assigned(SETTINGS, "SpeculativeMethod")
    assert config.keys() <= fields("SpeculativeConfig")


@pytest.mark.parametrize("name", [name for name, engine in CELLS if engine == "vllm"])
def test_a_loader_reads_every_key(name: str) -> None:
    config = config_of(name, "vllm")
    (command,) = speculative(made(name).plan_export(ExportFormat.vllm).command)
    architecture = class_of(config, command["method"])
    assert architecture in registered()
    assert keys_of(config) - words_of_loader(registered()[architecture][0]) <= KNOWN


@pytest.mark.parametrize("name", [name for name, engine in CELLS if engine == "speculators"])
def test_a_loader_reads_every_key_of_speculators(name: str) -> None:
    """Those of the layers; the others are read, or lost, where vLLM converts the config."""
    config = config_of(name, "speculators")
    read = words_of_loader(registered()[class_of_converted(config)][0])
    layers, kind = config.pop(LAYERS), config["speculators_model_type"]
    assert keys_of(layers) - read <= KNOWN
    converted = words_of_converter(kind) | words_of(parsed(f"{SPECULATORS}base.py"))
    # Read of DFlash alone; without a window, rows see later rows anyway.
    if not layers.get("use_sliding_window"):
        converted |= {"sliding_window_non_causal"}
    assert keys_of(config) - converted <= OF_OTHERS.keys() | {"architectures", "dtype"}


def test_every_exception_is_one() -> None:
    """Keys of others are written, and keys of other files are read there."""
    written = set().union(*(keys_of(config_of(*cell)) for cell in CELLS))
    assert OF_OTHERS.keys() <= written
    for path, keys in ELSEWHERE.items():
        assert {*keys} <= written & words_of(parsed(path))


def test_speculators_heads_are_those_that_vllm_converts() -> None:
    kinds = {
        config_of(name, engine)["speculators_model_type"]
        for name, engine in CELLS
        if engine == "speculators"
    }
    assert kinds == converters().keys()


def test_medusa_is_gone() -> None:
    assert "medusa" not in assigned(SETTINGS, "SpeculativeMethod")
    assert not [name for name in registered() if "medusa" in name.lower()]
    versions = [check.version for check in CHECKS if check.engine == "vLLM"]
    assert versions[1].startswith(LAST_VERSIONS[ExportFormat.vllm])


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_type_what_vllm_takes(page: Path) -> None:
    for config in speculative(page.read_text()):
        assert config["method"] in assigned(SETTINGS, "SpeculativeMethod")
        assert config.keys() <= fields("SpeculativeConfig")


def test_vllm_knows_what_its_page_names() -> None:
    """Classes, keys and values of the newest version, with those that no export has."""
    text = (ROOT / "docs/serving/vllm.md").read_text()
    sections = re.findall(r"^(?:## What 0.33 knows|### Keys)\n.*?(?=^## )", text, re.M | re.S)
    assert len(sections) == 2
    named = set(re.findall(r'"(\w+)"', "".join(sections)))
    classes = {name for name in named if name.endswith("Model")}
    methods = assigned(SETTINGS, "RejectionSampleMethod") | assigned(SETTINGS, "SpeculativeMethod")
    assert len(classes) == 3
    assert classes <= registered().keys()
    assert named - classes <= fields("SpeculativeConfig") | methods | {
        "fp8",
        "nvfp4",
        "enable_thinking",
    }
    assert {"draft_lm_head_quantization", "num_speculative_tokens_per_batch_size"} <= named
