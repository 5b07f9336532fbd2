"""Run a training step of a draft head on stored hidden states, the way of one toolkit.

A worker (`scripts.bench.harness.run_worker`) in the environment of the path that the job names, so
it imports only torch and that path's library. Letters: T tokens, H hidden, V vocabulary, W draft
vocabulary, K depths.
"""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import LlamaConfig

from scripts.bench.harness import best_device, measure_footprint

NORM_EPS = 1e-5
NUM_LAYERS = 3
"""Layers of the target, whose states EAGLE-3 fuses."""
IGNORED = -100
LEARNING_RATE = 1e-4
LARGEST_NORM = 1.0
PeerTraining = tuple[nn.Module, Callable[[], Tensor]]
"""A head, and the function of its loss on the text."""


@dataclass(frozen=True)
class StepInputs:
    """Hold the contents of a feature store, and the target's ends, in float32.

    Attributes:
        llama: config of the target, and of EAGLE's layer.
        depth: K, steps of EAGLE's training-time test or Medusa heads.
        text: `input_ids`, `position_ids`, `document_ids` [1, T] int64, `loss_mask` [1, T] bool;
            the first third of each document is a prompt.
        layers: [L, T, H] states that EAGLE-3 fuses.
        prenorm_states: [T, H] states before the final norm, whose weight is one.
        embedding, output_head: [V, H] weights of the target.
        draft_ids: [W] int64, sorted ids of the draft vocabulary.
        weights: the trained matrices of an EAGLE-3 head by name.
    """

    llama: LlamaConfig
    depth: int
    text: dict[str, Tensor]
    layers: Tensor
    prenorm_states: Tensor
    embedding: Tensor
    output_head: Tensor
    draft_ids: Tensor
    weights: dict[str, Tensor]

    @classmethod
    def from_job(cls, job: dict[str, Any], device: torch.device) -> "StepInputs":
        """Draw the inputs of a job, the same numbers in every process.

        Args:
            job: see `measure_peer_step`.
            device: device of the inputs.
        """
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device)

        tokens, hidden, wide, vocab = (
            job[name] for name in ("tokens", "hidden", "intermediate", "vocab")
        )
        queries, keys = (job[name] * job["head_dim"] for name in ("num_heads", "num_kv_heads"))
        shapes = {
            "fc.weight": (hidden, NUM_LAYERS * hidden),
            "layer.self_attn.q_proj.weight": (queries, 2 * hidden),
            "layer.self_attn.k_proj.weight": (keys, 2 * hidden),
            "layer.self_attn.v_proj.weight": (keys, 2 * hidden),
            "layer.self_attn.o_proj.weight": (hidden, queries),
            "layer.mlp.gate_proj.weight": (wide, hidden),
            "layer.mlp.up_proj.weight": (wide, hidden),
            "layer.mlp.down_proj.weight": (hidden, wide),
        }
        order = torch.randperm(vocab, generator=generator)
        output_head = draw(vocab, hidden, scale=hidden**-0.5)
        # A real draft vocabulary holds the frequent ids, so it nearly always contains the target's
        # first choice. The other rows of the output head are scaled down to make that hold here.
        # Otherwise losses would differ: our loss and EAGLE-3's skip a token whose first choice lies
        # outside the draft vocabulary, speculators' loss does not.
        output_head[order[job["draft_vocab"] :].to(device)] *= 0.1
        text = _draw_sequence(tokens, vocab, generator)
        return cls(
            llama=LlamaConfig(
                vocab_size=vocab, hidden_size=hidden, intermediate_size=wide,
                num_hidden_layers=NUM_LAYERS, num_attention_heads=job["num_heads"],
                num_key_value_heads=job["num_kv_heads"], head_dim=job["head_dim"],
                rms_norm_eps=NORM_EPS, max_position_embeddings=tokens,
            ),
            depth=job["depth"],
            text={name: row.to(device) for name, row in text.items()},
            layers=draw(NUM_LAYERS, tokens, hidden),
            prenorm_states=draw(tokens, hidden),
            embedding=draw(vocab, hidden),
            output_head=output_head,
            draft_ids=order[: job["draft_vocab"]].sort().values.to(device),
            weights={name: draw(*shape, scale=0.02) for name, shape in shapes.items()},
        )  # fmt: skip

    @property
    def hidden_states(self) -> Tensor:
        """Compute the [T, H] states after the final norm."""
        return F.rms_norm(self.prenorm_states, self.prenorm_states.shape[-1:], eps=NORM_EPS)


def _draw_sequence(tokens: int, vocab: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw one packed sequence of documents of T / 8 to T / 2 tokens."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(torch.randint(tokens // 8, tokens // 2, (), generator=generator))
        # A remainder too short for a document lengthens the last one.
        lengths.append(left if left - drawn < tokens // 8 else drawn)
    places = [torch.arange(length) for length in lengths]
    answers = [place >= len(place) // 3 for place in places]
    return {
        "input_ids": torch.randint(vocab, (1, tokens), generator=generator),
        "position_ids": torch.cat(places)[None],
        "document_ids": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        "loss_mask": torch.cat(answers)[None],
    }


def build_eagle3_step(inputs: StepInputs, compiled: bool = False) -> PeerTraining:
    """Build the step of `train/eagle.py`, with a frozen output head and the weights of speculators.

    `compiled` is `train.compile=true`.
    """
    from conf.settings.eagle import EagleConfig, OutputHead, TokenNormalizer
    from heads.eagle.eagle import EagleHead
    from heads.vocab import DraftVocab
    from train.eagle import EagleObjective

    config = EagleConfig(
        layers=[*range(1, NUM_LAYERS + 1)], num_steps=inputs.depth, step_decay=1.0,
        token_normalizer=TokenNormalizer.supervised, output_head=OutputHead.frozen,
        teacher_temperature=1.0, learn_prompts=False,
    )  # fmt: skip
    target = make_target_parts(inputs)
    vocab = DraftVocab(inputs.draft_ids, target.vocab_size)
    head = EagleHead.from_settings(target, config, vocab, seed=0)
    _copy_weights(head, "layer.", inputs.weights)
    return build_own_step(EagleObjective(head, target, config), inputs, compiled)


def build_medusa_step(inputs: StepInputs) -> PeerTraining:
    """Build the step of `train/medusa.py`, with heads weighted as in the original."""
    from conf.settings.medusa import Labels, MedusaConfig
    from heads.medusa import MedusaHead
    from train.medusa import MedusaObjective

    config = MedusaConfig(num_heads=inputs.depth, loss_decay=1.0, labels=Labels.hard)
    target = make_target_parts(inputs)
    head = MedusaHead.from_target(target, inputs.depth, config.num_layers)
    return build_own_step(MedusaObjective(head, target, config), inputs, False)


def make_target_parts(inputs: StepInputs) -> Any:
    """Make the target's embedding and output head."""
    from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead

    embedding = nn.Embedding.from_pretrained(inputs.embedding)
    vocab, hidden = inputs.output_head.shape
    output_head = nn.Linear(hidden, vocab, bias=False).requires_grad_(False)
    output_head.weight.data = inputs.output_head
    model = SimpleNamespace(config=inputs.llama, generation_config=None)
    return EmbeddingsAndOutputHead(model, None, "random", embedding, output_head)


def build_own_step(objective: Any, inputs: StepInputs, compiled: bool) -> PeerTraining:
    """Build the step of an objective, as the training loop runs it."""
    from train.batch.data_loader import batch_to_device

    if compiled:
        objective.compile_parts()
    layers = {f"layers.{i}": states[None] for i, states in enumerate(inputs.layers, start=1)}
    device = inputs.prenorm_states.device
    text = objective.index_batch({name: rows.cpu() for name, rows in inputs.text.items()})
    weights, counts = objective.term_weights.to(device), objective.compute_divisors(text).to(device)
    batch = {**batch_to_device(text, device), **layers, "hidden_states": inputs.hidden_states[None]}

    def loss() -> Tensor:
        scale = weights / counts.clamp_min(1)
        return objective(batch, scale).total

    return objective.head.train(), loss


def build_original_medusa_step(inputs: StepInputs) -> PeerTraining:
    """Build the step of FasterDecoding/Medusa (`medusa/train/train_legacy.py`).

    Every head gives logits at every token, [K, T, V] in all; the cross-entropy applies the mask,
    and heads are summed without weights.
    """
    from heads.medusa import MedusaHead

    head = MedusaHead.from_target(make_target_parts(inputs), inputs.depth, num_layers=1)
    hidden = inputs.hidden_states
    text = inputs.text
    labels = text["input_ids"].masked_fill(~text["loss_mask"], IGNORED)[0]

    def loss() -> Tensor:
        logits = head(hidden)
        losses = []
        for ahead, all_predicted in enumerate(logits, start=2):
            predicted, wanted = all_predicted[:-ahead], labels[ahead:]
            losses.append(F.cross_entropy(predicted, wanted, ignore_index=IGNORED))
            learnt = wanted != IGNORED
            # The accuracy that its trainer logs, brought to the host at each step.
            (predicted.topk(1).indices[learnt, 0] == wanted[learnt]).float().mean().item()
        return torch.stack(losses).sum()

    return head.train(), loss


def build_speculators_step(inputs: StepInputs) -> PeerTraining:
    """Build speculators' step of EAGLE-3, called as `speculators/train/trainer.py` calls it.

    On CUDA unchanged. Elsewhere its SDPA replaces flex attention, which has no backward pass there,
    and its eager loss replaces its Triton kernel.
    """
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    on_cuda = inputs.prenorm_states.is_cuda
    llama = copy.deepcopy(inputs.llama)
    llama.num_hidden_layers = 1
    llama._attn_implementation = "simple_flex_attention" if on_cuda else "sdpa"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=llama, draft_vocab_size=len(inputs.draft_ids)
        )
    )
    rows = inputs.output_head[inputs.draft_ids]
    frozen = {
        "lm_head.weight": rows, "verifier_lm_head.weight": rows,
        "embed_tokens.weight": inputs.embedding,
    }  # fmt: skip
    _copy_weights(model, "layers.0.", inputs.weights | frozen)
    model.to(inputs.prenorm_states.device).train()
    implementation = "fused" if on_cuda else "eager"
    settings, _validation = model.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation=implementation,
        ttt_steps=inputs.depth, ttt_step_loss_decay=1.0,
    )  # fmt: skip
    batch = _build_speculators_batch(inputs)

    def loss() -> Tensor:
        _draft_tokens, total, _metrics = model(**batch, **settings)
        return total

    return model, loss


def _build_speculators_batch(inputs: StepInputs) -> dict[str, Tensor]:
    """Build the batch as speculators' collator does: documents shifted, the end padded to T."""
    from speculators.models.eagle3.data import shift_batch

    text = {name: row[0] for name, row in inputs.text.items()}
    fused = torch.cat(list(inputs.layers), dim=-1)
    packed = []
    for number in text["document_ids"].unique().tolist():
        inside = text["document_ids"] == number
        document = {
            "input_ids": text["input_ids"][inside],
            "position_ids": text["position_ids"][inside],
            # Its mask lies one token before ours; shift it so that the same tokens are learnt.
            "loss_mask": F.pad(text["loss_mask"][inside][1:], (0, 1)),
            "hidden_states": fused[inside],
            "verifier_last_hidden_states": inputs.prenorm_states[inside],
            "lengths": inside.sum()[None],
        }
        shifted = shift_batch(document)
        shifted["document_ids"] = torch.full_like(shifted["input_ids"], number)
        packed.append({name: rows for name, rows in shifted.items() if name != "lengths"})
    batch = {}
    for name in packed[0]:
        rows = torch.cat([document[name] for document in packed])
        missing = len(fused) - len(rows), *rows.shape[1:]
        batch[name] = torch.cat([rows, rows.new_full(missing, -(name == "document_ids"))])[None]
    return batch


def _copy_weights(module: nn.Module, layer: str, weights: dict[str, Tensor]) -> None:
    """Copy weights by name; those of the decoder layer have the prefix `layer` in the module."""
    for name, weight in weights.items():
        module.get_parameter(name.replace("layer.", layer)).data.copy_(weight)


STEPS_BY_NAME: dict[str, Callable[[StepInputs], PeerTraining]] = {
    "eagle3": build_eagle3_step,
    "eagle3_compiled": partial(build_eagle3_step, compiled=True),
    "speculators": build_speculators_step,
    "medusa": build_medusa_step,
    "original_medusa": build_original_medusa_step,
}


def build_stepper(training: PeerTraining) -> Callable[[], Tensor]:
    """Build a function that takes one optimizer step and returns the loss before the step."""
    head, loss = training
    parameters = [each for each in head.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)

    def step() -> Tensor:
        total = loss()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        optimizer.step()
        # Here, so that a step's peak only holds its own gradients.
        optimizer.zero_grad()
        return total.detach()

    return step


def measure_peer_step(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the loss of the first step and the cost of later ones.

    Args:
        job: `path`, a key of `STEPS_BY_NAME`; `tokens`, `hidden`, `vocab` and `draft_vocab`, which
            are T, H, V and W; `num_heads`, `num_kv_heads`, `head_dim` and `intermediate`, sizes of
            EAGLE's layer; `depth`, which is K; `threads` of torch; `repeats`, number of timed
            steps.
    """
    device = best_device()
    torch.set_num_threads(job["threads"])
    step = build_stepper(STEPS_BY_NAME[job["path"]](StepInputs.from_job(job, device)))
    return {"loss": float(step()), **measure_footprint(step, device, job["repeats"])._asdict()}


if __name__ == "__main__":
    print(json.dumps(measure_peer_step(json.loads(sys.argv[1]))))
