"""The one error of this package."""


class ModelError(ValueError):
    """The base model cannot be served; the message is one sentence that names what is wrong with it."""
