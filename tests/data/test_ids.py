"""Token ids that the target has no row for: refused with their place wherever they meet it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stores import captured
from toys import noisy_head, save_target, tokenizer

from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from conf.settings.drafting import HeadRef
from conf.settings.measure import AcceptanceRun, SpeedupRun
from conf.settings.scripts import RegenerateRun
from conf.settings.target import TargetConfig
from conf.settings.training import TrainRun
from data.features.store_reader import FeatureStore
from data.prepared.prepare import prepare_datasets
from eval import acceptance, speedup
from heads.target_model.load import load_target
from scripts import regenerate
from tests.chats import assistant, user, write_rows
from train.loop.sources import load_store_source, load_target_source

CPU = torch.device("cpu")
ROWS = 300
REFUSED = (
    r"chat.jsonl:4(: its prompt|, turn 1)?: token id 301, but the embedding of .*target has 300 "
    r"rows, so the tokenizer is larger than the model .* set target.path to a model"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that was given `<new>`, id 301, and its model was not; row 4 has it."""
    folder = tmp_path_factory.mktemp("inputs")
    words = tokenizer()
    words.add_tokens([f"<filler{n}>" for n in range(ROWS - len(words))])
    words.add_special_tokens({"additional_special_tokens": ["<new>"], "pad_token": "<padding>"})
    path = save_target(folder / "target", num_hidden_layers=4)
    words.save_pretrained(path)
    noisy_head(load_target(TargetConfig(path=str(path)), CPU)).save(folder / "head")
    rows = [["Hi", "Yes"] for _ in range(20)]
    rows[3][0] = "Hi <new>"
    write_rows(folder / "chat.jsonl", [{"messages": [user(a), assistant(b)]} for a, b in rows])
    return folder


def data(inputs: Path, **changes: object) -> DataConfig:
    return DataConfig(path=str(inputs / "chat.jsonl"), max_length=64, **changes)


def train(inputs: Path, _: Path) -> None:
    run = TrainRun(target=target(inputs), data=data(inputs))
    load_target_source(run, SimpleNamespace(device=CPU, is_main_process=True))


def capture(inputs: Path, out_dir: Path) -> None:
    captured(inputs, out_dir)


def target(inputs: Path) -> TargetConfig:
    return TargetConfig(path=str(inputs / "target"))


def accept(inputs: Path, out_dir: Path) -> None:
    head = HeadRef(path=str(inputs / "head"))
    acceptance.main(
        AcceptanceRun(target=target(inputs), data=data(inputs), head=head, out_dir=str(out_dir))
    )


def speed(inputs: Path, out_dir: Path) -> None:
    speedup.main(SpeedupRun(target=target(inputs), data=data(inputs), out_dir=str(out_dir)))


def answer(inputs: Path, out_dir: Path) -> None:
    run = RegenerateRun(target=target(inputs), data=data(inputs), out_dir=str(out_dir))
    run.max_new_tokens, run.vllm = 4, "none"
    regenerate.main(run)


@pytest.mark.parametrize("command", [train, capture, accept, speed, answer])
def test_every_command_refuses_them_with_their_place(command, inputs, tmp_path) -> None:
    with pytest.raises(InputError, match=REFUSED):
        command(inputs, tmp_path / "out")


def test_a_place_counts_malformed_rows(inputs: Path, tmp_path: Path) -> None:
    words = load_tokenizer_of(inputs)
    lines = (inputs / "chat.jsonl").read_text().splitlines()
    (tmp_path / "chat.jsonl").write_text("\n".join(["7", "", *lines[:2], "{}", *lines[2:]]))
    config = data(tmp_path, on_bad_row=OnBadRow.skip)
    sets = prepare_datasets(config, words, seed=0)[:2]
    toy = SimpleNamespace(name="toy", num_embeddings=300, vocab_size=300)
    with pytest.raises(InputError, match=r"chat.jsonl:7: token id 301, but the embedding of toy"):
        for each in sets:
            each.check_token_ids(toy)


def test_ids_in_a_store_are_checked_as_they_are_read(inputs: Path, tmp_path: Path) -> None:
    lines = (inputs / "chat.jsonl").read_text().splitlines()
    (tmp_path / "chat.jsonl").write_text("\n".join(lines[4:]))
    (tmp_path / "target").symlink_to(inputs / "target")
    store = FeatureStore(captured(tmp_path, tmp_path / "store"))
    assert store.manifest.plan.pad_id == 0  # the tokenizer's is 300
    store.train.check_token_ids(
        SimpleNamespace(name="toy", num_embeddings=ord("z"), vocab_size=300)
    )
    with pytest.raises(InputError, match=r"store: sequence 0 of train: token id \d+, but the emb"):
        store.train[0]
    load_store_source(TrainRun(), store, CPU)  # as every training does
    for each in (store.train, store.heldout, store.replay):
        assert each.target is not None
        assert each.target.num_embeddings == ROWS


def load_tokenizer_of(inputs: Path):
    return load_target(target(inputs), CPU).tokenizer
