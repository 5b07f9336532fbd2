"""`eval/acceptance.py target.engine=...`: answers and states of engines give the same figures."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import eagle_head, noisy_head, save_target

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.measure import AcceptanceRun, Mode
from conf.settings.target import Dtype, TargetConfig
from eval import acceptance
from eval.measure.measurement import open_measurement
from heads.target_model.load import load_target
from heads.target_model.model import Target
from tests.chats import write_rows
from tests.servers import serving

NUM_LAYERS = 4
LAYERS = {"medusa": [], "eagle3": [1, 2, 3]}


pytestmark = pytest.mark.usefixtures("few_draws", "no_picture")


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a head of each kind, and two dialogues of two turns."""
    folder = tmp_path_factory.mktemp("inputs")
    save_target(folder / "target", num_hidden_layers=NUM_LAYERS)
    target = loaded(folder)
    noisy_head(target).save(folder / "medusa")
    rows = [{"category": c, "turns": [f"hello {c}, how are you?", "and?"]} for c in ("a", "b")]
    write_rows(folder / "prompts.jsonl", rows)
    eagle_head(target, EagleForm.eagle3, num_updates=30).save(folder / "eagle3")
    return folder


def loaded(folder: Path) -> Target:
    config = TargetConfig(path=str(folder / "target"), dtype=Dtype.float32)
    return load_target(config, torch.device("cpu"))


def run(folder: Path, out_dir: Path, kind: str, urls: list[str], **changes: Any) -> AcceptanceRun:
    return AcceptanceRun(
        target=TargetConfig(path=str(folder / "target"), dtype=Dtype.float32, engine=urls),
        data=DataConfig(path=str(folder / "prompts.jsonl")),
        head=HeadRef(path=str(folder / kind)), max_new_tokens=11, out_dir=str(out_dir), **changes,
    )  # fmt: skip


def measured(config: AcceptanceRun) -> dict[str, Any]:
    acceptance.main(config)
    return json.loads((Path(config.out_dir) / "acceptance.json").read_text())


@pytest.mark.parametrize(("kind", "tree"), [("medusa", "static_tree"), ("eagle3", "dynamic_tree")])
def test_engines_give_the_figures_of_the_target_itself(
    folder: Path, tmp_path: Path, kind: str, tree: str
) -> None:
    here = measured(run(folder, tmp_path / "here", kind, []))
    server = serving(loaded(folder), tmp_path, [*LAYERS[kind], NUM_LAYERS])
    with server:
        served = measured(run(folder, tmp_path / "served", kind, [server.url]))
    assert here[tree]["tau"] > 1.0
    for name in ("tau", "alpha", "agreement", "num_tokens", "by_category", tree):
        assert served[name] == here[name], name
    assert served["num_prompts"] == 4
    assert "log-probabilities 0.0000 nats" in served["engines"][0]
    assert list(server.folder.iterdir()) == []
    assert {body["repetition_penalty"] for body in server.bodies if body["max_tokens"] > 1} == {1.0}


def test_an_answer_ends_at_a_text_that_the_engine_does_not_know(
    folder: Path, tmp_path: Path
) -> None:
    target = loaded(folder)
    (prompt,) = [[5, 17, 40]]
    with serving(target, tmp_path, [NUM_LAYERS]) as server:
        config = run(folder, tmp_path / "out", "medusa", [server.url], num_turns=1)
        with open_measurement(config, "acceptance.json", may_use_engines=True) as bench:
            ((whole, _),) = bench.answer_source.answer_with_states(
                [prompt], 8, bench.head.draft_head.taps
            )
            bench.embeddings_and_output_head.stop_strings = (target.tokenizer.decode(whole[:3]),)
            ((ids, output),) = bench.answer_source.answer_with_states(
                [prompt], 8, bench.head.draft_head.taps
            )
    assert 0 < len(ids) <= 3
    assert ids == whole[: len(ids)]
    assert output.hidden_states.shape[1] == len(prompt) + len(ids) - 1


def test_what_runs_the_target_s_layers_refuses_engines(folder: Path, tmp_path: Path) -> None:
    urls = ["http://localhost:1/v1"]
    with pytest.raises(InputError, match=r"mode=decode: .*leave target\.engine unset"):
        run(folder, tmp_path / "out", "medusa", urls, mode=Mode.decode)
    with pytest.raises(InputError, match="runs the target in its own process"):
        open_measurement(run(folder, tmp_path / "out", "medusa", urls), "other.json")
