"""The one exception for mistakes that the user can mend."""


class ConfigurationError(ValueError):
    """Something the user gave cannot be honoured: says what, where, and how to fix it, in one line.

    The command line prints it without a traceback and exits with status 1. Everything else that is raised is a bug,
    ours or the user's, and keeps its traceback.

    Attributes:
        is_said_elsewhere: Whether another process of the run raised the same and tells the user.
    """

    is_said_elsewhere = False


def first_line(error: BaseException) -> str:
    r"""What another library's exception says, for a message of ours; its class, if it says nothing.

    Example:
        >>> first_line(ValueError("no such file\nsee the manual")), first_line(KeyError())
        ('no such file', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]
