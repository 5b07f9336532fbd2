"""Families of chat templates, each as small as its structure allows, and what each makes learnt.

A template is written here on lines of its own, joined without breaks: a line break that it
renders is `¶`. What a family makes learnt of a turn is, in this order,

    think or inline, lead, the content as `says` leaves it, call, close

with the model's thinking and the call's own text put in. `blank` and `opens` say how what was read
differs from the generation prompt.
"""

# ruff: noqa: RUF001  DeepSeek's tokens have bars of their own

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

VERBATIM = "<think>\n{}\n</think>\n\n"
"""The form of thinking inside the content of a conversation."""
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."


@dataclass(frozen=True)
class Family:
    template: str | dict[str, str]
    special: str
    """Its special tokens, apart by spaces."""
    close: str
    """The end of a turn: the end-of-turn token, and the text that the model writes before it."""
    lead: str = ""
    """Text between the generation prompt and the answer's text."""
    says: Callable[[str], str] = str
    """The spacing of contents; unchanged by default."""
    think: str = ""
    """The form of `reasoning_content`; empty where the template drops it."""
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
    """The end of a prompt that only turns with thinking go on from."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Refused parts (system, calls, thinking, calls behind thinking), and the words for each."""
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


# Without thinking: words for roles, parts of other kinds.

PHI3_SAID = "<|{{ m.role }}|>¶{{ m.content }}<|end|>¶"
COHERE = "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>"  # fmt: skip # noqa: E501
COHERE_TURN = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>{{{{ m.content.strip() }}}}<|END_OF_TURN_TOKEN|>"
ROLE = "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>¶"
GRANITE = "<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>"
KIMI = (
    "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"at": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)
KIMI_CALLS = (
    "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    + calls(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>"
    )
    + "<|tool_calls_section_end|>{% endif %}"
)
OFFSET = "{% set offset = 1 if messages[0].role == 'system' else 0 %}"
TEXTS = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"

MORE = {
    # Its header belongs to the user's turn; special tokens swallow the line break behind them.
    "phi-3": Family(
        lines(
            "{{ bos_token }}",
            by_role(
                system=PHI3_SAID,
                user="<|user|>¶{{ m.content }}<|end|>¶<|assistant|>¶",
                assistant="{{ m.content }}<|end|>¶",
            ),
        ),
        PHI, "<|end|>", says=str.lstrip, eos="<|endoftext|>", strips_right=True,
    ),
    # The end of the whole text has a token of its own, whoever spoke last.
    "phi-3.5": Family(
        lines(
            by_role(system=PHI3_SAID, user=PHI3_SAID, assistant=PHI3_SAID),
            ask("<|assistant|>¶", "{{ eos_token }}"),
        ),
        PHI, "<|end|>", says=str.lstrip, eos="<|endoftext|>", strips_right=True,
    ),
    "phi-4": Family(
        lines(
            "<|im_start|>system<|im_sep|>", POP_SYSTEM, "{{ system or 'You are Phi.' }}<|im_end|>",
            by_role(
                user="<|im_start|>user<|im_sep|>{{ m.content }}<|im_end|>",
                assistant="<|im_start|>assistant<|im_sep|>{{ m.content }}<|im_end|>",
            ),
            ask("<|im_start|>assistant<|im_sep|>"),
        ),
        IM + " <|im_sep|>", "<|im_end|>",
    ),
    "phi-4-mini": Family(
        lines(
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.first %}", TOOLS,
            "{% endif %}<|end|>{% endfor %}", ask("<|assistant|>", "{{ eos_token }}"),
        ),
        PHI, "<|end|>", eos="<|endoftext|>",
    ),
    "command-r": Family(
        lines(
            "{{ bos_token }}", POP_SYSTEM,
            "{% if system %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ system }}",
            "<|END_OF_TURN_TOKEN|>{% endif %}",
            by_role(
                ALTERNATES, user=COHERE_TURN.format("USER"),
                assistant=COHERE_TURN.format("CHATBOT"),
            ),
            ask("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
        ),
        COHERE, "<|END_OF_TURN_TOKEN|>", says=str.strip, refuses=NO_TOOL_ROLE,
    ),
    "granite-3": Family(
        lines(
            "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>", TOOLS,
            "<|end_of_text|>¶{% endif %}",
            by_role(system=ROLE, user=ROLE, assistant=ROLE),
            ask("<|start_of_role|>assistant<|end_of_role|>"),
        ),
        GRANITE, "<|end_of_text|>",
    ),
    "granite-3.3": Family(
        lines(
            "<|start_of_role|>system<|end_of_role|>", POP_SYSTEM,
            "{{ system or 'You are Granite.' }}", TOOLS, "<|end_of_text|>¶",
            "{% for m in messages %}", ROLE, "{% endfor %}",
            ask("<|start_of_role|>assistant<|end_of_role|>"),
        ),
        GRANITE, "<|end_of_text|>",
    ),
    # One token begins the text and ends each turn; the last has no line break behind it.
    "olmo": Family(
        lines(
            "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>¶{{ m.content }}",
            "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}",
            "{% if m.role != 'assistant' or not loop.last %}¶{% endif %}{% endfor %}",
            ask("<|assistant|>¶"),
        ),
        "<|endoftext|>", "<|endoftext|>", bos="<|endoftext|>", eos="<|endoftext|>",
    ),
    # Closed only when another's turn follows; results of tools stand inside the turn.
    "apertus": Family(
        lines(
            "{{ bos_token }}<|system_start|>", POP_SYSTEM, "{{ system }}", TOOLS, "<|system_end|>",
            "{% set ns = namespace(open=false) %}",
            by_role(
                user="{% if ns.open %}<|assistant_end|>{% set ns.open = false %}{% endif %}"
                "<|user_start|>{{ m.content }}<|user_end|>",
                assistant="{% if not ns.open %}<|assistant_start|>{% set ns.open = true %}"
                "{% endif %}{{ m.content }}"
                "{% if m.tool_calls %}<|tools_prefix|>["
                + calls('{"{{ f.name }}": {{ f.arguments | tojson }}}')
                + "]<|tools_suffix|>{% endif %}",
                tool="[{{ m.content }}]",
            ),
            ask("<|assistant_start|>"),
        ),
        "<|system_start|> <|system_end|> <|user_start|> <|user_end|> <|assistant_start|> "
        "<|assistant_end|> <|tools_prefix|> <|tools_suffix|>",
        "<|assistant_end|>", call='<|tools_prefix|>[{"look": {"at": "Oslo"}}]',
        call_close="<|tools_suffix|>",
    ),
    # Earlier turns lose their inline thinking.
    "lfm2": Family(
        lines(
            "{{ bos_token }}", POP_SYSTEM,
            "{% if system or tools %}<|im_start|>system¶{{ system }}",
            TOOLS, "<|im_end|>¶{% endif %}{% set ns = namespace(last=-1) %}",
            by_role(assistant="{% set ns.last = loop.index0 %}"),
            "{% for m in messages %}<|im_start|>{{ m.role }}¶",
            "{% if loop.index0 != ns.last and '</think>' in m.content %}",
            "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}",
            "<|im_end|>¶{% endfor %}", ask("<|im_start|>assistant¶"),
        ),
        IM, "<|im_end|>", bos="<|startoftext|>",
    ),
    # No token ends a turn, and blank lines become line breaks.
    "falcon": Family(
        lines(
            POP_SYSTEM, "{{ system }}",
            by_role(
                ALTERNATES, user="{{ '¶¶User: ' + m.content | replace('¶¶', '¶') | trim }}",
                assistant="{{ '¶¶Assistant: ' + m.content | replace('¶¶', '¶') | trim }}",
            ),
            ask("{{ '¶¶Assistant:' }}"),
        ),
        "", "", " ", lambda text: text.replace("\n\n", "\n").strip(),
        inline="<think>\n{}\n</think>\n", refuses=NO_TOOL_ROLE,
    ),
    "zephyr": Family(
        lines(
            OFFSET, "{% for m in messages %}", ALTERNATES.replace("== 0", "== offset"),
            "{{ '<|' + m.role + '|>¶' + m.content | trim + eos_token }}¶",
            "{% endfor %}", ask("<|assistant|>¶"),
        ),
        "", "</s>", says=str.strip, refuses=NO_TOOL_ROLE,
    ),
    "vicuna": Family(
        lines(
            POP_SYSTEM, "{{ bos_token }}{% if system %}{{ system | trim }}¶¶{% endif %}",
            by_role(
                ALTERNATES, user="{{ 'USER: ' + m.content | trim + '¶' }}",
                assistant="{{ 'ASSISTANT: ' + m.content | trim + eos_token + '¶' }}",
            ),
            ask("ASSISTANT:"),
        ),
        "", "</s>", " ", str.strip, refuses=NO_TOOL_ROLE,
    ),
    "alpaca": Family(
        lines(
            POP_SYSTEM, "{{ bos_token }}{% if system %}{{ system | trim }}¶¶{% endif %}",
            by_role(
                ALTERNATES, user="{{ '### Instruction:¶' + m.content | trim + '¶¶' }}",
                assistant="{{ '### Response:¶' + m.content | trim + eos_token + '¶¶' }}",
            ),
            ask("### Response:¶"),
        ),
        "", "</s>", says=str.strip, refuses=NO_TOOL_ROLE,
    ),
    # No token ends a turn: nothing but the text can be learnt.
    "solar": Family(
        lines(
            "{{ bos_token }}", OFFSET, "{% for m in messages %}",
            ALTERNATES.replace("== 0", "== offset"),
            "{{ '### ' + m.role | capitalize + ':¶' + m.content | trim + '¶¶' }}{% endfor %}",
            ask("### Assistant:¶"),
        ),
        "", "", says=str.strip, refuses=NO_TOOL_ROLE,
    ),
    "openchat": Family(
        lines(
            POP_SYSTEM, "{{ bos_token }}{% if system %}{{ system }}<|end_of_turn|>{% endif %}",
            "{% for m in messages %}", ALTERNATES,
            "GPT4 Correct {{ m.role | capitalize }}: {{ m.content }}<|end_of_turn|>{% endfor %}",
            ask("GPT4 Correct Assistant:"),
        ),
        "<|end_of_turn|>", "<|end_of_turn|>", " ", refuses=NO_TOOL_ROLE,
    ),
    "jamba": Family(
        lines(
            "<|startoftext|>", POP_SYSTEM,
            "{% if system or tools %}<|bom|><|system|> {{ system }}", TOOLS, "<|eom|>{% endif %}",
            "{% for m in messages %}<|bom|><|{{ m.role }}|> {{ m.content }}",
            "{% if m.tool_calls %}<tool_calls>[¶",
            calls('    {"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'),
            "{{ '¶]' }}</tool_calls>{% endif %}<|eom|>{% endfor %}", ask("<|bom|><|assistant|>"),
        ),
        "<|startoftext|> <|bom|> <|eom|> <|system|> <|user|> <|assistant|> <|tool|> <tool_calls> "
        "</tool_calls>",
        "<|eom|>", " ", call=f"<tool_calls>[\n    {OSLO}\n]</tool_calls>", call_lead=" ",
        bos="<|startoftext|>",
    ),
    "kimi-k2": Family(
        lines(
            "{% if tools %}<|im_system|>tool_declare<|im_middle|>", TOOLS, "<|im_end|>{% endif %}",
            by_role(
                system="<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
                user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
                assistant="<|im_assistant|>assistant<|im_middle|>{{ m.content }}"
                + KIMI_CALLS + "<|im_end|>",
                tool="<|im_system|>{{ m.name }}<|im_middle|>## Return of {{ m.tool_call_id }}¶"
                "{{ m.content }}<|im_end|>",
            ),
            ask("<|im_assistant|>assistant<|im_middle|>"),
        ),
        KIMI, "<|im_end|>", call=KIMI_CALL, bos="[BOS]", eos="[EOS]",
    ),
    # Contents are parts.
    "idefics": Family(
        lines(
            "<|begin_of_text|>{% for m in messages %}{{ m.role.capitalize() }}: ", TEXTS,
            "<end_of_utterance>¶{% endfor %}", ask("Assistant:"),
        ),
        "<|begin_of_text|> <end_of_utterance>", "<end_of_utterance>", " ",
        bos="<|begin_of_text|>",
    ),
    "llava": Family(
        lines(
            by_role(
                user="USER: " + TEXTS + " ", system=TEXTS + " ",
                assistant="ASSISTANT: " + TEXTS + " ",
            ),
            ask("ASSISTANT:"),
        ),
        "<image>", "", " ",
    ),
    "llava-next": Family(
        lines(
            by_role(
                system="<<SYS>>¶{{ m.content[0].text }}¶<</SYS>>¶¶",
                user="[INST] " + TEXTS + " [/INST]",
                assistant="{{ ' ' + m.content[0].text + '</s> ' }}",
                tool=refuse("Only user and assistant roles are supported!"),
            ),
        ),
        "<image>", "</s>", " ",
        refuses={"calls": "refuses the conversation: Only user and assistant roles are supported!"},
    ),
}  # fmt: skip


# Thinking in tags.

# What follows the last question still thinks, what stands before it no longer does.
LAST = (
    "{% set ns = namespace(last=-1) %}"
    + by_role(user="{% set ns.last = loop.index0 %}")
)  # fmt: skip
SPLIT = (
    "{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('¶') %}"
    "{% set content = content.split('</think>')[-1].lstrip('¶') %}{% endif %}"
)
SYSTEM = (
    "{% if system or tools %}<|im_start|>system¶{{ system }}" + TOOLS + "<|im_end|>¶{% endif %}"
)
RESULT = "<|im_start|>user¶<tool_response>¶{{ m.content }}¶</tool_response><|im_end|>¶"
JSON_CALLS = calls("{% if content or not loop.first %}¶{% endif %}<tool_call>¶" + JSON_CALL + "¶</tool_call>")  # noqa: E501 # fmt: skip
XML_CALLS = calls(
    "<tool_call>¶<function={{ f.name }}>¶{% for k, v in f.arguments | items %}<parameter={{ k }}>¶"
    "{{ v }}¶</parameter>¶{% endfor %}</function>¶</tool_call>"
)
XML_OSLO = (
    "<tool_call>\n<function=look>\n<parameter=at>\nOslo\n</parameter>\n</function>\n</tool_call>"
)
TAGS = "<think> </think> <tool_call> </tool_call>"
# A prompt closes thinking; a turn that thinks was not written after it.
THINKS_ELSEWHERE = {"thinking": "renders an answer elsewhere than after its generation prompt"}
EMPTY = "<think>\n\n</think>\n\n"

QWEN3 = lines(
    POP_SYSTEM, SYSTEM, LAST,
    by_role(
        SPLIT, user=SAID,
        assistant="<|im_start|>assistant¶"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}"
        "<think>¶{{ thought.strip('¶') }}¶</think>¶¶{{ content.lstrip('¶') }}"
        "{% else %}{{ content }}{% endif %}" + JSON_CALLS + "<|im_end|>¶",
        tool=RESULT,
    ),
    "{% if add_generation_prompt %}<|im_start|>assistant¶",
    "{% if enable_thinking is defined and not enable_thinking %}<think>¶¶</think>¶¶{% endif %}",
    "{% endif %}",
)  # fmt: skip
QWEN35 = lines(
    POP_SYSTEM, SYSTEM, LAST,
    by_role(
        SPLIT.replace("set content = m.content", "set content = m.content | trim"), user=SAID,
        assistant="<|im_start|>assistant¶{% if loop.index0 > ns.last %}"
        "<think>¶{{ thought | trim }}¶</think>¶¶{% endif %}{{ content }}" + XML_CALLS
        + "<|im_end|>¶",
        tool=RESULT,
    ),
    "{% if add_generation_prompt %}<|im_start|>assistant¶",
    "{% if enable_thinking is defined and not enable_thinking %}<think>¶¶</think>¶¶",
    "{% else %}<think>¶{% endif %}{% endif %}",
)  # fmt: skip
THINKING = {
    "qwen3": Family(
        QWEN3, IM, "<|im_end|>", says=lambda text: text.lstrip("\n"), think=VERBATIM, blank=EMPTY,
        call=f"<tool_call>\n{OSLO}\n</tool_call>", added=TAGS,
    ),
    "qwen3.5": Family(
        QWEN35, IM, "<|im_end|>", says=str.strip, think="{}\n</think>\n\n",
        inline="{}\n</think>\n\n", blank="\n</think>\n\n", call=XML_OSLO, added=TAGS,
    ),
    "exaone-4": Family(
        lines(
            POP_SYSTEM, "{% if system or tools %}[|system|]¶{{ system }}", TOOLS,
            "[|endofturn|]¶{% endif %}",
            by_role(
                SPLIT.replace("lstrip('¶')", "strip()"),
                user="[|user|]¶{{ m.content }}[|endofturn|]¶",
                assistant="[|assistant|]¶{% if not skip_think and loop.last and thought %}"
                "<think>¶{{ thought }}¶</think>¶¶{% else %}<think>¶¶</think>¶¶{% endif %}"
                "{{ content }}" + calls(f"<tool_call>{JSON_CALL}</tool_call>") + "[|endofturn|]¶",
                tool='[|tool|]¶<tool_result>{{ m.content }}</tool_result>[|endofturn|]¶',
            ),
            "{% if add_generation_prompt %}[|assistant|]¶<think>¶",
            "{% if not enable_thinking %}¶</think>¶¶{% endif %}{% endif %}",
        ),
        "[|system|] [|user|] [|assistant|] [|tool|] [|endofturn|]", "[|endofturn|]",
        think="", inline="", call=f"<tool_call>{OSLO}</tool_call>", added=TAGS,
        kwargs={"skip_think": True},
    ),
    # The system message names the mode; thinking apart from the content is never rendered.
    "smollm3": Family(
        lines(
            "<|im_start|>system¶Reasoning Mode: /think¶¶", POP_SYSTEM, "{{ system }}<|im_end|>¶",
            by_role(
                user=SAID, tool="<|im_start|>user¶{{ m.content }}<|im_end|>¶",
                assistant="<|im_start|>assistant¶{{ m.content.lstrip('¶') }}<|im_end|>¶",
            ),
            ask("<|im_start|>assistant¶"),
        ),
        IM, "<|im_end|>", says=lambda text: text.lstrip("\n"), added=TAGS,
    ),
    # The prompt opens thinking; a turn without any has an empty block in one piece.
    "nemotron-3": Family(
        lines(
            POP_SYSTEM, SYSTEM, LAST,
            by_role(
                "{% set content = m.content %}{% if m.reasoning_content %}{% set content = "
                "'<think>¶' + m.reasoning_content + '¶</think>¶' + content %}"
                "{% elif '</think>' not in content %}"
                "{% set content = '<think></think>' + content %}{% endif %}"
                "{% if loop.index0 < ns.last %}"
                "{% set content = '<think></think>' + content.split('</think>')[-1] %}{% endif %}",
                user=SAID,
                assistant="<|im_start|>assistant¶{{ content | trim }}{% if m.tool_calls %}¶"
                + XML_CALLS + "¶{% endif %}<|im_end|>¶",
                tool="<|im_start|>user¶<tool_response>¶{{ m.content }}¶</tool_response>¶"
                "<|im_end|>¶",
            ),
            ask("<|im_start|>assistant¶<think>¶"),
        ),
        IM, "<|im_end|>", says=str.rstrip, think="{}\n</think>\n", inline="{}\n</think>\n\n",
        blank="<think></think>", opens="<think>\n", call="\n" + XML_OSLO,
        call_think="{}\n</think>", call_close="\n<|im_end|>", added=TAGS,
    ),
    "nemotron-h": Family(
        lines(
            "<SPECIAL_10>System¶", POP_SYSTEM, "{{ system }}¶", LAST,
            by_role(
                user="<SPECIAL_11>User¶{{ m.content }}¶",
                assistant="<SPECIAL_11>Assistant¶{{ m.content.split('</think>')[-1] | trim "
                "if not loop.last else m.content | trim }}¶<SPECIAL_12>¶",
            ),
            ask("<SPECIAL_11>Assistant¶<think>¶"),
        ),
        "<SPECIAL_10> <SPECIAL_11> <SPECIAL_12>", "\n<SPECIAL_12>", says=str.strip,
        inline="{}\n</think>\n\n",
        opens="<think>\n",
    ),
    "stepfun": Family(
        lines(
            "{{ bos_token }}", POP_SYSTEM, SYSTEM, LAST,
            by_role(
                SPLIT, user=SAID,
                assistant="<|im_start|>assistant¶{% if loop.index0 > ns.last %}"
                "<think>¶{{ thought }}¶</think>¶{% endif %}{{ content }}" + XML_CALLS
                + "<|im_end|>¶",
                tool="<|im_start|>tool_response¶<tool_response>{{ m.content }}</tool_response>"
                "<|im_end|>¶",
            ),
            ask("<|im_start|>assistant¶<think>¶"),
        ),
        IM, "<|im_end|>", think="{}\n</think>\n", inline="{}\n</think>\n",
        blank="\n</think>\n", call=XML_OSLO, added=TAGS,
    ),
    # The prompt opens thinking that a turn without any does not close.
    "minimax": Family(
        lines(
            "]~!b[]~b]system¶", POP_SYSTEM, "{{ system or 'You are helpful.' }}", TOOLS, "[e~[¶",
            LAST,
            by_role(
                SPLIT, user="]~b]user¶{{ m.content }}[e~[¶",
                assistant="]~b]ai¶{% if thought and loop.index0 > ns.last %}"
                "<think>¶{{ thought }}¶</think>¶¶{% endif %}{{ content }}{% if m.tool_calls %}"
                "<minimax:tool_call>¶"
                + calls(
                    '<invoke name="{{ f.name }}">¶{% for k, v in f.arguments | items %}'
                    '<parameter name="{{ k }}">{{ v }}</parameter>¶{% endfor %}</invoke>¶'
                ) + "</minimax:tool_call>{% endif %}[e~[¶",
                tool="]~b]tool¶<response>{{ m.content }}</response>[e~[¶",
            ),
            ask("]~b]ai¶<think>¶"),
        ),
        "]~!b[ ]~b] [e~[", "[e~[", think="{}\n</think>\n\n", inline="{}\n</think>\n\n",
        opens="<think>\n", added="<think> </think> <minimax:tool_call> </minimax:tool_call>",
        call='<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">Oslo</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "kimi-k2-thinking": Family(
        lines(
            "{% if tools %}<|im_system|>tool_declare<|im_middle|>", TOOLS, "<|im_end|>{% endif %}",
            LAST,
            by_role(
                system="<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
                user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
                assistant="<|im_assistant|>assistant<|im_middle|><think>"
                "{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>{{ m.content }}"
                + KIMI_CALLS + "<|im_end|>",
                tool="<|im_system|>{{ m.name }}<|im_middle|>{{ m.content }}<|im_end|>",
            ),
            ask("<|im_assistant|>assistant<|im_middle|>"),
        ),
        KIMI, "<|im_end|>", think="<think>{}</think>", inline="<think></think>" + VERBATIM,
        blank="<think></think>", call=KIMI_CALL, added="<think> </think>", bos="[BOS]", eos="[EOS]",
    ),
}  # fmt: skip
THINKING["qwen3-off"] = Family(
    QWEN3, IM, "<|im_end|>", says=lambda text: text.lstrip("\n"), kwargs={"enable_thinking": False},
    refuses=THINKS_ELSEWHERE,
    call=f"<tool_call>\n{OSLO}\n</tool_call>", added=TAGS,
)  # fmt: skip
THINKING["qwen3.5-off"] = Family(
    QWEN35, IM, "<|im_end|>", says=str.strip, call=XML_OSLO, added=TAGS,
    kwargs={"enable_thinking": False}, refuses=THINKS_ELSEWHERE,
)  # fmt: skip
THINKING["exaone-4-thinking"] = Family(
    THINKING["exaone-4"].template, THINKING["exaone-4"].special, "[|endofturn|]",
    think="{}\n</think>\n\n", inline="{}\n</think>\n\n", blank="\n</think>\n\n",
    call=f"<tool_call>{OSLO}</tool_call>", added=TAGS, kwargs={"enable_thinking": True},
)  # fmt: skip


# Thinking in channels, in parts, or not at all when read again.

DEEPSEEK = (
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>"
)
DEEPSEEK_BOS, DEEPSEEK_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜>"
    + calls(
        "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}¶```json¶"
        "{{ '' + f.arguments }}¶```<｜tool▁call▁end｜>"
    )
    + "<｜tool▁calls▁end｜>{{ eos_token }}"
)
DEEPSEEK_OSLO = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"at": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
ANSWERED = "{{ m.content.split('</think>')[-1] + eos_token }}"


DEEPSEEK31_CALLS = (
    "<｜tool▁calls▁begin｜>"
    + calls(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
        "<｜tool▁call▁end｜>"
    )
    + "<｜tool▁calls▁end｜>{{ eos_token }}"
)
DEEPSEEK31_OSLO = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "Oslo"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def deepseek(
    prompt: str,
    header: str = "<｜Assistant｜>",
    calling: str = DEEPSEEK_CALLS,
    *,
    calls_end_twice: bool = False,
) -> str:
    """Templates that drop thinking; what follows results of tools has no header."""
    plain = (
        "{% if ns.tool %}{{ m.content + eos_token }}{% set ns.tool = false %}{% else %}"
        f"{header}{ANSWERED}{{% endif %}}"
    )
    otherwise = "{% endif %}" + plain if calls_end_twice else "{% else %}" + plain + "{% endif %}"
    return lines(
        POP_SYSTEM, "{{ bos_token }}{{ system }}", TOOLS, "{% set ns = namespace(tool=false) %}",
        by_role(
            user="{% set ns.tool = false %}<｜User｜>{{ m.content }}",
            assistant="{% if m.tool_calls %}" + header + calling + otherwise,
            tool="{% set ns.tool = true %}<｜tool▁outputs▁begin｜>{{ m.content }}"
            "<｜tool▁outputs▁end｜>",
        ),
        "{% if not ns.tool %}", ask(prompt), "{% endif %}",
    )  # fmt: skip


GLM = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>"
GLM_CALL = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
HARMONY = "<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>"
GEMMA4 = "<|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> "

CHANNELS = {
    "deepseek-v3": Family(
        deepseek("<｜Assistant｜>"), DEEPSEEK, DEEPSEEK_EOS, inline="\n\n", call=DEEPSEEK_OSLO,
        bos=DEEPSEEK_BOS, eos=DEEPSEEK_EOS,
    ),
    "deepseek-v3.1": Family(
        deepseek("<｜Assistant｜></think>", "<｜Assistant｜></think>", DEEPSEEK31_CALLS),
        DEEPSEEK, DEEPSEEK_EOS, inline="\n\n", call=DEEPSEEK31_OSLO, bos=DEEPSEEK_BOS,
        eos=DEEPSEEK_EOS, added="<think> </think>",
    ),
    "deepseek-v3.1-thinking": Family(
        deepseek("<｜Assistant｜><think>", "<｜Assistant｜></think>", DEEPSEEK31_CALLS),
        DEEPSEEK, DEEPSEEK_EOS, inline="\n\n", opens="<think>", blank="</think>",
        call=DEEPSEEK31_OSLO, bos=DEEPSEEK_BOS, eos=DEEPSEEK_EOS, added="<think> </think>",
    ),
    # Thinking is opened by the prompt and dropped from every turn; calls are closed twice.
    "deepseek-r1": Family(
        deepseek("<｜Assistant｜><think>¶", calls_end_twice=True), DEEPSEEK, DEEPSEEK_EOS,
        inline="\n\n", opens="<think>\n", call=DEEPSEEK_OSLO, bos=DEEPSEEK_BOS, eos=DEEPSEEK_EOS,
        added="<think> </think>",
    ),
    # As Qwen2.5 and Llama models distilled from R1: the tags are text.
    "deepseek-r1-distill": Family(
        deepseek("<｜Assistant｜><think>¶", calls_end_twice=True), DEEPSEEK, DEEPSEEK_EOS,
        inline="\n\n", opens="<think>\n", call=DEEPSEEK_OSLO, bos=DEEPSEEK_BOS, eos=DEEPSEEK_EOS,
    ),
    # Nothing closes a turn but the token that opens the next.
    "glm-4": Family(
        lines(
            "[gMASK]<sop>", "{% for m in messages %}<|{{ m.role }}|>¶{{ m.content }}{% endfor %}",
            ask("<|assistant|>"),
        ),
        GLM, "<|user|>", "\n",
    ),
    "glm-4.6": Family(
        lines(
            "[gMASK]<sop>{% if tools %}<|system|>¶", TOOLS, "{% endif %}", LAST,
            by_role(
                SPLIT, system="<|system|>¶{{ m.content }}", user="<|user|>¶{{ m.content }}"
                "{{ '/nothink' if enable_thinking is false else '' }}",
                assistant="<|assistant|>{% if loop.index0 > ns.last and thought %}"
                "{{ '¶<think>' + thought.strip() + '</think>' }}{% else %}{{ '¶<think></think>' }}"
                "{% endif %}{% if content.strip() %}{{ '¶' + content.strip() }}{% endif %}"
                + calls(
                    "{{ '¶<tool_call>' + f.name + '¶' }}{% for k, v in f.arguments | items %}"
                    "<arg_key>{{ k }}</arg_key>¶<arg_value>{{ v }}</arg_value>¶{% endfor %}"
                    "</tool_call>"
                ),
                tool="<|observation|>¶<tool_response>¶{{ m.content }}¶</tool_response>",
            ),
            ask("<|assistant|>{{ '¶<think></think>' if enable_thinking is false else '' }}"),
        ),
        GLM, "<|user|>", says=str.strip, think="\n<think>{}</think>\n",
        inline="\n<think>{}</think>\n", blank="\n<think></think>\n", call=GLM_CALL,
        call_close="<|observation|>", added=TAGS,
    ),
    "glm-5": Family(
        lines(
            "[gMASK]<sop><|system|>Reasoning Effort: Max{% if tools %}<|system|>", TOOLS,
            "{% endif %}", LAST,
            by_role(
                SPLIT.replace(".strip('¶')", "").replace(".lstrip('¶')", ""),
                system="<|system|>{{ m.content }}", user="<|user|>{{ m.content }}",
                assistant="<|assistant|><think>{% if loop.index0 > ns.last %}{{ thought }}"
                "{% endif %}</think>{{ content.strip() }}"
                + calls(
                    "<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}<arg_key>{{ k }}"
                    "</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
                ),
                tool="<|observation|><tool_response>{{ m.content }}</tool_response>",
            ),
            ask("<|assistant|><think>"),
        ),
        GLM, "<|user|>", says=str.strip, think="{}</think>", inline="\n{}\n</think>",
        blank="</think>", call_close="<|observation|>", added=TAGS,
        call="<tool_call>look<arg_key>at</arg_key><arg_value>Oslo</arg_value></tool_call>",
    ),
    # Thinking goes before calls only; the plan is there even when it is empty.
    "command-r7b": Family(
        lines(
            "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", TOOLS,
            "<|END_OF_TURN_TOKEN|>"
            "{% for m in messages %}<|START_OF_TURN_TOKEN|>"
            "{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}"
            "{% elif m.role == 'system' %}<|SYSTEM_TOKEN|>{{ m.content }}"
            "{% elif m.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}"
            "<|END_TOOL_RESULT|>{% else %}<|CHATBOT_TOKEN|>{% if m.tool_calls %}"
            "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[¶"
            + calls(
                '{"tool_call_id": "0", "tool_name": "{{ f.name }}", '
                '"parameters": {{ f.arguments | tojson }}}'
            )
            + "¶]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
            "{% endif %}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
            "{% if not enable_thinking %}<|START_THINKING|><|END_THINKING|>{% endif %}",
        ),
        COHERE + " <|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> "
        "<|START_RESPONSE|> <|END_RESPONSE|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>",
        call_think="<|START_THINKING|>{}<|END_THINKING|>",
        call='<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "look", "parameters": '
        '{"at": "Oslo"}}\n]', call_close="<|END_ACTION|><|END_OF_TURN_TOKEN|>",
    ),
    # Thinking before calls only; the prompt leads past it into the answer.
    "gemma-4": Family(
        lines(
            "{{ bos_token }}", POP_SYSTEM, "{% if system or tools %}<|turn>system¶{{ system }}",
            "{% if tools %}<|tool>{{ tools | tojson }}<tool|>{% endif %}<turn|>¶{% endif %}", LAST,
            "{% set ns.tool = false %}",
            by_role(
                user="{% set ns.tool = false %}<|turn>user¶{{ m.content | trim }}<turn|>¶",
                assistant="{% if not ns.tool %}<|turn>model¶{% endif %}"
                "{% if m.reasoning_content and m.tool_calls and loop.index0 > ns.last %}"
                "<|channel>thought¶{{ m.reasoning_content }}¶<channel|>{% endif %}"
                + calls(
                    "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | items %}"
                    '{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}{{ "}" }}<tool_call|>'
                )
                + "{% if m.tool_calls %}{% set ns.tool = true %}<|tool_response>"
                "{% else %}{{ m.content | trim }}<turn|>¶{% endif %}",
                tool='response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>',
            ),
            "{% if not ns.tool %}",
            ask(
                "<|turn>model¶{% if not enable_thinking %}<|channel>thought¶<channel|>{% endif %}"
            ),
            "{% endif %}",
        ),
        GEMMA4 + '<|tool_response> <tool_response|> <|"|>', "<turn|>", says=str.strip,
        call_think="<|channel>thought\n{}\n<channel|>",
        call='<|tool_call>call:look{at:<|"|>Oslo<|"|>}<tool_call|>', call_close="<|tool_response>",
        bos="<bos>",
    ),
    # Thinking is a part of the content.
    "ministral": Family(
        lines(
            "{{ bos_token }}[SYSTEM_PROMPT]", POP_SYSTEM, "{{ system or 'Think first.' }}",
            "[/SYSTEM_PROMPT]{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}",
            "[/AVAILABLE_TOOLS]{% endif %}",
            by_role(
                user="[INST]{{ m.content }}[/INST]",
                assistant="{% if m.content is string %}{{ m.content }}{% else %}"
                "{% for part in m.content %}{% if part.type == 'thinking' %}[THINK]"
                "{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}{% endfor %}"
                "{% endif %}" + calls("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")
                + "{{ eos_token }}",
                tool="[TOOL_RESULTS]{{ m.content | string }}[/TOOL_RESULTS]",
            ),
        ),
        INST + " [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [ARGS] [THINK] [/THINK]", "</s>",
        think="[THINK]{}[/THINK]", call='[TOOL_CALLS]look[ARGS]{"at": "Oslo"}',
    ),
    # Channels; the last turn is closed otherwise than the rest, and calls again otherwise.
    "gpt-oss": Family(
        lines(
            "<|start|>system<|message|>Reasoning: medium<|end|>", POP_SYSTEM,
            "{% if system or tools %}<|start|>developer<|message|>{{ system }}", TOOLS,
            "<|end|>{% endif %}{% set ns = namespace(finals=[]) %}",
            by_role(
                assistant="{% if not m.tool_calls %}"
                "{% set ns.finals = ns.finals + [loop.index0] %}{% endif %}"
            ),
            by_role(
                user="<|start|>user<|message|>{{ m.content }}<|end|>",
                assistant="{% if '<|channel|>' in m.content %}" + refuse("Pass thinking apart!")
                + "{% endif %}{% set final = ns.finals and ns.finals[-1] > loop.index0 %}"
                "{% if m.thinking and ((m.tool_calls and not final) "
                "or (loop.last and not add_generation_prompt)) %}"
                "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
                "<|start|>assistant{% if m.tool_calls %}"
                + calls(
                    " to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
                    "{{ f.arguments | tojson }}<|call|>"
                )
                + "{% else %}<|channel|>final<|message|>{{ m.content }}"
                "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>"
                "{% endif %}{% endif %}",
                tool="<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
                "{{ m.content | tojson }}<|end|>",
            ),
            ask("<|start|>assistant"),
        ),
        HARMONY, "<|return|>", "<|channel|>final<|message|>",
        think="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        call=' to=functions.look<|channel|>commentary json<|message|>{"at": "Oslo"}',
        call_close="<|call|>",
    ),
}  # fmt: skip
for name, blank in (
    ("gemma-4", ""),
    ("command-r7b", "<|START_THINKING|><|END_THINKING|>"),
):
    # As they are, their prompts close thinking, and calls behind thinking were not written there.
    CHANNELS[f"{name}-thinking"] = replace(
        CHANNELS[name], kwargs={"enable_thinking": True}, call_blank=blank
    )
    words = THINKS_ELSEWHERE["thinking"]
    CHANNELS[name] = replace(CHANNELS[name], refuses={"calls behind thinking": words})
# The prompt holds the empty block, the line break behind it is the model's.
CHANNELS["glm-4.6-off"] = replace(
    CHANNELS["glm-4.6"], kwargs={"enable_thinking": False}, lead="\n", call_lead="\n", blank="",
    refuses=THINKS_ELSEWHERE,
)  # fmt: skip


FAMILIES = PLAIN | MORE | THINKING | CHANNELS
