"""Further families of chat templates without thinking: words for roles, channels, parts."""

from templates import (
    ALTERNATES,
    IM,
    NO_TOOL_ROLE,
    OSLO,
    PHI,
    POP_SYSTEM,
    TOOLS,
    Family,
    ask,
    by_role,
    calls,
    lines,
    refuse,
)

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
