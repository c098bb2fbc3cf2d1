"""The one exception for a mistake that the user can mend."""


class UserError(ValueError):
    """A mistake in a user's configuration, data or command.

    The message is one clear paragraph: the key or the file, what was found, the arithmetic where there is any, and
    what would work. The command line prints it without a traceback and exits with code 2.
    """
