import warnings

import block_heads
import peagle_heads
import pytest
import torch
from toys import noisy_head, random_model
from transformers import GenerationConfig

from conf.schema_eagle import EagleConfig, EagleForm
from eval.decode.engine import NoDraft, decode, decode_batch, stream
from eval.measure.replay import replay
from heads.blocks.drafter import BlockChain, BlockTree
from heads.eagle.drafter import EagleChain, EagleTree
from heads.eagle.head import EagleHead
from heads.medusa.drafter import MedusaDrafter
from heads.peagle.drafter import PEagleChain, PEagleTree
from heads.sampling import Sampling
from heads.target.check import check_served
from heads.target.model import Target
from heads.tree import DynamicShape, Tree, default_tree
from heads.vocab import DraftVocab
from scripts.store.states import Copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = [5, 17, 40, 8, 77, 23, 61]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_decoding_on_cuda_is_lossless_and_replayed_exactly(family: str) -> None:
    target = Target(random_model(family).to("cuda"), None, family)
    target.model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT], device="cuda")
    settings = GenerationConfig(do_sample=False, max_new_tokens=40, pad_token_id=0)
    expected = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )[0, len(PROMPT) :].tolist()
    assert decode(target, NoDraft(), PROMPT, 40).token_ids == expected
    head = noisy_head(target)
    for tree in (Tree.chain(3), default_tree(3, 32)):
        drafted = decode(target, MedusaDrafter(head, tree), PROMPT, 40)
        assert drafted.token_ids == expected
        assert replay(target, head, tree, PROMPT, expected) == drafted.steps


@pytest.mark.parametrize("form", list(EagleForm))
def test_eagle_on_cuda_is_lossless_and_replayed_exactly(form: EagleForm) -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    vocab = DraftVocab.everything(target.vocab_size)
    head = EagleHead.from_target(target, EagleConfig(form=form), vocab, seed=0)
    expected = decode(target, NoDraft(), PROMPT, 40).token_ids
    chain = decode(target, EagleChain(head, 4), PROMPT, 40)
    assert chain.token_ids == expected
    assert replay(target, head, Tree.chain(4), PROMPT, expected) == chain.steps
    tree = EagleTree(head, DynamicShape(4, 4, 16))
    assert decode(target, tree, PROMPT, 40).token_ids == expected
    sampling = Sampling(temperature=1.0, top_k=1)
    sampled = decode(target, EagleChain(head, 4, sampling), PROMPT, 40, sampling)
    assert sampled.token_ids == expected


@pytest.mark.parametrize("name", ["dflash, causal in a window", "dflash2", "dspark, rnn"])
def test_block_drafters_on_cuda_are_lossless_and_replayed_exactly(name: str) -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    head = block_heads.fresh(target, block_heads.settings_of(name)).eval()
    expected = decode(target, NoDraft(), PROMPT, 40).token_ids
    chain = decode(target, BlockChain(head, 4), PROMPT, 40)
    assert chain.token_ids == expected
    assert replay(target, head, Tree.chain(4), PROMPT, expected) == chain.steps
    tree = BlockTree(head, DynamicShape(4, 4, 16))
    assert decode(target, tree, PROMPT, 40).token_ids == expected
    sampling = Sampling(temperature=1.0, top_k=1)
    sampled = decode(target, BlockChain(head, 4, sampling), PROMPT, 40, sampling)
    assert sampled.token_ids == expected


def test_peagle_on_cuda_is_lossless_and_replayed_exactly() -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    head = peagle_heads.fresh(target, peagle_heads.settings_of()).eval()
    expected = decode(target, NoDraft(), PROMPT, 40).token_ids
    chain = decode(target, PEagleChain(head, 4), PROMPT, 40)
    assert chain.token_ids == expected
    assert replay(target, head, Tree.chain(4), PROMPT, expected) == chain.steps
    tree = PEagleTree(head, DynamicShape(4, 4, 16))
    assert decode(target, tree, PROMPT, 40).token_ids == expected


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_bfloat16_targets_pass_the_check(family: str) -> None:
    check_served(Target(random_model(family).to("cuda", torch.bfloat16), None, family))


def test_a_batch_on_cuda_compiled_or_not_equals_its_texts_alone() -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    prompts = [PROMPT, PROMPT[:2], PROMPT[::-1]]
    head = noisy_head(target)

    def drafter() -> MedusaDrafter:
        return MedusaDrafter(head, default_tree(3, 16))

    alone = [decode(target, drafter(), prompt, 40).token_ids for prompt in prompts]
    assert [g.token_ids for g in decode_batch(target, drafter(), prompts, 40)] == alone
    target.compile(128)
    assert [g.token_ids for g in decode_batch(target, drafter(), prompts, 40)] == alone


def test_a_step_on_cuda_waits_once() -> None:
    target = Target(random_model(num_hidden_layers=4).to("cuda"), None, "llama")
    target.model.generation_config.eos_token_id = None
    head = EagleHead.from_target(
        target, EagleConfig(), DraftVocab.everything(target.vocab_size), seed=0
    )
    steps = stream(target, EagleTree(head, DynamicShape(3, 3, 8)), [PROMPT, PROMPT[:3]], 40)
    next(steps), next(steps)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in found if "synchroniz" in str(w.message)]) == 1


def test_copies_to_the_host_hold_what_was_computed_before_them() -> None:
    copies, taken = Copies(torch.device("cuda"), 1), []
    for number in range(50):
        ones = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
        # Late, and in memory that the next round would like to have.
        states = (ones @ ones @ ones).mul_(0).add_(number)
        taken.append(copies.take({"states": states, "int8": states[1:].to(torch.int8)}))
    for number, copied in enumerate(taken):
        found = copied.wait()
        assert found["states"].is_pinned()
        assert found["states"].eq(number).all()
        assert found["int8"].eq(number).all()
        assert found["int8"].shape == (2047, 2048)
