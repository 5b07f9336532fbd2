"""Export folders for vLLM, written by hand from heads, to be broken by tests."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.settings.eagle import EagleConfig, EagleForm
from heads.eagle.eagle import EagleHead
from heads.eagle.layouts import build_config_json
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.medusa import MedusaHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

NUM_ROWS, DEPTH = 12, 4
GOLDEN = "parity/parity.safetensors"


def eagle(
    target: Target,
    form: EagleForm = EagleForm.eagle3,
    num_ids: int | None = None,
    **settings: Any,
) -> EagleHead:
    """A random head, none of whose weights is a one or a zero."""
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
    vocab = DraftVocab.from_counts(counts, num_ids, [0, 1, 2])
    head = EagleHead.from_settings(target, EagleConfig(form=form, **settings), vocab, seed=0)
    return shaken(head)


def shaken(head: EagleHead) -> EagleHead:
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def write_eagle(folder: Path, head: EagleHead, target: Target, **config: Any) -> Path:
    """An EAGLE head as vLLM loads it, with golden logits; `config` changes config.json."""
    eagle3 = head.config.form is EagleForm.eagle3
    written = build_config_json(head.config, len(head.vocab.ids)) | {"rope_scaling": None} | config
    layers = list(head.config.layers)
    note = {"kind": "eagle3" if eagle3 else "eagle1", "layers": layers}
    return _write(
        folder, written, "model.safetensors", head.collect_tensors(), note, _golden(head, target)
    )


def write_medusa(folder: Path, head: MedusaHead, target: Target) -> Path:
    """Medusa heads as vLLM loads them, with golden logits."""
    states = _hidden_states(target)
    golden = {f"hidden_states.{i}": each for i, each in states.items()}
    with torch.no_grad():
        logits = head(states[target.num_layers])
    ids = torch.arange(target.vocab_size)
    golden |= {"ids": ids, "logits": logits, "logsumexp": logits.logsumexp(-1)}
    golden["position_ids"] = torch.arange(NUM_ROWS)
    metadata = _metadata("medusa", target)
    return _write(
        folder,
        head.build_files().config,
        "medusa_lm_head.safetensors",
        head.collect_tensors(),
        {"kind": "medusa", "layers": []},
        (golden, metadata),
    )


@contextmanager
def edited_json(file: Path) -> Iterator[dict[str, Any]]:
    """The content of a JSON file, written back."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


@contextmanager
def edited(file: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a safetensors file, written back with its metadata."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    yield tensors
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, file, metadata=metadata)


def old_spelling(rope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def copied(good: Path, tmp_path: Path, kind: str) -> Path:
    return shutil.copytree(good / kind, tmp_path / kind)


def absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update({name: value})


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    return lambda values: [values.pop(name) for name in names] and None


def change(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: how(tensors[name])})


def halves_swapped(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def swap(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)

    return swap


def both_ropes(theta: float | None = None, **scaling: Any) -> Callable[[dict[str, Any]], None]:
    """Another RoPE in either spelling."""

    def write(config: dict[str, Any]) -> None:
        theta_now = theta or config["rope_theta"]
        config["rope_theta"], config["rope_scaling"] = theta_now, scaling or None
        config["rope_parameters"] = {"rope_theta": theta_now, "rope_type": "default", **scaling}

    return write


def layers(*ids: int) -> Callable[[dict[str, Any]], None]:
    def write(config: dict[str, Any]) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = list(ids)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)

    return write


def swapped(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    """Exchanges two tensors."""

    def swap(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return swap


def _write(
    folder: Path,
    config: dict[str, Any],
    weights: str,
    tensors: dict[str, Tensor],
    note: dict[str, Any],
    golden: tuple[dict[str, Tensor], dict[str, str]],
) -> Path:
    (folder / "parity").mkdir(parents=True)
    export = {"format": "vllm", "target": "toy", "dtype": "float32", **note}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "headsmith.json").write_text(json.dumps({"export": export}))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / weights)
    save_file({n: t.contiguous() for n, t in golden[0].items()}, folder / GOLDEN, golden[1])
    return folder


@torch.no_grad()
def _golden(head: EagleHead, target: Target) -> tuple[dict[str, Tensor], dict[str, str]]:
    states = _hidden_states(target)
    token_ids, places = _token_ids(target), _places(head)
    eagle3 = head.config.form is EagleForm.eagle3
    read = head.config.layers if eagle3 else (target.num_layers,)
    fused = head.fuse(torch.cat([states[i] for i in read], dim=-1))
    text = head.encode_context(fused, token_ids[:NUM_ROWS], places)
    rows = torch.arange(NUM_ROWS)
    branches = BranchCache(
        text.keys[None],
        text.values[None],
        build_causal_range(Documents.from_length(len(rows), torch.device("cpu")), rows),
    )
    # Of a text, token_ids[0] follows feature 0; `unroll` counts from the token before it.
    chain = head.unroll(text, torch.cat([token_ids[:1], token_ids]), rows, branches)
    drafted = torch.stack([head.compute_logits(next(chain)) for _ in range(DEPTH)])
    logits = torch.full((DEPTH, NUM_ROWS, target.vocab_size), -torch.inf)
    logits[..., head.vocab.ids] = drafted
    golden = {
        **{f"hidden_states.{i}": each for i, each in states.items()},
        "token_ids": token_ids,
        "position_ids": places,
        "token_embeddings": target.embedding.weight[token_ids],
        "ids": torch.arange(target.vocab_size),
        "logits": logits,
    }
    if head.lm_head is None:
        golden["output_head"] = target.output_head.weight.clone()
    else:
        golden["logsumexp"] = drafted.logsumexp(-1)
    return golden, _metadata("eagle3" if eagle3 else "eagle1", target)


def _places(head: EagleHead) -> Tensor:
    """Far apart, up to the last position that leaves room for the drafts."""
    last = head.config.llama.max_position_embeddings - DEPTH
    return torch.linspace(0, last, NUM_ROWS).long()


def _token_ids(target: Target) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, target.vocab_size, (NUM_ROWS + DEPTH,), generator=generator)


@torch.no_grad()
def _hidden_states(target: Target) -> dict[int, Tensor]:
    ids = _token_ids(target)[None, :NUM_ROWS]
    output = target.model(input_ids=ids, output_hidden_states=True)
    return {i: each[0].clone() for i, each in enumerate(output.hidden_states)}


def _metadata(kind: str, target: Target) -> dict[str, str]:
    return {
        "headsmith_parity": "1",
        "kind": kind,
        "num_layers": str(target.num_layers),
        "max_position_embeddings": str(target.config.max_position_embeddings),
        "vocab_size": str(target.vocab_size),
    }
