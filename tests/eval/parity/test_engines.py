"""The parity gate on what the exporter writes: every engine, and each one's own traps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import change, copied, drop, eagle, edited, edited_json, put, shaken
from torch import Tensor
from toys import noisy_head, random_target

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat
from eval.parity.gate import TOLERANCE, check_parity
from heads.eagle.head import EagleHead
from heads.export.golden import golden
from heads.export.writer import export_head
from heads.head import DraftHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

DIFFER = "logits of the served head differ"
LAYERS = [2, 4, 5]
CELLS = {
    "medusa": ("vllm", "trtllm", "tgi", "original"),
    "eagle1": ("vllm", "sglang", "original"),
    "eagle1 with a bias": ("sglang", "original"),
    "eagle3": ("vllm", "sglang", "trtllm", "speculators", "original"),
    "eagle3 of all ids": ("vllm", "sglang", "trtllm", "speculators", "original"),
    "eagle3 with the target's output head": (
        "vllm",
        "sglang",
        "trtllm",
        "speculators",
        "original",
    ),
    "eagle3 with a bias": ("trtllm",),
    "eagle3.1": ("vllm", "sglang", "trtllm", "speculators"),
    "eagle3 over a norm": ("vllm", "trtllm", "speculators"),
    "eagle3 with a normed residual": ("vllm", "speculators"),
    "eagle3 as Qwen3": ("vllm", "speculators"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(num_hidden_layers=8, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def heads(target: Target) -> dict[str, DraftHead]:
    plain = eagle(target, num_ids=40, layers=LAYERS)

    def changed(**settings: Any) -> EagleHead:
        config = replace(plain.config, **settings)
        return shaken(EagleHead(config, DraftVocab.everything(target.vocab_size)).attach(target))

    return {
        "medusa": noisy_head(target),
        "eagle1": eagle(target, EagleForm.eagle1),
        "eagle1 with a bias": eagle(target, EagleForm.eagle1, fc_bias=True),
        "eagle3": plain,
        "eagle3 of all ids": eagle(target, layers=LAYERS),
        "eagle3 with the target's output head": changed(own_output_head=False),
        "eagle3 with a bias": changed(fc_bias=True),
        "eagle3.1": changed(fc_norm=True, norm_output=True, layers=(1, 3, 5, 7)),
        "eagle3 over a norm": changed(norm_before_fc=True),
        "eagle3 with a normed residual": changed(norm_before_residual=True),
        "eagle3 as Qwen3": changed(qk_norm=True),
    }


@pytest.fixture(scope="module")
def good(
    target: Target, heads: dict[str, DraftHead], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An export per cell, named `format head`."""
    root = tmp_path_factory.mktemp("good")
    for name, formats in CELLS.items():
        made = golden(heads[name], target)
        for engine in formats:
            out_dir = root / f"{engine} {name}"
            export_head(heads[name], ExportFormat(engine), made, out_dir, {"seed": 0})
    return root


@pytest.mark.parametrize(
    "cell", [f"{engine} {name}" for name, formats in CELLS.items() for engine in formats]
)
def test_what_the_exporter_writes_is_what_was_trained(good: Path, cell: str) -> None:
    verdict = check_parity(good / cell)
    assert verdict.max_difference < TOLERANCE * verdict.scale / 2


def test_a_bfloat16_export_is_compared_as_it_will_be_served(
    target: Target, heads: dict[str, DraftHead], tmp_path: Path
) -> None:
    config = heads["eagle3.1"].config
    assert not isinstance(config, str)
    head = EagleHead(config, DraftVocab.everything(target.vocab_size))
    head = shaken(head).attach(target, torch.bfloat16)
    folder = tmp_path / "export"
    export_head(head, ExportFormat.vllm, golden(head, target), folder, {"seed": 0})
    assert any("of bfloat16" in line for line in check_parity(folder).lines)


def ids(*numbers: int) -> Callable[[dict[str, Any]], None]:
    """The same layer ids in every place."""

    def write(config: dict[str, Any]) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = list(numbers)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(numbers)

    return write


def nested(part: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config[part].update({name: value})


CONFIGS = {
    "SGLang counts outputs, not inputs": ("sglang eagle3", ids(*LAYERS), r"read .*\[3, 5, 6\]"),
    "SGLang reads the nested ids alone": (
        "sglang eagle3", nested("eagle_config", "eagle_aux_hidden_state_layer_ids", [1, 3, 5]),
        r"\[1, 3, 4\]: SGLang needs \[1, 3, 5\]",
    ),
    "SGLang's ids differ where others read them": (
        "sglang eagle3",
        put("eagle_aux_hidden_state_layer_ids", LAYERS),
        r"eagle_aux_hidden_state_layer_ids is \[2, 4, 5\]",
    ),
    "SGLang counts features apart from the ids": (
        "sglang eagle3", put("num_aux_hidden_states", 4), "num_aux_hidden_states is 4",
    ),
    "SGLang has no normed residual": (
        "sglang eagle3", put("norm_before_residual", True), "norm_before_residual is True",
    ),
    "SGLang has no norm over all": (
        "sglang eagle3", put("norm_before_fc", True), "norm_before_fc is True",
    ),
    "SGLang drops the output head at null": (
        "sglang eagle3", put("draft_vocab_size", None), "null makes it drop",
    ),
    "SGLang gives the attention a bias for `bias`": (
        "sglang eagle1", put("bias", True), "bias is True",
    ),
    "SGLang takes the embedding for the output head": (
        "sglang eagle3", put("tie_word_embeddings", True), "tie_word_embeddings",
    ),
    "SGLang knows one class": (
        "sglang eagle3", put("architectures", ["LlamaForCausalLM"]), "LlamaForCausalLMEagle3",
    ),
    "TensorRT-LLM reads norm_before_fc in eagle_config": (
        "trtllm eagle3 over a norm",
        lambda c: c["eagle_config"].pop("norm_before_fc"),
        "eagle_config.norm_before_fc is absent",
    ),
    "TensorRT-LLM does not read norm_before_fc at the root": (
        "trtllm eagle3", put("norm_before_fc", True), "norm_before_fc is True",
    ),
    "SGLang has no bias of the inputs of the attention": (
        "sglang eagle3", put("attention_bias", True), "attention_bias is True",
    ),
    "vLLM has one of its output, too": (
        "vllm eagle3", put("attention_bias", True), "missing: .*self_attn.o_proj.bias",
    ),
    "vLLM's Qwen3 layer has no bias": (
        "vllm eagle3 as Qwen3", put("mlp_bias", True), "mlp_bias is True",
    ),
    "TensorRT-LLM has another name for norm_output": (
        "trtllm eagle3",
        nested("eagle_config", "return_hidden_post_norm", True),
        "return_hidden_post_norm is True",
    ),
    "TensorRT-LLM reads the old spelling alone": (
        "trtllm eagle3", drop("rope_theta"), "rope_theta is absent",
    ),
    "TensorRT-LLM knows no attention_factor": (
        "trtllm eagle3",
        put("rope_scaling", {"rope_type": "default", "attention_factor": 2.0}),
        "attention_factor is 2.0",
    ),
    "TensorRT-LLM drops a bias without `bias`": (
        "trtllm eagle3 with a bias", drop("bias"), "bias is absent",
    ),
    "TensorRT-LLM puts EAGLE3 before the name": (
        "trtllm eagle3", put("architectures", ["EAGLE3LlamaForCausalLM"]), "architectures",
    ),
    "the authors give fc a bias unless told": (
        "original eagle1", drop("bias"), "bias is absent",
    ),
    "the authors know RoPE of two keys": (
        "original eagle3",
        lambda c: (
            c.update(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5),
            c.update(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        ),
        "rope_theta of 10000",
    ),
    "the authors divide to get head_dim": (
        "original eagle3", put("head_dim", 16), "head_dim is 16",
    ),
    "the authors know no norm flag": ("original eagle3", put("fc_norm", True), "fc_norm is True"),
    "the authors' Medusa has one block": (
        "original medusa", put("medusa_num_layers", 2), "medusa_num_layers is 2",
    ),
    "TGI takes a config with architectures for another model": (
        "tgi medusa", put("architectures", ["MedusaModel"]), "architectures",
    ),
    "TGI must find the target": (
        "tgi medusa", drop("base_model_name_or_path"), "base_model_name_or_path is absent",
    ),
    "TensorRT-LLM must know the number of heads": (
        "trtllm medusa", drop("medusa_num_heads"), "medusa_num_heads is absent",
    ),
    "speculators needs its kind": (
        "speculators eagle3", drop("speculators_model_type"), "speculators_model_type is absent",
    ),
    "speculators and vLLM differ on norm_before_residual": (
        "speculators eagle3", drop("norm_before_residual"), "norm_before_residual is absent",
    ),
    "speculators flips the residual": (
        "speculators eagle3", put("norm_before_residual", True), DIFFER,
    ),
    "speculators' algorithm is another": (
        "speculators eagle3", nested("speculators_config", "algorithm", "eagle"), "algorithm is",
    ),
    "speculators needs a proposal": (
        "speculators eagle3", nested("speculators_config", "proposal_methods", []), "first entry",
    ),
    "speculators needs the target": (
        "speculators eagle3",
        lambda c: c["speculators_config"].pop("verifier"),
        "verifier.name_or_path is absent",
    ),
    "speculators' layer without RoPE": (
        "speculators eagle3",
        lambda c: [c["transformer_layer_config"].pop(n) for n in ("rope_theta", "rope_parameters")],
        "transformer_layer_config.rope_theta is absent",
    ),
    "speculators counts three layers unless told": (
        "speculators eagle3.1",
        lambda c: c["transformer_layer_config"].pop("num_aux_hidden_states"),
        "num_aux_hidden_states is absent",
    ),
    "speculators fuses features of its own width": (
        "speculators eagle3", put("target_hidden_size", 128), "target_hidden_size is 128",
    ),
    "one norm or the other": (
        "speculators eagle3.1", put("norm_before_fc", True), "not both",
    ),
    "vLLM knows Qwen3 by its class": (
        "vllm eagle3 as Qwen3", put("model_type", "llama"), "model_type is 'llama'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", CONFIGS)
def test_a_trap_of_an_engine_in_the_config(good: Path, tmp_path: Path, trap: str) -> None:
    cell, breaks, message = CONFIGS[trap]
    folder = copied(good, tmp_path, cell)
    with edited_json(folder / "config.json") as config:
        breaks(config)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def foreign_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(96, 64)


TENSORS = {
    "SGLang's EAGLE-1 starts fc.bias at random": (
        "sglang eagle1", drop("fc.bias"), r"missing: \['fc.bias'\]",
    ),
    "vLLM has no fc.bias": ("vllm eagle1", put("fc.bias", torch.zeros(64)), "fc.bias"),
    "SGLang puts the target's embedding in": (
        "sglang eagle3", foreign_embedding, "embed_tokens.weight is not the target's",
    ),
    "TensorRT-LLM has no t2d": (
        "trtllm eagle3", put("t2d", torch.zeros(96, dtype=torch.bool)), r"not read: \['t2d'\]",
    ),
    "the authors need an embedding": (
        "original eagle1", drop("embed_tokens.weight"), r"missing: \['embed_tokens.weight'\]",
    ),
    "the output head that the authors' code would start at random": (
        "original eagle3 with the target's output head", drop("lm_head.weight"), "at random",
    ),
    "speculators needs t2d": ("speculators eagle3", drop("t2d"), r"missing: \['t2d'\]"),
    "speculators names the layer otherwise": (
        "speculators eagle3",
        lambda t: t.update({"midlayer.hidden_norm.weight": t.pop("layers.0.hidden_norm.weight")}),
        "not read: .*midlayer",
    ),
    "the authors name the layer otherwise": (
        "original eagle3",
        lambda t: t.update({"layers.0.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")}),
        "missing: .*layers.0.hidden_norm",
    ),
    "an output head instead of the target's": (
        "speculators eagle3 with the target's output head",
        change("lm_head.weight", lambda t: t + 0.01),
        DIFFER,
    ),
    "the output head that SGLang would start at random": (
        "sglang eagle3 with the target's output head", drop("lm_head.weight"), "at random",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TENSORS)
def test_a_trap_of_an_engine_in_the_weights(good: Path, tmp_path: Path, trap: str) -> None:
    cell, breaks, message = TENSORS[trap]
    folder = copied(good, tmp_path, cell)
    with edited(next(folder.glob("*.safetensors"))) as tensors:
        breaks(tensors)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("eagle3_layers_to_capture: [2, 4, 5]", r"would read hidden states \[3, 5, 6\]"),
        ("", "no eagle3_layers_to_capture"),
    ],
)
def test_the_layers_that_tensorrt_llm_is_launched_with(
    good: Path, tmp_path: Path, wrong: str, message: str
) -> None:
    folder = copied(good, tmp_path, "trtllm eagle3")
    text = (folder / "README.md").read_text()
    assert "eagle3_layers_to_capture: [1, 3, 4]" in text
    (folder / "README.md").write_text(text.replace("eagle3_layers_to_capture: [1, 3, 4]", wrong))
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_one_feature_as_wide_as_the_head_is_not_fused(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path, "sglang eagle3")
    with edited_json(folder / "config.json") as config:
        ids(3)(config)
        config["num_aux_hidden_states"] = 1
    with pytest.raises(InputError, match="leaves fc out"):
        check_parity(folder)


def test_medusa_heads_lie_in_the_file_that_is_opened(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path, "tgi medusa")
    next(folder.glob("*.safetensors")).rename(folder / "model.safetensors")
    with pytest.raises(InputError, match=r"reads medusa_lm_head\.safetensors alone"):
        check_parity(folder)
