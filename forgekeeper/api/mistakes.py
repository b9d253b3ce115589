"""The error of a wrong declaration."""


class Mistake(TypeError):
    """An error in a batch's declaration; the message names the batch and the correction."""
