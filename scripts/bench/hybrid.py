"""Heads on a hybrid target beside heads on a Llama of the same size, from the same conversations.

`python scripts/bench/hybrid.py --tokenizer FOLDER --data chats.jsonl --prompts mt_bench.jsonl`
trains both targets from scratch, a Qwen3.5 with three gated delta nets to each attention and a
Llama, then Medusa and EAGLE-3.1 on each, and prints tau, speed-up of chains and how many texts
equal the target's own. An hour of one core each at most; a second start goes on where one is done.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import json
import math
import subprocess
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conf.settings.data import DataConfig
from data.prepared.pack import PackedDataset, prepare
from eval.measure.stats import shown
from heads.layers.documents import Documents
from heads.storage import write_folder
from heads.target_model.model import Target

ROOT = Path(__file__).resolve().parents[2]
WIDTH, NUM_LAYERS, HEAD_DIM = 192, 8, 32
BATCH_SIZE, MAX_LENGTH = 4, 512
RATE, WARMUP_STEPS = 6e-3, 50
HEADS = {"medusa": ["medusa.py"], "eagle3_1": ["eagle.py", "head=eagle3_1"]}
CHAINS = {"medusa": "medusa_chain", "eagle3_1": "eagle_chain"}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="of a target with a chat template")
    parser.add_argument("--data", required=True, help="conversations to learn from")
    parser.add_argument("--prompts", required=True, help="to measure on")
    parser.add_argument("--steps", type=int, default=1500, help="of the targets")
    parser.add_argument("--head-steps", type=int, default=290)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--out-dir", type=Path, default=Path("outputs/hybrid"))
    return parser.parse_args(given)


def target_config(family: str, tokenizer: Any) -> Any:
    """Of a random target; both have 5 million parameters within 5%."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": WIDTH // HEAD_DIM,
        "num_key_value_heads": WIDTH // HEAD_DIM // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "llama":
        return AutoConfig.for_model(family, **sizes, intermediate_size=576)
    delta = {"linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM}
    num_heads = WIDTH // HEAD_DIM
    heads = {"linear_num_key_heads": num_heads, "linear_num_value_heads": num_heads}
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (NUM_LAYERS // 4)
    return AutoConfig.for_model(
        family, **sizes, **delta, **heads, layer_types=kinds, intermediate_size=480
    )


def pretrain(family: str, options: argparse.Namespace, folder: Path) -> None:
    """Writes a target that has learnt every token of the conversations, documents kept apart."""
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    data = DataConfig(path=options.data, max_length=MAX_LENGTH, eval_fraction=0.002)
    dataset, _, _ = prepare(data, tokenizer, seed=0)
    torch.manual_seed(0)
    config = target_config(family, tokenizer)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    target = Target(model, tokenizer, family)
    model.requires_grad_(True)
    optimizers = _optimizers(model)
    steps = tqdm(range(options.steps), desc=f"{family}, {model.num_parameters() / 1e6:.2f}M")
    for step in steps:
        loss = _loss(target, dataset, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done = max(0, step - WARMUP_STEPS) / max(1, options.steps - WARMUP_STEPS)
        factor = min(1, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * done))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * factor
            optimizer.step()
        model.zero_grad()
        steps.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

    def fill(staging: Path) -> None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)

    write_folder(folder, fill)


def _loss(target: Target, dataset: PackedDataset, step: int) -> torch.Tensor:
    """Mean over all tokens of a batch but the first of each document and padding."""
    first = step * BATCH_SIZE
    rows = [dataset[(first + row) % len(dataset)] for row in range(BATCH_SIZE)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    numbers = batch["document_ids"]
    with torch.autocast("cpu", torch.bfloat16):
        states = target.read(batch["input_ids"], batch["position_ids"], Documents.of(numbers))
        follows = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)
        logits = target.output_head(states.hidden_states[:, :-1][follows])
    return torch.nn.functional.cross_entropy(logits.float(), batch["input_ids"][:, 1:][follows])


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def measured(family: str, head: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `eval/speedup.py` says of a head's chains, after training it if need be."""
    target, out_dir = options.out_dir / family / "target", options.out_dir / family / head
    if not (out_dir / "head").exists():
        _command(
            "train", *HEADS[head], f"target.path={target}", f"data.path={options.data}",
            f"data.max_length={MAX_LENGTH}", f"train.batch_size={BATCH_SIZE}",
            f"train.max_steps={options.head_steps}", "train.num_replay_prompts=0",
            f"out_dir={out_dir}",
        )  # fmt: skip
    if not (out_dir / "speedup.json").exists():
        _command(
            "eval", "speedup.py", f"target.path={target}", f"head.path={out_dir}/head",
            f"data.path={options.prompts}", f"data.num_prompts={options.num_prompts}",
            "num_turns=1", "depth=4", "max_new_tokens=96", f"methods=[vanilla,{CHAINS[head]}]",
            f"out_dir={out_dir}",
        )  # fmt: skip
    return dict(json.loads((out_dir / "speedup.json").read_text()))


def _command(room: str, script: str, *words: str) -> None:
    command = [sys.executable, str(ROOT / room / script), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stderr[-2000:]}")


def main(given: list[str] | None = None) -> None:
    """Prints a row for every target and head."""
    options = arguments(given)
    table = Table(title="chains of 4 on a hybrid and on a Llama")
    for column in ("target", "head", "tau", "speed-up", "95% interval", "texts equal"):
        table.add_column(column, justify="right")
    for family in ("qwen3_5_text", "llama"):
        folder = options.out_dir / family / "target"
        if not folder.exists():
            pretrain(family, options, folder)
        for head in HEADS:
            result = measured(family, head, options)
            row, same = result["methods"][CHAINS[head]], result["lossless"]
            table.add_row(
                family, head, f"{row['tau']:.3f}", f"{row['speedup']:.2f}",
                shown(row["speedup_ci95"], between=" to "),
                f"{same['num_equal']} of {same['num_prompts']}",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
