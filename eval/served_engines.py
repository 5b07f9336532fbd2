"""How each engine reads an EAGLE head: names, keys, defaults and layer numbers.

Sources, read November 2026: vLLM 0.32 `model_executor/models/llama_eagle.py`, `llama_eagle3.py`,
`qwen3_eagle3.py`, `v1/worker/gpu_model_runner.py`; SGLang `srt/models/llama_eagle.py`,
`llama_eagle3.py`; TensorRT-LLM `_torch/models/modeling_speculative.py`; speculators 0.9
`models/eagle3`; SafeAILab/EAGLE `eagle/model/cnets.py` (EAGLE-3) and `cnets1.py` (EAGLE-1).
"""

from dataclasses import dataclass
from enum import Enum

from eval.served_chain import FLAGS


class Bias(Enum):
    """Whether the fusion layer of an engine has a bias."""

    never = "never"
    always = "always"
    key = "key"
    """As `bias` in config.json says."""


class Layers(Enum):
    """Where an engine finds the target layers that an EAGLE-3 head reads."""

    hidden_states = "hidden_states"
    """`eagle_aux_hidden_state_layer_ids` at the root or in `eagle_config`; i is what enters
    layer i: index i of `output_hidden_states`."""
    outputs = "outputs"
    """The same key in `eagle_config` alone; i is the output of layer i: index i + 1."""
    launch = "launch"
    """In the launch configuration, not in a file of the export."""
    fixed = "fixed"
    """2, L // 2 and L - 3 of `output_hidden_states`, whatever a file says."""


@dataclass(frozen=True)
class Engine:
    """The conventions of one engine for one kind of head.

    Attributes:
        title: for messages.
        architectures: allowed in `architectures`.
        prefixes: of the layer's tensors.
        flags: of `FLAGS` that the engine has.
        written: whether flags that it has not must be written all the same, as false.
        nested: flags that it reads in `eagle_config` alone.
        layers: where it finds the layers.
        fc_bias: see `Bias`.
        biases: whether it has the layer's `attention_bias` and `mlp_bias`.
        legacy_rope: whether it reads `rope_theta` and `rope_scaling` alone.
        target_embedding: whether it puts the target's embedding in place of the head's.
        needs_embedding: whether the file must hold an embedding.
        maps: whether it has `d2t` and an output head of W rows.
        needs_t2d: whether `t2d` must stand beside `d2t`.
    """

    title: str
    architectures: tuple[str, ...]
    prefixes: tuple[str, ...]
    flags: frozenset[str] = frozenset()
    written: bool = True
    nested: frozenset[str] = frozenset()
    layers: Layers = Layers.fixed
    fc_bias: Bias = Bias.never
    biases: bool = False
    legacy_rope: bool = False
    target_embedding: bool = False
    needs_embedding: bool = False
    needs_t2d: bool = False


EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
ENGINES = {
    ("vllm", "eagle1"): Engine(
        "vLLM",
        ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
        ("layers.0.",),
        biases=True,
    ),
    ("vllm", "eagle3"): Engine(
        "vLLM",
        ("LlamaForCausalLM", *EAGLE3),
        ("midlayer.", "layers.0."),
        flags=frozenset(FLAGS),
        layers=Layers.hidden_states,
        biases=True,
    ),
    ("speculators", "eagle3"): Engine(
        "vLLM",
        ("Eagle3Speculator", "Eagle3DraftModel"),
        ("layers.0.",),
        flags=frozenset(FLAGS),
        layers=Layers.hidden_states,
        biases=True,
        needs_t2d=True,
    ),
    ("sglang", "eagle1"): Engine(
        "SGLang",
        ("LlamaForCausalLMEagle",),
        ("layers.0.",),
        fc_bias=Bias.always,
        target_embedding=True,
    ),
    ("sglang", "eagle3"): Engine(
        "SGLang",
        ("LlamaForCausalLMEagle3",),
        ("midlayer.", "layers.0."),
        flags=frozenset(("norm_output", "fc_norm")),
        layers=Layers.outputs,
        fc_bias=Bias.key,
        target_embedding=True,
    ),
    ("trtllm", "eagle3"): Engine(
        "TensorRT-LLM",
        ("LlamaForCausalLM", "EAGLE3LlamaForCausalLM"),
        ("midlayer.", "layers.0."),
        flags=frozenset(("norm_output", "fc_norm", "norm_before_fc")),
        nested=frozenset(("norm_before_fc",)),
        layers=Layers.launch,
        fc_bias=Bias.key,
        legacy_rope=True,
        target_embedding=True,
    ),
    ("original", "eagle1"): Engine(
        "EAGLE",
        ("LlamaForCausalLM",),
        ("layers.0.",),
        fc_bias=Bias.key,
        legacy_rope=True,
        needs_embedding=True,
    ),
    ("original", "eagle3"): Engine(
        "EAGLE",
        ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        ("midlayer.",),
        written=False,
        legacy_rope=True,
        needs_embedding=True,
        needs_t2d=True,
    ),
}
