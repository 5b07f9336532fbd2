"""No fault of an export passes the parity gate; each is named, or shows in the logits."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT
from exported import (
    GOLDEN,
    Fault,
    absolute,
    both,
    damage,
    edited,
    edited_json,
    extra,
    flag,
    key,
    renamed,
    ropes,
    tensor,
)
from exports import write
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from eval.parity.parity_check import check_parity
from scripts import verify_export

WEIGHTS, CONFIG, NOTE = "model.safetensors", "config.json", "headsmith.json"
LOGITS = "logits of the served head differ"
IDS = "eagle_aux_hidden_state_layer_ids"
INNER, LAYER, PLAN = "eagle_config", "transformer_layer_config", "speculators_config"
BLOCK = "dflash_config"
MIDDLE, FIRST, NORM = "midlayer.", "layers.0.", "hidden_norm.weight"
SLIDING, FULL = "sliding_attention", "full_attention"
EAGLE, DFLASH = "eagle3.", "dflash."
MASK_KEY = "tokenizer.ggml.mask_token_id"


def ids(*numbers: int) -> Fault:
    """The same layer ids in every place."""
    return flag(IDS, list(numbers))


def nan(found: Tensor) -> Tensor:
    found[0, :1] = float("nan")
    return found


def twice(offsets: Tensor) -> Tensor:
    offsets[1] = offsets[0] - 1
    return offsets


# Of each export: message, and the faults that it names. That what is read counts, test_exports.py
# says; here are sizes that no toy has, and what engines would refuse or guess.
FAULTS: dict[tuple[str, str], list[tuple[str, list[Fault]]]] = {
    ("eagle3", "vllm"): [
        (LOGITS, [
            tensor("fc.weight", lambda t: t.bfloat16().float()), ropes(partial_rotary_factor=0.5),
            key("rms_norm_eps", to=0.1), key("logit_scale", to=2.0),
        ]),
        ("it holds target ids", [tensor("d2t", absolute)]),
        ("ids than t2d", [tensor("t2d", lambda t: t.roll(1)), tensor("t2d", torch.ones_like)]),
        (r"missing tensors: \['d2t'\]", [tensor("d2t")]),
        ("d2t is of torch.float32", [tensor("d2t", Tensor.float)]),
        ("same id twice", [both(tensor("t2d"), tensor("d2t", twice))]),
        ("drafts other ids", [
            both(tensor("t2d"), tensor("d2t", lambda t: torch.cat([t[:-1], t[-1:] - 1]))),
        ]),
        ("lm_head.weight is missing", [tensor("lm_head.weight")]),
        (r"not read: \['fc.bias'\]", [extra("fc.bias", torch.zeros(64))]),
        ("under two names", [renamed(f"{MIDDLE}{NORM}", f"{FIRST}{NORM}", stays=True)]),
        (r"fc.weight is \[64, 191\]", [tensor("fc.weight", lambda t: t[:, :-1])]),
        ("fc.weight: 1 values", [tensor("fc.weight", nan)]),
        ("its floats have dtypes", [tensor("fc.weight", Tensor.bfloat16)]),
        (r"trained on \[2, 4, 5\]", [ids(1, 3, 4)]),
        ("in rising order", [ids(4, 2, 5)]),
        ("before the final norm", [ids(2, 4, 8)]),
        ("as at the other place", [key(INNER, IDS, to=[3, 4, 5]), key(INNER, "fc_norm", to=True)]),
        (f"{IDS} is absent", [flag(IDS)]),
        ("num_aux_hidden", [key("num_aux_hidden_states", to=4)]),
        ("norm_before_residual is absent", [flag("norm_before_residual")]),
        ("norm_before_fc is absent", [flag("norm_before_fc")]),
        ("a value of type bool", [flag("norm_output", "false")]),
        ("two spellings of RoPE disagree", [key("rope_theta", to=5e5)]),
        ("dynamic", [ropes(rope_type="dynamic", factor=2.0)]),
        ("the key 'factor' for linear", [ropes(rope_type="linear")]),
        ("rope_theta is absent", [both(key("rope_theta"), key("rope_parameters"))]),
        ("max_position_embeddings", [key("max_position_embeddings", to=128)]),
        ("vocab_size is 128", [key("vocab_size", to=128)]),
        ("draft_vocab_size is absent", [key("draft_vocab_size")]),
        ("bias is True", [key("bias", to=True)]),
        ("architectures", [key("architectures", to=["LlamaModel"])]),
        ("needs an object", [key(INNER, to=[2])]),
        ("is 'mistral'", [key("model_type", to="mistral")]),
        ("num_hidden_layers is 2", [key("num_hidden_layers", to=2)]),
        ("hidden_act is 'gelu'", [key("hidden_act", to="gelu")]),
        ("layer_types is", [key("layer_types", to=[SLIDING])]),
        ("qkv_bias", [key("qkv_bias", to=True)]),
        ("use_aux", [key(INNER, "use_aux_hidden_state", to=False)]),
        ("must be the same one of", [key("dtype", to="bfloat16")]),
        ("missing tensors: .*self_attn.o_proj.bias", [key("attention_bias", to=True)]),
    ],
    ("eagle3, llama3", "vllm"): [("type is 'yarn'", [key("rope_scaling", "type", to="yarn")])],
    ("eagle3, qwen3", "vllm"): [
        ("mlp_bias is True", [key("mlp_bias", to=True)]),
        ("model_type is 'llama'", [key("model_type", to="llama")]),
    ],
    ("medusa", "vllm"): [
        (r"missing tensors: \['1.1.weight", [tensor("lm_heads.1.weight")]),
        # The authors' name for it.
        ("under two names", [renamed("lm_heads.0.weight", "0.1.weight", stays=True)]),
        ("0.0.linear.bias is", [tensor("blocks.0.layers.0.bias", lambda t: t[1:])]),
        ("takes 32001", [key("vocab_size")]),
        ("architectures", [key("architectures", to=["Medusa"])]),
        ("model_type is 'llama'", [key("model_type", to="llama")]),
        ("hidden_size is 32", [key("hidden_size", to=32)]),
        ("truncated_vocab_size", [key("truncated_vocab_size", to=40)]),
        ("original_lm_head", [key("original_lm_head", to=True)]),
        ("disagree", [key("num_attention_heads", to=8)]),
    ],
    ("medusa", "original"): [
        ("medusa_num_layers is 2", [key("medusa_num_layers", to=2)]),
        ("base_model_name_or_path is absent", [key("base_model_name_or_path")]),
    ],
    ("medusa", "trtllm"): [("medusa_num_heads is absent", [key("medusa_num_heads")])],
    ("eagle3", "sglang"): [
        # It counts outputs, not inputs, in the inner part alone.
        (r"read .*\[3, 5, 6\]", [ids(2, 4, 5)]),
        (r"\[1, 3, 4\]: SGLang needs \[1, 3, 5\]", [key(INNER, IDS, to=[1, 3, 5])]),
        (rf"{IDS} is \[2, 4, 5\]", [key(IDS, to=[2, 4, 5])]),
        ("num_aux_hidden_states is 4", [key("num_aux_hidden_states", to=4)]),
        ("leaves fc out", [both(ids(3), key("num_aux_hidden_states", to=1))]),
        ("norm_before_residual is True", [key("norm_before_residual", to=True)]),
        (r"missing tensors: \['input_norm.weight'\]", [
            both(key("norm_before_fc", to=True), key(INNER, "norm_before_fc", to=True)),
        ]),
        ("null makes it drop", [key("draft_vocab_size", to=None)]),
        ("tie_word_embeddings", [key("tie_word_embeddings", to=True)]),
        ("attention_bias is True", [key("attention_bias", to=True)]),
        ("embed_tokens.weight is not the target's", [
            extra("embed_tokens.weight", torch.randn(96, 64)),
        ]),
    ],
    ("eagle3, target's head", "sglang"): [("at random", [tensor("lm_head.weight")])],
    ("eagle1", "sglang"): [
        ("bias is True", [key("bias", to=True)]),
        (r"missing tensors: \['fc.bias'\]", [tensor("fc.bias")]),
    ],
    ("eagle3", "trtllm"): [
        ("norm_before_fc is True", [key("norm_before_fc", to=True)]),
        ("return_hidden_post_norm is True", [key(INNER, "return_hidden_post_norm", to=True)]),
        # It reads the old spelling alone, and no attention_factor.
        ("rope_theta is absent", [key("rope_theta")]),
        ("attention_factor is 2.0", [
            key("rope_scaling", to={"rope_type": "default", "attention_factor": 2.0}),
        ]),
        (r"not read: \['t2d'\]", [extra("t2d", torch.zeros(96, dtype=torch.bool))]),
    ],
    ("eagle3, norm before fc", "trtllm"): [
        ("eagle_config.norm_before_fc is absent", [key(INNER, "norm_before_fc")]),
    ],
    ("eagle3, bias", "trtllm"): [("bias is absent", [key("bias")])],
    ("eagle1", "original"): [
        ("bias is absent", [key("bias")]),
        (r"missing tensors: \['embed_tokens.weight'\]", [tensor("embed_tokens.weight")]),
    ],
    ("eagle3", "original"): [
        ("rope_theta of 10000", [ropes(5e5, type="linear", rope_type="linear", factor=2.0)]),
        ("head_dim is 16", [key("head_dim", to=16)]),
        ("fc_norm is True", [key("fc_norm", to=True)]),
    ],
    ("eagle3, target's head", "original"): [("at random", [tensor("lm_head.weight")])],
    ("eagle3", "speculators"): [
        ("speculators_model_type is absent", [key("speculators_model_type")]),
        ("norm_before_residual is absent", [key("norm_before_residual")]),
        ("algorithm is", [key(PLAN, "algorithm", to="eagle")]),
        ("first entry", [key(PLAN, "proposal_methods", to=[])]),
        ("verifier.name_or_path is absent", [key(PLAN, "verifier")]),
        ("target_hidden_size is 128", [key("target_hidden_size", to=128)]),
        (r"missing tensors: \['t2d'\]", [tensor("t2d")]),
    ],
    ("eagle3.1", "speculators"): [("not both", [key("norm_before_fc", to=True)])],
    ("eagle3, target's head", "speculators"): [
        (LOGITS, [tensor("lm_head.weight", lambda t: t + 0.01 * torch.arange(64))]),
    ],
    ("peagle", "vllm"): [("trained with 3", [key("mask_token_id", to=4)])],
    ("peagle", "speculators"): [("'peagle'", [key("speculators_model_type", to="eagle3")])],
    ("dflash", "vllm"): [
        ("would read hidden", [key(BLOCK, "target_layer_ids", to=[1, 2])]),
        ("causal is absent", [key(BLOCK, "causal")]),
        ("mask_token_id is absent", [key(BLOCK, "mask_token_id")]),
        ("needs 3, as it was trained", [key(BLOCK, "mask_token_id", to=4)]),
        (r"has shape \[4, 5, 96\]; must be \[3", [key("block_size", to=4)]),
        ("the target's 256 or more", [key("max_position_embeddings", to=128)]),
        ("layer_types is absent", [key("layer_types")]),
        ("DFlashDraftModel", [key("architectures", to=["LlamaForCausalLM"])]),
    ],
    ("dflash, causal in a window", "vllm"): [
        (LOGITS, [key("sliding_window", to=2)]),
        ("sliding_window is absent", [key("sliding_window")]),
    ],
    ("dflash", "speculators"): [
        ("sample_from_anchor is absent", [key("sample_from_anchor")]),
        ("needs False", [key("sample_from_anchor", to=True)]),
        ("non_causal is absent", [key("sliding_window_non_causal")]),
    ],
    ("dflash, reduced", "speculators"): [("missing tensors: .'lm_h", [tensor("lm_head.weight")])],
    ("dflash, mixed", "vllm"): [
        (LOGITS, [key("layer_types", to=[SLIDING, FULL])]),
        ("needs False", [key("layer_types", to=[FULL] * 2)]),
        # Engines go by this one word in all layers.
        ("causal is True: vLLM needs False", [key(BLOCK, "causal", to=True)]),
    ],
    ("dspark", "vllm"): [
        ("sample_from_anchor is absent", [key("sample_from_anchor")]),
        (r"weight is \[1, 72\]", [key("markov_rank", to=9)]),
        ("needs 'vanilla'", [key("markov_head_type", to="gated")]),
    ],
    ("dspark, gated", "sglang"): [("does not read", [key("markov_head_type", to="vanilla")])],
    ("dspark, in a window", "speculators"): [
        ("it drops the key", [key("sliding_window_non_causal", to=True)]),
    ],
    ("dflash, causal in a window", "sglang"): [
        ("is_causal is absent", [key("is_causal")]),
        (LOGITS, [key("is_causal", to=False)]),
    ],
    ("eagle3, norm before fc", "sglang"): [
        ("norm_before_fc is absent", [both(key("norm_before_fc"), key(INNER, "norm_before_fc"))]),
    ],
    ("dflash2, nine", "vllm"): [
        ("conv_kernel_size is absent", [key(BLOCK, "conv_kernel_size")]),
        ("causal is True: vLLM needs False", [key(BLOCK, "causal", to=True)]),
    ],
    ("dflash2, nine", "speculators"): [
        ("kind of the hea", [key("speculators_model_type", to="dflash")]),
    ],
    ("dflash2, in a window", "speculators"): [
        ("needs True", [key("sliding_window_non_causal", to=False)]),
    ],
    # What llama.cpp would compute in silence, and what it would refuse.
    ("eagle3", "llamacpp"): [
        ("d2t: llama.cpp needs 24", [tensor("d2t", lambda t: t - torch.arange(24))]),
        ("freq_base: without it llama.cpp turns with a t", [key(f"{EAGLE}rope.freq_base")]),
        ("lm_head.weight is missing", [tensor("output.weight")]),
        ("block_count is 2: llama.cpp needs 1", [key(f"{EAGLE}block_count", to=2)]),
        (r"needs a value of type int \(4\)", [key(f"{EAGLE}block_count", to=1.0)]),
        ("needs 'eagle3'", [key("general.architecture", to="llama")]),
        ("context_length is 128: .* needs 256", [key(f"{EAGLE}context_length", to=128)]),
        ("value_length is 32.* needs 16", [key(f"{EAGLE}attention.key_length", to=16)]),
        ("all must be the same one of", [key("general.file_type", to=1)]),
        ("needs the target's 96", [key("tokenizer.ggml.tokens", to=["a", "b"])]),
        ("of torch.float16: llama.cpp needs", [tensor("output_norm.weight", Tensor.half)]),
        ("d2t is of torch.float32: llama.cpp needs torch.int64", [tensor("d2t", Tensor.float)]),
    ],
    ("dflash", "llamacpp"): [
        ("the head was trained on .1, 2.", [
            key(f"{DFLASH}target_layers", to=[0, 1]),
        ]),
        ("no dflash.block_size: without it llama.cpp takes", [key(f"{DFLASH}block_size")]),
        (r"has shape \[4, 5, 96\]; must be \[3", [key(f"{DFLASH}block_size", to=4)]),
        ("mask_token_id: without it llama.cpp has", [key(MASK_KEY)]),
        ("needs 3, as it was trained", [key(MASK_KEY, to=4)]),
    ],
    ("dflash, own embedding", "llamacpp"): [
        ("head's own embedding as output head", [tensor("output.weight")]),
    ],
    ("dflash, causal in a window", "llamacpp"): [
        (LOGITS, [key(f"{DFLASH}attention.sliding_window", to=2)]),
    ],
    ("dflash, window in one layer", "llamacpp"): [
        ("see all of the t", [key(f"{DFLASH}attention.causal", to=True)]),
    ],
    ("dflash, reduced", "llamacpp"): [
        ("offsets", [tensor("d2t", lambda t: t - torch.arange(64))]),
        (r"lm_head.weight is \[64, 64\].* needs \[96, 64\]", [tensor("d2t")]),
    ],
    ("dflash2", "llamacpp"): [
        ("these are not the tensors of dflash2 heads", [tensor("selector_hidden.weight")]),
        ("is 8: .* k with k . .k . 1. of at most 64", [key(f"{DFLASH}selector_top_k", to=8)]),
        (r"kernel_projection.weight is \[48, 64\]", [key(f"{DFLASH}conv_group_size", to=16)]),
    ],
    ("dspark", "llamacpp"): [
        (r"is \[1, 64\].* needs \[1, 72\]", [tensor("conf_proj.weight", lambda w: w[:, :64])]),
    ],
    ("dspark, filled in", "llamacpp"): [
        (r"has shape \[4, 5, 96\]; must", [key(f"{DFLASH}sample_from_anchor")]),
    ],
}  # fmt: skip
# What each key is needed for; JSON's messages also say its type.
ABSENT: dict[tuple[str, str], dict[str, str]] = {
    ("medusa", "vllm"): {"medusa_fc_bias": "drops the biases: bool"},
    ("medusa", "original"): {
        "base_model_name_or_path": "finds no target: str",
        "medusa_num_heads": "takes 5: int", "medusa_num_layers": "takes 1: int",
    },
    ("eagle3", "vllm"): {
        "architectures": "finds no class: list", "model_type": "finds no class: str",
        "draft_vocab_size": "takes the target's vocabulary or fails: int",
    },
    ("eagle3, bias", "trtllm"): {"bias": "guesses, and not as others do: bool"},
    ("dspark", "vllm"): {
        "markov_head_type": "takes vanilla: str", "markov_rank": "takes 256 or none: int",
        "confidence_head_with_markov": "takes false, or true: bool",
        "enable_confidence_head": "takes false, or true: bool",
    },
    ("eagle3", "llamacpp"): {
        f"{EAGLE}block_count": "loads nothing",
        f"{EAGLE}embedding_length": "loads nothing",
        f"{EAGLE}attention.head_count_kv": "takes head_count",
        f"{EAGLE}attention.key_length": "divides the hidden size by the heads",
        f"{EAGLE}context_length": "loads nothing",
        f"{EAGLE}target_hidden_size": "loads nothing",
        f"{EAGLE}rope.freq_base": "turns with a theta of 10000",
        "tokenizer.ggml.model": "loads nothing",
    },
}  # fmt: skip
for each, absent in ABSENT.items():
    FAULTS.setdefault(each, []).extend(
        (
            rf"{name}.*: without it \S+ {why.replace(': ', '; must be a value of type ')}$",
            [key(name)],
        )
        for name, why in absent.items()
    )
CASES = [
    pytest.param(cell, fault, message, id=f"{' for '.join(cell)}: {message} {number}")
    for cell, rows in FAULTS.items()
    for message, faults in rows
    for number, fault in enumerate(faults)
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports that nothing is wrong with, each written when it is first asked for."""
    return tmp_path_factory.mktemp("good")


def copied(good: Path, tmp_path: Path, name: str = "eagle3", engine: str = "vllm") -> Path:
    return shutil.copytree(write(name, engine, good / f"{engine} {name}"), tmp_path / "export")


@pytest.mark.parametrize(("cell", "fault", "message"), CASES)
def test_a_fault_is_caught(
    good: Path, tmp_path: Path, cell: tuple[str, str], fault: Fault, message: str
) -> None:
    folder = copied(good, tmp_path, *cell)
    damage(folder, fault)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_layers_off_by_one_show_in_the_logits_too(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path)
    damage(folder, ids(1, 3, 4))
    with edited_json(folder / NOTE) as note:
        note["export"]["layers"] = [1, 3, 4]
    with pytest.raises(InputError, match=rf"{LOGITS}.* at depth \d, row \d+"):
        check_parity(folder)


def undraftable(tensors: dict[str, Tensor]) -> None:
    """Leaves the ids that the head cannot draft."""
    chosen = tensors["logits"][0, 0].isinf()
    tensors["ids"], tensors["logits"] = tensors["ids"][chosen], tensors["logits"][..., chosen]


BROKEN_GOLDEN = {
    "no tensor hidden_states.5": lambda t: t.pop("hidden_states.5"),
    "no tensor logits": lambda t: t.pop("logits"),
    "logits has shape": lambda t: t.update(logits=t["logits"][:-1]),
    "logsumexp of the served head": lambda t: t.update(logsumexp=t["logsumexp"] + 0.1),
    "a whole row is -inf": undraftable,
    "a wrong RoPE would go unnoticed": lambda t: t.update(position_ids=torch.arange(5)),
    "logits: 1 values": lambda t: t["logits"][0, 0, :1].fill_(float("nan")),
}


@pytest.mark.parametrize("message", BROKEN_GOLDEN)
def test_a_fault_in_the_golden_file_is_named(good: Path, tmp_path: Path, message: str) -> None:
    folder = copied(good, tmp_path)
    with edited(folder / GOLDEN) as tensors:
        BROKEN_GOLDEN[message](tensors)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def reworded(file: Path, text: str, other: str) -> None:
    content = file.read_text()
    assert text in content
    file.write_text(content.replace(text, other))


LAUNCH, FILE = "eagle3_layers_to_capture: ", "eagle3-toy-F32.gguf"
VLLM, TRTLLM, LLAMACPP = ("eagle3", "vllm"), ("eagle3", "trtllm"), ("eagle3", "llamacpp")
BROKEN_FOLDERS: list[tuple[tuple[str, str], Any, str]] = [
    (VLLM, lambda f: (f / "pytorch_model.bin").touch(), "pickled files"),
    (VLLM, lambda f: shutil.copy(f / WEIGHTS, f / "more.safetensors"), "exactly one"),
    (VLLM, lambda f: shutil.copy(f / GOLDEN, f / "parity.safetensors"), "exactly one"),
    (VLLM, lambda f: shutil.rmtree(f / "parity"), "cannot be checked"),
    (VLLM, lambda f: save_file({"logits": torch.zeros(1)}, f / GOLDEN), "metadata"),
    (VLLM, lambda f: cut(f / WEIGHTS, -100), "truncated"),
    (VLLM, lambda f: (f / CONFIG).write_text("[]"), "list, not an object"),
    (VLLM, lambda f: (f / CONFIG).write_text("{"), "not JSON"),
    (VLLM, lambda f: (f / CONFIG).unlink(), "cannot be read"),
    (VLLM, lambda f: (f / NOTE).unlink(), "give --format"),
    (VLLM, shutil.rmtree, "no such folder"),
    (TRTLLM, lambda f: reworded(f / "README.md", f"{LAUNCH}[1, 3, 4]", f"{LAUNCH}[2, 4, 5]"),
     r"would read hidden states \[3, 5, 6\]"),
    (TRTLLM, lambda f: reworded(f / "README.md", f"{LAUNCH}[1, 3, 4]", ""),
     f"{LAUNCH}.* is missing"),
    (("medusa", "trtllm"), lambda f: next(f.glob("*.safetensors")).rename(f / WEIGHTS),
     r"only reads medusa_lm_head\.safetensors"),
    (LLAMACPP, lambda f: cut(f / FILE, 2000), "not a whole GGUF file"),
    (LLAMACPP, lambda f: cut(f / FILE, 50), "not a whole GGUF file"),
    (LLAMACPP, lambda f: (f / FILE).write_bytes(b"GGUF\2" + (f / FILE).read_bytes()[5:]),
     "not a whole GGUF file"),
    # The length of the first key.
    (LLAMACPP, lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:24] + b"\xff" * 8),
     "not a whole GGUF file"),
    (LLAMACPP, lambda f: shutil.copy(f / FILE, f / "a.gguf"),
     rf"GGUF files \['a.gguf', '{FILE}'\]; must be exactly one"),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "breaks", "message"), BROKEN_FOLDERS)
def test_a_fault_in_the_folder_is_named(
    good: Path, tmp_path: Path, cell: tuple[str, str], breaks: Any, message: str
) -> None:
    folder = copied(good, tmp_path, *cell)
    breaks(folder)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_the_note_must_fit_the_golden_file_and_the_format(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path)
    with pytest.raises(InputError, match="--format sglang"):
        check_parity(folder, "sglang")
    with edited_json(folder / NOTE) as note:
        note["export"]["format"] = "tgi"
    with pytest.raises(InputError, match=r"no heads of kind eagle3; allowed: .*'vllm'"):
        check_parity(folder)
    with edited_json(folder / NOTE) as note:
        note["export"]["kind"] = "medusa"
    with pytest.raises(InputError, match=r"export\.kind=medusa"):
        check_parity(folder)


def test_the_command_prints_one_line_per_check(good: Path, tmp_path: Path) -> None:
    """On a machine that has neither transformers nor hydra."""
    folder = copied(good, tmp_path)
    (folder / NOTE).unlink()
    block = (
        "import sys, runpy; sys.modules.update(dict.fromkeys(['transformers', 'hydra', 'heads']));"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script = str(ROOT / "scripts" / "verify_export.py")
    command = [sys.executable, "-c", block, script, str(folder), "--format", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert first.endswith("format vllm, head eagle3")
    assert last.startswith("parity: max |difference| ") and " of logits up to " in last


def test_the_command_says_what_is_wrong(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(good, tmp_path)
    (folder / CONFIG).unlink()
    monkeypatch.setattr(sys, "argv", ["verify_export.py", str(folder)])
    assert verify_export.main() == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("error: ") and "config.json" in found.err
