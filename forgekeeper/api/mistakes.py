"""The error of a wrong declaration."""


class Mistake(TypeError):
    """A batch is declared wrongly; the message names it and says what to write instead."""
