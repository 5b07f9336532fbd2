"""Trains a chat model together with a layer for multi-token prediction, for measurements.

    python scripts/bench/mtp_target.py MODEL CHATS.jsonl OUT --steps 300

MODEL, of Llama's type, trains further on CHATS in MiMo's layout (Qwen2 with biases of 0, and one
MTP layer). The loss is DeepSeek-V3's (arXiv 2412.19437, eq. 24 and 25): the cross-entropy of the
next token, plus `--weight` times that of the token after it. Its gradient also reaches the model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import json
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from conf.settings.data import DataConfig
from conf.settings.eagle import MtpConfig
from conf.settings.target import Dtype, TargetConfig
from data.prepared.packing import PackedDataset
from data.prepared.prepare import prepare_datasets
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.mtp.mtp import MtpHead
from heads.mtp.stitch import stitch_layer
from heads.target_model.load import load_target
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from train.batch.data_loader import stack_sequences

LENGTH = 512
SHARED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "hidden_act", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


def main() -> None:
    """Train a chat model with an MTP layer, and write it in the layout of MiMo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "chats", "out"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch", type=int, default=8, help=(f"sequences of {LENGTH} tokens per step")
    )
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate of AdamW")
    parser.add_argument("--weight", type=float, default=0.3, help="weight of the layer's loss")
    given = parser.parse_args()
    torch.manual_seed(0)
    with TemporaryDirectory() as plain:
        write_as_qwen2(given.model, Path(plain))
        target = load_target(TargetConfig(path=plain, dtype=Dtype.float32), torch.device("cpu"))
        everything = DraftVocab.make_full(target.vocab_size)
        head = MtpHead.from_settings(target, MtpConfig(), everything, seed=0)
        train_target_and_head(target, head, given)
        target.model.save_pretrained(plain)
        rename_to_mimo(Path(plain))
        stitch_layer(Path(plain), head, Path(given.out))


def write_as_qwen2(model: str, folder: Path) -> None:
    """Write a Llama-type model in Qwen2's layout."""
    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {name: getattr(llama.config, name) for name in SHARED}
    qwen = Qwen2ForCausalLM(Qwen2Config(**settings))
    missing, foreign = qwen.load_state_dict(llama.state_dict(), strict=False)
    assert not foreign and all(name.endswith("_proj.bias") for name in missing)
    for name in missing:
        qwen.get_parameter(name).data.zero_()
    qwen.generation_config = llama.generation_config
    qwen.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    rename_to_mimo(folder)


def rename_to_mimo(folder: Path) -> None:
    """Rename the architecture in a folder's config to MiMo's, which has an MTP layer.

    MiMo differs from Qwen2 in that layer only.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["MiMoForCausalLM"]}
    file.write_text(json.dumps(config, indent=2))


def train_target_and_head(target: Target, head: MtpHead, given: argparse.Namespace) -> None:
    """Train all parameters of the target and of the head."""
    data, _, report = prepare_datasets(
        DataConfig(path=given.chats, max_length=LENGTH), target.tokenizer, 0
    )
    print(*report.format_lines(), sep="\n")
    target.model.requires_grad_(True)
    parameters = [*target.model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=given.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, given.rate, total_steps=given.steps, pct_start=0.1
    )
    for step in (progress := tqdm(range(given.steps))):
        numbers = range(step * given.batch, (step + 1) * given.batch)
        with torch.autocast("cpu", torch.bfloat16):
            losses = compute_losses(target, head, data, numbers)
        (losses[0] + given.weight * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(next=f"{losses[0]:.3f}", after=f"{losses[1]:.3f}")
    target.model.requires_grad_(False)


def compute_losses(
    target: Target, head: MtpHead, data: PackedDataset, numbers: range
) -> list[Tensor]:
    """Compute the cross-entropies of the next token and of the token after it.

    Each is a mean over all tokens of the documents that such a token follows.
    """
    batch = stack_sequences(data, [number % len(data) for number in numbers])
    ids, positions = batch["input_ids"].flatten(), batch["position_ids"].flatten()
    document_ids = batch["document_ids"].add(torch.arange(len(numbers)).unsqueeze(1) * LENGTH)
    document_ids = document_ids.masked_fill(batch["document_ids"] < 0, -1).flatten()
    documents = Documents.from_ids(batch["document_ids"])
    output = target.encode_documents(
        batch["input_ids"], batch["position_ids"], documents, head.taps
    )
    states = output.hidden_states.flatten(0, 1)
    text = head.encode_context(head.collect_features(output).flatten(0, 1), ids.roll(-1), positions)
    rows = torch.arange(len(ids))
    seen = build_causal_range(documents, rows)
    outputs = head.draft(text, rows, BranchCache(text.keys[None], text.values[None], seen))
    losses = []
    for logits, ahead in ((target.compute_logits(states), 1), (head.compute_logits(outputs), 2)):
        same = (document_ids == document_ids.roll(-ahead)) & (document_ids >= 0)
        same[-ahead:] = False
        losses.append(cross_entropy(logits[same].float(), ids.roll(-ahead)[same]))
    return losses


if __name__ == "__main__":
    main()
