"""One training step of a DFlash head on stored hidden states, ours or speculators'.

    python -m scripts.bench.peers.block_steps job.json result.json

runs as `scripts/bench/peers/steps.py` does, of whose jobs `depth` is the size of a block here. Both
draft behind the same tokens of one document, learn the target's distribution alike, and through
its output head, which stays as it is.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from scripts.bench.peers.steps import (
    EPS,
    NUM_LAYERS,
    StepInputs,
    StepJob,
    Training,
    ours,
    run,
    target_of,
)

NUM_BLOCK_LAYERS, NUM_ANCHORS, GAMMA, MASK = 5, 128, 4.0, 0
ENDS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")


def dflash(job: StepJob, inputs: StepInputs) -> Training:
    """`train/dflash.py`, with the text left out of the loss."""
    from transformers import GenerationConfig

    from conf.settings.blocks import DFlashConfig
    from heads.blocks.config import block_config
    from heads.dflash.head import DFlashHead
    from heads.vocab import DraftVocab
    from train.blocks import objective as blocks
    from train.dflash import DFlashObjective

    config = DFlashConfig(
        layers=[*range(1, NUM_LAYERS + 1)], num_layers=NUM_BLOCK_LAYERS, block_size=job.depth,
        mask_token_id=MASK, slot_gamma=GAMMA, text_weight=0.0, divergence_weight=1.0,
        off_path_weight=1.0,
    )  # fmt: skip
    target = target_of(job, inputs)
    # Its last hidden state, which has passed the final norm, is no feature.
    target.config.num_hidden_layers = NUM_LAYERS + 1
    target.generation_config = GenerationConfig()
    shape = block_config(config, target, sample_from_anchor=False)
    head = DFlashHead(shape, DraftVocab.everything(job.vocab)).begin(target, seed=0)
    _fill(head)
    # Features end one token before the one that is sure.
    blocks.drawn = lambda *_args: _anchors(job) - 1
    objective = DFlashObjective(head, target, config)
    # speculators divides by all drafts, not by those of a depth.
    objective.weights = objective.weights / len(objective.weights)
    return ours(objective, inputs, compiled=False)


def speculators(job: StepJob, inputs: StepInputs) -> Training:
    """speculators' DFlash and the way its trainer calls it; on a CPU as `steps.speculators`."""
    from speculators.models.dflash import DFlashSpeculatorConfig, core
    from transformers import Qwen3Config

    on_cuda = inputs.last.is_cuda
    shape = Qwen3Config(
        vocab_size=job.vocab, hidden_size=job.hidden, intermediate_size=job.intermediate,
        num_hidden_layers=NUM_BLOCK_LAYERS, num_attention_heads=job.num_heads,
        num_key_value_heads=job.num_kv_heads, head_dim=job.head_dim, rms_norm_eps=EPS,
        max_position_embeddings=job.tokens, tie_word_embeddings=False, use_sliding_window=False,
        rope_parameters=job.llama().rope_parameters,
    )  # fmt: skip
    shape._attn_implementation = "simple_flex_attention" if on_cuda else "sdpa"
    model = core.DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=shape, draft_vocab_size=job.vocab, block_size=job.depth,
            aux_hidden_state_layer_ids=[*range(1, NUM_LAYERS + 1)], mask_token_id=MASK,
        )
    )  # fmt: skip
    ends = {"lm_head.weight": inputs.output_head, "verifier_lm_head.weight": inputs.output_head}
    ends["embed_tokens.weight"] = inputs.embedding
    _fill(model)
    for name, weight in ends.items():
        model.get_parameter(name).requires_grad_(False).copy_(weight)
    model.to(inputs.last.device).train()
    anchors = _anchors(job).to(inputs.last.device)
    drawn = anchors, torch.ones_like(anchors, dtype=torch.bool)
    core.select_anchors = lambda *_args: drawn
    settings, _validation = model.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="fused" if on_cuda else "eager",
        dflash_decay_gamma=GAMMA, max_anchors=NUM_ANCHORS,
        per_position_loss_weight="fixed-exp-decay",
    )  # fmt: skip
    batch = {
        **{name: inputs.text[name] for name in ("input_ids", "position_ids", "document_ids")},
        "loss_mask": inputs.text["loss_mask"].float(),
        "hidden_states": torch.cat(list(inputs.layers), -1)[None],
        "verifier_last_hidden_states": inputs.last[None],
    }

    def loss() -> Tensor:
        _draft_tokens, total, _metrics = model(**batch, **settings)
        return total

    return Training(model, loss)


def _anchors(job: StepJob) -> Tensor:
    """[A] tokens of the answer behind which a whole block is learnt."""
    return torch.linspace(job.tokens // 3 + 1, job.tokens - job.depth - 1, NUM_ANCHORS).long()


def _fill(head: nn.Module) -> None:
    """The same numbers in all trained matrices, by their names."""
    generator = torch.Generator().manual_seed(0)
    trained = {name: each for name, each in head.named_parameters() if each.dim() == 2}
    for name in sorted(trained):
        if name not in ENDS:
            trained[name].data.copy_(torch.randn(trained[name].shape, generator=generator) * 0.02)


def one_document(job: StepJob, inputs: StepInputs) -> StepInputs:
    """The inputs with all tokens in one document, the first third of which is a prompt."""
    places = torch.arange(job.tokens, device=inputs.last.device)[None]
    text = {
        "input_ids": inputs.text["input_ids"],
        "position_ids": places,
        "document_ids": torch.zeros_like(places),
        "loss_mask": places >= job.tokens // 3,
    }
    return replace(inputs, text=text)


PATHS = {
    "dflash": lambda job, inputs: dflash(job, one_document(job, inputs)),
    "speculators_dflash": lambda job, inputs: speculators(job, one_document(job, inputs)),
}

if __name__ == "__main__":
    run(PATHS)
