"""The one exception for mistakes that the user can mend."""


class ConfigurationError(ValueError):
    """Something the user gave cannot be honoured: says what, where, and how to fix it, in one line.

    The command line prints it without a traceback and exits with status 1. Everything else that is raised is a bug,
    ours or the user's, and keeps its traceback.

    Attributes:
        is_said_elsewhere: Whether another process of the run raised the same and tells the user.
    """

    is_said_elsewhere = False
