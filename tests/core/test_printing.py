"""Loggers keep the stream that they were made with; a study's runs print to their own file all the same."""

import io
import logging
import sys
from contextlib import contextmanager

import pytest

from fedbc_lightning.core.printing import each_line_once, printing_to


@contextmanager
def logging_to_standard_error():
    """Yield a stream for all that is printed, and a logger whose handler writes to standard error, as Lightning's."""
    stream, logger = io.StringIO(), logging.getLogger("test_printing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        logger.addHandler(handler := logging.StreamHandler(sys.stderr))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        yield stream, logger
    logger.removeHandler(handler)


def test_printed_and_logged_lines_go_to_one_stream():
    with logging_to_standard_error() as (terminal, logger):
        file = io.StringIO()

        def fail():
            print("printed")
            print("error", file=sys.stderr)
            logger.info("logged")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), printing_to(file):
            fail()
        print("later")
        logger.info("logged later")
    assert file.getvalue().splitlines() == ["printed", "error", "logged"]
    assert terminal.getvalue().splitlines() == ["later", "logged later"]


def test_a_handler_of_a_file_keeps_it():
    with logging_to_standard_error() as (terminal, logger):
        own, file = io.StringIO(), io.StringIO()
        logger.addHandler(handler := logging.StreamHandler(own))
        with printing_to(file):
            logger.info("logged")
        logger.removeHandler(handler)
    assert own.getvalue() == file.getvalue() == "logged\n"
    assert not terminal.getvalue()


def test_a_handler_that_is_made_inside_writes_to_standard_error_afterwards():
    """As that of ``logging.basicConfig`` in a user's module."""
    with logging_to_standard_error() as (terminal, logger):
        file = io.StringIO()
        with printing_to(file):
            logger.addHandler(handler := logging.StreamHandler())
            logger.info("logged")
        file.close()
        logger.info("later")
        logger.removeHandler(handler)
    assert terminal.getvalue().splitlines() == ["later"] * 2  # the logger's own handler, and the new one


def test_a_line_is_logged_once():
    with logging_to_standard_error() as (terminal, logger):
        logger.addHandler(handler := logging.StreamHandler(other := io.StringIO()))
        with each_line_once():
            for size in (1, 1, 2):
                logger.info("%d images", size)
            logger.error("%d images", 1)
        logger.info("%d images", 1)
        logger.removeHandler(handler)
    assert terminal.getvalue().splitlines() == ["1 images", "2 images", "1 images", "1 images"]
    assert other.getvalue() == terminal.getvalue()


def test_each_exception_is_logged():
    with logging_to_standard_error() as (terminal, logger), each_line_once():
        for text in ("first", "second"):
            logger.error("failed", exc_info=ValueError(text))
    assert "ValueError: first" in terminal.getvalue()
    assert "ValueError: second" in terminal.getvalue()
