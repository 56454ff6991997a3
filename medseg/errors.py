"""The exceptions that a user is meant to read."""


class UserError(Exception):
    """A mistake of the user or a bad file, told in one clear sentence: what was expected, what came, what to do.

    Only the outermost entry (`medseg.apps.entry`) turns it into exit code 2, without a traceback.
    """


class NotFiniteError(UserError):
    """The loss became infinite or not a number."""


def require(condition: bool, message: str) -> None:
    """Refuse what a user asked for unless a condition holds.

    Raises:
        UserError: With the message.
    """
    if not condition:
        raise UserError(message)
