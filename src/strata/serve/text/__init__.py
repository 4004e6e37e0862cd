"""What an answer's text means: thinking, content, tool calls; and what text is allowed at all.

Two sides use this package. The HTTP process feeds the text of one answer to an ``AnswerParser``
and sends the deltas to the client; it checks constraints before a request is queued. The engine
process turns the checked ``ConstraintSpec`` into a ``Constraint``, whose masks enter the sampler.

Nothing here imports torch. The shared nouns are in ``deltas`` (answers) and ``specs`` (requests).
The doors:

    parsers.parser_for(family, template_hint, tools, *, reasoning, prompt_tail) -> AnswerParser
        family: architecture name of the checkpoint ("qwen4_exp"); template_hint: source of its
        chat template ("" without one); tools: of the request; reasoning: False when the client
        wants thinking left in the content; prompt_tail: the last 500 characters of the prompt,
        which tell whether thinking is open or closed already.
    parsers.reasoning_end(family, template_hint, prompt_tail) -> str | None
        the text that ends thinking when the answer begins with thinking, else None
    parsers.with_thinking(spec, family, template_hint, prompt_tail) -> ConstraintSpec
        the spec with the thinking that comes, or may come, first
    constraints.check_constraint(spec) -> None
        InputError that names the keyword or pattern that cannot be enforced, and its place
    constraints.constraint_for(spec, tokenizer) -> Constraint
"""
