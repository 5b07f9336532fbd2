"""Against real engines and trainers, each in an environment of its own: `make test-oracles`."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import layouts
import pytest
import torch
from exports import exported
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import eagle_head, noisy_head, random_target, save_target, texts, tokenizer

from conf.schema import Dtype, TargetConfig
from conf.schema_eagle import EagleForm
from data.endpoint import Endpoint
from data.engine_states import EngineStates, EngineTaps
from eval.draft import Draft
from eval.draft_model import DraftModel
from eval.eagle import EagleChain
from eval.engine import Drafter, NoDraft, decode
from eval.lookup import PromptLookup
from eval.medusa import MedusaDrafter
from eval.replay import accepted_lengths, ranked_drafts
from heads.branch_attention import Branches, causal_rows
from heads.eagle import EagleHead
from heads.eagle_formats import load_eagle
from heads.layerless import final_norm, load_layerless
from heads.load import Head, load_head
from heads.load_target import load_target
from heads.target import Reads, Target
from heads.tree import Tree

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
    return head.pruned(head.vocab.narrowed(counts, num_ids, [0, 1, 2]))


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


def counted(
    folder: Path, target: Target, prompts: list[list[int]], depth: int, **speculative: Any
) -> Any:
    """What vLLM counts under its `speculative_config`, per prompt as `vllm_count.py` says."""
    job = {
        "target": target.name,
        "speculative": speculative | {"num_speculative_tokens": depth},
        "num_tokens": NUM_TOKENS,
        "prompts": prompts,
    }
    question, answer = folder / "job.json", folder / "result.json"
    question.write_text(json.dumps(job))
    run(VLLM, "vllm_count.py", question, answer)
    return json.loads(answer.read_text())


def per_depth(accepted: list[int], depth: int) -> list[int]:
    """How many drafts had a token accepted at each depth."""
    return [sum(n > place for n in accepted) for place in range(depth)]


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
    method = {EagleForm.eagle1: "eagle", EagleForm.eagle3: "eagle3"}[form]
    model = str(tmp_path / "head")
    theirs = counted(tmp_path, target, prompts, DEPTH, method=method, model=model)

    head = load_eagle(str(tmp_path / "head")).attach(target)
    total = torch.zeros(DEPTH, dtype=torch.int64)
    for prompt, counts in zip(prompts, theirs, strict=True):
        decoded = decode(target, EagleChain(head, DEPTH), prompt, NUM_TOKENS)
        accepted = accepted_per_pass(target, head, prompt)
        cut = [min(n, step.room) for n, step in zip(accepted, decoded.steps, strict=True)]
        assert [step.accepted for step in decoded.steps] == cut
        ours = {
            "text": decoded.token_ids,
            "drafts": len(accepted),
            "proposed": DEPTH * len(accepted),
            "accepted": per_depth(accepted, DEPTH),
        }
        assert ours == counts
        total += torch.tensor(counts["accepted"])
    assert total.min() > 20


@needs(VLLM)
@pytest.mark.xfail(
    strict=True,
    reason="vLLM 0.32 gives heads beside a token_map vocab_size rows, and does not count token_map "
    "as loaded",
)
def test_vllm_drafts_with_pruned_medusa_heads(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Heads of 64 ids with their token_map; passes once vLLM loads them, as with both mended."""
    trained = noisy_head(target)
    seen = torch.tensor([token for text in texts(target, 6, 40) for token in text])
    counts = torch.bincount(seen, minlength=target.vocab_size)
    head = trained.pruned(trained.vocab.narrowed(counts, 64, [0, 1, 2]))
    head.save(tmp_path / "head")
    model, depth = str(tmp_path / "head"), head.num_heads
    theirs = counted(tmp_path, target, prompts, depth, method="medusa", model=model)
    drafter = MedusaDrafter(head, Tree.chain(depth))
    assert theirs == [our_counts(target, drafter, prompt, depth) for prompt in prompts]
    assert sum(counts["accepted"][0] for counts in theirs) > 20


class Recorded:
    """A drafter of chains for one text, and how many tokens each of its drafts had."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.reads = drafter, drafter.reads
        self.observe, self.keep = drafter.observe, drafter.keep
        self.sizes: list[int] = []

    def propose(self, roots: list[int]) -> Draft:
        draft = self.drafter.propose(roots)
        self.sizes.append(draft.tokens.shape[1])
        return draft


def our_counts(target: Target, drafter: Drafter, prompt: list[int], depth: int) -> dict[str, Any]:
    """One prompt's text and counts, as `vllm_count.py` gives them.

    Unlike the steps, the paths go on beyond the end of the text, and so does vLLM. A pass for
    which nothing was found to propose is a step of ours, but no draft of vLLM's.
    """
    recorded = Recorded(drafter)
    decoded = decode(target, recorded, prompt, NUM_TOKENS)
    return {
        "text": decoded.token_ids,
        "drafts": sum(size > 0 for size in recorded.sizes),
        "proposed": sum(recorded.sizes),
        "accepted": per_depth([len(path) for path in decoded.paths], depth),
    }


@needs(VLLM)
@pytest.mark.parametrize(("shortest", "longest", "depth"), [(1, 3, 5), (2, 2, 4), (2, 4, 8)])
def test_vllm_looks_up_what_we_do(
    target: Target, prompts: list[list[int]], tmp_path: Path, shortest, longest, depth
) -> None:
    """Method `ngram`, where prompts repeat themselves and the target soon does."""
    twice = [prompt + other + prompt for prompt, other in pairwise([*prompts, prompts[0]])]
    limits = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    theirs = counted(tmp_path, target, twice, depth, method="ngram", **limits)
    ours = [
        our_counts(target, PromptLookup(depth, longest, shortest), prompt, depth)
        for prompt in twice
    ]
    assert ours == theirs
    assert min(sum(column) for column in zip(*(c["accepted"] for c in ours), strict=True)) > 20
    # Drafts that the end of the text cut short are among them.
    assert sum(c["proposed"] for c in ours) < depth * sum(c["drafts"] for c in ours)


@needs(VLLM)
def test_vllm_drafts_with_a_model_what_we_do(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Method `draft_model`: the target itself with noise in its weights."""
    noisy = deepcopy(target.model)
    torch.manual_seed(0)
    for parameter in noisy.parameters():
        parameter.data.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    folder = tmp_path / "draft"
    noisy.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    theirs = counted(tmp_path, target, prompts, DEPTH, method="draft_model", model=str(folder))
    draft, chain = opened(folder), Tree.chain(DEPTH)
    ours = [our_counts(target, DraftModel(draft, chain), prompt, DEPTH) for prompt in prompts]
    assert ours == theirs
    assert min(sum(column) for column in zip(*(c["accepted"] for c in ours), strict=True)) > 20


@needs(VLLM)
@pytest.mark.parametrize(
    ("engine", "method"),
    [("vllm", "medusa"), ("vllm", "eagle"), ("vllm", "eagle3"), ("speculators", "eagle3")],
)
def test_vllm_drafts_with_an_export_what_we_do(
    target: Target, prompts: list[list[int]], tmp_path: Path, engine: str, method: str
) -> None:
    if method == "medusa":
        head: Head = noisy_head(target, DEPTH)
    else:
        form = EagleForm.eagle1 if method == "eagle" else EagleForm.eagle3
        head = eagle_head(target, form, **(EAGLE31 if method == "eagle3" else {}))
    folder = exported(head, target, engine, tmp_path / "export")
    theirs = counted(tmp_path, target, prompts, DEPTH, method=method, model=str(folder))
    back, chain = load_head(str(folder)).attach(target), Tree.chain(DEPTH)
    ours = []
    for prompt in prompts:
        eagle = isinstance(back, EagleHead)
        drafter = EagleChain(back, DEPTH) if eagle else MedusaDrafter(back, chain)
        ours.append(our_counts(target, drafter, prompt, DEPTH))
    assert ours == theirs
    assert sum(counts["accepted"][0] for counts in ours) > 20


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


@contextmanager
def served(log: Path, *arguments: str) -> Iterator[str]:
    """The base URL of vLLM's server, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ[VLLM], str(ORACLES / "vllm_states.py"), "--host", "127.0.0.1"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port), *arguments],
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1"
    try:
        while not answers(f"{url}/models"):
            assert server.poll() is None, log.read_text()[-5000:]
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@needs(VLLM)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vllm_hands_out_the_states_that_we_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Documents that share their beginnings, up to the whole context, prefilled in pieces."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = save_target(tmp_path / "target", family, num_hidden_layers=4)
    target = opened(folder)
    bare = load_layerless(TargetConfig(path=str(folder), dtype=Dtype.float32), target.device)
    taps = EngineTaps((0, 3, 1), target.num_layers, target.hidden_size, final_norm(bare))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (127,), generator=generator).tolist()
    ends = torch.randint(target.vocab_size, (6, 9), generator=generator).tolist()
    documents = [ids, ids[:1], *(ids[: 20 * n] + end for n, end in enumerate(ends)), ids[:64]]
    storage = tmp_path / "states"
    options = ["--model", str(folder), "--dtype", "float32", "--enforce-eager"]
    limits = ["--max-model-len", "128", "--max-num-batched-tokens", "48", "--max-num-seqs", "4"]
    arguments = [*options, *limits, *taps.serve_options(storage)]
    with (
        served(tmp_path / "server.log", *arguments) as url,
        EngineStates(Endpoint(url), taps, concurrency=4) as engine,
    ):
        assert engine.max_model_len == 128
        found = list(engine.read_many(documents))
        assert list((storage / "layers-0-1-3-4").iterdir()) == []
    assert len(found) == len(documents)
    for document, states in zip(documents, found, strict=True):
        ours = target.read_text(document, Reads((0, 3, 1)))
        wanted = {f"layers.{index}": layer[0] for index, layer in ours.layers.items()}
        wanted["hidden_states"] = ours.hidden_states[0]
        assert states.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(states[name], tensor, rtol=0, atol=1e-5, msg=name)
