"""The two decorators of a role: `role` for its function in deploy.py, `operation` for what it does to a host.

Both keep a fault to the host that has it (see `kit.refusal`). An operation of ours always has a name, because pyinfra
prints the arguments of nameless ones, and a file's content may be a secret.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pyinfra import logger
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.operation import operation as pyinfra_operation
from pyinfra.api.state import StateStage
from typing_extensions import ParamSpec

from kit.command import host
from kit.refusal import Refusal, Refused, fail_now, is_refused

if TYPE_CHECKING:
    from pyinfra.api.operation import OperationMeta

P = ParamSpec("P")
R = TypeVar("R")


def _unexpected(where: str, error: Exception) -> Refusal:
    """A fault of ours, or a host in a state that nobody thought of: it must not stop the other hosts."""
    logger.warning(traceback.format_exc())
    return Refusal(f"{where}: unexpected {type(error).__name__}: {error}. Fix: report this with the lines above it")


def role(title: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Decorate a role's function. It returns None, and adds nothing, on a host that has been refused.

    Raises PyinfraError when no host is left.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        # Typed by pyinfra as taking its global arguments first, which no role is given.
        deployed = cast(Callable[..., R], deploy(title)(function))

        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            current = host()
            if is_refused(current):
                return None
            try:
                return deployed(*args, **kwargs)
            except Refusal as refusal:
                found = refusal
            except PyinfraError:
                raise
            except Exception as error:
                found = _unexpected(title, error)
            if not is_refused(current):
                fail_now(current, found)
            return None

        return guarded

    return decorate


def operation(title: str) -> Callable[[Callable[P, Iterable[Any]]], Callable[P, OperationMeta]]:
    """Decorate a generator of commands as a pyinfra operation whose name is `title` unless a call gives `name=`.

    A Refusal raised in it, in Prepare or in Execute, fails this host only, and in Prepare leaves the role's function.
    pyinfra's global arguments may be given too, but roles do not need them and mypy is not told of them.
    """

    def decorate(function: Callable[P, Iterable[Any]]) -> Callable[P, OperationMeta]:
        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, Any]:
            try:
                yield from function(*args, **kwargs)
                return
            except Refusal as refusal:
                found = refusal
            except PyinfraError:
                raise
            except Exception as error:
                found = _unexpected(title, error)
            current = host()
            if current.state.current_stage >= StateStage.Execute:
                yield Refused(found)
            elif not is_refused(current):
                fail_now(current, found)

        wrapped = pyinfra_operation()(guarded)

        @wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("name", title)
            done = wrapped(*args, **kwargs)
            if is_refused(host()):
                raise Refusal([])  # already printed: only leave the role
            return done

        named._inner = guarded  # type: ignore[attr-defined]
        return named

    return decorate
