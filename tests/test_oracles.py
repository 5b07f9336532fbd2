"""Against real engines and trainers, each in an environment of its own: `make test-oracles`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import eagle_head, random_target, save_target, texts

from conf.schema import Dtype, TargetConfig
from conf.schema_eagle import EagleForm
from eval.eagle import EagleChain
from eval.engine import NoDraft, decode
from eval.replay import accepted_lengths, ranked_drafts
from heads.eagle import EagleHead
from heads.eagle_formats import load_eagle
from heads.eagle_layer import Branches, causal_rows
from heads.load_target import load_target
from heads.target import Target
from heads.tree import Tree
from heads.vocab import DraftVocab

ORACLES = Path(__file__).parent / "oracles"
VLLM, SPECULATORS = "HEADSMITH_VLLM_PYTHON", "HEADSMITH_SPECULATORS_PYTHON"
DEPTH, NUM_TOKENS = 4, 100
EAGLE31 = {"fc_norm": True, "norm_output": True}
AFTER = {"norm_before_residual": True}

pytestmark = pytest.mark.oracle


def needs(variable: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        variable not in os.environ,
        reason=f"{variable} names no Python: `make test-oracles` builds its environment",
    )


def run(variable: str, script: str, *arguments: str | Path) -> None:
    command = [os.environ[variable], str(ORACLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]


def opened(folder: Path) -> Target:
    target = load_target(TargetConfig(path=str(folder), dtype=Dtype.float32), torch.device("cpu"))
    # Texts of one length, whatever the engine takes for their end.
    target.tokenizer, target.model.generation_config.eos_token_id = None, None
    return target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return opened(save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=6))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """Six that the heads have learnt from, and 14 that they have not."""
    return [text[:4] for text in texts(target, 20, 1)]


def reduced(head: EagleHead, target: Target, num_ids: int) -> EagleHead:
    """The same head with the ids that are commonest in the target's texts, wherever they lie."""
    seen = torch.tensor([token for text in texts(target, 6, 40) for token in text])
    counts = torch.bincount(seen, minlength=target.vocab_size)
    vocab = DraftVocab.choose(counts, num_ids, [0, 1, 2])
    small = EagleHead(head.config, vocab)
    tensors = head.state_dict()
    small.load_state_dict(tensors | {"lm_head.weight": tensors["lm_head.weight"][vocab.ids]})
    return small


def accepted_per_pass(target: Target, head: EagleHead, prompt: list[int]) -> list[int]:
    """Also what lies beyond the end of the text, which engines count and `decode` does not."""
    text = decode(target, NoDraft(), prompt, NUM_TOKENS + DEPTH).token_ids
    output = target.read_text(prompt + text[:-1], head.reads)
    chain = Tree.chain(DEPTH)
    lengths = accepted_lengths(chain, ranked_drafts(head, chain, output, prompt, text), text)
    found, root = [], 0
    while root < NUM_TOKENS - 1:
        found.append(lengths[root])
        root += lengths[root] + 1
    return found


def counted(head: Path, form: EagleForm, target: Target, prompts: list[list[int]]) -> Any:
    """What vLLM says of a head folder: per prompt text, drafts, accepted tokens of each depth."""
    job = {
        "target": target.name,
        "head": str(head),
        "method": {EagleForm.eagle1: "eagle", EagleForm.eagle3: "eagle3"}[form],
        "num_draft_tokens": DEPTH,
        "num_tokens": NUM_TOKENS,
        "prompts": prompts,
    }
    question, answer = head.parent / "job.json", head.parent / "result.json"
    question.write_text(json.dumps(job))
    run(VLLM, "vllm_count.py", question, answer)
    return json.loads(answer.read_text())


@needs(VLLM)
@pytest.mark.parametrize(
    ("form", "num_ids", "settings"),
    [
        pytest.param(EagleForm.eagle1, None, {}, id="EAGLE-1"),
        pytest.param(EagleForm.eagle3, None, {}, id="EAGLE-3"),
        pytest.param(EagleForm.eagle3, 64, {}, id="EAGLE-3, 64 ids"),
        pytest.param(EagleForm.eagle3, None, AFTER, id="EAGLE-3, norm_before_residual"),
        pytest.param(EagleForm.eagle3, None, EAGLE31, id="EAGLE-3.1"),
    ],
)
def test_vllm_drafts_and_accepts_what_we_do(
    target: Target, prompts: list[list[int]], tmp_path: Path, form, num_ids, settings
) -> None:
    """A saved head in vLLM: our texts token for token, our counts to the unit."""
    trained = eagle_head(target, form, **settings)
    trained = reduced(trained, target, num_ids) if num_ids else trained
    trained.save(tmp_path / "head")
    theirs = counted(tmp_path / "head", form, target, prompts)

    head = load_eagle(str(tmp_path / "head")).attach(target)
    total = torch.zeros(DEPTH, dtype=torch.int64)
    for prompt, counts in zip(prompts, theirs, strict=True):
        decoded = decode(target, EagleChain(head, DEPTH), prompt, NUM_TOKENS)
        accepted = accepted_per_pass(target, head, prompt)
        cut = [min(n, step.room) for n, step in zip(accepted, decoded.steps, strict=True)]
        assert [step.accepted for step in decoded.steps] == cut
        per_depth = [sum(n > depth for n in accepted) for depth in range(DEPTH)]
        ours = {"text": decoded.token_ids, "drafts": len(accepted), "accepted": per_depth}
        assert ours == counts
        total += torch.tensor(per_depth)
    assert total.min() > 20


@torch.no_grad()
def unrolled(head: EagleHead, ids: Tensor, features: Tensor) -> list[Tensor]:
    """[T, W] logits of three steps, fed with the tokens ids [T + 1] and features [T + 1, 3H]."""
    rows = torch.arange(len(ids) - 1)
    text = head.read(head.fuse(features[:-1]), ids[1:], rows)
    allowed = causal_rows(torch.zeros_like(rows), rows)
    steps = head.unroll(text, ids, rows, Branches(text.keys[None], text.values[None], allowed))
    return [head.logits(next(steps)) for _ in range(3)]


@needs(SPECULATORS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="EAGLE-3"),
        pytest.param(AFTER, id="EAGLE-3, norm_before_residual"),
        pytest.param(EAGLE31, id="EAGLE-3.1"),
    ],
)
def test_speculators_unrolls_the_logits_that_we_do(tmp_path: Path, settings) -> None:
    """A head of 24 of 96 ids in the original layout, three steps of the training-time test."""
    target = random_target(num_hidden_layers=4)
    target.model.save_pretrained(tmp_path / "target")
    stated = {"draft_vocab_size": layouts.DRAFT, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config = layouts.LLAMA | stated | {"torch_dtype": "float32"} | settings
    norms = layouts.random({f"fc_norm.{i}.weight": [layouts.HIDDEN] for i in range(3)}, seed=6)
    tensors = layouts.eagle3_tensors() | (norms if "fc_norm" in settings else {})
    layouts.write(tmp_path / "head", config, tensors)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(layouts.VOCAB, (25,), generator=generator)
    features = torch.randn(25, 3 * layouts.HIDDEN, generator=generator)
    save_file({"ids": ids, "features": features}, tmp_path / "inputs.safetensors")
    arguments = (tmp_path / name for name in ("head", "target", "inputs.safetensors"))
    run(SPECULATORS, "speculators_logits.py", *arguments, tmp_path / "logits.safetensors")

    theirs = load_file(tmp_path / "logits.safetensors")
    head = load_eagle(str(tmp_path / "head")).attach(target)
    for step, ours in enumerate(unrolled(head, ids, features)):
        # The last rows have no token left to read.
        num_rows = len(ids) - 1 - step
        wanted = theirs[f"step{step}"][:num_rows]
        torch.testing.assert_close(ours[:num_rows], wanted, rtol=0, atol=1e-4)
