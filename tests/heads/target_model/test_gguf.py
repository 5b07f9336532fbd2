"""Targets in GGUF files: their weights, what is recorded of them, and what is refused."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ggufs import save_gguf
from tokenizers import normalizers
from toys import CHATML, random_model, tokenizer

from conf.command.run_record import find_changed_keys, make_fingerprint
from conf.errors import InputError
from conf.files import split_gguf_path
from conf.settings.target import Quantization, TargetConfig
from heads.folders import check_target_files
from heads.gguf_target import load_gguf_target
from heads.target_model import dequantise
from heads.target_model.identity import TargetIdentity, identify_target
from heads.target_model.load import (
    RemoteTarget,
    load_generation_config,
    load_target,
    load_target_tokenizer,
)
from heads.target_model.model import Target

CPU = torch.device("cpu")
IDS = torch.randint(4, 300, (1, 40), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SIZES = {"F32": 4, "F16": 2, "BF16": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(path: Path | str, **settings: Any) -> Target:
    config = TargetConfig(path=str(path), **settings)
    check_target_files(config)
    return load_target(config, CPU)


def put_config(folder: Path, model: Any) -> None:
    """Puts the config of a model beside a file."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def identity(path: Path) -> TargetIdentity:
    config = TargetConfig(path=str(path))
    return identify_target(config, load_target_tokenizer(config), torch.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1"])  # others are of the package
def test_weights_are_those_of_the_file_to_the_bit_in_the_narrowest_dtype(
    tmp_path: Path, cache: Path, kind: str
) -> None:
    model = save_gguf(tmp_path / "a.gguf", kind)
    target = load(tmp_path / "a.gguf")
    for name, parameter in target.model.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, model.get_parameter(name)), name
    if kind in SIZES:
        (kept,) = (cache / "gguf").glob("a-*/model.safetensors")
        values = sum(parameter.numel() for parameter in model.parameters())
        assert kept.stat().st_size == pytest.approx(SIZES[kind] * values, rel=0.05)
    # The same weights as safetensors give the same logits.
    model.save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain")
    assert torch.equal(target.model(IDS).logits, plain.model(IDS).logits)
    assert identity(tmp_path / "a.gguf").quantization == kind
    assert identity(tmp_path / "plain").quantization == "none"


def test_text_goes_in_and_out_as_beside_safetensors(tmp_path: Path) -> None:
    save_gguf(tmp_path / "a.gguf")
    target, text = load(tmp_path / "a.gguf"), "hello there,<|im_end|>\n how  are you? 3.14 ünï"
    plain = tokenizer()
    assert target.tokenizer.encode(text) == plain.encode(text)
    assert target.tokenizer.decode(plain.encode(text)) == text
    assert target.tokenizer.chat_template == plain.chat_template
    assert target.stop_ids == [2]
    assert target.special_ids == [0, 1, 2, 3]
    assert target.name == str(tmp_path / "a.gguf")
    assert target.architectures == ["LlamaForCausalLM"]


def test_it_is_dequantised_once_and_anew_when_the_file_changes(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.gguf"
    save_gguf(file, "Q4_1")
    load(file)
    assert "a.gguf: dequantising Q4_1 to" in capsys.readouterr().err
    load(file)
    shutil.copy(file, tmp_path / "b.gguf")
    (tmp_path / "b.gguf").rename(file)
    load(file)
    assert "dequantising" not in capsys.readouterr().err
    assert len([*(cache / "gguf").glob("a-*/model.safetensors")]) == 1
    save_gguf(file, "Q4_1", seed=1)
    load(file)
    assert "dequantising" in capsys.readouterr().err


def test_of_two_that_start_at_once_one_dequantises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_gguf(tmp_path / "a.gguf")
    config = TargetConfig(path=str(tmp_path / "a.gguf"))
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(dequantise.resolve_target_folder, [config, config]))
    assert folders[0] == folders[1]
    assert capsys.readouterr().err.count("dequantising F32") == 1


def test_a_name_says_as_much_as_a_folder_and_a_file(tmp_path: Path) -> None:
    joined = TargetConfig(path="a/b/c.gguf")
    assert TargetConfig(path="a/b", gguf_file="c.gguf") == joined
    assert TargetConfig(path="a/b/", gguf_file="c.gguf") == joined
    save_gguf(tmp_path / "a.gguf")
    load(tmp_path, gguf_file="a.gguf")


def test_what_identifies_it_is_the_content_and_not_the_place(tmp_path: Path) -> None:
    def of(name: str) -> dict[str, Any]:
        return make_fingerprint(target=identity(tmp_path / name))

    save_gguf(tmp_path / "a.gguf", "Q4_1")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert of("a.gguf")["target.name"].endswith("a.gguf")
    assert find_changed_keys(of("a.gguf"), of("b.gguf")) == []
    save_gguf(tmp_path / "c.gguf", "Q8_0")
    assert find_changed_keys(of("a.gguf"), of("c.gguf")) == [
        "target.weights",
        "target.quantization",
    ]
    save_gguf(tmp_path / "d.gguf", "Q4_1", {"llama.rope.freq_base": 20000.0})
    assert find_changed_keys(of("a.gguf"), of("d.gguf")) == ["target.config"]
    save_gguf(tmp_path / "e.gguf", "Q4_1", {"tokenizer.chat_template": "other"})
    assert find_changed_keys(of("a.gguf"), of("e.gguf")) == ["target.template"]
    save_gguf(tmp_path / "f.gguf", "Q4_1", {"tokenizer.ggml.eos_token_id": 1})
    assert find_changed_keys(of("a.gguf"), of("f.gguf")) == ["target.tokenizer"]
    # Versions of transformers write the same tokenizer of a file in different ways.
    config, written = TargetConfig(path=str(tmp_path / "a.gguf")), tokenizer()
    written.backend_tokenizer.normalizer = normalizers.Sequence([])
    now = make_fingerprint(target=identify_target(config, written, torch.float32))
    assert find_changed_keys(of("a.gguf"), now) == []
    # Files beside decide, where there are any.
    tokenizer().save_pretrained(tmp_path)
    assert find_changed_keys(of("a.gguf"), now) == ["target.tokenizer"]


@pytest.mark.parametrize(("stated", "said"), [(15, "Q4_K_M"), (None, "Q4_1"), (9999, "Q4_1")])
def test_the_type_is_as_llama_cpp_calls_it_or_that_of_most_values(
    tmp_path: Path, stated: int | None, said: str
) -> None:
    save_gguf(tmp_path / "a.gguf", "Q4_1", {"general.file_type": stated})
    assert load_gguf_target(str(tmp_path / "a.gguf")).quantization == said


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("model", None),
        ("me/model", None),
        ("a.gguf", (".", "a.gguf")),
        ("/models/a.gguf", ("/models", "a.gguf")),
        ("../models/a.gguf", ("../models", "a.gguf")),
        ("me/model/a.gguf", ("me/model", "a.gguf")),
        ("me/model/q4/a.gguf", ("me/model", "q4/a.gguf")),
        ("here/model/q4/a.gguf", ("here/model/q4", "a.gguf")),
        ("here/folder.gguf", None),
    ],
)
def test_a_path_is_a_place_and_a_name(
    path: str, parts: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here/model/q4", "here/folder.gguf"):
        Path(folder).mkdir(parents=True)
    assert split_gguf_path(path) == parts


def test_what_lies_beside_it_comes_before_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    divisors = torch.ones(16)
    save_gguf(file, tensors={"rope_freqs.weight": divisors})
    model = random_model("llama", vocab_size=300, rope_parameters=LLAMA3)
    put_config(tmp_path, model)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    tokenizer("{{ 'own' }}").save_pretrained(tmp_path)
    target = load(file)
    assert target.config.rope_parameters["rope_type"] == "llama3"
    assert torch.equal(target.model(IDS).logits, model(IDS).logits)
    assert target.stop_ids == [2, 7]
    assert target.tokenizer.chat_template == "{{ 'own' }}"
    stored = load_generation_config(TargetConfig(path=str(file)))
    assert stored is not None
    assert stored["eos_token_id"] == [2, 7]


def test_a_tokenizer_beside_it_without_a_template_takes_its_own(tmp_path: Path) -> None:
    save_gguf(tmp_path / "a.gguf")
    tokenizer(None).save_pretrained(tmp_path)
    assert load(tmp_path / "a.gguf").tokenizer.chat_template == CHATML


def test_a_config_that_names_a_type_alone_says_nothing(tmp_path: Path) -> None:
    model = save_gguf(tmp_path / "a.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert torch.equal(load(tmp_path / "a.gguf").model(IDS).logits, model(IDS).logits)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    more = {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    beyond = {"blk.2.nextn.eh_proj.weight": torch.ones(64, 128)}
    model = save_gguf(tmp_path / "a.gguf", metadata=more, tensors=beyond)
    put_config(tmp_path, model)
    assert torch.equal(load(tmp_path / "a.gguf").model(IDS).logits, model(IDS).logits)


def test_texts_end_where_they_end_in_llama_cpp(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    save_gguf(tmp_path / "a.gguf", metadata=more)
    assert load(tmp_path / "a.gguf").stop_ids == [2, 9]


def test_layers_may_run_in_an_engine(tmp_path: Path) -> None:
    model = save_gguf(tmp_path / "a.gguf", "Q4_0")
    remote = RemoteTarget.from_config(TargetConfig(path=str(tmp_path / "a.gguf")), CPU)
    assert torch.equal(remote.output_head.weight, model.lm_head.weight)
    assert torch.equal(remote.final_norm.weight, model.model.norm.weight)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"metadata": {"split.count": 3}}, r"one of 3 parts, .* run llama-gguf-split --merge"),
        ({"metadata": {"general.architecture": "eagle3"}}, r"draft head \(eagle3\), .*head\.path"),
        ({"metadata": {"general.type": "adapter"}}, r"holds no model .*'adapter'"),
        (
            {"metadata": {"general.architecture": "wavtokenizer"}},
            r"cannot dequantise architecture wavtokenizer; .*llama, .*Name the original",
        ),
        (
            {"tensors": {"rope_freqs.weight": torch.ones(16)}},
            r"scales RoPE \(rope_freqs\.weight\), .*put the config\.json of the original",
        ),
        (
            {"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}},
            r"scales RoPE \(rope\.scaling\.type=yarn\)",
        ),
        (
            {"tensors": {"blk.0.attn_q.bias": torch.ones(64)}},
            r"transformers would drop blk\.0\.attn_q\.bias and 0 more .*; name the original",
        ),
        ({"metadata": {"llama.attention.key_length": 16}}, r"has attention\.key_length=16, .* 32"),
        ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, r"type rwkv, .*; put the tokenizer"),
    ],
    ids=["split", "head", "adapter", "architecture", "rope", "yarn", "bias", "fact", "words"],
)  # fmt: skip
def test_files_that_are_refused(
    tmp_path: Path, cache: Path, written: dict[str, Any], message: str
) -> None:
    save_gguf(tmp_path / "a.gguf", **written)
    with pytest.raises(InputError, match=rf"^target\.path=.*a\.gguf: .*{message}"):
        load(tmp_path / "a.gguf")
    assert not [*cache.glob("gguf/*/")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e-3}, r"has attention\.layer_norm_rms_epsilon=1e-06, .*config 0\.001"),
        ({"rope_parameters": LLAMA3}, r"does not scale RoPE, but its config does \(llama3\)"),
        ({"num_hidden_layers": 1}, r"has block_count=2, but its config 1"),
    ],
)
def test_a_config_of_another_model_beside_it_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_gguf(tmp_path / "a.gguf")
    put_config(tmp_path, random_model("llama", vocab_size=300, **changes))
    with pytest.raises(InputError, match=message):
        load(tmp_path / "a.gguf")


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    save_gguf(file, "Q4_1")
    with pytest.raises(InputError, match=r"b\.gguf: no such file; GGUF files there: a\.gguf$"):
        load(tmp_path / "b.gguf")
    with pytest.raises(InputError, match=r"target\.path=.*nowhere: no such folder"):
        load(tmp_path / "nowhere" / "a.gguf")
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(InputError, match=r"a\.gguf: cut off, .* lies beyond its end"):
        load(file)
    file.write_bytes(b"PK" + content)
    with pytest.raises(InputError, match=r"a\.gguf: not a complete GGUF file"):
        load(file)


def test_a_file_of_the_hub_is_that_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"me/m/q4\.gguf: no such folder here, no q4\.gguf of it"):
        load("me/m/q4.gguf")
    commit = "c" * 40
    snapshot = tmp_path / "models--me--m" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    save_gguf(snapshot / "q4.gguf", "Q4_1")
    hub = "huggingface_hub."
    monkeypatch.setattr(f"{hub}try_to_load_from_cache", lambda *_, **__: str(snapshot / "q4.gguf"))
    monkeypatch.setattr(f"{hub}snapshot_download", lambda *_, **__: str(snapshot))
    monkeypatch.setattr(f"{hub}list_repo_files", lambda *_, **__: ["README.md", "q4.gguf"])
    target = load("me/m", gguf_file="q4.gguf")
    assert target.name == "me/m/q4.gguf"
    found = identify_target(TargetConfig(path="me/m/q4.gguf"), target.tokenizer, torch.float32)
    assert (found.name, found.revision) == ("me/m/q4.gguf", commit)
    with pytest.raises(InputError, match=r"q8\.gguf: no such file; GGUF files there: q4\.gguf$"):
        load("me/m/q8.gguf")


def test_a_disk_without_room_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gguf(tmp_path / "a.gguf")
    monkeypatch.setattr(
        dequantise.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0)
    )
    with pytest.raises(InputError, match=r"dequantised it takes 0\.0 GB, .*HEADSMITH_CACHE"):
        load(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gguf_file": "a.gguf"}, r"target\.gguf_file=a\.gguf: target\.path=None must be the fold"),
        ({"path": "x.gguf", "gguf_file": "a.gguf"}, r"target\.path=x\.gguf must be the folder"),
        ({"path": "x", "gguf_file": "a.bin"}, r"target\.gguf_file=a\.bin: must end with \.gguf"),
        (
            {"path": "x.gguf", "quantization": Quantization.nf4},
            r"target\.quantization=nf4: .*x\.gguf .*leave target\.quantization unset",
        ),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TargetConfig(**settings)
