"""Adapters: a saved one, whatever it changes, and what a trained one costs.

The target says what the adapted model says, or refuses; its layers may be run again for gradients.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import CHATML, packed, random_model, random_target, save_target, tokenizer
from transformers import AutoModelForCausalLM

from conf.errors import InputError
from conf.settings.export import MergeAdapterRun
from conf.settings.medusa import AdapterConfig, MedusaConfig
from conf.settings.target import Dtype, TargetConfig
from heads.layers.documents import Documents
from heads.medusa import MedusaHead
from heads.target_model.adapter import Adapter
from heads.target_model.load import load_target, load_target_tokenizer
from scripts import merge_adapter
from scripts.bench.harness import measure_peak_bytes
from train.medusa import MedusaObjective

CPU = torch.device("cpu")
IDS = torch.arange(2, 40)[None]
BOTH = ["q_proj", "lm_head", "embed_tokens"]
KINDS: dict[str, Any] = {
    "lora": LoraConfig(target_modules=["q_proj", "down_proj"]),
    "lora of the head": LoraConfig(target_modules=["q_proj", "lm_head"]),
    "lora of the embedding": LoraConfig(target_modules=["embed_tokens"]),
    "dora of both": LoraConfig(target_modules=BOTH, use_dora=True),
    "both saved whole": LoraConfig(
        target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
    ),
    "tokens": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[0, 7]),
    "tokens alone": peft.TrainableTokensConfig(token_indices=[0, 7], task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "oft": peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8, r=0),
    "a shared bank": peft.VBLoRAConfig(
        target_modules=["q_proj"], vector_length=32, num_vectors=8, topk=2
    ),
}
NOT_OF_WEIGHTS: dict[str, Any] = {
    "PROMPT_TUNING": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P_TUNING": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "PREFIX_TUNING": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "aLoRA": LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5, 6]),
}


def adapted(folder: Path, config: Any, rows: int = 300, **changes: Any) -> Any:
    """A peft model whose adapter changes much, saved in a folder."""
    model = random_model("llama", vocab_size=300, **changes)
    if rows > 300:
        model.resize_token_embeddings(rows, mean_resizing=False)
    found = get_peft_model(model, config)
    torch.manual_seed(1)
    for parameter in found.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    found.eval().save_pretrained(str(folder))
    return found


def settings(folder: Path, **changes: Any) -> TargetConfig:
    save_target(folder / "target", **changes)
    return TargetConfig(path=str(folder / "target"), adapter=str(folder / "adapter"))


def paired(folder: Path, config: Any = KINDS["lora"]) -> TargetConfig:
    """A target and an adapter of it, both saved."""
    adapted(folder / "adapter", config)
    return settings(folder)


def first_loss(target: Any) -> float:
    objective = MedusaObjective(MedusaHead.from_target(target, 2, 1), target, MedusaConfig())
    batch = objective.prepare_batch(objective.index_batch(packed([IDS[0].tolist()])))
    return float(objective(batch, objective.term_weights).total)


# Ties matter to what changes an end; to the others in one way or the other.
TIED = [
    "lora of the head",
    "lora of the embedding",
    "dora of both",
    "both saved whole",
    "ia3",
    "oft",
]
CASES = [*((kind, True) for kind in TIED), *((kind, False) for kind in KINDS if kind not in TIED)]


@pytest.mark.parametrize(
    ("kind", "tied"), [*CASES, ("lora of the embedding", False), ("both saved whole", False)]
)
@torch.no_grad()
def test_the_target_says_what_the_adapted_model_says(tmp_path: Path, kind: str, tied: bool) -> None:
    config = settings(tmp_path, tie_word_embeddings=tied)
    expected = adapted(tmp_path / "adapter", KINDS[kind], tie_word_embeddings=tied)(IDS).logits
    assert not torch.allclose(random_model(vocab_size=300)(IDS).logits, expected, atol=0.1)
    target = load_target(config, CPU)
    near = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(target.model(IDS).logits, expected, **near)
    # As losses, stores and exports have it: from the rows of two matrices.
    states = target.model.get_decoder()(inputs_embeds=target.embedding.weight[IDS])[0]
    torch.testing.assert_close(states @ target.output_head.weight.T, expected, **near)
    torch.testing.assert_close(target.compute_logits(states), expected, **near)

    out_dir = tmp_path / "merged"
    merge_adapter.main(MergeAdapterRun(target=config, out_dir=str(out_dir)))
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(out_dir)(IDS).logits, expected, **near
    )
    merged = load_target(TargetConfig(path=str(out_dir)), CPU)
    assert first_loss(target) == pytest.approx(first_loss(merged), rel=1e-6)


@pytest.mark.parametrize("kind", NOT_OF_WEIGHTS)
def test_what_is_no_change_of_weights_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    config = paired(tmp_path, NOT_OF_WEIGHTS[kind])
    said = rf"target\.adapter=.*: {kind} changes more than a model's weights.*such as LoRA"
    with pytest.raises(InputError, match=said):
        load_target(config, CPU)
    with pytest.raises(InputError, match=said):
        merge_adapter.main(MergeAdapterRun(target=config, out_dir=str(tmp_path / "merged")))
    assert not (tmp_path / "merged").exists()


def narrow_pair(folder: Path, modules: Any) -> TargetConfig:
    """A bfloat16 target of eight layers and a LoRA of it, both saved, with a small effect."""
    model = AutoModelForCausalLM.from_pretrained(
        save_target(folder / "target", num_hidden_layers=8), dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "target")
    lora = get_peft_model(model, LoraConfig(r=8, target_modules=modules))
    torch.manual_seed(0)
    for name, factor in lora.named_parameters():
        if "lora_" in name:
            factor.data.add_(0.03 * torch.randn_like(factor))
    lora.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    return TargetConfig(
        path=str(folder / "target"), adapter=str(folder / "adapter"), dtype=Dtype.bfloat16
    )


def test_a_bfloat16_model_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    config = narrow_pair(tmp_path, "all-linear")
    merge_adapter.main(MergeAdapterRun(target=config, out_dir=str(tmp_path / "merged")))
    merged = load_file(tmp_path / "merged/model.safetensors")
    before = load_file(tmp_path / "target/model.safetensors")
    factors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for name, weight in before.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        expected = weight
        if f"{key}A.weight" in factors:
            product = factors[f"{key}B.weight"] @ factors[f"{key}A.weight"]
            expected = (weight.float() + product).bfloat16()  # alpha / rank is 1
            assert not expected.equal(weight)
        assert merged[name].dtype is torch.bfloat16 and merged[name].equal(expected), name


@pytest.mark.parametrize("room", [True, False], ids=["float32", "bfloat16"])
def test_rounding_of_an_embedding_is_no_change_beyond_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    config = narrow_pair(tmp_path, ["q_proj", "embed_tokens"])
    if not room:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    target = load_target(config, CPU)
    assert {p.dtype for n, p in target.model.named_parameters() if "lora" not in n} == {
        torch.bfloat16
    }
    merge_adapter.main(MergeAdapterRun(target=config, out_dir=str(tmp_path / "merged")))


def test_an_adapter_that_is_not_applied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its effect is smaller than the rounding of bfloat16."""
    config = narrow_pair(tmp_path, ["q_proj", "embed_tokens"])
    merge = MergeAdapterRun(target=config, out_dir=str(tmp_path / "merged"))
    with monkeypatch.context() as patched:
        patched.setattr(
            peft.tuners.lora.LoraModel, "merge_and_unload", lambda self, **_: self.unload()
        )
        with pytest.raises(InputError, match="the merged model would give other logits, as LORA"):
            merge_adapter.main(merge)
    monkeypatch.setattr(
        peft.tuners.lora.Embedding, "get_delta_weight", lambda self, _: self.weight * 0
    )
    with pytest.raises(InputError, match="LORA changes more than a model's weights"):
        load_target(config, CPU)


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    config = paired(tmp_path, peft.LilyConfig(target_modules=["q_proj", "v_proj"]))
    with pytest.raises(
        InputError, match=r"target\.adapter=.*: cannot be merged into weights: .*Lily"
    ):
        merge_adapter.main(MergeAdapterRun(target=config, out_dir=str(tmp_path / "merged")))


@pytest.mark.parametrize("config", [KINDS["dora of both"], KINDS["both saved whole"]])
@torch.no_grad()
def test_added_tokens_get_their_rows(tmp_path: Path, config: Any) -> None:
    where = settings(tmp_path)
    expected = adapted(tmp_path / "adapter", config, rows=304)(IDS).logits
    target = load_target(where, CPU)
    assert target.vocab_size == len(target.embedding.weight) == 304
    # Rows of the base that an adapter does not hold are drawn anew.
    torch.testing.assert_close(target.model(IDS).logits[..., :300], expected[..., :300])


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("lora", "layers.0."), ("ia3", "layers.1."), ("norms", "layers.0."), ("oft", "layers.1.")],
)
def test_an_adapter_that_lacks_weights_is_refused(tmp_path: Path, kind: str, layer: str) -> None:
    """As peft draws what it does not find, which mostly changes nothing."""
    config = paired(tmp_path, KINDS[kind])
    file = tmp_path / "adapter/adapter_model.safetensors"
    named = {key.replace(layer, "blocks."): each for key, each in load_file(file).items()}
    save_file(named, file)
    lacking = rf"target\.adapter=.*: its file lacks weights for this model: .*\.{layer}"
    with pytest.raises(InputError, match=lacking):
        load_target(config, CPU)
    with pytest.raises(InputError, match=lacking):
        merge_adapter.main(MergeAdapterRun(target=config, out_dir=str(tmp_path / "merged")))


def test_layers_that_only_the_file_of_an_adapter_has_are_refused(tmp_path: Path) -> None:
    """Engines apply them."""
    config = paired(tmp_path)
    file = tmp_path / "adapter/adapter_config.json"
    stated = json.loads(file.read_text())
    file.write_text(json.dumps(stated | {"layers_to_transform": [0]}))
    with pytest.raises(InputError, match=r"file holds .*layers\.1\..* and \d+ more, but its adapt"):
        load_target(config, CPU)


@torch.no_grad()
def test_weights_without_a_place_are_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = settings(tmp_path)
    expected = adapted(tmp_path / "adapter", KINDS["lora"])(IDS).logits
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(load_file(file) | {"vision.blocks.0.q_proj.lora_A.weight": torch.ones(2, 2)}, file)
    torch.testing.assert_close(load_target(config, CPU).model(IDS).logits, expected)
    assert (
        "without a place in the language model: vision.blocks.0.q_proj.lora_A.weight\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("base", "is_said"),
    [
        ("other", True),
        ("elsewhere/target", True),
        ("me/another-model", True),
        ("/on/another/machine/target", False),
        ("./elsewhere/../target", False),
        (None, False),
    ],
)
def test_the_base_model_of_an_adapter_is_said_if_the_target_is_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    base: str | None,
    is_said: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = paired(tmp_path)
    for name in ("other", "elsewhere/target"):
        (tmp_path / name).mkdir(parents=True)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    load_target(config, CPU)
    said = (
        f"target.adapter={config.adapter}: its adapter_config.json names the base model {base}, "
        f"but the target is {config.path}. If these are different models, set target.path={base}\n"
    )
    assert (said in capsys.readouterr().err) is is_said


@pytest.mark.parametrize(
    ("held", "lacking"), [("lm_head", "embed_tokens"), ("embed_tokens", "lm_head")]
)
def test_added_tokens_of_one_matrix_are_refused(tmp_path: Path, held: str, lacking: str) -> None:
    """As the rows of the other would be drawn anew at every start."""
    config = settings(tmp_path)
    adapted(
        tmp_path / "adapter", LoraConfig(target_modules=["q_proj"], modules_to_save=[held]), 304
    )
    said = rf"trained with 304 tokens, but the target has 300, .* lacks the rows of .*{lacking}"
    with pytest.raises(InputError, match=said):
        load_target(config, CPU)


def test_the_tokenizer_beside_an_adapter_comes_first(tmp_path: Path) -> None:
    config = paired(tmp_path)
    own = tokenizer("{{ 'own' }}")
    own.add_tokens(["<other>"])
    own.save_pretrained(tmp_path / "adapter")
    merge_adapter.main(MergeAdapterRun(target=config, out_dir=str(tmp_path / "merged")))
    found = [load_target(config, CPU), load_target(TargetConfig(str(tmp_path / "merged")), CPU)]
    for each in found:
        assert each.tokenizer.chat_template == "{{ 'own' }}"
        assert each.tokenizer.convert_tokens_to_ids("<other>") == len(own) - 1


def test_so_does_a_chat_template_alone(tmp_path: Path) -> None:
    config = paired(tmp_path)
    (tmp_path / "adapter/chat_template.jinja").write_text("{{ 'alone' }}")
    assert load_target(config, CPU).tokenizer.chat_template == "{{ 'alone' }}"


NAMED = {"default": "{{ 'a' }}", "rag": "{{ 'b' }}"}


@pytest.mark.parametrize(("own", "expected"), [(None, CHATML), (NAMED, NAMED)])
def test_without_a_template_of_its_own_a_tokenizer_takes_the_target_s(
    tmp_path: Path, own: Any, expected: Any
) -> None:
    config = paired(tmp_path)
    beside = tokenizer(None)
    beside.chat_template = own
    beside.add_tokens(["<other>"])
    beside.save_pretrained(tmp_path / "adapter")
    found = load_target_tokenizer(config)
    assert found.chat_template == expected
    assert found.convert_tokens_to_ids("<other>") == len(beside) - 1


def test_a_broken_tokenizer_beside_an_adapter_is_the_adapter_s(tmp_path: Path) -> None:
    config = paired(tmp_path)
    (tmp_path / "adapter/tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"^target\.adapter=.*adapter: cannot load it: "):
        load_target_tokenizer(config)


# --- A LoRA that is trained.

LENGTHS = [150, 90, 16]
WITHOUT_DROPOUT = {"mixtral", "qwen3_next"}  # peft has none for experts
MODULES = {"falcon_h1": ["in_proj", "q_proj"]}  # nor for all of a state space


def trained(
    family: str, recompute: bool, needs_masks: str = "", **changes: int
) -> Callable[[], list[Tensor]]:
    """Gives the gradients, on one packed sequence, of an adapter that has learnt something."""
    target = random_target(family, max_position_embeddings=512, **changes)
    target.needs_masks = target.needs_masks or needs_masks
    dropout = 0.0 if family in WITHOUT_DROPOUT else 0.3
    config = AdapterConfig(
        rank=4, dropout=dropout, modules=MODULES.get(family), recompute_layers=recompute
    )
    adapter, generator = Adapter(target, config, seed=0), torch.Generator().manual_seed(1)
    for factor in adapter.factors.values():
        factor.data.normal_(std=0.1, generator=generator)

    def gradients() -> list[Tensor]:
        torch.manual_seed(7)  # dropout is drawn anew alike
        ids = torch.randint(3, 90, (1, sum(LENGTHS)))
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        numbers = Documents.from_ids(torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None])
        states = target.encode_documents(ids, positions, numbers).hidden_states
        return list(torch.autograd.grad(states.square().mean(), [*adapter.parameters()]))

    return gradients


# A family of each kind of layer.
EACH_KIND = ("llama", "gemma4_text", "gpt_oss", "mixtral", "lfm2", "qwen3_next", "falcon_h1")


@pytest.mark.parametrize(
    ("family", "needs_masks"), [*((each, "") for each in EACH_KIND), ("mistral", "it is a test")]
)
def test_layers_that_are_run_again_give_the_same_gradients(family: str, needs_masks: str) -> None:
    kept, again = (trained(family, recompute, needs_masks)() for recompute in (False, True))
    assert any(each.any() for each in kept)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_layers_that_are_run_again_take_a_fraction_of_the_memory() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 8}
    kept, again = (
        measure_peak_bytes(trained("llama", recompute, **sizes), CPU) for recompute in (False, True)
    )
    assert again < kept / 3
