"""Rows of popular datasets and toolkits, with the fields that their cards list, and their reading.

A reading is the texts of a row's messages in order; learnt texts stand in [[ ]]. `refused(NAME)` is
a row that is refused by that field's name, and `unknown` a row of no known form.
"""

import json
from typing import Any

import pytest

from conf.errors import InputError
from data.rows.data_files import Row
from data.rows.field_checks import MalformedRowError
from data.rows.records import Record, detect_form, parse_record

Q, A, BAD = "Why is the sky blue?", "It scatters.", "Who knows?"
HUMAN, GPT = {"from": "human", "value": Q}, {"from": "gpt", "value": A}
USER, ANSWER = {"role": "user", "content": Q}, {"role": "assistant", "content": A}
WRONG = {"role": "assistant", "content": BAD}
READ = f"{Q} | [[{A}]]"
STORY = "The sun shines through air."
TOOL = {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "look", "arguments": {"at": "sky"}}
TOLD = '<tool>{"name": "look", "arguments": {"at": "sky"}}</tool>'
ARC = {"text": ["Air", "Sea"], "label": ["A", "B"]}
SHORT = {"text": ["air"], "answer_start": [21]}
unknown = "a row of no known form"


def refused(name: str) -> str:
    return f"refused: {name}"


SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    # Conversations.
    "ShareGPT": ({"id": "a_0", "conversations": [HUMAN, GPT]}, READ),
    "UltraChat 200k": ({"prompt": Q, "prompt_id": "f0", "messages": [USER, ANSWER]}, READ),
    "UltraChat": ({"id": "0", "data": [Q, A]}, unknown),
    "OpenHermes 2.5": (
        {"conversations": [HUMAN | {"weight": None}, GPT | {"weight": None}], "source": "airoboros",
         "category": "orca", "custom_instruction": None, "system_prompt": None, "idx": None,
         "language": None, "skip_prompt_formatting": False, "model_name": None, "hash": None},
        READ,
    ),
    "Tulu 3": ({"id": "x", "messages": [USER, ANSWER], "source": "ai2"}, READ),
    "SlimOrca": (
        {"conversations": [{"from": "system", "value": "Think.", "weight": None},
                           HUMAN | {"weight": 0.0}, GPT | {"weight": 1.0}]},
        f"Think. | {READ}",
    ),
    "Capybara": ({"source": "x", "conversation": [{"input": Q, "output": A}]}, READ),
    "LIMA": ({"conversations": [Q, A], "source": "stack"}, refused("conversations[0]")),
    "WildChat 1M": (
        {"conversation_hash": "f0", "model": "gpt-4", "turn": 1, "language": "English",
         "conversation": [USER | {"toxic": False, "turn_identifier": 1, "country": "France"},
                          ANSWER | {"toxic": False, "turn_identifier": 1, "country": None}],
         "openai_moderation": [{"flagged": False}], "toxic": False, "redacted": False},
        READ,
    ),
    "LMSYS-Chat 1M": (
        {"conversation_id": "f0", "model": "vicuna", "conversation": [USER, ANSWER], "turn": 1,
         "language": "English", "openai_moderation": [{"flagged": False}], "redacted": False},
        READ,
    ),
    "LMSYS arena": (
        {"model_a": "x", "model_b": "y", "winner": "model_a", "conversation_a": [USER, ANSWER],
         "conversation_b": [USER, WRONG], "turn": 1},
        unknown,
    ),
    "OpenThoughts": (
        {"system": "Think.", "conversations": [{"from": "user", "value": Q},
                                               {"from": "assistant", "value": A}]},
        f"Think. | {READ}",
    ),
    "NeMo's Daring-Anteater": (
        {"system": "", "mask": "User", "dataset": "x",
         "conversations": [{"from": "User", "value": Q, "label": None},
                           {"from": "Assistant", "value": A, "label": "quality:4"}]},
        READ,
    ),
    "ChatQA": (
        {"messages": [USER], "document": STORY, "answers": [A]}, refused("document"),
    ),
    "OpenAI fine-tuning": (
        {"messages": [USER, WRONG | {"weight": 0}, USER, ANSWER | {"weight": 1}]},
        f"{Q} | {BAD} | {READ}",
    ),
    "ms-swift messages": (
        {"messages": [USER, WRONG | {"loss": False}, USER, ANSWER | {"loss": True}]},
        f"{Q} | {BAD} | {READ}",
    ),
    "axolotl, messages": (
        {"conversations": [HUMAN | {"train": False}, GPT | {"train": True}]}, READ,
    ),
    "verl": ({"messages": [USER, WRONG | {"loss_mask": 0}]}, f"{Q} | {BAD}"),
    "tinker": ({"messages": [USER, WRONG | {"trainable": False}]}, f"{Q} | {BAD}"),
    "home-llm": ({"messages": [USER, WRONG | {"train_on_turn": False}]}, f"{Q} | {BAD}"),
    # Tools.
    "ToolACE": (
        {"system": "You may look.", "conversations": [
            {"from": "user", "value": Q}, {"from": "assistant", "value": "[look(at='sky')]"},
            {"from": "tool", "value": "blue"}, {"from": "assistant", "value": A}]},
        f"You may look. | {Q} | [[[look(at='sky')]]] | blue | [[{A}]]",
    ),
    "Hermes function calling": (
        {"id": "f0", "tools": json.dumps([{"type": "function", "function": TOOL}]), "task": "x",
         "category": "x", "subcategory": "y",
         "conversations": [HUMAN, {"from": "gpt", "value": TOLD}]},
        f"{Q} | [[{TOLD}]]",
    ),
    "xLAM function calling": (
        {"id": 0, "query": Q, "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])}, Q,
    ),
    "Glaive v2": ({"system": "SYSTEM: You may look.", "chat": f"USER: {Q}\n\n\nASSISTANT: {A}"},
                  unknown),
    "LlamaFactory's Glaive": (
        {"tools": json.dumps([TOOL]), "conversations": [
            HUMAN, {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "blue"}, GPT]},
        f"{Q} | [[]] | blue | [[{A}]]",
    ),
    # Instructions.
    "Alpaca": (
        {"instruction": "Explain.", "input": Q, "output": A, "text": "### Instruction: Explain."},
        f"Explain.\n\n{Q} | [[{A}]]",
    ),
    "CodeAlpaca": ({"instruction": Q, "input": "", "output": A}, READ),
    "Dolly": (
        {"instruction": Q, "context": STORY, "response": A, "category": "closed_qa"},
        f"{Q}\n\n{STORY} | [[{A}]]",
    ),
    "LlamaFactory alpaca": (
        {"instruction": "And at dusk?", "input": "", "output": "Red.", "system": "Be kind.",
         "history": [[Q, A]]},
        f"Be kind. | {READ} | And at dusk? | [[Red.]]",
    ),
    "ms-swift query-response": (
        {"system": "Be kind.", "query": "And at dusk?", "response": "Red.", "history": [[Q, A]]},
        f"Be kind. | {READ} | And at dusk? | [[Red.]]",
    ),
    "MetaMath": ({"query": Q, "response": A, "type": "x", "original_question": "Why?"}, READ),
    "NuminaMath": (
        {"source": "x", "problem": Q, "solution": A, "messages": [USER, ANSWER]}, READ,
    ),
    "Magicoder OSS": (
        {"lang": "python", "raw_index": 1, "index": 2, "seed": "x", "openai_fingerprint": "y",
         "problem": Q, "solution": A},
        READ,
    ),
    "s1K": (
        {"question": Q, "solution": A, "cot_type": "math", "source_type": "x", "metadata": "{}",
         "cot": None, "thinking_trajectories": ["Hm."], "attempt": BAD},
        READ,
    ),
    "Nemotron post-training": (
        {"input": [USER], "output": A, "category": "math", "license": "x", "reasoning": "off",
         "generator": "y", "used_in_training": "yes", "version": "v1", "system_prompt": ""},
        READ,
    ),
    "OASST 1": (
        {"message_id": "f0", "parent_id": None, "text": Q, "role": "prompter", "lang": "en",
         "review_count": 3, "deleted": False, "rank": None},
        refused("role"),
    ),
    "OASST Guanaco": ({"text": f"### Human: {Q}### Assistant: {A}"}, refused("text")),
    # Preferences and feedback.
    "HH-RLHF": (
        {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {A}", "rejected": f"\n\nHuman: {Q}"},
        refused("chosen"),
    ),
    "UltraFeedback": (
        {"source": "x", "instruction": Q, "models": ["y"], "completions": [{"response": BAD}]}, Q,
    ),
    "UltraFeedback binarized": (
        {"prompt": Q, "prompt_id": "f0", "chosen": [USER, ANSWER], "rejected": [USER, WRONG],
         "messages": [USER, ANSWER], "score_chosen": 8.0, "score_rejected": 2.0},
        READ,
    ),
    "Orca DPO pairs": ({"system": "", "question": Q, "chosen": A, "rejected": BAD}, READ),
    "Capybara DPO": (
        {"source": "x", "conversation": [{"input": Q, "output": BAD}], "original_response": BAD,
         "chosen": [USER, ANSWER], "rejected": [USER, WRONG], "rating_chosen": 5},
        READ,
    ),
    "LlamaFactory ranking": (
        {"conversations": [HUMAN, {"from": "gpt", "value": "Say more."}, HUMAN], "chosen": GPT,
         "rejected": {"from": "gpt", "value": BAD}},
        f"{Q} | [[Say more.]] | {READ}",
    ),
    "LlamaFactory alpaca ranking": (
        {"instruction": "Explain.", "input": Q, "chosen": A, "rejected": BAD},
        f"Explain.\n\n{Q} | [[{A}]]",
    ),
    "ms-swift ranking": ({"messages": [USER, ANSWER], "rejected_response": BAD}, READ),
    "TRL KTO mix": ({"prompt": [USER], "completion": [WRONG], "label": False}, f"{Q} | {BAD}"),
    "TRL KTO mix, good": ({"prompt": [USER], "completion": [ANSWER], "label": True}, READ),
    "LlamaFactory KTO": (
        {"instruction": Q, "input": "", "output": BAD, "kto_tag": False}, f"{Q} | {BAD}",
    ),
    "LlamaFactory KTO, ms-swift KTO": (
        {"messages": [USER, WRONG], "label": False}, f"{Q} | {BAD}",
    ),
    "HelpSteer 2": (
        {"prompt": Q, "response": A, "helpfulness": 4, "correctness": 4, "verbosity": 1}, READ,
    ),
    # Benchmarks.
    "MT-bench": ({"question_id": 81, "category": "writing", "turns": [Q, "Why?"]}, f"{Q} | Why?"),
    "Spec-Bench": ({"question_id": 1, "category": "qa", "turns": [Q], "reference": [A]}, Q),
    "GSM8K": ({"question": Q, "answer": A}, READ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": Q, "canonical_solution": A, "test": "x",
         "entry_point": "f"},
        Q,
    ),
    "MBPP": (
        {"task_id": 1, "text": Q, "code": A, "test_list": ["assert f()"], "test_setup_code": "",
         "challenge_test_list": []},
        refused("code"),
    ),
    "MBPP sanitized": (
        {"source_file": "x", "task_id": 2, "prompt": Q, "code": A, "test_imports": [],
         "test_list": ["assert f()"]},
        Q,
    ),
    "SQuAD": (
        {"id": "f0", "title": "Sky", "context": STORY, "question": Q, "answers": SHORT},
        f"{Q}\n\n{STORY}",
    ),
    "LongBench": (
        {"input": Q, "context": STORY, "answers": [A], "length": 9, "dataset": "qasper",
         "language": "en", "all_classes": None, "_id": "f0"},
        f"{Q}\n\n{STORY}",
    ),
    "LongBench 2": (
        {"_id": "f0", "domain": "x", "question": Q, "choice_A": "Air", "choice_B": "Sea",
         "choice_C": "Sun", "choice_D": "Moon", "answer": "A", "context": STORY},
        refused("choice_A"),
    ),
    "HotpotQA": (
        {"id": "f0", "question": Q, "answer": A, "level": "hard",
         "context": {"title": ["Sky"], "sentences": [[STORY]]}},
        refused("context"),
    ),
    "MMLU": (
        {"question": Q, "subject": "physics", "choices": ["Air", "Sea"], "answer": 0},
        refused("choices"),
    ),
    "MMLU-Pro": (
        {"question_id": 1, "question": Q, "options": ["Air", "Sea"], "answer": "A",
         "answer_index": 0, "cot_content": "", "category": "physics", "src": "x"},
        refused("options"),
    ),
    "CMMLU": ({"Question": Q, "A": "Air", "B": "Sea", "C": "Sun", "D": "Fog", "Answer": "A"},
              refused("A")),
    "ARC": ({"id": "x", "question": Q, "choices": ARC, "answerKey": "A"}, refused("choices")),
    "CommonsenseQA": (
        {"id": "f0", "question": Q, "question_concept": "sky", "choices": ARC, "answerKey": "A"},
        refused("choices"),
    ),
    "HellaSwag": (
        {"ind": 4, "activity_label": "x", "ctx_a": "The sky", "ctx_b": "is", "ctx": "The sky is",
         "endings": ["blue", "green"], "label": "0"},
        unknown,
    ),
    "RACE": (
        {"example_id": "x", "article": STORY, "question": Q, "options": ["Air"], "answer": "A"},
        refused("article"),
    ),
    "CNN-DailyMail": ({"article": STORY, "highlights": A, "id": "f0"}, unknown),
    "XSum": ({"document": STORY, "summary": A, "id": "1"}, unknown),
    "BoolQ": ({"question": Q, "passage": STORY, "answer": True}, refused("answer")),
    "TriviaQA": (
        {"question": Q, "question_id": "x", "question_source": "y",
         "answer": {"value": A, "aliases": [A]}},
        refused("answer"),
    ),
    "Natural Questions": (
        {"id": "1", "document": {"html": STORY}, "question": {"text": Q, "tokens": ["why"]}},
        refused("question"),
    ),
    "NQ open": ({"question": Q, "answer": ["air"]}, refused("answer")),
}  # fmt: skip


def format_reading(record: Record) -> str:
    """Format the texts of a record's messages, with the learnt ones in [[ ]]."""
    learnt = [
        message["role"] == "assistant" and i not in record.unlearnt_messages
        for i, message in enumerate(record.messages or [])
    ]
    texts = [message["content"] for message in record.messages or [{"content": f"[{record.text}]"}]]
    pairs = zip(texts, learnt or [True], strict=True)
    return " | ".join(f"[[{text}]]" if is_learnt else text for text, is_learnt in pairs)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_row_of_every_schema_is_read_or_refused_by_name(name: str) -> None:
    row, expected = SCHEMAS[name]
    line = Row("rows.jsonl:1", raw=json.dumps(row).encode())
    try:
        form = detect_form([line], "rows.jsonl")
        reading = format_reading(parse_record(line, form, detected=True))
    except MalformedRowError as error:
        reading = refused(error.name)
    except InputError:
        reading = unknown
    assert reading == expected
