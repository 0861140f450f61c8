"""A function of the user's that a command line names as MODULE:FUNCTION."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def user_function(where: str) -> Callable[..., Any]:
    """The function, from the working directory or from what is installed; what fails in it is one error.

    Args:
        where: "MODULE:FUNCTION".

    Raises:
        ValueError: there is no such module or function; from the function itself: whatever it raises.

    >>> user_function("math:gcd")(12, 18)
    6
    """
    module_name, _, function_name = where.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does
        raise ValueError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{where} cannot be imported: module {module_name!r} has no function {function_name!r}")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # whatever the user's function does
            raise ValueError(f"{where} failed: {type(error).__name__}: {error}") from error

    return call
