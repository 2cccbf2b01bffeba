"""Errors as a paragraph and an exit code: 0 done, 1 failed, 2 misused, 128 + signal."""

import errno
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence

from headlab.errors import HeadlabError

INTERRUPTED = 130  # 128 + SIGINT, as a shell counts it
LONGEST_LINE = 100  # columns; wider terminals don't make longer paragraphs easier to read
LONGEST_MESSAGE = 1000  # characters of an unforeseen message; --debug shows all of it


def guarded(run: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """`run(arguments)`, whose exit code it returns; an error becomes a paragraph and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        exit_code = run(arguments)
        sys.stdout.flush()  # a reader who left is noticed here, not when Python exits
        return exit_code
    except SystemExit as stop:  # argparse, after it printed help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", INTERRUPTED, debug)
    except BrokenPipeError:
        # the reader, such as `head`, has had enough; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except HeadlabError as error:
        return _fail(f"error: {error}", error.exit_code, debug)
    except Exception as error:  # noqa: BLE001 (the last resort of a command line)
        return _fail(_unexpected(error), 1, debug)


def _unexpected(error: Exception) -> str:
    for cause in _chain(error):
        code = cause.errno if isinstance(cause, OSError) else None
        # compiled libraries pass the system's words on in exceptions of their own
        if code in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(cause):
            file = cause.filename if isinstance(cause, OSError) else None
            where = f" while writing {file}" if file else ""
            return (
                f"error: the disk is full or its quota used up{where}: free some space, or choose "
                "a --workdir on another disk, and run the same command again; what was saved "
                "before is intact"
            )
    message = textwrap.shorten(str(error), LONGEST_MESSAGE, placeholder=" ...")
    return (
        f"unexpected failure: {type(error).__name__}: {message}; "
        "run again with --debug for the traceback"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _fail(message: str, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    paragraph = " ".join(f"headlab: {message}".split())
    width = min(shutil.get_terminal_size((LONGEST_LINE, 24)).columns, LONGEST_LINE)
    # paths and commands stay whole, so that they can be copied
    print(
        textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False),
        file=sys.stderr,
    )
    return exit_code
