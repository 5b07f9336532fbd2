"""The text of the embedded default: Python source as chats, and its tokenizer."""

import hashlib
import importlib.util
import random
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from conf.errors import InputError

SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")

CHAT_TEMPLATE = """\
{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>
' }}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '
' }}{% else %}{{ '<|' + m['role'] + '|>
' + m['content'] + '<|end|>
' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}"""

CATEGORIES = ("function", "method", "class", "module")
_FEWEST_PROMPT_TOKENS = 8

# A line break is always a separate token: the one after <|assistant|> must not merge with the
# indentation at the start of an answer, or prompts would end within a token.
_WORDS = r"\n| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|[^\S\n]+(?!\S)|[^\S\n]+"

_EXCLUDED = {
    "__phello__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "_vendor", "site-packages", "test", "tests",
}  # fmt: skip
PACKAGES = {
    "accelerate": "Apache-2.0", "datasets": "Apache-2.0", "filelock": "MIT", "fontTools": "MIT",
    "fsspec": "BSD-3-Clause", "huggingface_hub": "Apache-2.0", "hydra": "MIT",
    "jinja2": "BSD-3-Clause", "networkx": "BSD-3-Clause", "numpy": "BSD-3-Clause",
    "omegaconf": "BSD-3-Clause", "pandas": "BSD-3-Clause", "peft": "Apache-2.0", "pip": "MIT",
    "pydantic": "MIT", "requests": "Apache-2.0", "rich": "MIT", "setuptools": "MIT",
    "trio": "MIT OR Apache-2.0",
}  # fmt: skip
"""Installed packages whose source the target reads beside the standard library's, by licence."""
_FEWEST_BYTES = 3.6
"""A piece with fewer compressed bytes per ten than this is a table, and teaches repetition."""
_CONSTRUCT = re.compile(r" *(?:@|(?:async )?def |class )")
_HELD_OUT_IN = 10  # one file of ten
_MIN_FILES = 50


@dataclass(frozen=True)
class CodeChat:
    """One chat: the start of a piece of source, and its continuation."""

    category: str
    """function, method, class, module, or body for a later part of a long one."""
    file: str
    """Path inside the standard library."""
    prompt: str
    continuation: str


@dataclass(frozen=True)
class SourceFiles:
    """Standard-library files, sorted, split so that no file is on both sides."""

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
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if _EXCLUDED.isdisjoint(path.relative_to(root).parts)
        and not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata"))
    )
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


def _spread_names(names: list[str], count: int | None) -> list[str]:
    return names if count is None else names[:: max(1, len(names) // count)][:count]


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
        paths = (path.relative_to(root) for path in folder.rglob("*.py"))
        names += sorted(path.as_posix() for path in paths if _EXCLUDED.isdisjoint(path.parts))
    return SourceFiles(root, _spread_names(names, num_files), [])


def read_source(files: SourceFiles, names: list[str]) -> dict[str, str]:
    """Read files as UTF-8; skip the few with another encoding."""
    texts = {}
    for name in names:
        try:
            texts[name] = (files.root / name).read_text(encoding="utf-8").expandtabs()
        except UnicodeDecodeError:
            continue
    return texts


def iter_chats(file: str, text: str, max_chars: int) -> Iterator[CodeChat]:
    """Cut a file into chats: at every def and class, and within those above `max_chars`.

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
    max_prompt_tokens: int,
    rng: random.Random,
) -> list[CodeChat]:
    """Choose prompts in equal shares of the categories, in turn, short enough and distinct."""
    lengths = tokenizer([p.prompt for p in pieces], add_special_tokens=False)["input_ids"]
    unique = {
        piece.prompt: piece
        for piece, ids in zip(pieces, lengths, strict=True)
        if _FEWEST_PROMPT_TOKENS <= len(ids) <= max_prompt_tokens
    }
    columns = [[p for p in unique.values() if p.category == name] for name in CATEGORIES]
    for column in columns:
        rng.shuffle(column)
    in_turn = [p for row in zip_longest(*columns) for p in row if p is not None]
    return in_turn[:count]


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


def render_chat(piece: CodeChat, bos: str) -> str:
    """Render a piece as the chat template does; a test checks that both agree."""
    return f"{bos}<|user|>\n{piece.prompt}<|end|>\n<|assistant|>\n{piece.continuation}<|end|>\n"
