"""The two kinds of failure a user meets. Both print as one sentence; neither shows a traceback at the command line."""


class UserError(ValueError):
    """Something the user asked for cannot be: a wrong name, shape, flow, device or a missing dependency (exit code 2).

    The message is one sentence with the value, what is allowed, and the key or command that fixes it.
    """


class JobError(RuntimeError):
    """A job that had started had to end: a failed handshake, a violated flow, a lost weight (exit code 1)."""
