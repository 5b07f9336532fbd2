"""Reader of exported Medusa heads that computes their logits as their serving engine does.

Sources, read November 2026: vLLM 0.32 `model_executor/models/medusa.py` and
`transformers_utils/configs/medusa.py`; TensorRT-LLM
`models/medusa/weight.py`; FasterDecoding/Medusa `medusa/model/medusa_model.py`. Letters: S rows,
K heads, D hidden, V vocabulary, R compared ids.
"""

import re
from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from conf.errors import InputError
from eval.parity.decoder import ServedHead, Shapes
from eval.parity.engine_config import EngineConfig
from eval.parity.export_files import Export, ReferenceLogits

TITLES = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "original": "Medusa"}
FORMATS = {"medusa": tuple(TITLES)}
WEIGHTS = "medusa_lm_head.safetensors"
# vLLM's own names for a block's linear layer and an output head.
RENAMED = (
    (
        re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
        "{}.{}.linear.{}",
    ),
    (re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight"), "{}.{last}.weight"),
)


class ServedMedusa(ServedHead):
    """Exported Medusa heads."""

    def __init__(self, export: Export, golden: ReferenceLogits) -> None:
        super().__init__(export, golden, TITLES[export.format])
        root = EngineConfig(export.config, export.folder / "config.json", self.title)
        last = golden.require_tensor(f"hidden_states.{golden.num_layers}", (None, None))
        self._hidden_size = last.shape[1]
        self._bias, self._scale = True, 1.0
        if export.format == "vllm":
            root.check_equal("architectures", ["MedusaModel"], "its class", "finds no class")
            root.check_equal("model_type", "medusa", "its kind", "takes it for a language model")
            root.check_equal("hidden_size", self._hidden_size, "the target's", "takes 4096")
            root.check_equal("vocab_size", golden.vocab_size, "the target's", "takes 32001")
            root.check_allowed("truncated_vocab_size", None, golden.vocab_size)
            root.check_allowed("original_lm_head", False)
            self._bias = root.require_key("medusa_fc_bias", bool, "drops the biases")
            self._scale = float(root.values.get("logit_scale") or 1.0)
            self._num_heads = self._parse_count(root, "heads", "takes its default of 5")
            self._num_blocks = self._parse_count(root, "layers", "takes its default of 1")
        else:
            if export.weights.name != WEIGHTS:
                raise InputError(
                    f"{export.weights}: {self.title} only reads {WEIGHTS}; export again"
                )
            root.require_key("base_model_name_or_path", str, "finds no target")
            self._num_heads = root.require_key("medusa_num_heads", int, "takes 5")
            self._num_blocks = root.require_key("medusa_num_layers", int, "takes 1")
            if export.format == "original" and self._num_blocks > 1:
                raise root.make_error(
                    "medusa_num_layers", "1, as its blocks of a head are one module"
                )
        # Converted to float32 one at a time, as all heads together can exceed the memory.
        self.weights = self.rename_tensors(self._translate_name)
        self.check_tensors(self.weights, self._list_expected_shapes(), {})

    def _parse_count(self, root: EngineConfig, what: str, otherwise: str) -> int:
        """Read a count as vLLM does: from the last key that names heads or layers."""
        # A key that names both counts heads.
        keys = [k for k in root.values if "num" in k and what in k]
        keys = [k for k in keys if what == "heads" or "heads" not in k]
        counts = {key: root.require_key(key, int, otherwise) for key in keys or [f"num_{what}"]}
        if len(set(counts.values())) != 1:
            raise InputError(
                f"{root.file}: {counts} disagree, as vLLM reads each as the number of {what}; "
                "export again"
            )
        return next(iter(counts.values()))

    def describe_config(self) -> str:
        """Describe the heads that the serving engine builds."""
        return (
            f"{self._num_heads} heads of {self._num_blocks} blocks over {self._hidden_size} hidden "
            "units"
        )

    def iter_logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield logits [S, R] of the reference ids and logsumexp [S] over all ids, head by head."""
        ids = self.golden.require_tensor("ids", (None,))
        last = f"hidden_states.{self.golden.num_layers}"
        features = self.golden.require_tensor(last, (None, self._hidden_size))
        for head in range(self._num_heads):
            states = features
            for block in range(self._num_blocks):
                inner = self.apply_linear(states, f"{head}.{block}.linear")
                states = states + functional.silu(inner)
            every = self._scale * self.apply_linear(states, f"{head}.{self._num_blocks}")
            yield every[:, ids], every.logsumexp(dim=-1)

    def _list_expected_shapes(self) -> Shapes:
        """Compute the expected shapes by the original names."""
        size = self._hidden_size
        shapes: Shapes = {}
        for head in range(self._num_heads):
            for block in range(self._num_blocks):
                shapes[f"{head}.{block}.linear.weight"] = (size, size)
                if self._bias:
                    shapes[f"{head}.{block}.linear.bias"] = (size,)
            shapes[f"{head}.{self._num_blocks}.weight"] = (self.golden.vocab_size, size)
        return shapes

    def _translate_name(self, name: str) -> str:
        if self.export.format == "vllm":
            for pattern, original in RENAMED:
                if match := pattern.fullmatch(name):
                    return original.format(*match.groups(), last=self._num_blocks)
        return name


build_head = ServedMedusa
