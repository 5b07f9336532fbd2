"""Taps exported Medusa heads as their engine would, and computes their logits.

Sources, read November 2026: vLLM 0.32 `model_executor/models/medusa.py` and
`transformers_utils/configs/medusa.py`; TGI `layers/medusa.py`; TensorRT-LLM
`models/medusa/weight.py`; FasterDecoding/Medusa `medusa/model/medusa_model.py`. Letters: S rows,
K heads, D hidden, V vocabulary, R compared ids.
"""

import re
from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from conf.errors import InputError
from eval.parity.config import Settings
from eval.parity.files import Export, Golden

TITLES = {"vllm": "vLLM", "tgi": "TGI", "trtllm": "TensorRT-LLM", "original": "Medusa"}
FORMATS = {"medusa": tuple(TITLES)}
WEIGHTS = "medusa_lm_head.safetensors"
# vLLM's own names, of a block's linear layer and of an output head.
RENAMED = (
    (
        re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
        "{}.{}.linear.{}",
    ),
    (re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight"), "{}.{last}.weight"),
)


class ServedMedusa:
    """Exported Medusa heads.

    Args:
        export: the engine's files.
        golden: sizes of the target.

    Raises:
        InputError: the engine would refuse the files, guess, or serve other heads.
    """

    def __init__(self, export: Export, golden: Golden) -> None:
        self._export, self._golden, self._title = export, golden, TITLES[export.format]
        root = Settings(export.config, export.folder / "config.json", self._title)
        last = golden.need(f"hidden_states.{golden.num_layers}", (None, None))
        self._hidden_size, self._scale = last.shape[1], 1.0
        if export.format == "vllm":
            self._read_vllm(root)
        else:
            self._read_original(root)
        self._weights = self._check()

    def _read_vllm(self, root: Settings) -> None:
        golden, guess = self._golden, "takes its default"
        root.equal("architectures", ["MedusaModel"], "its class", "finds no class")
        root.equal("model_type", "medusa", "its kind", "takes it for a language model")
        root.equal("hidden_size", self._hidden_size, "the target's", "takes 4096")
        root.equal("vocab_size", golden.vocab_size, "the target's", "takes 32001")
        root.only("truncated_vocab_size", None, golden.vocab_size)
        root.only("original_lm_head", False)
        self._bias = root.need("medusa_fc_bias", bool, "drops the biases")
        self._num_heads = self._counted(root, "heads", f"{guess} of 5")
        self._num_layers = self._counted(root, "layers", f"{guess} of 1")
        self._scale = float(root.get("logit_scale") or 1.0)

    def _counted(self, root: Settings, what: str, otherwise: str) -> int:
        """vLLM takes any key that names a number of heads or layers, the last one of several."""
        # A key that names both counts heads.
        keys = [k for k in root.keys() if "num" in k and what in k]  # noqa: SIM118
        keys = [k for k in keys if what == "heads" or "heads" not in k]
        counts = {key: root.need(key, int, otherwise) for key in keys or [f"num_{what}"]}
        if len(set(counts.values())) != 1:
            raise InputError(
                f"{root.file}: {counts} disagree: vLLM reads each as the number of {what}"
            )
        return next(iter(counts.values()))

    def _read_original(self, root: Settings) -> None:
        if self._export.weights.name != WEIGHTS:
            raise InputError(f"{self._export.weights}: {self._title} reads {WEIGHTS} alone")
        root.need("base_model_name_or_path", str, "finds no target")
        if self._export.format == "tgi" and root.has("architectures"):
            raise root.wrong("architectures", "none: with one it loads no Medusa heads")
        self._num_heads = root.need("medusa_num_heads", int, "takes 5")
        self._num_layers = root.need("medusa_num_layers", int, "takes 1")
        self._bias = True
        if self._export.format == "original" and self._num_layers > 1:
            raise root.wrong("medusa_num_layers", "1, as its blocks of a head are one module")

    @property
    def lines(self) -> list[str]:
        """What was found, a line for each kind of check."""
        return [
            f"config.json: {self._title} reads {self._num_heads} heads of {self._num_layers} "
            f"blocks over {self._hidden_size} hidden units",
            f"{self._export.weights.name}: {len(self._export.tensors)} tensors of "
            f"{self._export.dtype}, none missing, none to spare",
        ]

    def logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """[S, R] logits of the golden ids, and [S] their logsumexp over all, of each head."""
        ids = self._golden.need("ids", (None,))
        last = f"hidden_states.{self._golden.num_layers}"
        features = self._golden.need(last, (None, self._hidden_size))
        for head in range(self._num_heads):
            states = features
            for block in range(self._num_layers):
                linear = f"{head}.{block}.linear"
                bias = self._float(f"{linear}.bias") if self._bias else None
                inner = functional.linear(states, self._float(f"{linear}.weight"), bias)
                states = states + functional.silu(inner)
            projection = self._float(f"{head}.{self._num_layers}.weight")
            every = self._scale * functional.linear(states, projection)
            yield every[:, ids], every.logsumexp(dim=-1)

    def _float(self, name: str) -> Tensor:
        """One at a time: all heads in float32 can be larger than memory."""
        return self._weights[name].float()

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the original's names."""
        size = self._hidden_size
        found: dict[str, tuple[int, ...]] = {}
        for head in range(self._num_heads):
            for block in range(self._num_layers):
                found[f"{head}.{block}.linear.weight"] = (size, size)
                if self._bias:
                    found[f"{head}.{block}.linear.bias"] = (size,)
            found[f"{head}.{self._num_layers}.weight"] = (self._golden.vocab_size, size)
        return found

    def _check(self) -> dict[str, Tensor]:
        """Tensors by the original's names, each there once and of its shape."""
        expected, found = self._expected(), {}
        for name, tensor in self._export.tensors.items():
            known = self._original_name(name)
            if known in found:
                raise self._wrong(name, "is there under two names", "one of them")
            found[known] = tensor
        missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        if missing or extra:
            raise InputError(
                f"{self._export.weights}: tensors missing: {missing}, that {self._title} does "
                f"not read: {extra}"
            )
        for name, tensor in found.items():
            if tuple(tensor.shape) != expected[name] or not tensor.is_floating_point():
                held = f"is {list(tensor.shape)} of {tensor.dtype}"
                raise self._wrong(name, held, f"floats of {list(expected[name])}")
        return found

    def _original_name(self, name: str) -> str:
        if self._export.format == "vllm":
            for pattern, original in RENAMED:
                if match := pattern.fullmatch(name):
                    return original.format(*match.groups(), last=self._num_layers)
        return name

    def _wrong(self, name: str, found: str, needed: str) -> InputError:
        return InputError(f"{self._export.weights}: {name} {found}: {self._title} needs {needed}")


def read(export: Export, golden: Golden) -> ServedMedusa:
    """See `eval.parity.gate.Reader`."""
    return ServedMedusa(export, golden)
