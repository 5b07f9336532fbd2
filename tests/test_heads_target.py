import pytest
import torch
from toys import CHATML, FAMILIES, random_model, random_target, save_target
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conf.schema import InputError, Quantization, TargetConfig
from heads.documents import Documents
from heads.load_target import check_served, load_target
from heads.target import Reads, Target

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_passes_its_own_check(family: str) -> None:
    check_served(random_target(family))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_layers_follow_the_index_convention(family: str) -> None:
    target = random_target(family)
    ids = torch.randint(3, 90, (1, 9))
    positions = torch.arange(9)[None]
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    reads = Reads(layers=(0, 1, 2))
    output = target.forward(ids, positions, causal, positions, reads=reads)
    theirs = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(output.layers[1], theirs[1])
    torch.testing.assert_close(output.hidden_states, theirs[2])
    if family == "llama":
        torch.testing.assert_close(output.layers[0], theirs[0])


def test_a_layer_that_is_not_there_is_named() -> None:
    target = random_target()
    ids = torch.tensor([[5]])
    with pytest.raises(InputError, match=r"hidden state 3: llama has 0\.\.2"):
        target.forward(ids, ids * 0, ids[None] > 0, ids * 0, reads=Reads(layers=(3,)))


def test_recurrent_architectures_are_refused_with_the_reason(tmp_path) -> None:
    config = AutoConfig.for_model(
        "mamba", vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError, match=r"mamba has .*cannot be rolled back"):
        check_served(Target(model, None, "some/mamba"))


def test_hybrid_layers_are_refused_by_name() -> None:
    model = random_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(InputError, match=r"linear_attention.*cannot be rolled back"):
        Target(model, None, "hybrid")


def test_an_unknown_output_scaling_is_refused() -> None:
    target = random_target()
    forward = target.model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    target.model.forward = scaled
    with pytest.raises(InputError, match="standard deviations"):
        check_served(target)


def test_load_target_round_trip(tmp_path) -> None:
    save_target(tmp_path / "t")
    target = load_target(TargetConfig(path=str(tmp_path / "t")), CPU)
    assert (target.vocab_size, target.hidden_size, target.dtype) == (300, 64, torch.float32)
    assert target.stop_ids == [2]
    assert target.tokenizer.chat_template == CHATML
    assert not any(p.requires_grad for p in target.model.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "t").eos_token_id == 2


def test_missing_target_is_named(tmp_path) -> None:
    with pytest.raises(InputError, match=r"target\.path=.*nothing.*cannot load it"):
        load_target(TargetConfig(path=str(tmp_path / "nothing")), CPU)


def test_truncated_target_weights_are_named(tmp_path) -> None:
    folder = save_target(tmp_path / "t")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"target\.path=.*cannot load it"):
        load_target(TargetConfig(path=str(folder)), CPU)


def test_adapter_changes_the_target(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = save_target(tmp_path / "t")
    plain = load_target(TargetConfig(path=str(folder)), CPU)
    model = get_peft_model(random_model(vocab_size=300), LoraConfig(target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "lora")
    adapted = load_target(TargetConfig(path=str(folder), adapter=str(tmp_path / "lora")), CPU)
    ids = torch.arange(5, 12)[None]
    document = Documents.single(7, CPU)
    position = torch.arange(7)[None]
    before = plain.read(ids, position, document).hidden_states
    after = adapted.read(ids, position, document).hidden_states
    assert (before - after).abs().max() > 1e-3
    torch.testing.assert_close(
        after, model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    )


def test_missing_adapter_is_named(tmp_path) -> None:
    folder = save_target(tmp_path / "t")
    (tmp_path / "empty").mkdir()
    config = TargetConfig(path=str(folder), adapter=str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"target\.adapter=.*no adapter_model\.safetensors"):
        load_target(config, CPU)


@pytest.mark.parametrize("kind", [Quantization.int8, Quantization.nf4])
def test_a_quantised_target_is_served(tmp_path, kind: Quantization) -> None:
    pytest.importorskip("bitsandbytes")
    folder = save_target(tmp_path / "t", intermediate_size=128)
    target = load_target(TargetConfig(path=str(folder), quantization=kind), CPU)
    ids = torch.arange(5, 12)[None]
    document = Documents.single(7, CPU)
    states = target.read(ids, torch.arange(7)[None], document).hidden_states
    plain = load_target(TargetConfig(path=str(folder)), CPU)
    exact = plain.read(ids, torch.arange(7)[None], document).hidden_states
    assert 1e-4 < (states - exact).norm() / exact.norm() < 0.5


def test_quantisation_without_bitsandbytes_says_what_to_install(tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    folder = save_target(tmp_path / "t")
    config = TargetConfig(path=str(folder), quantization=Quantization.nf4)
    with pytest.raises(InputError, match=r"target\.quantization=nf4 needs bitsandbytes"):
        load_target(config, CPU)
