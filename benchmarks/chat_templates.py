"""Compares the loss masks of published chat templates with what their authors, or a table of ours, say.

    python benchmarks/chat_templates.py FOLDER...

reads every `*.jinja` below these folders, such as those of the packages trl, axolotl and llama-cpp-python (its source
has `vendor/llama.cpp/models/templates`). Each renders 20 conversations. The text has to be that of transformers. The
mask has to be that of the twin `NAME_training.jinja` with `{% generation %}`, if there is one with the same text, and
otherwise that of `FAMILIES`: texts before and behind what the assistant writes, which know nothing of templates. Where
the generation prompt has more than the header, such as `<think>`, the mask may begin before or behind it.
"""

import argparse
import re
from collections import Counter
from datetime import date
from pathlib import Path
from typing import NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from gregale.data.chat.conversation import Conversation
from gregale.data.chat.renderer import NotRendered, Renderer
from gregale.data.chat.template import ChatTemplate
from gregale.data.sources import ChatSource
from gregale.errors import UserError

BEGIN = "<s>"
ENDS = ("<｜end▁of▁sentence｜>", "</s>")  # what ends generation: the first one that the template has, or the last
SPECIAL = re.compile(
    r"<\|[^|<>\"\s]+\|>|<｜[^｜<>\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]{3,}\]|\[\|\w+\|\]|<(?:start|end)_of_turn>"
    r"|<SPECIAL_\d+>|\]~b\]|\]~!b\[|\[e~\[|<seed:\w+>|<end_of_utterance>|<sep>|<(?:beginning|end)_of_sentence>"
)


class Family(NamedTuple):
    """How a family writes what the assistant says: regular expressions of what is before it, and of its last tokens."""

    header: str
    end: str
    within: str = "(?!)"  # written by others inside of a turn


FAMILIES = {  # by a text that only templates of the family have; the first one counts
    r"<\|turn>": Family(
        r"<\|turn>model\n|(?<=<turn\|>\n)(?=[^<])",
        r"<turn\|>|<\|tool_response>(?!response:)",
        r"<\|tool_response>response:.*?<tool_response\|>",
    ),
    r"<｜hy_Assistant": Family("<｜hy_Assistant:opensource｜>", "<｜hy_eos:opensource｜>"),
    r"<\|Bot\|>": Family(r"<｜start▁of▁sentence｜><\|Bot\|>", "<｜end▁of▁sentence｜>"),
    r"<SPECIAL_11>": Family("<SPECIAL_11>Assistant\n", "<SPECIAL_12>"),
    r"<\|im_sep\|>": Family(r"<\|im_start\|>assistant<\|im_sep\|>", r"<\|im_end\|>"),
    r"<\|im_middle\|>": Family(r"<\|im_assistant\|>(?:assistant)?<\|im_middle\|>", r"<\|im_end\|>"),
    r"<end_of_utterance>": Family("Assistant:", "<end_of_utterance>"),
    r"<\|im_start\|>": Family(r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    r"<\|start_header_id\|>": Family(
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r"<\|eot_id\|>|<\|eom_id\|>"
    ),
    r"<\|header_start\|>": Family(r"<\|header_start\|>assistant<\|header_end\|>\n\n", r"<\|eot\|>|<\|eom\|>"),
    r"<start_of_turn>": Family("<start_of_turn>model\n", "<end_of_turn>"),
    r"<\|start_of_role\|>": Family(r"<\|start_of_role\|>assistant<\|end_of_role\|>", r"<\|end_of_text\|>"),
    r"\[INST\]": Family(
        r"(?:\[/INST\]|\[/TOOL_RESULTS\]|\[/SYSTEM_PROMPT\]|(?<=</s>)(?=[^<]))"
        r"(?! ?\[(?:INST|TOOL_RESULTS|AVAILABLE_TOOLS))",
        "</s>",
    ),
    r"<｜Assistant｜>": Family(
        r"<｜Assistant｜>|<｜tool▁outputs▁end｜>|(?<=<｜tool▁output▁end｜>)(?!<｜tool▁output)(?!\n<｜tool▁output)"
        r"|(?<=</result>\n</function_results>\n\n)"
        r"|(?:(?<=<｜end▁of▁sentence｜>)|(?<=\A<s>)|(?<=Systemword rules.))(?=replyword)",
        "<｜end▁of▁sentence｜>|</s>",
    ),
    r"CHATBOT_TOKEN": Family(
        r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>(?!\Z|<\|START_THINKING\|><\|END_THINKING\|>\Z)",
        r"<\|END_OF_TURN_TOKEN\|>|(?=<\|START_OF_TURN_TOKEN\|>)",
    ),
    r"\[gMASK\]": Family(r"<\|assistant\|>", r"<\|user\|>|<\|observation\|>|<\|system\|>|(?=<\|assistant\|>)|\Z"),
    r"\[\|assistant\|\]": Family(r"\[\|assistant\|\]\n?", r"\[\|endofturn\|\]"),
    r"<\|channel\|>": Family(
        r"<\|start\|>assistant", r"<\|return\|>|<\|call\|>|<\|end\|>(?!<\|start\|>assistant)|(?<=says so\.)<\|end\|>"
    ),
    r"<\|begin\|>": Family(r"<\|begin\|>assistant", r"<\|end\|>(?!<\|begin\|>assistant(?!<\|content))|<\|calls\|>"),
    r"<\|eot\|>": Family(r"<\|start\|>assistant", r"<\|eot\|>"),
    r"beginning_of_sentence": Family("<beginning_of_sentence>ai name=assistant\n", "<end_of_sentence>"),
    r"\]~b\]": Family(r"\]~b\]ai\n", r"\[e~\["),
    r"<seed:bos>": Family("<seed:bos>assistant\n", "<seed:eos>"),
    r"<\|assistant_start\|>": Family(
        r"<\|assistant_start\|>|(?<=toolword\d\])", r"<\|assistant_end\|>|<\|tools_suffix\|>(?=\[)|\Z"
    ),
    r"<\|begin_assistant\|>": Family(r"<\|begin_assistant\|>\n", r"<\|end\|>|\Z"),
    r"<role>ASSISTANT": Family("<role>ASSISTANT</role>", r"<\|role_end\|>"),
    r"<\|bom\|>": Family(r"<\|bom\|><\|assistant\|>", r"<\|eom\|>"),
    r"<\|model\|>": Family(r"<\|model\|>", r"<\|user\|>|</s>|(?=<\|model\|>)"),
    r"<\|tool_result\|>": Family(r"<\|assistant\|>\n", r"<\|end\|>\n</s>"),
    r"<\|assistant\|>": Family(
        r"<\|assistant\|>\n?(?!\n?<\|user)|(?<=<\|end\|>\n)(?=[^<])|(?<=\A<s>)(?=[^<])", r"<\|end\|>"
    ),
    r"### Response": Family("### Response:\n", "</s>"),
    r"message_sep": Family(r"assistant<\|role_sep\|>\n", r"<\|message_sep\|>(?!\s*function call)"),
    r"<\|end_of_msg\|>": Family(r"<\|open\|>message role=\"assistant\"<\|sep\|>", r"<\|end_of_msg\|>"),
    r"'Assistant: ' \+": Family("Assistant:", r"\n\n"),
    r"<sep>": Family("assistant:", "<sep>"),
}
BETWEEN = (  # what a generation prompt may have beyond the header
    r"(?:\s|</?think(?::\w+)?>|</?mm:think>|</?seed:think>|>>>|<\|channel>thought|<channel\|>|\[/?THINK\]"
    r"|<\|(?:START|END)_(?:RESPONSE|TEXT|THINKING|ACTION)\|>|<\|open\|>think<\|sep\|>|<｜/?think｜>)*"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "a number"}},
                "required": ["x"],
            },
        },
    }
]


def say(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


def called(*numbers: int, content: str = "", **more) -> dict:
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "add", "arguments": {"x": number}}}
        for number in numbers
    ]
    return say("assistant", content, tool_calls=calls, **more)


def result(number: int) -> dict:
    return say("tool", f"toolword{number}", name="add", tool_call_id=f"call{number:05}")


def talk(*contents: str, **more) -> list[dict]:
    return [say("assistant", each, **more) if n % 2 else say("user", each) for n, each in enumerate(contents)]


SYSTEM = say("system", "Systemword rules.")
QUESTION, ANSWER = "userword1 asks", "replyword1 says so."
INLINE = "<think>\nthoughtword2\n</think>\n\nreplyword2"
CONVERSATIONS = {
    "one turn": talk(QUESTION, ANSWER),
    "system": [SYSTEM, *talk("My secret is 42. What is it?", "42.")],
    "several turns": talk(QUESTION, ANSWER, "userword2", "replyword2", "userword3", "replyword3"),
    "system, several turns": [SYSTEM, *talk("the same", "the same", "the same", "the same")],
    "assistant first": talk("-", ANSWER, "userword2", "replyword2")[1:],
    "system, assistant first": [SYSTEM, *talk("-", ANSWER, "userword2", "replyword2")[1:]],
    "two users": [*talk(QUESTION), *talk("userword2", ANSWER)],
    "two assistants": [*talk(QUESTION, ANSWER), say("assistant", "replyword2")],
    "thoughts": [SYSTEM, *talk(QUESTION, ANSWER, reasoning_content="thoughtword1\nmore")],
    "thoughts in several turns": talk(QUESTION, ANSWER, "userword2", "replyword2", reasoning_content="thoughtword1"),
    "thoughts in the content": talk(QUESTION, INLINE.replace("2", "1"), "userword2", INLINE),
    "empty content": talk(QUESTION, "", "userword2", "replyword2"),
    "special tokens typed": talk(
        "a <|im_end|>\n<|im_start|>assistant\nuserword1 </s> [/INST]", "replyword1 <|im_end|> <|eot_id|> x"
    ),
    "spaces": [
        say("system", " \n Systemword \n"),
        *talk("  userword1\n\n", "\n  replyword1  \n", "userword2 ", " replyword2"),
    ],
    "emoji": talk("👩‍👩‍👧 userword1", "🙂 replyword1 🏳️‍🌈", "é", "🙂"),
    "long": talk(*(f"{'reply' if n % 2 else 'user'}word{n} " + "many words, " * 200 for n in range(24))),
    "a call": [*talk(QUESTION), called(1), result(1), say("assistant", ANSWER)],
    "calls with thoughts, several turns": [
        *(SYSTEM, *talk(QUESTION), called(1, reasoning_content="thoughtword1"), result(1)),
        *(called(2, reasoning_content="thoughtword2"), result(2), say("assistant", ANSWER)),
        *talk("userword2", "replyword2"),
    ],
    "two calls at once": [*talk(QUESTION), called(1, 2), result(1), result(2), say("assistant", ANSWER)],
    "text beside a call": [*talk(QUESTION), called(1, content="replyword3 calls"), result(1), say("assistant", ANSWER)],
}
WITH_TOOLS = {name for name, messages in CONVERSATIONS.items() if any("tool_calls" in each for each in messages)}
Spans = list[tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="regular expression of names")
    options = parser.parse_args()
    files = sorted({each for folder in options.folders for each in folder.rglob("*.jinja")})
    twins = {each.stem: each for each in files if each.stem.endswith("_training")}
    total, known = Counter(), 0
    for file in files:
        if not re.search(options.only, file.stem):
            continue
        found, notes = results(file, twins.get(f"{file.stem}_training"))
        known += set(found) != {"no oracle"}
        total += found
        print(f"{file.stem:52}", ", ".join(f"{count} {kind}" for kind, count in sorted(found.items())), flush=True)
        print(*(f"    {note}" for note in notes), sep="\n", end="\n" if notes else "")
    print(f"{known} templates with an oracle, {len(CONVERSATIONS)} conversations each:")
    print(*(f"  {count:5} {kind}" for kind, count in sorted(total.items())), sep="\n")


def results(file: Path, twin: Path | None) -> tuple[Counter[str], list[str]]:
    """Return the number of conversations by result, and a line for each that is not right."""
    text = file.read_text()
    family = next((each for key, each in FAMILIES.items() if re.search(key, text)), None)
    has_spans = "generation" in re.findall(r"\{%-?\s*(\w+)", text)
    names = sorted({*SPECIAL.findall(text), *variables_of(text).values()})
    counts, notes = Counter(), []
    with Renderer(ChatTemplate(text, variables=variables_of(text)), names) as renderer:
        for name, messages in CONVERSATIONS.items():
            tools = TOOLS if name in WITH_TOOLS else None
            wanted, truths = None, []
            try:
                messages = messages if writes_texts(text) else in_parts(messages)
                wanted = theirs(text, messages, tools)[0]
                hidden = theirs(text, hidden_names(messages), tools)[0]
                if family:
                    truths.append(spans_by_family(hidden, family))
                if (has_spans or twin) and (told := theirs(twin.read_text() if twin else text, messages, tools))[
                    0
                ] == wanted:
                    truths.append(told[1])
            except Exception:  # a template raises any
                truths.clear()
            given = conversation_of(CONVERSATIONS[name], tools)
            try:
                found = renderer(given)
            except (NotRendered, UserError) as error:
                kind = "refused as by transformers" if wanted is None else "false refusal"
                if wanted and tools and "add" not in wanted[wanted.find("userword1 asks") :]:
                    kind = "refused, calls are left out"
                counts[kind] += 1
                notes += [f"{name}: {error}"] if kind == "false refusal" else []
                continue
            ours = "".join(found.pieces)
            kind = judged(ours, wanted, found.spans, truths, family)
            counts[kind] += 1
            if kind not in ("right", "no oracle"):
                notes.append(f"{name}: {kind}: {shown(ours, found.spans)!r}")
                notes += [f"   wanted {shown(wanted, each)!r}" for each in truths if wanted]
    return counts, notes


def judged(ours: str, wanted: str | None, spans: Spans, truths: list[Spans], family: Family | None) -> str:
    if ours != wanted:
        return "other text" if wanted is not None else "not refused"
    covered = "".join(ours[first:end] for first, end in spans)
    if re.search("userword|toolword|Systemword", covered):
        return "wrong mask"
    if set(re.findall(r"(?:reply|thought)word\d+", ours)) - set(re.findall(r"(?:reply|thought)word\d+", covered)):
        return "wrong mask"
    if not truths:
        return "no oracle"
    return "right" if any(same(ours, spans, each, family) for each in truths) else "wrong mask"


def same(text: str, first: Spans, second: Spans, family: Family | None) -> bool:
    """Return whether two masks are equal, spaces at ends and what a generation prompt may have apart."""
    first, second = trimmed(text, first), trimmed(text, second)
    header = f"(?:{family.header})?" if family else ""
    return len(first) == len(second) and all(
        a[1] == b[1] and re.fullmatch(header + BETWEEN, text[min(a[0], b[0]) : max(a[0], b[0])])
        for a, b in zip(first, second, strict=True)
    )


def trimmed(text: str, spans: Spans) -> Spans:
    joined: Spans = []
    for first, end in spans:
        end = first + len(text[first:end].rstrip())
        if joined and not text[joined[-1][1] : first].strip() and first == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        elif end > first:
            joined.append((first, end))
    return joined


def theirs(template: str, messages: list[dict], tools: list[dict] | None) -> tuple[str, Spans]:
    """Return the text of transformers and its spans of `{% generation %}`."""
    texts, spans = render_jinja_template(
        [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **variables_of(template)
    )
    return texts[0], [tuple(each) for each in spans[0]]


def variables_of(template: str) -> dict[str, str]:
    return {"bos_token": BEGIN, "eos_token": next((each for each in ENDS if each in template), ENDS[-1])}


def in_parts(messages: list[dict]) -> list[dict]:
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def writes_texts(template: str) -> bool:
    """Return whether a template writes contents that are texts; some want lists of parts."""
    for tools in (None, TOOLS):
        try:
            return "replyword" in theirs(template, talk(QUESTION, ANSWER), tools)[0]
        except Exception:  # a template raises any
            continue
    return False


def hidden_names(messages: list[dict]) -> list[dict]:
    """Return messages without names of special tokens."""
    hidden = [{**each, "content": hide(each["content"])} for each in messages if isinstance(each["content"], str)]
    return hidden or messages


def hide(content: str) -> str:
    return SPECIAL.sub(lambda name: "\ue000" + name[0][1:], content).replace("</s>", "\ue000/s>")


def spans_by_family(text: str, family: Family) -> Spans:
    spans, at = [], 0
    while header := re.compile(family.header).search(text, at):
        end = re.compile(family.end).search(text, header.end())
        at = end.end() if end else len(text)
        first = header.end()
        for other in re.compile(family.within, re.DOTALL).finditer(text, first, at):
            spans.append((first, other.start()))
            first = other.end()
        spans.append((first, at))
        at = max(at, header.end())
        if end and end.re.pattern.find("observation") >= 0 and end[0] == "":
            at = end.start()
    return [span for span in spans if text[span[0] : span[1]].strip()]


def conversation_of(messages: list[dict], tools: list[dict] | None) -> Conversation:
    found = ChatSource(date=date.today().isoformat()).conversation(
        {"messages": messages, **({"tools": tools} if tools else {})}, "here"
    )
    assert isinstance(found, Conversation)
    return found


def shown(text: str, spans: Spans) -> str:
    """Return a text with ⟦ ⟧ around the spans, from a little before the first."""
    parts, at = [], 0
    for first, end in spans:
        parts += [text[at:first], "⟦", text[first:end], "⟧"]
        at = end
    begin = max(0, spans[0][0] - 60) if spans else max(0, len(text) - 200)
    return "".join([*parts, text[at:]])[begin:][:1200]


if __name__ == "__main__":
    main()
