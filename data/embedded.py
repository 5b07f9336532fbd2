"""The embedded default: a small target and its dataset, made on first use without a network.

A Llama-type model is trained on the standard library's own source, then answers prompts
from it; both are cached. Shapes: B batch, T tokens, V vocabulary.
"""

import hashlib
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from conf import places
from conf.schema import DataRun, InputError
from data import embedded_corpus as corpus

CATEGORIES = ("function", "method", "class", "module")
_VERSION = 1  # raise it when the same recipe would give other files
_FREE_BYTES = 200 * 2**20


@dataclass(frozen=True)
class Recipe:
    """Every size of the embedded default."""

    num_files: int | None = None
    """Standard-library files to read; unset takes all."""
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
    batch_size: int = 4
    """Training sequences per step."""
    num_steps: int = 900
    warmup_steps: int = 30
    learning_rate: float = 3e-3
    num_conversations: int = 1024
    num_prompts: int = 64
    max_prompt_tokens: int = 96
    max_new_tokens: int = 112
    generate_batch_size: int = 64
    seed: int = 0

    def key(self) -> str:
        """Name of the cache folder: changes with the recipe and the Python version."""
        python = sys.version_info[:2]
        facts = json.dumps([_VERSION, python, corpus.CHAT_TEMPLATE, asdict(self)], sort_keys=True)
        return f"embedded-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Embedded:
    """Where the embedded default lies."""

    target_path: str
    train_path: str
    prompts_path: str


def ensure_embedded(
    cache_dir: Path | None = None, *, progress: bool = True, recipe: Recipe | None = None
) -> Embedded:
    """Return the embedded default, making it if this is its first use (minutes).

    Processes that ask at the same time make it once: the others wait.

    Args:
        cache_dir: Folder of caches; unset takes `$HEADSMITH_CACHE` or `~/.cache/headsmith`.
        progress: Draw progress bars.
        recipe: Sizes; unset takes the default recipe.

    Raises:
        InputError: The cache cannot be written, or this Python comes without its source.
    """
    recipe = recipe or Recipe()
    folder = (cache_dir or places.cache_dir()).expanduser().absolute() / recipe.key()
    if _is_complete(folder):
        return _embedded(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock"), progress):
            if not _is_complete(folder):  # another process may have made it meanwhile
                _build_into(folder, recipe, progress)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{folder.parent}: cannot write the embedded default ({error}): free "
            f"{_FREE_BYTES >> 20} MiB there, or set HEADSMITH_CACHE to a folder with room"
        ) from error
    return _embedded(folder)


def fill_unset(run: DataRun, *, prompts: bool = False, progress: bool = True) -> None:
    """Puts the embedded default where paths are unset.

    Effects: sets `target.path` and `data.path` of the run.

    Args:
        run: whose paths may be unset.
        prompts: its data are prompts to measure on, not conversations to learn from.
        progress: show bars where the default must be made first.
    """
    target, data = run.target, run.data
    if target.path is None or data.path is None:
        embedded = ensure_embedded(progress=progress)
        target.path = target.path or embedded.target_path
        data.path = data.path or (embedded.prompts_path if prompts else embedded.train_path)


def _embedded(folder: Path) -> Embedded:
    return Embedded(
        str(folder / "target"), str(folder / "train.jsonl"), str(folder / "prompts.jsonl")
    )


def _is_complete(folder: Path) -> bool:
    names = ("target/config.json", "target/model.safetensors", "train.jsonl", "prompts.jsonl")
    return all((folder / name).is_file() for name in names)


@contextmanager
def _lock(path: Path, progress: bool) -> Iterator[None]:
    lock = FileLock(path)  # the system drops it when its holder dies
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            tqdm.write(f"waiting for another process that makes {path.stem}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_into(folder: Path, recipe: Recipe, progress: bool) -> None:
    """Build beside `folder`, then move into place: a killed build is never taken for done."""
    if shutil.disk_usage(folder.parent).free < _FREE_BYTES:
        raise OSError("disk full")
    partial = folder.with_suffix(".partial")
    for leftover in (partial, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    if progress:
        tqdm.write(f"first use: making the embedded default in {folder}", file=sys.stderr)
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        # Launchers set one thread per process; while this is built the others only wait.
        torch.set_num_threads(_num_cores())
        try:
            build(partial, recipe, progress)
            partial.rename(folder)
        finally:
            torch.set_num_threads(num_threads)
            shutil.rmtree(partial, ignore_errors=True)


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return min(8, len(affinity(0)) if affinity else os.cpu_count() or 1)


def build(folder: Path, recipe: Recipe, progress: bool) -> None:
    """Train the target and write it, its conversations and the held-out prompts."""
    files = corpus.find_source_files(recipe.num_files)
    texts = corpus.read_source(files, files.train)
    train, held_out = (
        [p for text in side.items() for p in corpus.cut_pieces(*text, recipe.max_piece_chars)]
        for side in (texts, corpus.read_source(files, files.held_out))
    )
    tokenizer = corpus.train_tokenizer(
        list(texts.values()), recipe.vocab_size, recipe.max_position_embeddings
    )
    target = train_target(train, tokenizer, recipe, progress)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")

    rng = random.Random(recipe.seed)
    chosen = choose(train, recipe.num_conversations, tokenizer, recipe, rng)
    responses = respond(target, tokenizer, chosen, recipe, progress)
    rows = [
        {
            "messages": [
                {"role": "user", "content": piece.prompt},
                {"role": "assistant", "content": response},
            ],
            "category": piece.category,
            "file": piece.file,
        }
        for piece, response in zip(chosen, responses, strict=True)
        if response.strip()
    ]
    if progress and len(rows) < len(chosen):
        tqdm.write(f"{len(chosen) - len(rows)} of {len(chosen)} answers were empty: dropped")
    _write_jsonl(folder / "train.jsonl", rows)
    prompts = choose(held_out, recipe.num_prompts, tokenizer, recipe, rng)
    _write_jsonl(
        folder / "prompts.jsonl",
        [
            {"question_id": i, "category": p.category, "turns": [p.prompt], "file": p.file}
            for i, p in enumerate(prompts)
        ],
    )
    facts = {"recipe": asdict(recipe), "train": files.train, "held_out": files.held_out}
    (folder / "recipe.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def train_target(
    pieces: list[corpus.Piece], tokenizer: PreTrainedTokenizerFast, recipe: Recipe, progress: bool
) -> LlamaForCausalLM:
    """Train a Llama-type model from scratch on packed chats, loss on every token."""
    torch.manual_seed(recipe.seed)
    target = LlamaForCausalLM(_target_config(tokenizer, recipe))
    target.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    optimizers = _optimizers(target, recipe)
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
        for rows in _batches(pieces, tokenizer, recipe):  # rows: [B, T + 1]
            with torch.autocast("cpu", torch.bfloat16, enabled=_has_fast_bfloat16()):
                logits = target(rows[:, :-1], use_cache=False).logits  # [B, T, V]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), rows[:, 1:].flatten()
            )
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


def _target_config(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _optimizers(target: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks (about half the tokens for the same loss), else AdamW."""
    blocks = [p for p in target.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in blocks}
    others = [p for p in target.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(
            blocks, lr=recipe.learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        ),
    ]


def _learning_rate_factor(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.num_steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _has_fast_bfloat16() -> bool:
    """Whether bfloat16 products have instructions of their own; emulated, they are slower."""
    facts: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(facts.get("avx512_bf16") or facts.get("amx_bf16") or facts.get("bf16"))


def _batches(
    pieces: list[corpus.Piece], tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> Iterator[Tensor]:
    """Yield `num_steps` batches [B, T + 1], shuffling the chats anew for every epoch."""
    bos = str(tokenizer.bos_token)
    texts = [corpus.render(piece, bos) for piece in pieces]
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


def choose(
    pieces: list[corpus.Piece],
    count: int,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
) -> list[corpus.Piece]:
    """Choose prompts in equal shares of the categories, in turn, short enough and distinct."""
    lengths = tokenizer([p.prompt for p in pieces], add_special_tokens=False)["input_ids"]
    unique = {
        piece.prompt: piece
        for piece, ids in zip(pieces, lengths, strict=True)
        if 8 <= len(ids) <= recipe.max_prompt_tokens
    }
    columns = [[p for p in unique.values() if p.category == name] for name in CATEGORIES]
    for column in columns:
        rng.shuffle(column)
    in_turn = [p for row in zip_longest(*columns) for p in row if p is not None]
    return in_turn[:count]


@torch.inference_mode()
def respond(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pieces: list[corpus.Piece],
    recipe: Recipe,
    progress: bool,
) -> list[str]:
    """Answer every prompt with the target's own greedy text, left-padded in batches."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], add_generation_prompt=True, tokenize=False
        )
        for p in pieces
    ]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    bar = tqdm(
        total=len(prompts), desc="answering the prompts", unit="prompt", disable=not progress
    )
    num_tokens = 0
    with bar:
        for start in range(0, len(order), recipe.generate_batch_size):
            chosen = order[start : start + recipe.generate_batch_size]
            batch = tokenizer(
                [prompts[i] for i in chosen],
                add_special_tokens=False, padding=True, return_tensors="pt",
            )  # fmt: skip
            output = target.generate(  # type: ignore[misc]
                **batch, max_new_tokens=recipe.max_new_tokens, do_sample=False
            )[:, batch["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(output, skip_special_tokens=True)
            for i, text in zip(chosen, texts, strict=True):
                answers[i] = text
            num_tokens += int((output != tokenizer.pad_token_id).sum())
            bar.update(len(chosen))
            bar.set_postfix(tokens=num_tokens, refresh=False)
    return answers


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
