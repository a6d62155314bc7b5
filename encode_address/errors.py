"""The errors a user can act on. Each message is one line that says what to do."""


class EncodeAddressError(Exception):
    """Base of every error this package raises on purpose; the command line prints it and exits 2."""


class ModelError(EncodeAddressError):
    """The model cannot be loaded, or is not a supported hybrid."""


class NameNotFound(EncodeAddressError):
    """A block, layer, variant or position of that name does not exist."""


class TaskError(EncodeAddressError):
    """Prompts that cannot be built: pool too small, words of several tokens, unequal lengths."""


class RunError(EncodeAddressError):
    """A run that went wrong: NaN logits, an intervention that did not fire."""


class StoreError(EncodeAddressError):
    """The output folder cannot be used."""


class ServerError(EncodeAddressError):
    """A server that cannot be reached, refuses, or failed a job. What it said in full is the error's cause."""


class JobTimeout(ServerError):
    """A job that a server ended because it took too long."""
