"""Chat templates with the layouts of families of models, in few lines of our own.

`[[` and `]]` are around what the assistant writes: `{% generation %}` in the variant whose masks are the oracle.
"""

CHATML = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}[[{{ m.content }}<|im_end|>]]{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SMOLLM_HEAD = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}"""
SMOLLM = SMOLLM_HEAD + CHATML

LLAMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' + system }}
{%- for tool in tools or [] %}{{ '\\n' + tool | tojson(indent=4) }}{% endfor %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {#- -#}[[{{ '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}<|eot_id|>]]
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}[[{{ m.content | trim }}<|eot_id|>]]
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

QWEN_HEAD = """
{%- set ns = namespace(system='Be helpful.', last=0) %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{{- '<|im_start|>system\\n' + ns.system }}
{%- if tools %}
    {{- '\\n\\n<tools>' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}"""
QWEN_OTHERS = """
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
QWEN_CALLS = """
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if m.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}"""
QWEN_FOOT = """
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN25 = (
    QWEN_HEAD
    + "{%- for m in messages %}"
    + QWEN_OTHERS
    + """
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}[[{{ m.content }}"""
    + QWEN_CALLS
    + """{{- '<|im_end|>' }}]]{{ '\\n' }}
    {%- endif %}
{%- endfor %}"""
    + QWEN_FOOT
)

QWEN3 = (
    QWEN_HEAD
    + """
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}"""
    + QWEN_OTHERS
    + """
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content or '' %}{% set reasoning = m.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}[[
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}"""
    + QWEN_CALLS
    + """{{- '<|im_end|>' }}]]{{ '\\n' }}
    {%- endif %}
{%- endfor %}"""
    + QWEN_FOOT
)

GEMMA = """
{{- bos_token }}
{%- set ns = namespace(first='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.first = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles have to alternate') }}{% endif %}
    {%- if m.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' }}[[{{ m.content | trim }}<end_of_turn>]]{{ '\\n' }}
    {%- else %}
        {{- '<start_of_turn>user\\n' + (ns.first if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """
{%- set ns = namespace(system='', last=0) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        [[{{- '[TOOL_CALLS] ' + m.tool_calls | map(attribute='function') | list | tojson + eos_token }}]]
    {%- elif m.role == 'assistant' %}
        [[{{- ' ' + m.content + eos_token }}]]
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + m.content | tojson + '[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('only user, assistant and tool roles') }}{% endif %}
{%- endfor %}"""

MISTRAL3 = """
{{- bos_token }}
{%- set messages, system = (messages[1:], messages[0].content) if messages[0].role == 'system' else (messages, '') %}
{%- for m in messages %}
    {%- if m.role == 'user' and loop.last and system %}{{ '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
    {%- elif m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- else %}[[{{ ' ' + m.content + eos_token }}]]
    {%- endif %}
{%- endfor %}"""

OLMO = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}[[{{ m.content + eos_token }}]]{% if not loop.last %}{{ '\\n' }}{% endif %}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content + '\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""

DEEPSEEK = """
{{- bos_token }}
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜Assistant｜>' }}[[{{ m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}]]
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

PHI = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}[[{{ m.content + '<|end|>' }}]]{{ '\\n' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

ZEPHYR = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}[[{{ m.content + eos_token }}]]{{ '\\n' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""

GPT_OSS = """
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start|>assistant' }}[[
        {%- if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}
        {{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}<|call|>]]
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant' }}[[
        {%- if loop.last and m.thinking %}
            {{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}
        {%- endif %}
        {{- '<|channel|>final<|message|>' + m.content }}
        {%- if loop.last %}<|return|>{% else %}<|end|>{% endif %}]]
    {%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

GEMMA4 = """
{{- bos_token }}{% set ns = namespace(open=false, stopped=false) %}
{%- for m in messages %}{% if m.role not in ('tool', 'assistant') %}
    {{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}
{%- elif m.role == 'assistant' %}
    {%- if not ns.open %}{{ '<|turn>model\\n' }}{% endif %}
    {%- set ns.open = false %}{% set ns.stopped = false %}
    {%- if m.tool_calls %}[[
        {%- for call in m.tool_calls %}{{ '<|tool_call>' + call.function.name + '{}<tool_call|>' }}{% endfor %}]]
        {%- for k in range(loop.index0 + 1, messages | length) %}
            {%- set answer = messages[k] %}
            {%- if answer.role != 'tool' %}{% set ns.stopped = true %}
            {%- elif not ns.stopped %}
                {{- '<|tool_response>' + answer.content + '<tool_response|>' }}{% set ns.open = true %}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- set text %}{{ m.content or '' }}{% endset %}
    {%- if text | trim | length or not ns.open %}[[{{ text }}<turn|>]]{{ '\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""

QWEN36 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception('no question') }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought, content = m.reasoning_content or '', m.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\\n' }}[[{{ thought + '\\n</think>\\n\\n' }}]]{% endif %}
        {#- -#}[[{{ content }}<|im_end|>]]{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

COMMAND = """
{{- bos_token }}
{%- for i in range(messages | length) %}{% set m = messages[i] %}
    {%- if m.role == 'assistant' %}
        {{- '<|start|><|assistant|>' }}[[{{ m.content }}<|return|><|end|>]]
    {%- else %}
        {{- '<|start|>' + m.role + ': ' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|><|assistant|>' }}{% endif %}"""

GLM = """
{{- '[gMASK]' }}
{%- for m in messages %}
    {%- set answers = loop.index0 > 0 and messages[loop.index0 - 1].role == 'assistant' %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' }}[[{{ '\\n' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}]]
    {%- elif m.role == 'tool' %}
        {%- if answers %}[[<|observation|>]]{% else %}<|observation|>{% endif %}{{ '\\n' + m.content }}
    {%- else %}
        {%- if answers %}[[{{ '<|' + m.role + '|>' }}]]{% else %}{{ '<|' + m.role + '|>' }}{% endif %}
        {{- '\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

JAMBA = """
{{- bos_token }}
{%- for m in messages %}
    {%- if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}[[<|end|>]]
    {%- elif not loop.first %}<|end|>
    {%- endif %}
    {{- '<|start|><|' + m.role + '|> ' }}
    {%- if m.role == 'assistant' %}[[{{ m.content + '\\n' }}]]{% else %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if messages[-1].role == 'assistant' %}[[<|end|>]]{% else %}<|end|>{% endif %}
{%- if add_generation_prompt %}{{ '<|start|><|assistant|> ' }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "smollm": SMOLLM,
    "llama 3.1": LLAMA,
    "qwen 2.5": QWEN25,
    "qwen 3": QWEN3,
    "gemma 3": GEMMA,
    "mistral": MISTRAL,
    "mistral 3": MISTRAL3,
    "olmo 2": OLMO,
    "deepseek": DEEPSEEK,
    "phi": PHI,
    "zephyr": ZEPHYR,
    "gpt-oss": GPT_OSS,
    "gemma 4": GEMMA4,
    "qwen 3.6": QWEN36,
    "command a": COMMAND,
    "glm 4.5": GLM,
    "jamba": JAMBA,
}
WITH_TOOLS = ("llama 3.1", "qwen 2.5", "qwen 3", "mistral", "gpt-oss", "gemma 4", "glm 4.5")
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<|endoftext|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *("<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|turn>", "<turn|>"),
    *("<|tool_response>", "<tool_response|>", "<|assistant|>", "<|user|>", "<|system|>", "<|observation|>"),
]
# Tokens that are not special.
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>"]


def turns(*contents: str, **more) -> list[dict]:
    """Messages of user and assistant in turn; `more` is added to each of the assistant's."""
    roles = [{"role": "user"}, {"role": "assistant", **more}]
    return [{**roles[number % 2], "content": content} for number, content in enumerate(contents)]


SYSTEM = {"role": "system", "content": "  Speak of the café.  "}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"z": "é", "a": [1, 2]}}}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}
RESULT = {"role": "tool", "name": "add", "content": '{"sum": "3"}'}
THOUGHT = {**CALL, "reasoning_content": "the thought"}
TALKS = {
    "one turn": turns("the", "the the"),
    "a system's text": [SYSTEM, *turns(" a b ", "  the\n", "c", "\nthe  ")],
    "several turns": turns("a", "the", "b", "the", "a", "the"),
    "empty content": [SYSTEM, *turns("", "", "a", "")],
    "emoji": turns("👩‍👩‍👧 a", "the 🙂 the", "b", "🏳️‍🌈é a"),  # transformers leaves out pieces of a last character
    "what looks like JSON or markup": turns('{"a": "\\n"}', '<b>"the"</b> & {{ x }}\n```', "a", "{% x %}"),
    "one word of a format": turns("a", '{"a":1}', "b", "/usr/bin", "a", "|a|b|", "b", "[x](y)", "a", "{x}."),
    "words that come again": [SYSTEM, *turns("My secret is 42. What is it?", "42.")],
    "the assistant first": turns("", "the 42", "a", "the")[1:],
    "two in turn": [*turns("a", "the", "b", "c"), *turns("", "d")[1:]],
    "reasoning": [SYSTEM, *turns("a", "the", "b", "the", reasoning_content="x\ny")],
    "reasoning in the content": turns("a", "<think>\nx\n</think>\n\nthe", "b", "<think>\ny\n</think>\n\nc"),
}
TOOL_TALKS = {
    "a call": [SYSTEM, *turns("a"), CALL, RESULT, *turns("a", "the")[1:]],
    "calls in earlier turns": [*turns("a"), CALL, RESULT, *turns("b", "the")[1:], *turns("a", "the")],
    "thoughts of calls": [*turns("a"), THOUGHT, RESULT, THOUGHT, RESULT, *turns("b", "the")[1:], *turns("a", "the")],
}


INLINE = "<think>\nx\n</think>\n\nthe"
TOOL_TALKS["thoughts in the content beside calls"] = [
    *(*turns("a"), {**CALL, "content": INLINE}, RESULT, {"role": "assistant", "content": INLINE}),
    *turns("b", "the"),
]


def with_generation(template: str) -> str:
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


def without_generation(template: str) -> str:
    return template.replace("[[", "").replace("]]", "")
