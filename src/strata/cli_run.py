"""strata run: answer one prompt. The answer goes to standard output as it is written, the rest to
standard error.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.cli_flags import REQUEST, CommandParser, asked_settings, read_text
from strata.cli_screen import open_model, require_room, say, show, tokenizer_of
from strata.core.errors import SettingError
from strata.engine.build import Ready
from strata.engine.model import Message, text_tokens


def main(arguments: Sequence[str]) -> int:
    """Answer a prompt."""
    parser = CommandParser("run", "Answer one prompt, or continue a text.")
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the prompt; - or nothing reads standard input"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument("--quiet", action="store_true", help="the answer and nothing else")
    parser.add_settings(REQUEST)
    args = parser.read(arguments)
    if args.raw and args.system is not None:
        parser.error("--raw and --system exclude each other: a plain text has no system message")
    asked = asked_settings(args)
    text = read_text(args.prompt)
    if not text:
        raise SettingError("the prompt is empty; write one as an argument or pipe it in")

    def prompt_for(chats: bool) -> str | list[Message]:
        return prompt_of(text, args.system, chats=chats, raw=args.raw)

    def check(ready: Ready) -> None:
        """What generate() would refuse, before the weights are read."""
        tokenizer = tokenizer_of(ready)
        n_tokens = len(text_tokens(tokenizer, prompt_for(tokenizer.has_chat_template)))
        require_room(n_tokens, ready.settings.context)

    with open_model(args.model, asked, quiet=args.quiet, check=check) as model:
        answer = model.generate(prompt_for(model.chats))
        if not args.quiet:
            say(["", "mode: chat" if model.chats and not args.raw else "mode: plain text", ""])
        try:
            for event in answer:
                show(event)
        finally:
            print(flush=True)
        if not args.quiet:
            model.read_again()
            say(["", *answer.report.lines(), *model.counter_lines()])
    return 0


def prompt_of(text: str, system: str | None, *, chats: bool, raw: bool) -> str | list[Message]:
    """Messages when the model chats, else the text itself; a system message insists on chat."""
    if raw or (not chats and system is None):
        return text
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]
