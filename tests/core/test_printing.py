"""Loggers keep the stream that they were made with; a study's runs print to their own file all the same."""

import io
import logging
import sys
from contextlib import contextmanager

import pytest

from fedbc_lightning.core.printing import printing_to


@contextmanager
def logging_to_standard_error():
    """Yield a stream for all that is printed, and a logger whose handler writes to standard error, as Lightning's."""
    stream, logger = io.StringIO(), logging.getLogger("test_printing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        yield stream, logger
    logger.handlers.clear()


def test_printed_and_logged_lines_go_to_one_stream():
    with logging_to_standard_error() as (terminal, logger):
        own, file = io.StringIO(), io.StringIO()
        logger.addHandler(logging.StreamHandler(own))

        def fail():
            print("printed")
            print("error \x1b[31m", file=sys.stderr)
            logger.info("logged")
            logger.addHandler(logging.StreamHandler())  # as logging.basicConfig does in a user's module
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), printing_to(file):
            fail()
        print("later")
        logger.info("logged later")
    assert file.getvalue().splitlines() == ["printed", r"error \x1b[31m", "logged"]
    assert terminal.getvalue().splitlines() == ["later", "logged later", "logged later"]  # by the new handler, too
    assert own.getvalue().splitlines() == ["logged", "logged later"]
