"""The functions that other programs may call: all public Python of Headsmith, see docs/python.md.

Everything else may change without notice. The functions live here because `train` is the one room
that sees targets, heads, decoding and losses.

Letters: B sequences, T tokens of one, D hidden, K depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from conf.errors import InputError
from conf.settings.export import ExportFormat
from conf.settings.target import Dtype, TargetConfig
from data.embedded import TARGET_PATH
from data.features.store_format import HIDDEN_STATES, LAYER_PREFIX
from data.templates.record_encoder import RecordEncoder
from eval.decode.engine import NoDraft, decode
from eval.decode.generation_config import apply_generation_config
from eval.measure import acceptance_stats, replay
from heads import kinds
from heads.decoding.sampling import Sampling
from heads.decoding.tree import Tree
from heads.draft_head import UNKNOWN, DraftHead
from heads.export.writer import check_format
from heads.layers.documents import Documents
from heads.target_model import load
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target, TargetOutput
from heads.vocab import DraftVocab
from train.batch.batch import NOISE_SEEDS, Batch
from train.batch.data_loader import batch_to_device, hash_seed
from train.loop.evaluation import compute_metrics
from train.objective import Objective

PUBLIC = (
    "load_target", "load_head", "generate", "Answer", "acceptance", "Acceptance",
    "training_objective", "training_step", "StepLoss", "TargetOutput", "frozen_parts",
    "engine_tensors", "InputError",
)  # fmt: skip
"""The names that docs/python.md lists, and that stay."""

Messages = Sequence[dict[str, str]]
"""A conversation: `role` and `content` of each message."""


@dataclass(frozen=True)
class Answer:
    """Text that a target wrote.

    Attributes:
        text: the answer, without special tokens.
        prompt_ids: token ids of the rendered prompt.
        token_ids: token ids of the answer, the stop token included.
        tau: tokens that one pass of the target wrote; 1 without drafts.
    """

    text: str
    prompt_ids: list[int]
    token_ids: list[int]
    tau: float


@dataclass(frozen=True)
class Acceptance:
    """Drafts that a text accepts.

    Attributes:
        tau: tokens that one pass of the target would write.
        alpha: for each depth, the fraction of the drafts that reached it and were accepted there.
    """

    tau: float
    alpha: list[float]


class StepLoss(NamedTuple):
    """Loss of a training step.

    Attributes:
        loss: [] float32, with gradients for the head's parameters alone.
        metrics: `loss`, and `loss_d1`, `top1_d1`, ... for each depth.
    """

    loss: Tensor
    metrics: dict[str, float]


def load_target(path: str | None = None, dtype: str = "auto", device: str | None = None) -> Target:
    """Load a frozen target, checked as in every command.

    Args:
        path: Hub id, folder or GGUF file; the embedded default unless given.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: bfloat16 on CUDA, float32 on a CPU.
        device: device of torch; CUDA where there is one unless given.

    Raises:
        InputError: nothing is there, or the architecture cannot draft, with the reason.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = TargetConfig(path or TARGET_PATH, dtype=Dtype(dtype))
    target = load.load_target(config, torch.device(device))
    apply_generation_config(target)
    return target


def load_head(
    path: str, target: EmbeddingsAndOutputHead, dtype: torch.dtype | None = None
) -> DraftHead:
    """Load a trained, exported or published head, attached to its target, in eval mode.

    Args:
        path: folder, GGUF file or Hub id.
        target: target of the head, on whose device the head goes.
        dtype: dtype of the weights; float32, as training needs, unless given.

    Raises:
        InputError: no head is there, or it is the head of another target.
    """
    return kinds.load_head(path).attach(target, dtype).eval()


def generate(
    target: Target,
    head: DraftHead | None,
    prompt: str | Messages | list[int],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
) -> Answer:
    """Write an answer: the head drafts, the target verifies.

    Greedy text is the target's own to the token; sampled text has the target's distribution.

    Args:
        target: the target.
        head: result of `load_head`; None writes without drafts.
        prompt: a question, a conversation that ends with one, or token ids.
        max_new_tokens: largest number of tokens of the answer.
        temperature: temperature of sampling; 0 is greedy.
        seed: seed of everything that sampling draws.
    """
    ids = _encode_prompt(target, prompt)
    sampling = Sampling(temperature)
    drafter = (
        NoDraft()
        if head is None
        else head.make_drafter(head.make_default_shape(), sampling, [seed])
    )
    generation = decode(target, drafter, ids, max_new_tokens, sampling, seed)
    text = target.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    tau = acceptance_stats.tau([acceptance_stats.PromptSteps("", generation.steps)])
    return Answer(text, ids, generation.token_ids, tau)


def acceptance(
    target: Target,
    head: DraftHead,
    prompt: str | Messages | list[int],
    response: str | list[int],
    depth: int | None = None,
) -> Acceptance:
    """Replay a known answer: the drafts that greedy decoding would have accepted along it.

    The result equals decoding where the target itself wrote the answer; of any other text it is
    what a target that writes that text would accept.

    Args:
        target: the target.
        head: result of `load_head`.
        prompt: prompt as in `generate`.
        response: the answer, or its token ids.
        depth: draft tokens of a chain; the head's usual number unless given.
    """
    if isinstance(response, str):
        response = list(target.tokenizer(response, add_special_tokens=False)["input_ids"])
    tree = Tree.make_chain(depth or head.default_depth)
    steps = replay.replay_response(target, head, tree, _encode_prompt(target, prompt), response)
    text = [acceptance_stats.PromptSteps("", steps)]
    return Acceptance(acceptance_stats.tau(text), acceptance_stats.alpha(text, tree.depth))


def training_objective(
    head: DraftHead | str, target: EmbeddingsAndOutputHead, seed: int = 0, **settings: Any
) -> Objective:
    """Make the objective with which the training commands train a head.

    The objective's `head` is the head; `head.parameters()` are what an optimizer takes, and
    `head.taps.layers` names the hidden states that `training_step` wants.

    Args:
        head: result of `load_head`; or the name of a recipe in conf/head (`eagle3_1`, `dflash`,
            ...), `medusa` or `mtp`, for a fresh head that drafts every id.
        target: the target, or `frozen_parts` of it.
        seed: seed of the weights of a fresh head.
        settings: settings of the command's section `head`, where they differ from the recipe.

    Raises:
        InputError: an unknown recipe, or a setting that the head lacks or that does not fit.
    """
    training: Any
    if isinstance(head, str):
        known: dict[str, Any] = {}
        for kind in kinds.HEADS:  # a kind without recipes is its own
            main = import_module(f"{__package__}.{kind}").main
            known |= dict.fromkeys(main.command.recipes or (kind,), main)
        if head not in known:
            raise InputError(f"head={head}: no such recipe; allowed: {', '.join(known)}")
        training, recipe = known[head], head
    else:
        kind = kinds.find_kind_name(head)
        training, recipe = import_module(f"{__package__}.{kind}").main, head.variant
    chosen = [f"head={recipe}"] if recipe in training.command.recipes else []
    try:
        changed = OmegaConf.merge(training.command.compose_settings(chosen).head, settings)
    except OmegaConfBaseException as error:
        raise InputError(f"training_objective: {str(error).splitlines()[0]}") from error
    config: Any = OmegaConf.to_object(changed)
    if isinstance(head, str):
        vocab = DraftVocab.make_full(target.vocab_size)
        head = training.head.from_settings(target, config, vocab, seed)
    else:
        config.path = "(in memory)"  # a trained head is gone on with
    return training.objective(head, target, config)


def training_step(
    objective: Objective,
    input_ids: Tensor,
    loss_mask: Tensor,
    states: TargetOutput | None = None,
    document_ids: Tensor | None = None,
    seed: int = 0,
) -> StepLoss:
    """Compute the loss of one step, as the training commands do; changes nothing.

    The loss is a mean over the supervised tokens of these sequences. Call `loss.backward()` and
    step an optimizer of your own.

    Args:
        objective: result of `training_objective`.
        input_ids: [B, T] int64.
        loss_mask: [B, T] bool, the supervised tokens. The mask decides alone: the commands'
            `head.learn_prompts` is the mask of all tokens.
        states: the target's hidden states [B, T, D] of these tokens; None runs the target.
        document_ids: [B, T] int, the text that each token belongs to, -1 on padding; each sequence
            is one text unless given.
        seed: seed of noise and of drawn blocks; give the number of the step.

    Raises:
        InputError: tensors of other shapes, or hidden states that the head reads are missing.
    """
    if document_ids is None:
        document_ids = torch.zeros_like(input_ids)
    _check_step(objective, input_ids, loss_mask, states, document_ids)
    seeds = tuple(hash_seed(0, seed, row) for row in range(len(input_ids)))
    lengths = Documents.from_ids(document_ids.cpu()).lengths
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = {
        "input_ids": input_ids, "loss_mask": loss_mask.bool(), "document_ids": document_ids,
        "position_ids": positions.view_as(input_ids),
    }  # fmt: skip
    indexed = objective.index_batch(
        {**batch_to_device(batch, torch.device("cpu")), NOISE_SEEDS: seeds}
    )
    counts = objective.compute_divisors(indexed).clamp_min(1)
    ready = _add_given_states(objective, batch_to_device(indexed, objective.target.device), states)
    sums = objective(ready, (objective.term_weights / counts).to(objective.target.device))
    named = compute_metrics("train", sums.terms.detach(), objective.term_weights, objective)
    return StepLoss(sums.total, {n.removeprefix("train/"): value for n, value in named.items()})


def frozen_parts(model: Any, tokenizer: Any = None, name: str = UNKNOWN) -> EmbeddingsAndOutputHead:
    """Take the embedding and output head of a transformers model that goes on learning.

    Both share the model's memory, so a head always sees the current weights, and no gradient of the
    head reaches the model. Beside hidden states, `training_step` needs nothing else of a target.

    Args:
        model: model with whole weights on this process.
        tokenizer: tokenizer of the model; names special tokens.
        name: name of the target in the head's files: a Hub id or folder.
    """
    return EmbeddingsAndOutputHead.from_model(model, tokenizer, name)


def engine_tensors(
    head: DraftHead, engine: str = "vllm", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Name the head's tensors as a serving engine does, without writing files.

    Args:
        head: head that is attached to its target.
        engine: a `format` of scripts/export.py.
        dtype: dtype of floating tensors; the head's own unless given.

    Returns:
        The tensors of an export by their names in it, without gradients; tensors that need no
        change share the head's memory.

    Raises:
        InputError: the engine cannot serve this head, with the formats that can.
    """
    check_format(head, ExportFormat(engine))
    tensors = head.plan_export(ExportFormat(engine)).files().tensors
    return {
        name: each.detach().to(dtype if each.is_floating_point() else None)
        for name, each in tensors.items()
    }


def _encode_prompt(target: Target, prompt: str | Messages | list[int]) -> list[int]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], dict):
        return RecordEncoder(target.tokenizer).encode_prompt([*prompt])
    return [*prompt]


def _check_step(
    objective: Objective,
    input_ids: Tensor,
    loss_mask: Tensor,
    states: TargetOutput | None,
    document_ids: Tensor,
) -> None:
    shape = tuple(input_ids.shape)
    tensors = {"loss_mask": loss_mask, "document_ids": document_ids}
    if states is not None:
        missing = sorted({*objective.head.taps.layers} - {*states.layers})
        if missing:
            raise InputError(
                f"states.layers={sorted(states.layers)}: this head reads "
                f"{list(objective.head.taps.layers)}; give {missing} too, as "
                "output_hidden_states counts them"
            )
        tensors |= {"states.hidden_states": states.hidden_states}
        tensors |= {f"states.layers[{index}]": each for index, each in states.layers.items()}
    for name, tensor in tensors.items():
        if len(shape) != 2 or tuple(tensor.shape[:2]) != shape:
            raise InputError(
                f"{name} has the shape {list(tensor.shape)}, input_ids {list(shape)}: "
                "allowed are [B, T] ids, and the same B and T everywhere"
            )


def _add_given_states(objective: Objective, batch: Batch, states: TargetOutput | None) -> Batch:
    if states is None:
        return objective.prepare_batch(batch)
    target = objective.target
    named = {f"{LAYER_PREFIX}{index}": states.layers[index] for index in objective.head.taps.layers}
    named |= {HIDDEN_STATES: states.hidden_states}
    ready = {name: each.detach().to(target.device, target.dtype) for name, each in named.items()}
    return {**batch, **ready}
