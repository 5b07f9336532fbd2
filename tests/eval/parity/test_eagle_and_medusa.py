"""EAGLE and Medusa heads in the parity gate: what it lets through, and what it must not.

Exports for vLLM are written by hand; those for every serving engine, each with its own traps, by
the exporter.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import (
    absolute,
    both_ropes,
    change,
    copied,
    drop,
    eagle,
    edited,
    edited_json,
    halves_swapped,
    layers,
    old_spelling,
    put,
    shaken,
    swapped,
    write_eagle,
    write_medusa,
)
from torch import Tensor
from toys import noisy_head, random_target

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat
from eval.parity.parity_check import TOLERANCE, check_parity
from heads.draft_head import DraftHead
from heads.eagle.eagle import EagleHead
from heads.export.writer import compute_reference_tensors, export_head
from heads.target_model.model import Target
from heads.vocab import DraftVocab

WEIGHTS, CONFIG, NOTE = "model.safetensors", "config.json", "headsmith.json"
FAR = {"num_hidden_layers": 6, "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
E31 = {"fc_norm": True, "norm_output": True}


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(**FAR)


@pytest.fixture(scope="module")
def good(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per kind of head, that nothing is wrong with."""
    root = tmp_path_factory.mktemp("good")
    write_eagle(root / "eagle3", eagle(target, num_ids=40), target)
    write_eagle(root / "eagle31", eagle(target, **E31), target)
    write_eagle(root / "eagle1", eagle(target, EagleForm.eagle1), target)
    write_medusa(root / "medusa", noisy_head(target), target)
    scaled = random_target(**FAR, rope_parameters=LLAMA3)
    write_eagle(root / "llama3", eagle(scaled), scaled, rope_scaling=old_spelling(LLAMA3))
    return root


@pytest.mark.parametrize("settings", [{"layers": [1, 3]}, {"norm_before_residual": True, **E31}])
def test_a_good_export_gives_the_trained_logits(
    target: Target, tmp_path: Path, settings: dict[str, Any]
) -> None:
    head = eagle(target, **settings)
    count = {"num_aux_hidden_states": len(head.config.layers)}
    verdict = check_parity(write_eagle(tmp_path / "export", head, target, **count))
    assert verdict.max_difference < TOLERANCE * verdict.scale / 2
    assert "format vllm, head eagle3" in verdict.lines[0]


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_that_a_head_can_have_is_read(tmp_path: Path, rope: str) -> None:
    target = random_target(**FAR, rope_parameters=ROPES[rope])
    old = None if rope == "default" else old_spelling(ROPES[rope])
    check_parity(write_eagle(tmp_path / "export", eagle(target), target, rope_scaling=old))


def test_a_qwen3_head_with_its_own_embedding_and_one_norm_over_all_features(
    target: Target, tmp_path: Path
) -> None:
    config = replace(eagle(target).config, qk_norm=True, norm_before_fc=True, own_embedding=True)
    head = shaken(EagleHead(config, DraftVocab.make_full(target.vocab_size)).attach(target))
    check_parity(write_eagle(tmp_path / "export", head, target))


def test_medusa_under_the_names_of_the_authors_and_of_vllm(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path, "medusa")
    assert check_parity(folder).max_difference == 0
    with edited(folder / "medusa_lm_head.safetensors") as tensors:
        for name in list(tensors):
            head, layer, *rest = name.split(".")
            block = f"blocks.{head}.layers.{layer}.{rest[-1]}"
            new = block if rest[0] == "linear" else f"lm_heads.{head}.weight"
            tensors[new] = tensors.pop(name)
    assert check_parity(folder).max_difference == 0


DIFFER = "logits of the served head differ"
PROJECTIONS = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
MLP = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up")]
BROKEN_TENSORS = {
    "d2t holds absolute ids": ("eagle3", absolute, "it holds target ids"),
    "t2d marks other ids": ("eagle3", change("t2d", lambda t: t.roll(1)), "other ids than t2d"),
    "d2t is missing": ("eagle3", drop("d2t"), r"missing tensors: \['d2t'\]"),
    "d2t is of floats": ("eagle3", change("d2t", torch.Tensor.float), "d2t is of torch.float32"),
    "d2t names an id twice": ("eagle3",
     lambda t: (t.pop("t2d"), t["d2t"][1:2].copy_(t["d2t"][:1] - 1)), "same id twice"),
    "d2t leads elsewhere, unmarked": ("eagle3", lambda t: (t.pop("t2d"), t["d2t"][-1:].sub_(1)),
     "drafts other ids"),
    "lm_head is missing": ("eagle3", drop("lm_head.weight"), "lm_head.weight is missing"),
    "a norm is missing": ("eagle3", drop("norm.weight"), r"missing tensors: \['norm.weight'\]"),
    "a tensor too many": ("eagle3", put("fc.bias", torch.zeros(64)), r"not read: \['fc.bias'\]"),
    "a tensor under a foreign name": (
        "eagle1",
        lambda t: t.update({"midlayer.mlp.up_proj.weight": t.pop("layers.0.mlp.up_proj.weight")}),
        "missing tensors: .*not read: .*midlayer",
    ),
    "a tensor under two names": (
        "eagle3",
        lambda t: t.update({"layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"]}),
        "under two names",
    ),
    "a tensor is misshapen": ("eagle3", change("fc.weight", lambda t: t[:, :-1]),
     r"fc.weight is \[64, 191\]"),
    "a tensor holds NaN": ("eagle3", lambda t: t["fc.weight"][0, :1].fill_(float("nan")),
     "fc.weight: 1 values"),
    "a tensor is of another dtype": ("eagle3", change("fc.weight", lambda t: t.bfloat16()),
     "its floats have dtypes"),
    "a tensor was rounded to bfloat16": ("eagle3",
     change("fc.weight", lambda t: t.bfloat16().float()), DIFFER),
    "norms of two features are swapped": ("eagle31",
     swapped("fc_norm.0.weight", "fc_norm.1.weight"), DIFFER),
    "embedding and feature in the wrong order": ("eagle3", halves_swapped(*PROJECTIONS), DIFFER),
    "the same in EAGLE-1": ("eagle1", halves_swapped("fc.weight"), DIFFER),
    "gate and up are swapped": ("eagle3", swapped(*MLP), DIFFER),
    "the two norms of the input are swapped": ("eagle3",
     swapped("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"), DIFFER),
    "two Medusa heads are swapped": ("medusa", swapped("0.1.weight", "1.1.weight"), DIFFER),
    "a Medusa head is missing": ("medusa", drop("2.1.weight"), r"missing tensors: \['2.1.w"),
    "a Medusa head under two names": ("medusa",
     lambda t: t.update({"lm_heads.0.weight": t["0.1.weight"]}), "under two names"),
    "a Medusa bias is misshapen": ("medusa", change("0.0.linear.bias", lambda t: t[1:]),
     "0.0.linear.bias is"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_TENSORS)
def test_a_fault_in_the_weights_is_named(good: Path, tmp_path: Path, fault: str) -> None:
    kind, breaks, message = BROKEN_TENSORS[fault]
    folder = copied(good, tmp_path, kind)
    with edited(next(folder.glob("*.safetensors"))) as tensors:
        breaks(tensors)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


BROKEN_CONFIGS = {
    "layers off by one": ("eagle3", layers(0, 2, 4), r"trained on \[1, 3, 5\]"),
    "layers in another order": ("eagle3", layers(3, 1, 5), "in rising order"),
    "a layer after the final norm": ("eagle3", layers(1, 3, 6), "before the final norm"),
    "layers in one place alone": (
        "eagle3",
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
        "as at the other place",
    ),
    "no layers": (
        "eagle3",
        lambda c: (c.pop("eagle_aux_hidden_state_layer_ids"), c.pop("eagle_config")),
        "eagle_aux_hidden_state_layer_ids is absent",
    ),
    "layers counted otherwise": ("eagle3", put("num_aux_hidden_states", 4), "num_aux_hidden"),
    "norm_before_residual absent": ("eagle3", drop("norm_before_residual"),
     "norm_before_residual is absent"),
    "norm_output absent": ("eagle3", drop("norm_output"), "norm_output is absent"),
    "fc_norm absent": ("eagle3", drop("fc_norm"), "fc_norm is absent"),
    "norm_before_fc absent": ("eagle3", drop("norm_before_fc"), "norm_before_fc is absent"),
    "norm_before_residual flipped": ("eagle3", put("norm_before_residual", True), DIFFER),
    "norm_output flipped": ("eagle31", put("norm_output", False), DIFFER),
    "fc_norm flipped": ("eagle31", put("fc_norm", False), "not read: .*fc_norm"),
    "a flag in two places": ("eagle3", lambda c: c["eagle_config"].update(norm_before_fc=True),
     "as at the other place"),
    "a flag as text": ("eagle3", put("norm_output", "false"), "a value of type bool"),
    "another theta": ("eagle3", both_ropes(theta=500000.0), DIFFER),
    "half of the head turned": ("eagle3", both_ropes(partial_rotary_factor=0.5), DIFFER),
    "scaling dropped": ("llama3", both_ropes(), DIFFER),
    "scaling dropped from one spelling": ("llama3", put("rope_scaling", None),
     "two spellings of RoPE disagree"),
    "theta in one spelling alone changed": ("eagle3", put("rope_theta", 500000.0),
     "two spellings of RoPE disagree"),
    "a RoPE that heads have not": ("eagle3", both_ropes(rope_type="dynamic", factor=2.0),
     "dynamic"),
    "two kinds of RoPE in one spelling": ("llama3", lambda c: c["rope_scaling"].update(type="yarn"),
     "type is 'yarn'"),
    "a RoPE without its factor": ("eagle3", both_ropes(rope_type="linear"),
     "the key 'factor' for linear"),
    "no theta": ("eagle3", drop("rope_theta", "rope_parameters"), "rope_theta is absent"),
    "positions cut": ("eagle3", put("max_position_embeddings", 2048), "max_position_embeddings"),
    "another vocabulary": ("eagle3", put("vocab_size", 128), "vocab_size is 128"),
    "another draft vocabulary": ("eagle3", put("draft_vocab_size", 32), "is .40.*32"),
    "no draft vocabulary": ("eagle3", drop("draft_vocab_size"), "draft_vocab_size is absent"),
    "another epsilon": ("eagle3", put("rms_norm_eps", 0.1), DIFFER),
    "a bias that vLLM gives the attention": ("eagle3", put("bias", True), "bias is True"),
    "a scale of the logits": ("eagle3", put("logit_scale", 2.0), DIFFER),
    "another class": ("eagle3", put("architectures", ["LlamaModel"]), "architectures"),
    "a part that is no object": ("eagle3", put("eagle_config", [2]), "needs an object"),
    "a Qwen3 layer in EAGLE-1": ("eagle1", put("model_type", "qwen3"), "model_type is 'qwen3'"),
    "a layer of another family": ("eagle3", put("model_type", "mistral"), "is 'mistral'"),
    "two layers": ("eagle3", put("num_hidden_layers", 2), "num_hidden_layers is 2"),
    "another activation": ("eagle3", put("hidden_act", "gelu"), "hidden_act is 'gelu'"),
    "a sliding window": ("eagle3", put("layer_types", ["sliding_attention"]), "layer_types is"),
    "biases of the attention by another name": ("eagle3", put("qkv_bias", True), "qkv_bias"),
    "one feature, unfused": ("eagle3",
     lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux"),
    "another dtype": ("eagle3", put("dtype", "bfloat16"), "must be the same one of"),
    "Medusa's vocabulary absent": ("medusa", drop("vocab_size"), "takes 32001"),
    "Medusa's biases dropped": ("medusa", put("medusa_fc_bias", False),
     "not read: .*0.0.linear.bias"),
    "fewer Medusa heads": ("medusa", put("medusa_num_heads", 2), "not read: .*2.1.weight"),
    "Medusa as another class": ("medusa", put("architectures", ["Medusa"]), "architectures"),
    "Medusa as another model": ("medusa", put("model_type", "llama"), "model_type is 'llama'"),
    "Medusa of another width": ("medusa", put("hidden_size", 32), "hidden_size is 32"),
    "Medusa over some ids": ("medusa", put("truncated_vocab_size", 40), "truncated_vocab_size"),
    "Medusa with one output head": ("medusa", put("original_lm_head", True), "original_lm_head"),
    "two numbers of Medusa heads": ("medusa", put("num_attention_heads", 8), "disagree"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_CONFIGS)
def test_a_fault_in_the_config_is_named(good: Path, tmp_path: Path, fault: str) -> None:
    kind, breaks, message = BROKEN_CONFIGS[fault]
    folder = copied(good, tmp_path, kind)
    with edited_json(folder / CONFIG) as config:
        breaks(config)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_layers_off_by_one_show_in_the_logits_too(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path, "eagle3")
    with edited_json(folder / CONFIG) as config, edited_json(folder / NOTE) as note:
        layers(0, 2, 4)(config)
        note["export"]["layers"] = [0, 2, 4]
    with pytest.raises(InputError, match=rf"{DIFFER}.* at depth \d, row \d+"):
        check_parity(folder)


LAYERS = [2, 4, 5]
CELLS = {
    "medusa": ("vllm", "trtllm", "original"),
    "eagle1": ("vllm", "sglang", "original"),
    "eagle1 with a bias": ("sglang", "original"),
    "eagle3": ("vllm", "sglang", "trtllm", "speculators", "original"),
    "eagle3 of all ids": ("vllm", "sglang", "trtllm", "speculators", "original"),
    "eagle3 with the target's output head": ("vllm", "sglang", "trtllm", "speculators", "original"),
    "eagle3 with a bias": ("trtllm",),
    "eagle3.1": ("vllm", "sglang", "trtllm", "speculators"),
    "eagle3 over a norm": ("vllm", "trtllm", "speculators"),
    "eagle3 with a normed residual": ("vllm", "speculators"),
    "eagle3 as Qwen3": ("vllm", "speculators"),
}


@pytest.fixture(scope="module")
def deep_target() -> Target:
    return random_target(num_hidden_layers=8, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def heads(deep_target: Target) -> dict[str, DraftHead]:
    plain = eagle(deep_target, num_ids=40, layers=LAYERS)

    def changed(**settings: Any) -> EagleHead:
        config = replace(plain.config, **settings)
        return shaken(
            EagleHead(config, DraftVocab.make_full(deep_target.vocab_size)).attach(deep_target)
        )

    return {
        "medusa": noisy_head(deep_target),
        "eagle1": eagle(deep_target, EagleForm.eagle1),
        "eagle1 with a bias": eagle(deep_target, EagleForm.eagle1, fc_bias=True),
        "eagle3": plain,
        "eagle3 of all ids": eagle(deep_target, layers=LAYERS),
        "eagle3 with the target's output head": changed(own_output_head=False),
        "eagle3 with a bias": changed(fc_bias=True),
        "eagle3.1": changed(fc_norm=True, norm_output=True, layers=(1, 3, 5, 7)),
        "eagle3 over a norm": changed(norm_before_fc=True),
        "eagle3 with a normed residual": changed(norm_before_residual=True),
        "eagle3 as Qwen3": changed(qk_norm=True),
    }


@pytest.fixture(scope="module")
def exports(
    deep_target: Target, heads: dict[str, DraftHead], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An export per cell, named `format head`."""
    root = tmp_path_factory.mktemp("good")
    for name, formats in CELLS.items():
        made = compute_reference_tensors(heads[name], deep_target)
        for engine in formats:
            out_dir = root / f"{engine} {name}"
            export_head(heads[name], ExportFormat(engine), made, out_dir, {"seed": 0})
    return root


@pytest.mark.parametrize(
    "cell", [f"{engine} {name}" for name, formats in CELLS.items() for engine in formats]
)
def test_what_the_exporter_writes_is_what_was_trained(exports: Path, cell: str) -> None:
    verdict = check_parity(exports / cell)
    assert verdict.max_difference < TOLERANCE * verdict.scale / 2


def test_a_bfloat16_export_is_compared_as_it_will_be_served(
    deep_target: Target, heads: dict[str, DraftHead], tmp_path: Path
) -> None:
    config = heads["eagle3.1"].config
    assert not isinstance(config, str)
    head = EagleHead(config, DraftVocab.make_full(deep_target.vocab_size))
    head = shaken(head).attach(deep_target, torch.bfloat16)
    folder = tmp_path / "export"
    export_head(
        head, ExportFormat.vllm, compute_reference_tensors(head, deep_target), folder, {"seed": 0}
    )
    assert any("of bfloat16" in line for line in check_parity(folder).lines)


def ids(*numbers: int) -> Callable[[dict[str, Any]], None]:
    """The same layer ids in every place."""

    def write(config: dict[str, Any]) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = list(numbers)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(numbers)

    return write


def nested(part: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config[part].update({name: value})


ENGINE_CONFIGS = {
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
    "SGLang counts features apart from the ids": ("sglang eagle3", put("num_aux_hidden_states", 4),
     "num_aux_hidden_states is 4"),
    "SGLang has no normed residual": ("sglang eagle3", put("norm_before_residual", True),
     "norm_before_residual is True"),
    "SGLang has no norm over all": ("sglang eagle3", put("norm_before_fc", True),
     "norm_before_fc is True"),
    "SGLang drops the output head at null": ("sglang eagle3", put("draft_vocab_size", None),
     "null makes it drop"),
    "SGLang gives the attention a bias for `bias`": ("sglang eagle1", put("bias", True),
     "bias is True"),
    "SGLang takes the embedding for the output head": ("sglang eagle3",
     put("tie_word_embeddings", True), "tie_word_embeddings"),
    "SGLang knows one class": ("sglang eagle3", put("architectures", ["LlamaForCausalLM"]),
     "LlamaForCausalLMEagle3"),
    "TensorRT-LLM reads norm_before_fc in eagle_config": ("trtllm eagle3 over a norm",
     lambda c: c["eagle_config"].pop("norm_before_fc"), "eagle_config.norm_before_fc is absent"),
    "TensorRT-LLM does not read norm_before_fc at the root": ("trtllm eagle3",
     put("norm_before_fc", True), "norm_before_fc is True"),
    "SGLang has no bias of the inputs of the attention": ("sglang eagle3",
     put("attention_bias", True), "attention_bias is True"),
    "vLLM has one of its output, too": ("vllm eagle3", put("attention_bias", True),
     "missing tensors: .*self_attn.o_proj.bias"),
    "vLLM's Qwen3 layer has no bias": ("vllm eagle3 as Qwen3", put("mlp_bias", True),
     "mlp_bias is True"),
    "TensorRT-LLM has another name for norm_output": ("trtllm eagle3",
     nested("eagle_config", "return_hidden_post_norm", True), "return_hidden_post_norm is True"),
    "TensorRT-LLM reads the old spelling alone": ("trtllm eagle3", drop("rope_theta"),
     "rope_theta is absent"),
    "TensorRT-LLM knows no attention_factor": (
        "trtllm eagle3",
        put("rope_scaling", {"rope_type": "default", "attention_factor": 2.0}),
        "attention_factor is 2.0",
    ),
    "TensorRT-LLM drops a bias without `bias`": ("trtllm eagle3 with a bias", drop("bias"),
     "bias is absent"),
    "TensorRT-LLM puts EAGLE3 before the name": ("trtllm eagle3",
     put("architectures", ["EAGLE3LlamaForCausalLM"]), "architectures"),
    "the authors give fc a bias unless told": ("original eagle1", drop("bias"), "bias is absent"),
    "the authors know RoPE of two keys": (
        "original eagle3",
        lambda c: (
            c.update(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5),
            c.update(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        ),
        "rope_theta of 10000",
    ),
    "the authors divide to get head_dim": ("original eagle3", put("head_dim", 16),
     "head_dim is 16"),
    "the authors know no norm flag": ("original eagle3", put("fc_norm", True), "fc_norm is True"),
    "the authors' Medusa has one block": ("original medusa", put("medusa_num_layers", 2),
     "medusa_num_layers is 2"),
    "the authors' Medusa must find the target": ("original medusa", drop("base_model_name_or_path"),
     "base_model_name_or_path is absent"),
    "TensorRT-LLM must know the number of heads": ("trtllm medusa", drop("medusa_num_heads"),
     "medusa_num_heads is absent"),
    "speculators needs its kind": ("speculators eagle3", drop("speculators_model_type"),
     "speculators_model_type is absent"),
    "speculators and vLLM differ on norm_before_residual": ("speculators eagle3",
     drop("norm_before_residual"), "norm_before_residual is absent"),
    "speculators flips the residual": ("speculators eagle3", put("norm_before_residual", True),
     DIFFER),
    "speculators' algorithm is another": ("speculators eagle3",
     nested("speculators_config", "algorithm", "eagle"), "algorithm is"),
    "speculators needs a proposal": ("speculators eagle3",
     nested("speculators_config", "proposal_methods", []), "first entry"),
    "speculators needs the target": ("speculators eagle3",
     lambda c: c["speculators_config"].pop("verifier"), "verifier.name_or_path is absent"),
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
    "speculators fuses features of its own width": ("speculators eagle3",
     put("target_hidden_size", 128), "target_hidden_size is 128"),
    "one norm or the other": ("speculators eagle3.1", put("norm_before_fc", True), "not both"),
    "vLLM knows Qwen3 by its class": ("vllm eagle3 as Qwen3", put("model_type", "llama"),
     "model_type is 'llama'"),
}  # fmt: skip


@pytest.mark.parametrize("trap", ENGINE_CONFIGS)
def test_a_trap_of_an_engine_in_the_config(exports: Path, tmp_path: Path, trap: str) -> None:
    cell, breaks, message = ENGINE_CONFIGS[trap]
    folder = copied(exports, tmp_path, cell)
    with edited_json(folder / "config.json") as config:
        breaks(config)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def foreign_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(96, 64)


ENGINE_TENSORS = {
    "SGLang's EAGLE-1 starts fc.bias at random": ("sglang eagle1", drop("fc.bias"),
     r"missing tensors: \['fc.bias'\]"),
    "vLLM has no fc.bias": ("vllm eagle1", put("fc.bias", torch.zeros(64)), "fc.bias"),
    "SGLang puts the target's embedding in": ("sglang eagle3", foreign_embedding,
     "embed_tokens.weight is not the target's"),
    "TensorRT-LLM has no t2d": ("trtllm eagle3", put("t2d", torch.zeros(96, dtype=torch.bool)),
     r"not read: \['t2d'\]"),
    "the authors need an embedding": ("original eagle1", drop("embed_tokens.weight"),
     r"missing tensors: \['embed_tokens.weight'\]"),
    "the output head that the authors' code would start at random": (
        "original eagle3 with the target's output head", drop("lm_head.weight"), "at random",
    ),
    "speculators needs t2d": ("speculators eagle3", drop("t2d"), r"missing tensors: \['t2d'\]"),
    "speculators names the layer otherwise": (
        "speculators eagle3",
        lambda t: t.update({"midlayer.hidden_norm.weight": t.pop("layers.0.hidden_norm.weight")}),
        "not read: .*midlayer",
    ),
    "the authors name the layer otherwise": (
        "original eagle3",
        lambda t: t.update({"layers.0.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")}),
        "missing tensors: .*layers.0.hidden_norm",
    ),
    "an output head instead of the target's": ("speculators eagle3 with the target's output head",
     change("lm_head.weight", lambda t: t + 0.01), DIFFER),
    "the output head that SGLang would start at random": (
        "sglang eagle3 with the target's output head", drop("lm_head.weight"), "at random",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", ENGINE_TENSORS)
def test_a_trap_of_an_engine_in_the_weights(exports: Path, tmp_path: Path, trap: str) -> None:
    cell, breaks, message = ENGINE_TENSORS[trap]
    folder = copied(exports, tmp_path, cell)
    with edited(next(folder.glob("*.safetensors"))) as tensors:
        breaks(tensors)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("eagle3_layers_to_capture: [2, 4, 5]", r"would read hidden states \[3, 5, 6\]"),
        ("", "eagle3_layers_to_capture: .* is missing"),
    ],
)
def test_the_layers_that_tensorrt_llm_is_launched_with(
    exports: Path, tmp_path: Path, wrong: str, message: str
) -> None:
    folder = copied(exports, tmp_path, "trtllm eagle3")
    text = (folder / "README.md").read_text()
    assert "eagle3_layers_to_capture: [1, 3, 4]" in text
    (folder / "README.md").write_text(text.replace("eagle3_layers_to_capture: [1, 3, 4]", wrong))
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_one_feature_as_wide_as_the_head_is_not_fused(exports: Path, tmp_path: Path) -> None:
    folder = copied(exports, tmp_path, "sglang eagle3")
    with edited_json(folder / "config.json") as config:
        ids(3)(config)
        config["num_aux_hidden_states"] = 1
    with pytest.raises(InputError, match="leaves fc out"):
        check_parity(folder)


def test_medusa_heads_lie_in_the_file_that_is_opened(exports: Path, tmp_path: Path) -> None:
    folder = copied(exports, tmp_path, "trtllm medusa")
    next(folder.glob("*.safetensors")).rename(folder / "model.safetensors")
    with pytest.raises(InputError, match=r"only reads medusa_lm_head\.safetensors"):
        check_parity(folder)
