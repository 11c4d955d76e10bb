"""Lets a probe see which logical operators a fused step stands for.

A fused decoder layer does not call its children, so hooks on them would see nothing. It names them instead, relative to
itself, around each step; without a listener a name costs one comparison.
"""

from typing import Protocol


class Listener(Protocol):
    def enter(self, names: tuple[str, ...]) -> None: ...

    def leave(self) -> None: ...


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Send what runs from now on to `listener`, in this process; None stops it."""
    global _listener
    _listener = listener


class scope:
    """with scope("self_attn.q_proj", ...): what runs inside is these children's work, done together."""

    __slots__ = ("names", "listener")

    def __init__(self, *names: str) -> None:
        self.names = names

    def __enter__(self) -> None:
        self.listener = _listener
        if self.listener is not None:
            self.listener.enter(self.names)

    def __exit__(self, *exc) -> None:
        if self.listener is not None:
            self.listener.leave()
