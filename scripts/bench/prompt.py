"""What a long prompt needs: peak memory beyond weights and cache, by drafter.

`python scripts/bench/prompt.py --tokens 8192 32768 131072` decodes two tokens behind random prompts
with a random target of four layers and holds each peak against that of a prompt of one part
(`heads/target_model/prefill.py`). Memory that grows with tokens times tokens would show at once.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import gc
from collections.abc import Callable

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from conf.settings.eagle import EagleConfig
from eval.decode.engine import NoDraft, decode
from heads.decoding.buffers import reserved
from heads.decoding.drafting import Drafter
from heads.decoding.tree import Tree
from heads.eagle.drafter import EagleChain
from heads.eagle.head import EagleHead
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.head import MedusaHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench.apart import markdown
from scripts.bench.footprint import add_sizes, best_device, peak_bytes, where

MIB = 2**20
NUM_NEW = 2


def arguments() -> argparse.Namespace:
    """The sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of prompts")
    add_sizes(parser, hidden=64, layers=4, vocab=512, threads=1)
    return parser.parse_args()


def random_target(options: argparse.Namespace) -> Target:
    """A Llama of two heads that share one of keys and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab, hidden_size=options.hidden, num_hidden_layers=options.layers,
        intermediate_size=3 * options.hidden, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=max(options.tokens) + 64, eos_token_id=None,
    )  # fmt: skip
    with best_device():
        return Target(LlamaForCausalLM(config), None, "random")


def drafters(target: Target) -> dict[str, Callable[[], Drafter]]:
    """Makers of those that are measured."""
    medusa = MedusaHead.from_target(target, num_heads=2, num_layers=1)
    config = EagleConfig(layers=[1, 2, 3])
    eagle = EagleHead.from_target(target, config, DraftVocab.everything(target.vocab_size), seed=0)
    return {
        "none": NoDraft,
        "Medusa, chain of 2": lambda: MedusaDrafter(medusa, Tree.chain(2)),
        "EAGLE-3, chain of 2": lambda: EagleChain(eagle, 2),
    }


def peak(target: Target, make: Callable[[], Drafter], num_tokens: int) -> int:
    """Bytes that decoding behind a random prompt takes beyond the weights."""
    drawn = torch.randint(target.vocab_size, (num_tokens,), generator=torch.Generator())
    prompt = drawn.tolist()
    gc.collect()  # what is let go of while it is measured would be taken off
    return peak_bytes(lambda: decode(target, make(), prompt, NUM_NEW), target.device)


def cache_bytes(target: Target, make: Callable[[], Drafter], num_tokens: int) -> int:
    """Of keys and values, the drafter's included, with the slots that are ready for more."""
    config = target.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    drafter = make()
    if isinstance(drafter, EagleChain):
        numbers += 2 * drafter.head.layer.self_attn.k_proj.out_features
    return numbers * reserved(num_tokens) * target.dtype.itemsize


def beyond(target: Target, make: Callable[[], Drafter], num_tokens: int) -> int:
    """Bytes of the peak that are neither weights nor cache."""
    return peak(target, make, num_tokens) - cache_bytes(target, make, num_tokens)


def main() -> None:
    """Prints the table."""
    options = arguments()
    torch.set_num_threads(options.threads)
    target = random_target(options)
    rows = []
    for name, make in drafters(target).items():
        one = beyond(target, make, target.prefill_chunk)
        for num_tokens in tqdm(options.tokens, desc=name, unit="prompt"):
            cache, more = cache_bytes(target, make, num_tokens), beyond(target, make, num_tokens)
            cells = f"{num_tokens:,}", f"{cache / MIB:.1f}", f"{more / MIB:.1f}"
            rows.append((name, *cells, f"{more / one:.2f}"))
    columns = ("drafter", "tokens", "cache, MiB", "beyond it, MiB", "of one part's")
    print(f"{where(target.device)}, {options.layers} layers, hidden size {options.hidden}\n")
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
