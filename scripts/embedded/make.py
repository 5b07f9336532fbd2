"""Makes the embedded default again: `python scripts/embedded/make.py FOLDER`, 75 minutes.

A small Llama-type model is trained on Python source with permissive licences, then answers prompts
from the standard library with its own greedy text. FOLDER gets the contents of `data/embedded/`,
and `trained`, the target before it unlearnt loops. A second start continues.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import copy
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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

from conf.errors import InputError
from heads.devices import this_processor

PACKAGES = {
    "accelerate": "Apache-2.0", "datasets": "Apache-2.0", "filelock": "MIT", "fontTools": "MIT",
    "fsspec": "BSD-3-Clause", "huggingface_hub": "Apache-2.0", "hydra": "MIT",
    "jinja2": "BSD-3-Clause", "networkx": "BSD-3-Clause", "numpy": "BSD-3-Clause",
    "omegaconf": "BSD-3-Clause", "pandas": "BSD-3-Clause", "peft": "Apache-2.0", "pip": "MIT",
    "pydantic": "MIT", "requests": "Apache-2.0", "rich": "MIT", "setuptools": "MIT",
    "trio": "MIT OR Apache-2.0",
}  # fmt: skip
"""Installed packages whose source the target reads beside the standard library's, by licence."""
STDLIB_EPOCHS = 3
"""Copies of the standard library in the training data for one copy of the packages. The prompts
come from the standard library."""
_EXCLUDED = {
    "__phello__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "_vendor", "site-packages", "test", "tests",
}  # fmt: skip
_MIN_FILES = 50
_HELD_OUT_IN = 10  # one file of ten
_CONSTRUCT = re.compile(r" *(?:@|(?:async )?def |class )")
_FEWEST_BYTES = 3.6
"""A piece with fewer compressed bytes per ten than this is a table, and teaches repetition."""
CATEGORIES = ("function", "method", "class", "module")
_FEWEST_PROMPT_TOKENS = 8

SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CHAT_TEMPLATE = """\
{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>
' }}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '
' }}{% else %}{{ '<|' + m['role'] + '|>
' + m['content'] + '<|end|>
' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}"""
# A line break is always a separate token: the one after <|assistant|> must not merge with the
# indentation at the start of an answer, or prompts would end within a token.
_WORDS = r"\n| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|[^\S\n]+(?!\S)|[^\S\n]+"

LOOP = 6
"""A run of this many tokens that occurs twice in an answer is a loop; shorter ones are often good
code."""


@dataclass(frozen=True)
class Recipe:
    """Hold every size of the embedded default."""

    num_files: int | None = None
    """Source files of each kind to read; unset reads all."""
    max_piece_chars: int = 560
    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 448
    num_layers: int = 10
    num_heads: int = 6
    num_kv_heads: int = 3
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


def make_embedded(folder: Path, recipe: Recipe) -> None:
    """Write the target, conversations to learn from, held-out prompts, and checksums."""

    def cut(texts: dict[str, str]) -> list[CodeChat]:
        return [p for text in texts.items() for p in iter_chats(*text, recipe.max_piece_chars)]

    library = find_source_files(recipe.num_files)
    texts = read_source(library, library.train)
    learnt, held_out = cut(texts), cut(read_source(library, library.held_out))
    trained, place = folder / "trained", folder / "model"
    if not trained.is_dir():
        packages = find_packages(recipe.num_files)
        pieces = cut(read_source(packages, packages.train))
        tokenizer = train_tokenizer(
            list(texts.values()), recipe.vocab_size, recipe.max_position_embeddings
        )
        target = train_target(STDLIB_EPOCHS * learnt + pieces, tokenizer, recipe)
        save_trained(target, tokenizer, trained)
    if not place.is_dir():
        target, tokenizer = load_trained(trained)
        unlearn_loops(target, tokenizer, learnt, recipe)
        save_trained(target, tokenizer, place)
    target, tokenizer = load_trained(place)
    rng = random.Random(recipe.seed)
    chosen = choose_prompts(learnt, recipe.num_conversations, tokenizer, recipe, rng)
    answers = answer_prompts(target, tokenizer, chosen, recipe)
    rows = []
    for piece, answer in zip(chosen, answers, strict=True):
        if answer.strip():
            turns = (("user", piece.prompt), ("assistant", answer))
            messages = [{"role": role, "content": content} for role, content in turns]
            rows.append({"messages": messages, "category": piece.category, "file": piece.file})
    write_jsonl(folder / "train.jsonl", rows)
    prompts = choose_prompts(held_out, recipe.num_prompts, tokenizer, recipe, rng)
    asked = [
        {"question_id": i, "category": p.category, "turns": [p.prompt], "file": p.file}
        for i, p in enumerate(prompts)
    ]
    write_jsonl(folder / "prompts.jsonl", asked)
    paths = [folder / "train.jsonl", folder / "prompts.jsonl", *sorted(folder.glob("model/*"))]
    facts = {
        "recipe": asdict(recipe),
        "python": sys.version.split()[0],
        "packages": PACKAGES,
        "empty_answers": len(chosen) - len(rows),
        "sha256": {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in paths
        },
    }
    (folder / "recipe.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def save_trained(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write target and tokenizer completely or not at all, rounded to bfloat16."""
    partial = folder.with_suffix(".partial")
    tokenizer.save_pretrained(partial)
    target.bfloat16().save_pretrained(partial)
    partial.rename(folder)


def load_trained(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load target and tokenizer in float32, as every user on a CPU does."""
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return target, PreTrainedTokenizerFast.from_pretrained(folder)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Write a line of JSON for each row."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


@dataclass(frozen=True)
class SourceFiles:
    """Hold sorted source files, split so that no file is on both sides."""

    root: Path
    train: list[str]
    held_out: list[str]


def find_source_files(num_files: int | None = None) -> SourceFiles:
    """List the standard library's own modules.

    A file's side depends only on its name, so that all Python versions agree on it.

    Args:
        num_files: number of files to keep, evenly spread; unset keeps all.

    Raises:
        InputError: this Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = ("config-", "_sysconfigdata")
    names = [name for name in _list_modules(root, root) if not name.startswith(skipped)]
    if len(names) < _MIN_FILES:
        raise InputError(
            f"{root}: has {len(names)} source files of the standard library, but the embedded "
            f"default needs {_MIN_FILES}; set target.path and data.path, or use a Python with its "
            "source"
        )
    sides: tuple[list[str], list[str]] = [], []
    for name in _spread_names(names, num_files):
        digest = hashlib.sha256(name.encode()).digest()
        sides[int.from_bytes(digest[:4]) % _HELD_OUT_IN == 0].append(name)
    return SourceFiles(root, *sides)


def find_packages(num_files: int | None = None) -> SourceFiles:
    """List the modules of `PACKAGES`, all for training.

    Args:
        num_files: number of files to keep, evenly spread; unset keeps all.

    Raises:
        InputError: a package is not installed.
    """
    names: list[str] = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise InputError(f"{package}: not installed; run `make setup`, which installs it")
        folder = Path(spec.origin).parent
        root = folder.parent
        names += _list_modules(folder, root)
    return SourceFiles(root, _spread_names(names, num_files), [])


def _list_modules(folder: Path, root: Path) -> list[str]:
    """List Python files below a folder, relative to `root`, in order of their names."""
    names = []
    for place, folders, files in os.walk(folder):
        # Packages of a whole environment may lie below the standard library: they are not walked.
        folders[:] = set(folders) - _EXCLUDED
        relative = Path(place).relative_to(root)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(names)


def _spread_names(names: list[str], count: int | None) -> list[str]:
    return names if count is None else names[:: max(1, len(names) // count)][:count]


def read_source(files: SourceFiles, names: list[str]) -> dict[str, str]:
    """Read files as UTF-8; skip the few with another encoding."""
    texts = {}
    for name in names:
        with suppress(UnicodeDecodeError):
            texts[name] = (files.root / name).read_text(encoding="utf-8").expandtabs()
    return texts


@dataclass(frozen=True)
class CodeChat:
    """Hold one chat: the start of a piece of source, and its continuation."""

    category: str
    """function, method, class, module, or body for a later part of a long one."""
    file: str
    """Path inside the standard library."""
    prompt: str
    continuation: str


def iter_chats(file: str, text: str, max_chars: int) -> Iterator[CodeChat]:
    """Cut a file into chats: at every def and class, and within blocks above `max_chars`.

    Skips blocks of fewer than three lines, tables, and comment lines: licence headers and rulers
    teach a small model to repeat `#` without end.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    starts = [0]
    for i, line in enumerate(lines):
        if _CONSTRUCT.match(line) and not (i and lines[i - 1].lstrip().startswith("@")):
            starts.append(i)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        category = _find_category(lines[start:end])
        for block in _iter_blocks(lines[start:end], max_chars):
            clean = textwrap.dedent("\n".join(block)).strip("\n").splitlines()
            # The user's part: about a third, at least to the end of the first line that is no
            # decorator, at most eight lines.
            head = next((i for i, x in enumerate(clean) if not x.startswith("@")), 0)
            cut = max(head + 1, min(len(clean) // 3, 8))
            code = "\n".join(clean).encode()
            table = len(code) >= 200 and 10 * len(zlib.compress(code)) < _FEWEST_BYTES * len(code)
            if len(clean) > max(cut, 2) and not table:
                prompt, continuation = "\n".join(clean[:cut]), "\n".join(clean[cut:])
                yield CodeChat(category, file, prompt.rstrip(), continuation)
            category = "body"


def _find_category(block: list[str]) -> str:
    if not block or not _CONSTRUCT.match(block[0]):
        return "module"
    head = next((line for line in block if not line.lstrip().startswith("@")), block[0])
    if head.lstrip().startswith("class "):
        return "class"
    return "method" if head.startswith(" ") else "function"


def _iter_blocks(lines: list[str], max_chars: int) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for line in lines:
        if block and size + len(line.strip()) > max_chars:
            yield block
            block, size = [], 0
        block.append(line.rstrip()[: max_chars // 2])
        size += len(line.strip()) + 1
    yield block


def choose_prompts(
    pieces: list[CodeChat],
    count: int,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
) -> list[CodeChat]:
    """Choose prompts in equal shares of the categories, in turn, short enough and distinct."""
    lengths = tokenizer([p.prompt for p in pieces], add_special_tokens=False)["input_ids"]
    unique = {
        piece.prompt: piece
        for piece, ids in zip(pieces, lengths, strict=True)
        if _FEWEST_PROMPT_TOKENS <= len(ids) <= recipe.max_prompt_tokens
    }
    columns = [[p for p in unique.values() if p.category == name] for name in CATEGORIES]
    for column in columns:
        rng.shuffle(column)
    in_turn = [p for row in zip_longest(*columns) for p in row if p is not None]
    return in_turn[:count]


def render_chat(piece: CodeChat, bos: str) -> str:
    """Render a piece as the chat template does; a test checks that both agree."""
    return f"{bos}<|user|>\n{piece.prompt}<|end|>\n<|assistant|>\n{piece.continuation}<|end|>\n"


def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with the chat template on `texts`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|endoftext|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def train_target(
    pieces: list[CodeChat], tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> LlamaForCausalLM:
    """Train a Llama-type model from scratch on packed chats, with the loss on every token.

    Letters of the shapes here and below: B batch, T tokens, V vocabulary.
    """
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

    def compute_losses() -> Iterator[Tensor]:
        for rows in _iter_batches(pieces, tokenizer, recipe):  # rows: [B, T + 1]
            with _make_autocast():
                logits = target(rows[:, :-1], use_cache=False).logits  # [B, T, V]
            yield cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    loss = _take_steps(target, optimizers, recipe, compute_losses(), "training the target")
    if not math.isfinite(loss):
        raise RuntimeError(f"the embedded target's training ended with loss {loss}")
    return target.eval()


def _take_steps(
    target: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    recipe: Recipe,
    losses: Iterable[Tensor],
    title: str,
) -> float:
    """Take `num_steps` steps, each with the next loss; return the last loss."""
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: _learning_rate_factor(step, recipe))
        for each in optimizers
    ]
    last = math.nan
    with tqdm(losses, total=recipe.num_steps, desc=title, unit="step") as bar:
        for loss in bar:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            target.zero_grad()
            last = loss.item()
            bar.set_postfix(loss=f"{last:.3f}", refresh=False)
    return last


def _iter_batches(
    pieces: list[CodeChat], tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> Iterator[Tensor]:
    """Yield `num_steps` batches [B, T + 1], shuffling the chats anew for every epoch."""
    bos = str(tokenizer.bos_token)
    texts = [render_chat(piece, bos) for piece in pieces]
    # The garbage collector walks lists of numbers in many steps, and tuples of numbers in none.
    chats = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    rng = random.Random(recipe.seed)
    width = recipe.train_length + 1

    def iter_tokens() -> Iterator[int]:
        while True:
            rng.shuffle(chats)
            for chat in chats:
                yield from chat

    tokens = iter_tokens()
    for _ in range(recipe.num_steps):
        batch = list(islice(tokens, recipe.batch_size * width))
        yield torch.tensor(batch).view(recipe.batch_size, width)


def unlearn_loops(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pieces: list[CodeChat],
    recipe: Recipe,
) -> None:
    """Train a target not to repeat itself: it distils itself, without repeated tokens.

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
    short = [p.prompt for p in pieces if len(p.prompt) < 2 * recipe.max_prompt_tokens]

    def compute_losses() -> Iterator[Tensor]:
        for _ in range(steps.num_steps):
            asked = rng.sample(short, recipe.loop_batch_size)
            with _make_autocast():
                batch, ids = _generate_answers(target, tokenizer, asked, recipe)
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
            yield kl_div(
                logits[answered[:, 1:]].log_softmax(-1),
                teacher_logits[answered[:, 1:]].softmax(-1),
                reduction="batchmean",
            )

    _take_steps(target, [optimizer], steps, compute_losses(), "unlearning loops")


def find_loop_tokens(token_ids: list[int], length: int = LOOP) -> list[set[int]]:
    """Find the forbidden tokens of each place: they would complete `length` tokens seen before."""
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


def _make_autocast() -> torch.autocast:
    """Make the autocast of one forward pass; its weights stay cast until the pass ends."""
    return torch.autocast("cpu", torch.bfloat16, enabled=this_processor().is_fast(torch.bfloat16))


def answer_prompts(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pieces: list[CodeChat],
    recipe: Recipe,
) -> list[str]:
    """Answer every prompt with the target's own greedy text, left-padded in batches."""
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i].prompt))
    answers = [""] * len(pieces)
    for start in tqdm(range(0, len(order), recipe.generate_batch_size), "answering", unit="batch"):
        chosen = order[start : start + recipe.generate_batch_size]
        prompts = [pieces[i].prompt for i in chosen]
        batch, ids = _generate_answers(target, tokenizer, prompts, recipe)
        answered = ids[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answered, skip_special_tokens=True)
        for i, text in zip(chosen, texts, strict=True):
            answers[i] = text
    return answers


@torch.no_grad()
def _generate_answers(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    recipe: Recipe,
) -> tuple[BatchEncoding, Tensor]:
    """Answer prompts greedily; return their encoding, and the ids [B, T] with the answers."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    return batch, target.generate(  # type: ignore[misc, return-value]
        **batch, max_new_tokens=recipe.max_new_tokens, do_sample=False
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make_embedded(Path(sys.argv[1]), Recipe())
