"""What a terminal of some width shows: the few control sequences that progress displays use."""

import re

_PARTS = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07]*\x07|\x1b([78D])|(.)", re.S)


def showing_lines(written: str, columns: int) -> list[str]:
    """The lines on the screen and those scrolled away above it, after all that was written.

    AssertionError for a control sequence that could do more than colour, erase, move up and down
    and come back.
    """
    lines, row, column, saved = [""], 0, 0, (0, 0)
    for parameters, bracketed, single, character in _PARTS.findall(written):
        code = bracketed or single
        if character == "\r":
            column = 0
        elif character == "\n" or (character and column == columns):
            row, column = row + 1, 0 if character != "\n" else column
            lines += [""] * (row + 1 - len(lines))
        if character and character not in "\r\n":
            line = lines[row].ljust(column)
            lines[row] = line[:column] + character + line[column + 1 :]
            column += 1
        if code == "A":
            row = max(row - int(parameters or 1), 0)
        elif code in ("B", "D"):
            row += int(parameters or 1)
            lines += [""] * (row + 1 - len(lines))
        elif code == "7":
            saved = row, column
        elif code == "8":
            row, column = saved
        elif code == "K":
            lines[row] = "" if parameters == "2" else lines[row][:column]
        elif code == "J":
            lines[row:] = [lines[row][:column]]
        else:
            assert code in ("", "m", "h", "l"), f"ESC [ {parameters} {code}"
    return [line.rstrip() for line in lines]
