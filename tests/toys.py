"""Small random targets and a tokenizer, made on the spot."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from conf.settings.eagle import EagleForm
from eval.decode.engine import DecodingBatch, NewTokens, NoDraft, Request, decode_batch
from eval.decode.verification import AcceptedPaths, TreeOutputs, accept_paths
from heads.decoding.drafting import Draft, Drafter
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import Tree
from heads.eagle.eagle import EagleHead
from heads.medusa import MedusaHead
from heads.target_model.load import choose_attentions
from heads.target_model.model import Target, TargetOutput

VOCAB_SIZE = 96
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_configs.json").read_text())
"""Settings of tiny models: of families, of targets with an MTP layer, of models with towers."""
FAMILIES: dict[str, dict[str, Any]] = TINY["families"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A model of a family with weights large enough that its text is not constant."""
    torch.manual_seed(seed)
    settings = {**SMALL, **FAMILIES[family], **changes}
    for name in {"layer_types", "no_rope_layers"} & set(settings):
        settings[name] = list(islice(cycle(settings[name]), settings["num_hidden_layers"]))
    if "vocab_size_per_layer_input" in settings:
        settings["vocab_size_per_layer_input"] = settings["vocab_size"]
    config = AutoConfig.for_model(family, **settings)
    attention = choose_attentions(config)[0]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
        if name.endswith("sinks"):
            parameter.data.normal_()
    return model.eval()


class Clock:
    """In place of the module `time`: seconds pass in what is said to take some, nowhere else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now

    def taking(self, seconds: Callable[..., float], work: Callable[..., Any]) -> Any:
        """`work`, which takes as long as `seconds` says of the same arguments."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds(*args, **kwargs)
            return work(*args, **kwargs)

        return wrapped


class Watched(TorchDispatchMode):
    """Inside, each operation is told of with its arguments and what it gives."""

    def __init__(self, note: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.note(func, args, found)
        return found


def random_target(family: str = "llama", seed: int = 0, **changes: Any) -> Target:
    """A target around `random_model`, without a tokenizer."""
    return Target(random_model(family, seed, **changes), None, family)


def endless_target(family: str = "llama", seed: int = 0, **changes: Any) -> Target:
    """A random target whose texts no token ends."""
    target = random_target(family, seed, **changes)
    target.model.generation_config.eos_token_id = None
    return target


def noisy_head(target: Target, num_heads: int = 3, seed: int = 0) -> MedusaHead:
    """Heads whose drafts are sometimes right."""
    torch.manual_seed(seed)
    head = MedusaHead.from_target(target, num_heads, num_layers=1)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    return head.eval()


def eagle_head(
    target: Target,
    form: EagleForm,
    num_draft_ids: int | None = None,
    num_updates: int = 24,
    **settings: Any,
) -> EagleHead:
    """A head trained for some steps on the target's own texts, so that it is often right."""
    from feature_heads import feature_head

    settings["draft_vocab_size"] = num_draft_ids
    return feature_head(target, form.value, num_updates, **settings)


def trained(
    objective: Any, documents: list[list[int]], num_updates: int, num_prompt_tokens: int = 4
) -> Any:
    """The head of an objective after some steps on documents."""
    head = objective.head
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], 6e-3)
    batch = objective.index_batch(packed(documents, num_prompt_tokens))
    scale = objective.term_weights / objective.compute_divisors(batch).clamp_min(1)
    batch = objective.prepare_batch(batch)
    for _ in range(num_updates):
        optimizer.zero_grad()
        objective(batch, scale).total.backward()
        optimizer.step()
    optimizer.zero_grad()
    return head.eval()


def texts(target: Target, num_texts: int, num_tokens: int) -> list[list[int]]:
    """The target's greedy texts after some prompts of 4 tokens, prompts included."""
    generator = torch.Generator().manual_seed(1)
    shape = (num_texts, 4)
    prompts = torch.randint(3, target.vocab_size, shape, generator=generator).tolist()
    found = decode_batch(target, NoDraft(), prompts, num_tokens)
    return [prompt + text.token_ids for prompt, text in zip(prompts, found, strict=True)]


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    num_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] = (0, 0),
) -> Iterator[NewTokens]:
    """The new tokens of all prompts together, step by step."""
    requests = list(map(Request, prompts, seeds))
    batch = DecodingBatch(target, lambda _: drafter, requests, num_tokens, len(prompts), sampling)
    return batch.stream_tokens()


def accept(
    draft: Draft, tokens: Tensor, logits: Tensor, sampling: Sampling, generators: Generators
) -> AcceptedPaths:
    """`accept_paths` of trees whose tokens [B, N] have these logits [B, N, V]."""
    outputs = TreeOutputs(draft.build_layout(), tokens, TargetOutput(logits), logits)
    return accept_paths(draft, outputs, sampling, generators)


def packed(documents: list[list[int]], num_prompt_tokens: int = 4) -> dict[str, Tensor]:
    """One packed sequence [1, T] of documents whose first tokens are not learnt."""
    columns: dict[str, list[int]] = {
        "input_ids": [], "loss_mask": [], "position_ids": [], "document_ids": [],
    }  # fmt: skip
    for number, document in enumerate(documents):
        columns["input_ids"] += document
        columns["loss_mask"] += [place >= num_prompt_tokens for place in range(len(document))]
        columns["position_ids"] += range(len(document))
        columns["document_ids"] += [number] * len(document)
    return {name: torch.tensor([values]) for name, values in columns.items()}


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 300 tokens with ChatML markers."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["hello there, how are you today? fine, thanks."] * 4, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>"
    )
    made.chat_template = template
    return made


def save_target(
    folder: Path, family: str = "llama", template: str | None = CHATML, **changes: Any
) -> Path:
    """A loadable target folder: model, tokenizer and template."""
    model = random_model(family, vocab_size=300, **changes)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def tree_of(parents: Sequence[int]) -> Tree:
    """From the parent of each node but the root; siblings rank in their order."""
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    return Tree((-1, *parents), (-1, *ranks))
