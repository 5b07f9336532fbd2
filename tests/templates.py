"""Families of chat templates, each as small as its structure allows, and what each makes learnt.

A template is written here on lines of its own, joined without breaks: a line break that it
renders is `¶`. What a family makes learnt of a turn is, in this order,

    think or inline, lead, the content as `says` leaves it, call, close

with the model's thinking and the call's own text put in. `blank` and `opens` say how what was read
differs from the generation prompt. Templates without thinking are here, those with some in
`templates_thinking`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VERBATIM = "<think>\n{}\n</think>\n\n"
"""How a conversation writes thinking into a content."""
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."


@dataclass(frozen=True)
class Family:
    template: str | dict[str, str]
    special: str
    """Its special tokens, apart by spaces."""
    close: str
    """What ends a turn: the end-of-turn token, and what the model writes before it."""
    lead: str = ""
    """What stands between the generation prompt and the answer's text."""
    says: Callable[[str], str] = str
    """How contents are spaced; as they are by default."""
    think: str = ""
    """How `reasoning_content` is written; empty where the template drops it."""
    inline: str = VERBATIM
    """The same of thinking inside a content, which most templates leave as it is."""
    call: str = ""
    """A call of look(at="Oslo"); empty where the template renders none."""
    call_think: str | None = None
    """As `think`, where a turn with a call differs; so with the others below."""
    call_lead: str = ""
    call_close: str | None = None
    blank: str = ""
    """The empty thinking that a turn without any has behind its prompt, in place of `opens`."""
    call_blank: str | None = None
    opens: str = ""
    """What the prompt ends in that only turns with thinking go on from."""
    refuses: dict[str, str] = field(default_factory=dict)
    """What it refuses (system, calls, thinking, calls behind thinking), and the words for it."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    bos: str = "<s>"
    eos: str = "</s>"
    added: str = ""
    """Tokens that are never split and not special, such as `<think>`."""
    strips_right: bool = False
    """Special tokens swallow the white space after them (Phi-3)."""


def lines(*parts: str) -> str:
    """Joins the lines of a template; `¶` behind a block would be trimmed with it."""
    joined = "".join(line.strip("\n") for part in parts for line in part.splitlines())
    return joined.replace("%}¶", "%}{{ '\n' }}").replace("¶", "\n")


def by_role(each: str = "", **bodies: str) -> str:
    """Loops over the messages; a role without a body renders nothing."""
    arms = "".join(
        f"{{% {'elif' if i else 'if'} m.role == '{role}' %}}{body}"
        for i, (role, body) in enumerate(bodies.items())
    )
    return f"{{% for m in messages %}}{each}{arms}{{% endif %}}{{% endfor %}}"


def ask(header: str, otherwise: str = "") -> str:
    """The generation prompt."""
    return f"{{% if add_generation_prompt %}}{header}{{% else %}}{otherwise}{{% endif %}}"


def calls(body: str) -> str:
    return f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{body}{{% endfor %}}"


def refuse(words: str) -> str:
    return f"{{{{ raise_exception('{words}') }}}}"


POP_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
)
ALTERNATES = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + refuse(ALTERNATE) + "{% endif %}"
)
NO_TOOL_ROLE = {"calls": f"refuses the conversation: {ALTERNATE}"}
NO_SYSTEM = {"system": "refuses the conversation: System role not supported"}
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
SAID = "<|im_start|>{{ m.role }}¶{{ m.content }}<|im_end|>¶"
JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
OSLO = '{"name": "look", "arguments": {"at": "Oslo"}}'
IM = "<|im_start|> <|im_end|>"
HEADERS = "<|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
LLAMA3_SAID = "<|start_header_id|>{{ m.role }}<|end_header_id|>¶¶{{ m.content }}<|eot_id|>"
LLAMA3_ASK = "<|start_header_id|>assistant<|end_header_id|>¶¶"
GEMMA_SAID = "{{ m.content | trim }}<end_of_turn>¶"
PHI = "<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>"
INST = "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]"

LLAMA31 = lines(
    "{{ bos_token }}", POP_SYSTEM,
    "<|start_header_id|>system<|end_header_id|>¶¶Today Date: 26 Jul 2024¶¶",
    "{{ system | trim if system else '' }}<|eot_id|>",
    "{% for m in messages %}",
    "{% if 'tool_calls' in m %}<|start_header_id|>assistant<|end_header_id|>¶¶",
    calls('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}') + "<|eot_id|>",
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>¶¶",
    "{{ m.content | tojson }}<|eot_id|>",
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>¶¶",
    "{% if tools and loop.first %}Given these functions: {{ tools | tojson }}¶¶{% endif %}",
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}", ask(LLAMA3_ASK),
)  # fmt: skip

PLAIN = {
    "chatml": Family(
        lines(by_role(user=SAID, system=SAID, assistant=SAID), ask("<|im_start|>assistant¶")),
        IM, "<|im_end|>",
    ),
    "internlm": Family(
        lines(
            "{{ bos_token }}", by_role(user=SAID, system=SAID, assistant=SAID),
            ask("<|im_start|>assistant¶"),
        ),
        IM, "<|im_end|>",
    ),
    "falcon-h1": Family(
        lines(
            "{{ bos_token }}<|im_start|>system¶", POP_SYSTEM, "{{ system }}", TOOLS, "<|im_end|>¶",
            by_role(user=SAID, assistant=SAID, tool=SAID), ask("<|im_start|>assistant¶"),
        ),
        IM, "<|im_end|>",
    ),
    # The user's turn is always followed by the assistant's header.
    "yi": Family(
        lines(
            POP_SYSTEM, "{{ system }}",
            by_role(
                user="<|im_start|>user¶{{ m.content }}<|im_end|>¶<|im_start|>assistant¶",
                assistant="{{ m.content }}<|im_end|>¶",
            ),
        ),
        IM, "<|im_end|>",
    ),
    "qwen2.5": Family(
        lines(
            "<|im_start|>system¶{{ messages[0].content if messages[0].role == 'system' "
            "else 'You are Qwen.' }}", TOOLS, "<|im_end|>¶",
            by_role(
                user=SAID,
                assistant="<|im_start|>assistant{% if m.content %}¶{{ m.content }}{% endif %}"
                + calls(f"¶<tool_call>¶{JSON_CALL}¶</tool_call>") + "<|im_end|>¶",
                tool="<|im_start|>user¶<tool_response>¶{{ m.content }}¶</tool_response><|im_end|>¶",
            ),
            ask("<|im_start|>assistant¶"),
        ),
        IM, "<|im_end|>", call=f"<tool_call>\n{OSLO}\n</tool_call>",
    ),
    "qwen3-2507": Family(
        lines(
            "{% if tools %}<|im_start|>system¶{{ tools | tojson }}<|im_end|>¶{% endif %}",
            by_role(
                system=SAID, user=SAID,
                assistant="<|im_start|>assistant¶{{ m.content }}"
                + calls(
                    "{% if m.content %}¶{% endif %}<tool_call>¶" + JSON_CALL + "¶</tool_call>"
                ) + "<|im_end|>¶",
                tool="<|im_start|>user¶<tool_response>¶{{ m.content }}¶</tool_response><|im_end|>¶",
            ),
            ask("<|im_start|>assistant¶"),
        ),
        IM, "<|im_end|>", call=f"<tool_call>\n{OSLO}\n</tool_call>",
        added="<think> </think> <tool_call> </tool_call>",
    ),
    "qwen3-coder": Family(
        lines(
            POP_SYSTEM, "{% if system or tools %}<|im_start|>system¶{{ system }}", TOOLS,
            "<|im_end|>¶{% endif %}",
            by_role(
                user=SAID,
                assistant="{% if m.tool_calls %}<|im_start|>assistant"
                "{% if m.content | trim %}¶{{ m.content | trim }}¶{% endif %}"
                + calls(
                    "¶<tool_call>¶<function={{ f.name }}>¶{% for k, v in f.arguments | items %}"
                    "<parameter={{ k }}>¶{{ v }}¶</parameter>¶{% endfor %}</function>¶</tool_call>"
                ) + "<|im_end|>¶{% else %}" + SAID + "{% endif %}",
                tool="<|im_start|>user¶<tool_response>¶{{ m.content }}¶</tool_response>¶"
                "<|im_end|>¶",
            ),
            ask("<|im_start|>assistant¶"),
        ),
        IM, "<|im_end|>", added="<tool_call> </tool_call>",
        call="<tool_call>\n<function=look>\n<parameter=at>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    # A template of its own for conversations with tools.
    "hermes-2-pro": Family(
        {
            "default": lines(
                "{{ bos_token }}", by_role(user=SAID, system=SAID, assistant=SAID),
                ask("<|im_start|>assistant¶"),
            ),
            "tool_use": lines(
                "{{ bos_token }}<|im_start|>system¶{% for tool in tools %}{{ tool.function.name }}",
                "({{ tool.function.parameters.properties | join }}){% endfor %}<|im_end|>¶",
                by_role(
                    user=SAID,
                    assistant="{% if m.tool_calls is not defined %}" + SAID
                    + "{% else %}<|im_start|>assistant"
                    + calls(f"¶<tool_call>¶{JSON_CALL}¶</tool_call>") + "<|im_end|>¶{% endif %}",
                    tool="<|im_start|>tool¶<tool_response>¶{{ m.content }}¶</tool_response>"
                    "<|im_end|>",
                ),
                ask("<|im_start|>assistant¶"),
            ),
        },
        IM, "<|im_end|>", call=f"<tool_call>\n{OSLO}\n</tool_call>",
    ),
    "llama-2": Family(
        lines(
            POP_SYSTEM,
            by_role(
                ALTERNATES,
                user="{{ bos_token }}[INST] {% if loop.first and system %}<<SYS>>¶{{ system }}¶"
                "<</SYS>>¶¶{% endif %}{{ m.content | trim }} [/INST]",
                assistant="{{ ' ' + m.content | trim + ' ' + eos_token }}",
            ),
        ),
        "", " </s>", " ", str.strip, refuses=NO_TOOL_ROLE,
    ),
    "llama-3": Family(
        lines(
            "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}",
            "<|end_header_id|>¶¶{{ m.content | trim }}<|eot_id|>{% endfor %}", ask(LLAMA3_ASK),
        ),
        HEADERS, "<|eot_id|>", says=str.strip,
    ),
    "llama-3.1": Family(
        LLAMA31, HEADERS, "<|eot_id|>", says=str.strip,
        call='{"name": "look", "parameters": {"at": "Oslo"}}',
    ),
    "functionary-3.1": Family(
        lines(
            "{{ bos_token }}<|start_header_id|>system<|end_header_id|>¶¶", TOOLS, "<|eot_id|>",
            by_role(
                user=LLAMA3_SAID, system=LLAMA3_SAID,
                assistant="<|start_header_id|>assistant<|end_header_id|>¶¶{{ m.content }}"
                "{% if m.tool_calls %}"
                + calls("<function={{ f.name }}>{{ f.arguments | tojson }}</function>")
                + "<|eom_id|>{% else %}<|eot_id|>{% endif %}",
                tool="<|start_header_id|>ipython<|end_header_id|>¶¶{{ m.content }}<|eot_id|>",
            ),
            ask(LLAMA3_ASK),
        ),
        HEADERS, "<|eot_id|>", call='<function=look>{"at": "Oslo"}</function>',
        call_close="<|eom_id|>",
    ),
    # The prompt ends in `>>>`; the model writes whom it speaks to.
    "functionary-3.2": Family(
        lines(
            "{{ bos_token }}<|start_header_id|>system<|end_header_id|>¶¶", TOOLS, "<|eot_id|>",
            by_role(
                user=LLAMA3_SAID, system=LLAMA3_SAID,
                assistant="<|start_header_id|>assistant<|end_header_id|>¶¶"
                "{% if m.content %}>>>all¶{{ m.content }}{% endif %}"
                + calls(">>>{{ f.name }}¶{{ '' + f.arguments }}") + "<|eot_id|>",
                tool="<|start_header_id|>tool<|end_header_id|>¶¶{{ m.content }}<|eot_id|>",
            ),
            ask(LLAMA3_ASK + ">>>"),
        ),
        HEADERS, "<|eot_id|>", "all\n", call='look\n{"at": "Oslo"}',
    ),
    "gemma-2": Family(
        lines(
            "{{ bos_token }}{% if messages[0].role == 'system' %}",
            refuse("System role not supported"), "{% endif %}",
            by_role(
                ALTERNATES, user="<start_of_turn>user¶" + GEMMA_SAID,
                assistant="<start_of_turn>model¶" + GEMMA_SAID,
            ),
            ask("<start_of_turn>model¶"),
        ),
        "<start_of_turn> <end_of_turn>", "<end_of_turn>", says=str.strip,
        refuses=NO_TOOL_ROLE | NO_SYSTEM,
    ),
    "gemma-3": Family(
        lines(
            "{{ bos_token }}", POP_SYSTEM,
            by_role(
                ALTERNATES,
                user="<start_of_turn>user¶{% if loop.first and system %}{{ system }}¶¶{% endif %}"
                + GEMMA_SAID,
                assistant="<start_of_turn>model¶" + GEMMA_SAID,
            ),
            ask("<start_of_turn>model¶"),
        ),
        "<start_of_turn> <end_of_turn>", "<end_of_turn>", says=str.strip, refuses=NO_TOOL_ROLE,
    ),
    "mistral-v1": Family(
        lines(
            "{{ bos_token }}", POP_SYSTEM,
            by_role(
                ALTERNATES,
                user=" [INST] {% if loop.first and system %}{{ system }}¶¶{% endif %}"
                "{{ m.content }} [/INST]",
                assistant="{{ ' ' + m.content + eos_token }}",
            ),
        ),
        "", "</s>", " ", refuses=NO_TOOL_ROLE,
    ),
    "mixtral": Family(
        lines(
            "{{ bos_token }}",
            by_role(
                ALTERNATES, user="[INST] {{ m.content }} [/INST]",
                assistant="{{ m.content + eos_token + ' ' }}",
            ),
        ),
        "", "</s>", refuses=NO_TOOL_ROLE | {"system": f"refuses the conversation: {ALTERNATE}"},
    ),
    # The system message and the tools stand before the last question.
    "mistral-nemo": Family(
        lines(
            "{{ bos_token }}", POP_SYSTEM,
            "{% set asked = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}",
            by_role(
                user="{% if tools and m == asked %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
                "[/AVAILABLE_TOOLS]{% endif %}[INST]{% if loop.last and system %}{{ system }}¶¶"
                "{% endif %}{{ m.content }}[/INST]",
                assistant="{% if m.tool_calls %}[TOOL_CALLS]["
                + calls("{{ (f | tojson)[:-1] }}, \"id\": \"{{ c.id }}\"}")
                + "]{% endif %}{{ m.content + eos_token }}",
                tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
            ),
        ),
        INST + " [/TOOL_RESULTS]", "</s>",
        call='[TOOL_CALLS][{"name": "look", "arguments": {"at": "Oslo"}, "id": "callnine1"}]',
    ),
    "mistral-small": Family(
        lines(
            "{{ bos_token }}[SYSTEM_PROMPT]", POP_SYSTEM, "{{ system or 'You are Mistral.' }}",
            "[/SYSTEM_PROMPT]{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}",
            "[/AVAILABLE_TOOLS]{% endif %}",
            by_role(
                user="[INST]{{ m.content }}[/INST]",
                assistant="{% if m.tool_calls %}"
                + calls(
                    "{% if c.id | length != 9 %}" + refuse("Tool call IDs should be 9 long!")
                    + "{% endif %}[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]"
                    "{{ f.arguments | tojson }}"
                ) + "{{ eos_token }}{% else %}{{ m.content + eos_token }}{% endif %}",
                tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
            ),
        ),
        INST + " [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [CALL_ID] [ARGS]", "</s>",
        call='[TOOL_CALLS]look[CALL_ID]callnine1[ARGS]{"at": "Oslo"}',
    ),
}  # fmt: skip
