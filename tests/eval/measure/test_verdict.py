"""Verdicts: for each outcome, figures, the sentence and the next command."""

from itertools import product
from typing import Any

import pytest

from conf.settings.data import RowsConfig
from conf.settings.drafting import HeadRef
from conf.settings.measure import AcceptanceRun, ServeRun, SpeedupRun
from conf.settings.target import TargetConfig
from eval.measure.verdict import (
    Outcome,
    Verdict,
    judge_acceptance,
    judge_serving,
    judge_speedup,
    print_verdict,
)
from tests.conf.command.test_following import pasted

Bounds = tuple[float, float] | None


def rows(number: int) -> list[dict[str, int]]:
    """Two turns of each dialogue."""
    return [{"dialogue": n // 2, "turn": 1 + n % 2} for n in range(2 * number)]


def acceptance(number: int, tau: float, bounds: Bounds, tree: float = 1.0) -> dict[str, Any]:
    in_tree = {"tau": tree, "tau_ci95": bounds}
    return {"tau": tau, "tau_ci95": bounds, "prompts": rows(number), "static_tree": in_tree}


def speedup(number: int, **methods: tuple[float, Bounds]) -> dict[str, Any]:
    made = {
        name: {"speedup": value, "speedup_ci95": bounds, "prompts": rows(number)}
        for name, (value, bounds) in methods.items()
    }
    return {"methods": {"vanilla": {"speedup": 1.0, "speedup_ci95": None}} | made}


def serving(*sizes: tuple[int, float | None, Bounds]) -> dict[str, Any]:
    def of(value: float | None, bounds: Bounds) -> dict[str, Any]:
        drafts = {"speedup": value, "speedup_ci95": bounds}
        without = {} if value is None else {"without": {"speedup": 1.0, "speedup_ci95": None}}
        baseline = None if value is None else "without"
        return {"baseline": baseline, "methods": {"with drafts": drafts, **without}}

    return {"concurrency": {str(size): of(*figures) for size, *figures in sizes}}


def test_figures_that_are_too_good_are_no_reason_to_go_on() -> None:
    known = {"data": {"trained_on": [{"num_trained": 3, "num_dialogues": 10}]}}
    said = (
        " 3 of 10 dialogues begin with prompts that the head was trained on, so these figures are "
    )
    for result, judge in (
        (acceptance(10, 2.0, (1.8, 2.2)), judge_acceptance),
        (speedup(10, eagle_chain=(1.4, (1.3, 1.5))), lambda it: judge_speedup(it, ["eagle"])),
    ):
        fresh, found = judge(result), judge(result | known)
        assert (fresh.outcome, found.outcome) == (Outcome.worth, Outcome.unclear)
        assert found.sentence == f"{fresh.sentence}{said}too good."
        few = {"data": {"trained_on": [{"num_trained": None, "num_dialogues": 10}]}}
        assert judge(result | few) == fresh


def test_modes_in_which_drafts_fail_are_said() -> None:
    low = {"tau": 1.4, "tau_ci95": (1.3, 1.45), "num_dialogues": 9}
    fallen = {"by_mode": {"text": {"tool call": low, "prose": low | {"tau_ci95": (1.3, 1.6)}}}}
    said = (
        " In some modes the target accepts at most half as many draft tokens as on average (1.00 "
        "per pass): text: tool call 0.40 (0.30-0.45, 9 dialogues)."
    )
    chain = acceptance(10, 2.0, (1.8, 2.2))
    plain = judge_acceptance(chain)
    assert judge_acceptance(chain | fallen) == Verdict(Outcome.worth, f"{plain.sentence}{said}")
    # Of several conditions, the modes of all of them.
    assert judge_acceptance(chain, {"tau": 2.0, **fallen}).sentence == f"{plain.sentence}{said}"
    assert judge_acceptance(chain | fallen, {"tau": 2.0}) == plain
    # Of a speed-up, the modes of the chain that is judged.
    measured = speedup(10, eagle_chain=(1.4, (1.3, 1.5)), eagle_tree=(1.2, (1.1, 1.3)))
    plain = judge_speedup(measured, ["eagle"])
    measured["methods"]["eagle_tree"] |= fallen
    assert judge_speedup(measured, ["eagle"]) == plain
    measured["methods"]["eagle_chain"] |= fallen | {"tau": 2.0}
    assert judge_speedup(measured, ["eagle"]) == Verdict(Outcome.worth, f"{plain.sentence}{said}")


def test_a_head_of_another_target_is_not_judged() -> None:
    result = acceptance(10, 2.0, (1.8, 2.2)) | {"data": {"target_changes": ["head.path=..."]}}
    verdict = judge_acceptance(result)
    assert verdict.outcome is Outcome.unclear
    assert verdict.sentence.endswith(" another target: measure it with that target.")


def test_a_gguf_target_is_judged_by_what_llama_cpp_does() -> None:
    result = acceptance(10, 2.0, (1.8, 2.2)) | {"target": "chat.Q4_1.gguf"}
    assert "on a CPU no head pays there" in judge_acceptance(result).sentence


COSTS = (
    "1.5, about the plain steps that a step with four drafts costs (8B, H200); eval/speedup.py "
    "compares it with suffixes, which need no training."
)
TREES = "vLLM and llama.cpp run chains alone, SGLang also trees of EAGLE heads."
UNWORTHY = "This head is not worth serving"


@pytest.mark.parametrize(
    ("result", "outcome", "sentence"),
    [
        (acceptance(4, 1.1, (1.1, 1.1)), Outcome.unclear,
         "Too few prompts to judge this head: tau 1.10 (chain, 4 dialogues)."),
        (acceptance(32, 1.14, (1.05, 1.22)), Outcome.weak,
         f"{UNWORTHY} yet: tau 1.14 (chain, 95% interval 1.05-1.22, 32 dialogues) lies below "
         f"{COSTS}"),
        (acceptance(8, 1.25, (1.1, 1.5)), Outcome.unclear,
         "The figures do not tell whether this head is worth it: tau 1.25 (chain, 95% interval "
         f"1.10-1.50, 8 dialogues) should exceed {COSTS}"),
        (acceptance(32, 1.6, (1.5, 1.7)), Outcome.worth,
         "The target accepts enough drafts to measure seconds: tau 1.60 (chain, 95% interval "
         "1.50-1.70, 32 dialogues) tokens per pass."),
        (acceptance(32, 1.2, (1.1, 1.3), tree=1.6), Outcome.weak,
         f"{UNWORTHY} yet: tau 1.20 (chain, 95% interval 1.10-1.30, 32 dialogues) lies below "
         f"{COSTS} The tree's tau is 1.60, but {TREES}"),
    ],
)  # fmt: skip
def test_acceptance_is_judged(result: dict[str, Any], outcome: Outcome, sentence: str) -> None:
    found = judge_acceptance(result)
    assert (found.outcome, found.sentence) == (outcome, sentence)


Measured = dict[str, tuple[float, Bounds]]


@pytest.mark.parametrize(
    ("number", "methods", "outcome", "sentence"),
    [
        (1, {"eagle_chain": (2.0, None), "suffix": (3.0, None)}, Outcome.unclear,
         "Too few prompts to judge this head: eagle_chain decodes at 2.00 of the baseline's "
         "speed (1 dialogue)."),
        (20, {"eagle_chain": (1.16, (1.1, 1.2)), "ngram": (1.18, (1.1, 1.2)),
              "suffix": (1.26, (1.2, 1.3)), "eagle_suffix": (1.53, (1.5, 1.6))}, Outcome.weak,
         UNWORTHY + ": [eagle_chain], but suffix at 1.26 (95% interval 1.20-1.30, 20 dialogues) "
         "without any training."),
        (20, {"eagle_chain": (0.83, (0.8, 0.9)), "suffix": (0.9, (0.8, 1.0))}, Outcome.weak,
         UNWORTHY + ": [eagle_chain]."),
        (20, {"eagle_chain": (1.1, (0.97, 1.2)), "eagle_tree": (1.0, (0.9, 1.1))}, Outcome.unclear,
         "The figures do not tell whether this head pays: [eagle_chain]."),
        (20, {"eagle_chain": (1.1, (1.0, 1.2)), "eagle_chain_2": (1.2, (1.1, 1.3)),
              "eagle_tree_2": (1.9, (1.8, 2.0))}, Outcome.worth,
         f"This head is worth serving: [eagle_chain_2]. [eagle_tree_2], but {TREES}"),
        (8, {"eagle_chain": (1.11, (0.86, 1.45)), "eagle_tree": (1.65, (1.29, 2.18)),
             "suffix": (1.15, (0.92, 1.49))}, Outcome.weak,
         UNWORTHY + ": [eagle_chain], but suffix at 1.15 (95% interval 0.92-1.49, 8 dialogues) "
         f"without any training. [eagle_tree], but {TREES}"),
        (20, {"eagle_tree": (1.9, (1.8, 2.0)), "suffix": (1.5, (1.4, 1.6))}, Outcome.no_chain,
         "Nothing says whether this head is worth serving, as no chain was measured: "
         f"[eagle_tree], but {TREES}"),
    ],
)  # fmt: skip
def test_speedup_is_judged(number: int, methods: Measured, outcome: Outcome, sentence: str) -> None:
    """A name in brackets stands for what is said of that method."""
    for name, (value, bounds) in methods.items():
        low, high = bounds or (0, 0)
        sentence = sentence.replace(
            f"[{name}]",
            f"{name} decodes at {value:.2f} of the baseline's speed (95% interval {low:.2f}-"
            f"{high:.2f}, {number} dialogues)",
        )
    found = judge_speedup(speedup(number, **methods), ["eagle"])
    assert found is not None
    assert (found.outcome, found.sentence) == (outcome, sentence)


def test_nothing_is_judged_without_a_head_or_without_times() -> None:
    assert judge_speedup(speedup(20, suffix=(2.0, (1.9, 2.1))), []) is None
    assert judge_speedup(speedup(20, eagle_suffix=(2.0, (1.9, 2.1))), ["eagle"]) is None
    assert judge_serving({"concurrency": {}}, 20) is None


def spoiled(result: dict[str, Any], size: str) -> dict[str, Any]:
    """A result in which the window of the baseline at a load is not valid."""
    result["concurrency"][size]["methods"]["without"]["valid"] = False
    return result


IN_FLIGHT = "with 1 in flight the server answers at"
SPEED = "of the baseline's speed"


@pytest.mark.parametrize(
    ("result", "number", "outcome", "sentence"),
    [
        (serving((1, None, None)), 20, Outcome.alone,
         "No server without drafts was given, so nothing says whether drafts pay."),
        (serving((1, 1.4, (1.4, 1.4))), 7, Outcome.unclear,
         f"Too few prompts to judge this head: {IN_FLIGHT} 1.40 {SPEED} (7 dialogues)."),
        (serving((1, 0.9, (0.8, 0.95)), (16, 0.7, (0.6, 0.8))), 20, Outcome.weak,
         f"{UNWORTHY}: {IN_FLIGHT} 0.90 {SPEED} (95% interval 0.80-0.95, 20 dialogues), and is no "
         "faster with 1, 16."),
        (serving((1, 1.05, (0.9, 1.2))), 20, Outcome.unclear,
         f"The figures do not tell whether this head pays: {IN_FLIGHT} 1.05 {SPEED} (95% interval "
         "0.90-1.20, 20 dialogues)."),
        (serving((1, 1.4, (1.3, 1.5)), (16, 0.9, (0.8, 1.0))), 20, Outcome.worth,
         f"This head is worth serving: {IN_FLIGHT} 1.40 {SPEED} (95% interval 1.30-1.50, 20 "
         "dialogues), and is no faster with 16."),
        (spoiled(serving((1, 1.4, (1.3, 1.5)), (16, 0.9, (0.8, 0.95))), "1"), 20, Outcome.weak,
         f"{UNWORTHY}: with 16 in flight the server answers at 0.90 {SPEED} (95% interval "
         "0.80-0.95, 20 dialogues)."),
        (spoiled(serving((1, 1.4, (1.3, 1.5))), "1"), 20, Outcome.unclear,
         "No load has valid windows, so nothing says whether drafts pay."),
    ],
)  # fmt: skip
def test_serving_is_judged(
    result: dict[str, Any], number: int, outcome: Outcome, sentence: str
) -> None:
    found = judge_serving(result, number)
    assert found is not None
    assert (found.outcome, found.sentence) == (outcome, sentence)


TARGET, DATA = TargetConfig("me/model"), RowsConfig("mine.jsonl", num_prompts=4)
METHODS = ["eagle_tree", "eagle_tree_2", "suffix"]
RUNS = {
    "acceptance": (
        AcceptanceRun(TARGET, DATA, HeadRef("h"), out_dir="o"), "eval/speedup.py", {},
    ),
    "speedup": (
        SpeedupRun(TARGET, DATA, HeadRef("h"), out_dir="o", methods=METHODS),
        "scripts/export.py", {"format": "vllm"},
    ),
    "serve": (
        ServeRun(TARGET, DATA, HeadRef("h"), endpoint="http://a", out_dir="o"),
        "scripts/push.py", {"repo_id": "me/head", "dry_run": True},
    ),
}  # fmt: skip
"""Of each command its run, and what comes next where a head is worth it."""
ALWAYS = (Outcome.unclear, Outcome.weak, Outcome.worth)
ENDS = [*product(RUNS, ALWAYS), ("serve", Outcome.alone), ("speedup", Outcome.no_chain)]


@pytest.mark.parametrize(("ended", "outcome"), ENDS)
def test_the_next_command_fits_the_outcome(
    ended: str, outcome: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, onward, more = RUNS[ended]
    verdict = Verdict(outcome, "So it is.")
    print_verdict(ended, verdict, settings, {"head.path": "h", **more})
    said = capsys.readouterr().out
    assert said.startswith("\nSo it is.\n\nnext, ")
    script, run = pasted(said)
    if outcome is Outcome.worth:
        assert (script, run.head.path) == (onward, "h")
    elif outcome is Outcome.weak:
        assert script == "scripts/regenerate.py"
        assert (run.target.path, run.data.path) == ("me/model", "CHATS.jsonl")
        assert "to train on (your file in place of CHATS.jsonl):" in said
    else:
        assert (script, run.head.path, run.out_dir) == (f"eval/{ended}.py", "h", "o-again")
        same = outcome in (Outcome.alone, Outcome.no_chain)
        assert run.data.path == ("mine.jsonl" if same else "PROMPTS.jsonl")
        assert run.data.num_prompts == (4 if same else None)
        alone = outcome is Outcome.alone
        assert getattr(run, "baseline", None) == ("http://localhost:8001" if alone else None)
        if ended == "speedup":
            way = "chain" if outcome is Outcome.no_chain else "tree"
            assert run.methods == [f"eagle_{way}", f"eagle_{way}_2", "suffix"]


def test_a_head_that_no_engine_serves_gets_a_verdict_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdict = judge_acceptance(acceptance(32, 2.0, (1.9, 2.1)))
    print_verdict("speedup", verdict, RUNS["speedup"][0], None)
    assert capsys.readouterr().out == f"\n{verdict.sentence}\n"
