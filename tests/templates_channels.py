"""Families of chat templates that think in channels, in parts, or not at all when read again."""

# ruff: noqa: RUF001  DeepSeek's tokens have bars of their own

from dataclasses import replace

from templates import INST, POP_SYSTEM, TOOLS, Family, ask, by_role, calls, lines, refuse
from templates_more import COHERE
from templates_thinking import LAST, SPLIT, TAGS, THINKS_ELSEWHERE

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
