"""What decoding costs in memory and operations, which no clock is needed for."""

import argparse
import json

import pytest
from toys import save_target

from eval.decode.engine import NoDraft
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from scripts.bench import (
    generate as bench_generate,
)
from scripts.bench import (
    operations as bench_operations,
)
from scripts.bench import (
    products as bench_products,
)
from scripts.bench import (
    prompt as bench_prompt,
)


@pytest.fixture
def small_parts(monkeypatch) -> None:
    monkeypatch.setattr(EmbeddingsAndHead, "prefill_chunk", 64)


@pytest.mark.usefixtures("small_parts")
def test_memory_beyond_the_cache_does_not_grow_with_a_prompt() -> None:
    sizes = argparse.Namespace(tokens=[64, 384], hidden=64, layers=4, vocab=128)
    target = bench_prompt.random_target(sizes)
    for name, make in bench_prompt.drafters(target).items():
        one, six = (bench_prompt.beyond(target, make, size) for size in sizes.tokens)
        assert 0 < six < 2 * one, name


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_the_table_of_prompts(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["prompt.py", "--tokens", "64", "128"])
    bench_prompt.main()
    table = capsys.readouterr().out
    assert "| EAGLE-3, chain of 2 | 128 |" in table
    assert "| none | 64 | 0.1 |" in table


def test_a_plain_step_builds_no_mask_and_scatters_nothing() -> None:
    target = bench_operations.random_target(4)
    counts = bench_operations.of_a_step(
        target, bench_operations.drafters(target)["none"], bench_operations.plain
    )
    assert counts["_scaled_dot_product_flash_attention_for_cpu"] == 4
    assert counts["embedding"] == 1
    for name in ("masked_fill_", "index_put_", "_index_put_impl_", "scatter_", "where"):
        assert counts[name] == 0


@pytest.mark.slow
def test_the_table_of_operations(monkeypatch, capsys) -> None:
    sizes = ["--layers", "6", "--compiled-layers", "4"]
    monkeypatch.setattr("sys.argv", ["operations.py", *sizes])
    bench_operations.main()
    assert capsys.readouterr().out.count("| EAGLE-3, chain of 4 |") == 3


def test_what_a_compiled_target_leaves_to_launch_does_not_grow_with_its_layers() -> None:
    totals = []
    for num_layers in (1, 2):
        target = bench_operations.compiled_target(num_layers)
        totals.append(bench_operations.of_a_step(target, NoDraft, bench_operations.plain).total())
    assert totals[0] == totals[1] < 40


def generate_options(tmp_path, monkeypatch) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"question {number}"], "category": "a"} for number in range(2)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = save_target(tmp_path / "target")
    options = ["--target", str(target), "--data", str(prompts), "--batch-sizes", "2"]
    monkeypatch.setattr("sys.argv", ["generate.py", *options, "--max-new-tokens", "6"])
    return options


def test_the_table_of_plain_decoding(tmp_path, monkeypatch, capsys) -> None:
    generate_options(tmp_path, monkeypatch)
    bench_generate.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("| 2 | 12 |")


def test_texts_that_differ_are_not_timed(tmp_path, monkeypatch) -> None:
    generate_options(tmp_path, monkeypatch)
    usual = bench_generate.decode_batch
    monkeypatch.setattr(bench_generate, "decode_batch", lambda *a: usual(*a)[::-1])
    with pytest.raises(SystemExit, match="write different texts"):
        bench_generate.main()


@pytest.mark.parametrize("name", ["none", "EAGLE-3, tree of 8 levels, 59 nodes"])
def test_a_captured_step_is_one_launch_and_one_copy(name: str) -> None:
    target = bench_operations.random_target(4)
    make = bench_operations.drafters(target)[name]
    found = bench_operations.of_a_step(target, make, bench_operations.captured)
    assert found == {"graph": 1, "copy_": 1}


def test_the_table_of_products(monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench_products, "SIZES", ((32, 64), (64, 16)))
    options = ["--rows", "1", "5", "--repeats", "1", "--megabytes", "0"]
    monkeypatch.setattr("sys.argv", ["products.py", *options])
    bench_products.main()
    head, _, *rows = capsys.readouterr().out.splitlines()[2:]
    assert head == "| dtype | matrix | 1 rows | 5 rows |"
    assert [row.split(" | ")[1] for row in rows] == ["32 x 64", "64 x 16"] * 2
