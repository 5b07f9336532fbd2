"""How each engine reads an EAGLE head: names, keys, defaults and layer numbers.

Sources, read November 2026: vLLM 0.32 `model_executor/models/llama_eagle.py`, `llama_eagle3.py`,
`qwen3_eagle3.py`, `v1/worker/gpu_model_runner.py`; SGLang `srt/models/llama_eagle.py`,
`llama_eagle3.py`; TensorRT-LLM `_torch/models/modeling_speculative.py`; speculators 0.9
`models/eagle3`; SafeAILab/EAGLE `eagle/model/cnets.py` (EAGLE-3) and `cnets1.py` (EAGLE-1).
"""

from dataclasses import dataclass, replace
from enum import Enum

from eval.parity.chain import FLAGS
from eval.parity.rope import RopeKeys


class Layers(Enum):
    """Where an engine finds the target layers that an EAGLE-3 head reads."""

    hidden_states = "hidden_states"
    """`eagle_aux_hidden_state_layer_ids` at the root or in `eagle_config`; i is what enters
    layer i: index i of `output_hidden_states`."""
    outputs = "outputs"
    """The same key in `eagle_config` alone; i is the output of layer i: index i + 1."""
    launch = "launch"
    """`eagle3_layers_to_capture` of the launch configuration, which an export carries in its
    README; i as above."""
    fixed = "fixed"
    """2, L // 2 and L - 3 of `output_hidden_states`, whatever a file says."""


class Bias(Enum):
    """Whether the fusion layer of an engine has a bias."""

    never = "never"
    always = "always"
    key = "key"
    """As `bias` in config.json says."""


class Place(Enum):
    """Whether an engine has a place for a tensor."""

    must = "must"
    may = "may"
    no = "no"


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
        always_fuses: whether `fc` is also applied to features as wide as the head.
        fc_bias: of the fusion layer.
        biases: keys of the biases that its layer may have.
        qwen3: whether it has a layer with norms on queries and keys.
        rope: which spelling it reads.
        random_head: whether a missing output head starts at random; at SGLang, unless
            `draft_vocab_size` is null.
        embedding: `no` if it takes the target's where that is as wide as the head.
        t2d: beside `d2t`.
        method: the kind of head in speculators' words.
    """

    title: str
    architectures: tuple[str, ...]
    prefixes: tuple[str, ...] = ("midlayer.", "layers.0.")
    flags: tuple[str, ...] = ()
    written: bool = True
    nested: tuple[str, ...] = ()
    layers: Layers = Layers.fixed
    always_fuses: bool = False
    fc_bias: Bias = Bias.never
    biases: tuple[str, ...] = ()
    qwen3: bool = False
    rope: RopeKeys = RopeKeys.both
    random_head: bool = False
    embedding: Place = Place.may
    t2d: Place = Place.may
    method: str = "eagle3"


BIASES = ("attention_bias", "mlp_bias")
VLLM_EAGLE3 = Engine(
    "vLLM",
    (
        "LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
    ),
    flags=FLAGS,
    layers=Layers.hidden_states,
    always_fuses=True,
    biases=BIASES,
    qwen3=True,
)
ENGINES = {
    ("vllm", "eagle1"): Engine(
        "vLLM", ("LlamaForCausalLM", "EagleLlamaForCausalLM"), ("layers.0.",), biases=BIASES
    ),
    ("vllm", "eagle3"): VLLM_EAGLE3,
    ("speculators", "eagle3"): replace(
        VLLM_EAGLE3,
        architectures=("Eagle3Speculator", "Eagle3DraftModel"),
        prefixes=("layers.0.",),
        random_head=True,
        t2d=Place.must,
    ),
    ("sglang", "eagle1"): Engine(
        "SGLang",
        ("LlamaForCausalLMEagle",),
        ("layers.0.",),
        fc_bias=Bias.always,
        embedding=Place.no,
    ),
    # `fc` follows the key `bias`, but so does a bias of the attention's output.
    ("sglang", "eagle3"): Engine(
        "SGLang",
        ("LlamaForCausalLMEagle3",),
        flags=("norm_output", "fc_norm"),
        layers=Layers.outputs,
        random_head=True,
        embedding=Place.no,
    ),
    # `EAGLE3` is put before the name, without an `Eagle3` at its end.
    ("trtllm", "eagle3"): Engine(
        "TensorRT-LLM",
        ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        flags=("norm_output", "fc_norm", "norm_before_fc"),
        nested=("norm_before_fc",),
        layers=Layers.launch,
        fc_bias=Bias.key,
        biases=("mlp_bias",),
        rope=RopeKeys.old,
        embedding=Place.no,
        t2d=Place.no,
    ),
    ("original", "eagle1"): Engine(
        "EAGLE",
        ("LlamaForCausalLM",),
        ("layers.0.",),
        fc_bias=Bias.key,
        rope=RopeKeys.two_keys,
        embedding=Place.must,
    ),
    ("original", "eagle3"): Engine(
        "EAGLE",
        ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        ("midlayer.",),
        written=False,
        rope=RopeKeys.two_keys,
        random_head=True,
        embedding=Place.must,
        t2d=Place.must,
    ),
}
