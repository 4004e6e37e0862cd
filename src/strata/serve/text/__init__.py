"""What an answer's text means: thinking, content, tool calls; and what text is allowed at all.

Two sides use this package. The HTTP process feeds the text of one answer to an ``AnswerParser``
and sends the deltas to the client; it checks constraints before a request is queued. The engine
process turns the checked ``ConstraintSpec`` into a ``Constraint``, whose masks enter the sampler.

Nothing here imports torch. The shared nouns are in ``deltas`` (answers) and ``specs`` (requests);
``parsers.parser_for`` and ``constraints.constraint_for`` make the two objects.
"""
