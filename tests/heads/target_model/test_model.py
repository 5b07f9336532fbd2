from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import CHATML, random_model, random_target, save_target
from transformers import AutoTokenizer, LlamaForCausalLM

import heads.devices
from conf.errors import InputError
from conf.settings.target import Dtype, Quantization, TargetConfig
from eval.decode.engine import NoDraft, decode
from heads.devices import Processor, warn_if_slow
from heads.layers.documents import Documents
from heads.target_model.attention import CachedPass
from heads.target_model.check import check_target_support
from heads.target_model.embeddings_and_output_head import move_to_embedding_device
from heads.target_model.load import load_config, load_model, load_target
from heads.target_model.model import FeatureLayers, Target

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["lfm2", "llama4_text", "mamba2", "qwen3_next"])
def test_a_model_gives_what_it_gave_before_it_was_a_target(family: str) -> None:
    """Functions put into layers do the same as the layers' own, Llama 4's scaled queries too."""
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    before, after = random_model(family), random_target(family).model
    torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=1e-4, atol=1e-4)


def test_recurrent_layers_are_not_compiled() -> None:
    with pytest.raises(InputError, match=r"compile=true: lfm2 has recurrent layers.*=false"):
        random_target("lfm2").compile(64)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_layers_follow_the_index_convention(family: str) -> None:
    target = random_target(family)
    ids = torch.randint(3, 90, (1, 9))
    positions = torch.arange(9)[None]
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    taps = FeatureLayers(layers=(0, 1, 2))
    output = target.forward(ids, positions, causal, positions, taps=taps)
    theirs = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(output.layers[1], theirs[1])
    torch.testing.assert_close(output.hidden_states, theirs[2])
    if family == "llama":
        torch.testing.assert_close(output.layers[0], theirs[0])


def test_a_layer_that_is_not_there_is_named() -> None:
    target = random_target()
    ids = torch.tensor([[5]])
    with pytest.raises(InputError, match=r"hidden state 3: llama has 0\.\.2"):
        target.forward(ids, ids * 0, ids[None] > 0, ids * 0, taps=FeatureLayers(layers=(3,)))


def test_layers_of_a_type_that_is_not_served_are_refused_with_the_reason() -> None:
    model = random_model()
    model.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(InputError, match=r"llama.*type indexed_attention chooses the keys"):
        Target(model, None, "t")


def test_an_unknown_output_scaling_is_refused() -> None:
    target = random_target()
    forward = target.model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    target.model.forward = scaled
    with pytest.raises(InputError, match=r"packed documents: .* standard deviations"):
        check_target_support(target)


def wrong(_found: CachedPass, _layer: Any, query: Tensor, *_others: Any) -> Tensor:
    return torch.zeros_like(query).transpose(1, 2)


def refusing(*_given: Any) -> Tensor:
    raise NotImplementedError("keys of a kind that nobody knows")


@pytest.mark.parametrize(
    ("attend", "reason"), [(wrong, "a prompt, after texts of"), (refusing, "nobody knows")]
)
def test_what_only_decodes_wrong_without_masks_is_given_them(attend, reason, monkeypatch) -> None:
    target = random_target()
    monkeypatch.setattr(CachedPass, "attend", attend)
    check_target_support(target)
    assert reason in target.needs_masks


def test_load_target_round_trip(tmp_path) -> None:
    save_target(tmp_path / "t")
    target = load_target(TargetConfig(path=str(tmp_path / "t")), CPU)
    assert (target.vocab_size, target.hidden_size, target.dtype) == (300, 64, torch.float32)
    assert target.stop_ids == [2]
    assert target.tokenizer.chat_template == CHATML
    assert not any(p.requires_grad for p in target.model.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "t").eos_token_id == 2


@pytest.mark.parametrize(("dtype", "lines"), [(Dtype.auto, 0), (Dtype.float16, 1)])
def test_a_dtype_that_the_processor_imitates_is_told(
    dtype: Dtype, lines: int, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(heads.devices, "this_processor", lambda: Processor("a CPU", "AVX2"))
    warn_if_slow.cache_clear()
    load_target(TargetConfig(str(save_target(tmp_path / "t")), dtype=dtype), CPU)
    found = capsys.readouterr().err.count(
        "target.dtype=float16: products of many rows will be slow, as a CPU, AVX2 emulates them; "
        "set target.dtype=float32\n"
    )
    assert found == lines


def test_files_that_are_missing_or_truncated_are_named(tmp_path) -> None:
    folder, weights = save_target(tmp_path / "t"), tmp_path / "t/model.safetensors"
    adapted = TargetConfig(path=str(folder), adapter=str(tmp_path))
    with pytest.raises(InputError, match=r"target\.adapter=.*no adapter_model\.safetensors"):
        load_target(adapted, CPU)
    weights.write_bytes(weights.read_bytes()[:1000])
    for path in (folder, tmp_path / "nothing"):
        with pytest.raises(InputError, match=rf"target\.path={path}: cannot load it"):
            load_target(TargetConfig(path=str(path)), CPU)


@pytest.mark.parametrize("kind", [Quantization.int8, Quantization.nf4])
def test_a_quantised_target_is_served(tmp_path, kind: Quantization) -> None:
    pytest.importorskip("bitsandbytes")
    folder = save_target(tmp_path / "t", intermediate_size=128)
    target = load_target(TargetConfig(path=str(folder), quantization=kind), CPU)
    ids = torch.arange(5, 12)[None]
    document = Documents.from_lengths([7], CPU)
    states = target.encode_documents(ids, torch.arange(7)[None], document).hidden_states
    plain = load_target(TargetConfig(path=str(folder)), CPU)
    exact = plain.encode_documents(ids, torch.arange(7)[None], document).hidden_states
    assert 1e-4 < (states - exact).norm() / exact.norm() < 0.5


def test_quantisation_without_bitsandbytes_says_what_to_install(tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    folder = save_target(tmp_path / "t")
    config = TargetConfig(path=str(folder), quantization=Quantization.nf4)
    with pytest.raises(InputError, match=r"target\.quantization=nf4 needs bitsandbytes"):
        load_target(config, CPU)


# --- A target over several devices; here there is one, under several names.


def hooked_target(family: str) -> Target:
    """With the hooks of accelerate on every part, which move what comes in."""
    from accelerate import dispatch_model

    model = random_model(family)
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{index}" for index in range(model.config.num_hidden_layers)]
    skipped = model._skip_keys_device_placement  # as transformers has it
    where = dict.fromkeys(parts, "cpu")
    dispatch_model(model, where, main_device="cpu", skip_keys=skipped, force_hooks=True)
    return Target(model, None, "t")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_hooks_that_move_inputs_change_nothing(family: str) -> None:
    hooked, plain = hooked_target(family), random_target(family)
    check_target_support(hooked)
    assert hooked.needs_masks == ""
    ids, where = (
        torch.randint(3, 90, (1, 40)),
        Documents.from_ids(torch.tensor([[0] * 25 + [1] * 15])),
    )
    positions = torch.tensor([[*range(25), *range(15)]])
    found, expected = (
        each.encode_documents(ids, positions, where, FeatureLayers((1,)))
        for each in (hooked, plain)
    )
    assert torch.equal(found.hidden_states, expected.hidden_states)
    assert torch.equal(found.layers[1], expected.layers[1])
    texts = [decode(each, NoDraft(), [5, 7, 9], 12).token_ids for each in (hooked, plain)]
    assert texts[0] == texts[1]


def test_all_that_a_target_gives_lies_beside_its_embedding(monkeypatch) -> None:
    target = random_target()
    elsewhere = torch.device("meta")
    states = target.encode_text([5, 7, 9]).hidden_states
    ids, positions = torch.tensor([[5, 7, 9]]), torch.arange(3)[None]
    monkeypatch.setattr(Target, "device", property(lambda _self: elsewhere))
    output = target.encode_documents(
        ids, positions, Documents.from_lengths([3], CPU), FeatureLayers((0, 2))
    )
    each = [output.hidden_states, *output.layers.values(), target.compute_logits(states)]
    assert [tensor.device for tensor in each] == [elsewhere] * 4


def test_an_output_head_on_another_device_has_a_copy_beside_the_embedding() -> None:
    embedding = torch.nn.Embedding(7, 3, device="meta")
    for bias in (False, True):
        head = torch.nn.Linear(3, 7, bias=bias)
        copy = move_to_embedding_device(embedding, head)
        assert {each.device.type for each in copy.parameters()} == {"meta"}
        assert not any(each.requires_grad for each in copy.parameters())
        assert len([*copy.parameters()]) == 1 + bias
        assert {each.device.type for each in head.parameters()} == {"cpu"}
    tied = torch.nn.Linear(3, 7, bias=False, device="meta")
    assert move_to_embedding_device(embedding, tied) is tied


def test_an_embedding_that_is_offloaded_is_refused() -> None:
    from accelerate import cpu_offload

    model = cpu_offload(random_model(), execution_device=CPU)
    with pytest.raises(InputError, match=r"target\.path=t: its embedding is offloaded"):
        check_target_support(Target(model, None, "t"))


def test_states_beyond_float16_are_said(tmp_path) -> None:
    folder = save_target(tmp_path / "t")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_target(TargetConfig(path=str(folder)), CPU)
    said = r"target\.dtype=float16: .* overflow.*set target\.dtype=bfloat16 or float32"
    with pytest.raises(InputError, match=said):
        load_target(TargetConfig(path=str(folder), dtype=Dtype.float16), CPU)


def test_a_target_goes_straight_to_its_device(tmp_path, monkeypatch) -> None:
    folder = save_target(tmp_path / "t")
    asked = []

    def from_pretrained(path: str, device_map: object = None, **_options: object) -> object:
        asked.append(device_map)
        return random_model(vocab_size=300), {"missing_keys": set(), "unexpected_keys": set()}

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", from_pretrained)
    gpu = torch.device("cuda", 1)
    for config, device in [
        (TargetConfig(path=str(folder)), gpu),
        (TargetConfig(path=str(folder)), CPU),
        (TargetConfig(path=str(folder), device_map="auto"), gpu),
    ]:
        load_model(config, load_config(config), torch.float32, device)
    assert asked == [{"": gpu}, None, "auto"]
