"""Trains the embedded default's target, a small Llama-type model, and has it answer prompts.

Shapes: B batch, T tokens, V vocabulary.
"""

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from heads.devices import this_processor
from scripts.embedded import corpus

LOOP = 6
"""A run of this many tokens that occurs twice in an answer is a loop; shorter ones are often good
code."""


@dataclass(frozen=True)
class Recipe:
    """Every size of the embedded default."""

    num_files: int | None = None
    """Source files of each kind to read; unset reads all."""
    max_piece_chars: int = 560
    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    max_position_embeddings: int = 1024
    train_length: int = 256
    """Tokens of a training sequence."""
    batch_size: int = 16
    """Training sequences per step."""
    num_steps: int = 2400
    warmup_steps: int = 100
    learning_rate: float = 4e-3
    num_loop_steps: int = 120
    """Steps of unlearning loops, after the training."""
    loop_batch_size: int = 48
    """Answers per such step."""
    loop_learning_rate: float = 4e-4
    num_conversations: int = 1536
    num_prompts: int = 64
    max_prompt_tokens: int = 96
    max_new_tokens: int = 112
    generate_batch_size: int = 64
    seed: int = 0


def train_target(
    pieces: list[corpus.CodeChat],
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    progress: bool,
) -> LlamaForCausalLM:
    """Train a Llama-type model from scratch on packed chats, with the loss on every token."""
    torch.manual_seed(recipe.seed)
    tokens = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = LlamaConfig(
        vocab_size=recipe.vocab_size, hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size, num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads, num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=recipe.max_position_embeddings, tie_word_embeddings=False, **tokens,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    target.generation_config = GenerationConfig(**tokens)
    # Muon for the matrices of the blocks (about half the tokens for the same loss); others AdamW.
    blocks = [p for p in target.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in blocks}
    others = [p for p in target.parameters() if id(p) not in taken]
    rate = recipe.learning_rate
    optimizers = [
        torch.optim.Muon(blocks, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: _learning_rate_factor(step, recipe))
        for o in optimizers
    ]
    bar = tqdm(
        total=recipe.num_steps * recipe.batch_size * recipe.train_length,
        desc="training the target", unit="tok", unit_scale=True, disable=not progress,
    )  # fmt: skip
    loss = torch.tensor(math.nan)
    with bar:
        for rows in _iter_batches(pieces, tokenizer, recipe):  # rows: [B, T + 1]
            with _make_autocast():
                logits = target(rows[:, :-1], use_cache=False).logits  # [B, T, V]
            loss = cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            target.zero_grad()
            bar.update(rows[:, 1:].numel())
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"the embedded target's training ended with loss {loss.item()}")
    return target.eval()


def unlearn_loops(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pieces: list[corpus.CodeChat],
    recipe: Recipe,
    progress: bool,
) -> None:
    """Teach a target not to repeat itself: it distils itself, without repeated tokens.

    Each step answers prompts greedily. At every token of the answers the teacher is the original
    target, without the tokens that would end a run of `LOOP` tokens seen earlier in the answer.
    Unlikelihood (arXiv 1908.04319) was tried first and destroyed the sense of the answers.
    """
    rng = random.Random(recipe.seed)
    teacher = copy.deepcopy(target)
    optimizer = torch.optim.AdamW(
        target.parameters(), lr=recipe.loop_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    steps = replace(recipe, num_steps=recipe.num_loop_steps, warmup_steps=10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(step, steps)
    )
    short = [p.prompt for p in pieces if len(p.prompt) < 2 * recipe.max_prompt_tokens]
    bar = tqdm(total=steps.num_steps, desc="unlearning loops", unit="step", disable=not progress)
    with bar:
        for _ in range(steps.num_steps):
            batch = _encode_prompts(tokenizer, rng.sample(short, recipe.loop_batch_size))
            with _make_autocast():
                ids = _generate_answers(target, batch, recipe)  # [B, T]
            first = batch["input_ids"].shape[1]
            answered = torch.zeros_like(ids, dtype=torch.bool)
            loops = []
            for row, padded in enumerate(ids[:, first:].tolist()):
                ended = [*padded, tokenizer.eos_token_id].index(tokenizer.eos_token_id)
                answer = padded[: ended + 1]
                answered[row, first : first + len(answer)] = True
                for place, tokens in enumerate(find_loop_tokens(answer), first - 1):
                    loops += [(row, place, token) for token in tokens]
            real = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, first:])], dim=1)
            positions = (real.cumsum(1) - 1).clamp(min=0)
            places = {"attention_mask": real[:, :-1], "position_ids": positions[:, :-1]}
            with _make_autocast():
                with torch.no_grad():
                    teacher_logits = teacher(ids[:, :-1], **places, use_cache=False).logits.float()
                logits = target(ids[:, :-1], **places, use_cache=False).logits.float()
            if loops:
                teacher_logits[tuple(torch.tensor(loops).T)] = -math.inf
            loss = kl_div(
                logits[answered[:, 1:]].log_softmax(-1),
                teacher_logits[answered[:, 1:]].softmax(-1),
                reduction="batchmean",
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            target.zero_grad()
            bar.update()
            bar.set_postfix(kl=f"{loss.item():.3f}", refresh=False)


def _make_autocast() -> torch.autocast:
    """Autocast for one forward pass; its weights stay cast until the pass ends."""
    return torch.autocast("cpu", torch.bfloat16, enabled=this_processor().is_fast(torch.bfloat16))


def find_loop_tokens(token_ids: list[int], length: int = LOOP) -> list[set[int]]:
    """Forbidden tokens per place: those that would complete `length` tokens seen before."""
    after: dict[tuple[int, ...], set[int]] = {}
    forbidden = []
    for place, token in enumerate(token_ids):
        before = tuple(token_ids[max(0, place - length + 1) : place])
        known = after.setdefault(before, set()) if len(before) == length - 1 else set()
        forbidden.append(set(known))
        known.add(token)
    return forbidden


def _learning_rate_factor(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.num_steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _iter_batches(
    pieces: list[corpus.CodeChat], tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> Iterator[Tensor]:
    """Yield `num_steps` batches [B, T + 1], shuffling the chats anew for every epoch."""
    bos = str(tokenizer.bos_token)
    texts = [corpus.render_chat(piece, bos) for piece in pieces]
    chats = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rng = random.Random(recipe.seed)
    width = recipe.train_length + 1
    need = recipe.batch_size * width
    stream: list[int] = []
    for _ in range(recipe.num_steps):
        while len(stream) < need:
            rng.shuffle(chats)
            stream += [token for chat in chats for token in chat]
        yield torch.tensor(stream[:need]).view(recipe.batch_size, width)
        stream = stream[need:]


def answer_prompts(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pieces: list[corpus.CodeChat],
    recipe: Recipe,
    progress: bool,
) -> list[str]:
    """Answer every prompt with the target's own greedy text, left-padded in batches."""
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i].prompt))
    answers = [""] * len(pieces)
    bar = tqdm(total=len(pieces), desc="answering", unit="prompt", disable=not progress)
    with bar:
        for start in range(0, len(order), recipe.generate_batch_size):
            chosen = order[start : start + recipe.generate_batch_size]
            batch = _encode_prompts(tokenizer, [pieces[i].prompt for i in chosen])
            ids = _generate_answers(target, batch, recipe)[:, batch["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            for i, text in zip(chosen, texts, strict=True):
                answers[i] = text
            bar.update(len(chosen))
    return answers


def _encode_prompts(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> BatchEncoding:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    return tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")


@torch.no_grad()
def _generate_answers(target: LlamaForCausalLM, batch: BatchEncoding, recipe: Recipe) -> Tensor:
    return target.generate(  # type: ignore[misc, return-value]
        **batch, max_new_tokens=recipe.max_new_tokens, do_sample=False
    )
