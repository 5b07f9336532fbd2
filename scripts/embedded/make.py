"""Makes the embedded default again: `python scripts/embedded/make.py FOLDER`, about an hour.

A small Llama-type model is trained on Python source with permissive licences, then answers prompts
from the standard library with its own greedy text. FOLDER gets the contents of `data/embedded/`,
and `trained`, the target before it unlearnt loops. A second start continues.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import hashlib
import json
import random
from dataclasses import asdict

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.embedded import corpus
from scripts.embedded.target import Recipe, answer_prompts, train_target, unlearn_loops

STDLIB_EPOCHS = 3
"""Times that the standard library is read per reading of the packages, as prompts are like it."""


def make_embedded(folder: Path, recipe: Recipe, progress: bool = True) -> None:
    """Write the target, conversations to learn from, held-out prompts, and checksums."""
    library = corpus.find_source_files(recipe.num_files)
    texts = corpus.read_source(library, library.train)
    learnt, held_out = (
        [p for text in side.items() for p in corpus.iter_chats(*text, recipe.max_piece_chars)]
        for side in (texts, corpus.read_source(library, library.held_out))
    )
    trained, place = folder / "trained", folder / "model"
    if not trained.is_dir():
        packages = corpus.find_packages(recipe.num_files)
        others = corpus.read_source(packages, packages.train).items()
        pieces = [p for text in others for p in corpus.iter_chats(*text, recipe.max_piece_chars)]
        tokenizer = corpus.train_tokenizer(
            list(texts.values()), recipe.vocab_size, recipe.max_position_embeddings
        )
        target = train_target(STDLIB_EPOCHS * learnt + pieces, tokenizer, recipe, progress)
        save_trained(target, tokenizer, trained)
    if not place.is_dir():
        target, tokenizer = load_trained(trained)
        unlearn_loops(target, tokenizer, learnt, recipe, progress)
        save_trained(target, tokenizer, place)
    target, tokenizer = load_trained(place)
    rng = random.Random(recipe.seed)
    chosen = corpus.choose_prompts(
        learnt, recipe.num_conversations, tokenizer, recipe.max_prompt_tokens, rng
    )
    answers = answer_prompts(target, tokenizer, chosen, recipe, progress)
    rows = []
    for piece, answer in zip(chosen, answers, strict=True):
        if answer.strip():
            turns = (("user", piece.prompt), ("assistant", answer))
            messages = [{"role": role, "content": content} for role, content in turns]
            rows.append({"messages": messages, "category": piece.category, "file": piece.file})
    write_jsonl(folder / "train.jsonl", rows)
    prompts = corpus.choose_prompts(
        held_out, recipe.num_prompts, tokenizer, recipe.max_prompt_tokens, rng
    )
    asked = [
        {"question_id": i, "category": p.category, "turns": [p.prompt], "file": p.file}
        for i, p in enumerate(prompts)
    ]
    write_jsonl(folder / "prompts.jsonl", asked)
    paths = [folder / "train.jsonl", folder / "prompts.jsonl", *sorted(folder.glob("model/*"))]
    facts = {
        "recipe": asdict(recipe),
        "python": sys.version.split()[0],
        "packages": corpus.PACKAGES,
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
    """Write both completely or not at all, rounded to bfloat16."""
    partial = folder.with_suffix(".partial")
    tokenizer.save_pretrained(partial)
    target.bfloat16().save_pretrained(partial)
    partial.rename(folder)


def load_trained(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load both in float32, as every user on a CPU does."""
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return target, PreTrainedTokenizerFast.from_pretrained(folder)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Write a line of JSON for each row."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make_embedded(Path(sys.argv[1]), Recipe())
