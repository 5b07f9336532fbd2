"""Families of chat templates that write thinking in tags."""

from templates import (
    IM,
    JSON_CALL,
    OSLO,
    POP_SYSTEM,
    SAID,
    TOOLS,
    VERBATIM,
    Family,
    ask,
    by_role,
    calls,
    lines,
)
from templates_more import KIMI, KIMI_CALL, KIMI_CALLS

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
